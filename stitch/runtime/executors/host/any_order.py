"""The most bytes that the values inside a program take at one time, computed in whatever order.

Comes in: a program. Goes out: bytes. ONNX Runtime frees a value after its last reader, but chooses
the order itself: it may compute all branches before it adds the first two up. Must not know
executors, or where values lie.
"""

from __future__ import annotations

import numpy as np

from stitch.ops import computed_nbytes
from stitch.program import ABSENT, Program

#: Programs with more operations count all their values: which precedes which is a square of bits.
MOST_OPERATIONS = 8192


def most_inner_nbytes(program: Program) -> int:
    """What values that are no slots take, at most, while any one operation is computed."""
    slots = {s.value for s in program.inputs} | {s.value for s in program.outputs}
    makers = {
        v: i
        for i, operation in enumerate(program.operations)
        for v in operation.outputs
        if v != ABSENT and v not in slots
    }
    sizes = {v: computed_nbytes(program.values[v].type) for v in makers}
    count = len(program.operations)
    if count > MOST_OPERATIONS or not makers:
        return sum(sizes.values())
    readers = _readers(program)
    before, after = _before(program, count), _after(program, readers, count)
    every = (1 << count) - 1
    alive = np.zeros(count, np.int64)
    for value, maker in makers.items():
        # Not alive while an operation runs that comes before its maker, or after all its readers.
        gone = every if readers.get(value) else 0
        for reader in readers.get(value, ()):
            gone &= after[reader]
        alive[_places(every & ~(gone | before[maker]), count)] += sizes[value]
    return int(alive.max())


def _readers(program: Program) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for index, operation in enumerate(program.operations):
        for value in operation.inputs:
            readers.setdefault(value, set()).add(index)
    return readers


def _before(program: Program, count: int) -> list[int]:
    """For each operation those that must come before it, as bits."""
    makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs if v != ABSENT}
    before = [0] * count
    for index, operation in enumerate(program.operations):
        for value in operation.inputs:
            maker = makers.get(value)
            if maker is not None:
                before[index] |= before[maker] | 1 << maker
    return before


def _after(program: Program, readers: dict[int, set[int]], count: int) -> list[int]:
    """For each operation those that must come after it, as bits."""
    after = [0] * count
    for index in reversed(range(count)):
        for value in program.operations[index].outputs:
            for reader in readers.get(value, ()) if value != ABSENT else ():
                after[index] |= after[reader] | 1 << reader
    return after


def _places(bits: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    held = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(held, count=count, bitorder="little").astype(np.bool_)
