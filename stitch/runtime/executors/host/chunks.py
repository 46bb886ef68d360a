"""Divide a program into units that are computed together; compute elementwise groups in chunks.

Each chunk goes through the whole group while it is in the caches: a step of SGD on 400,000 weights
takes 145 us instead of 220. The results are the same if each written array is either disjoint from
all other arrays of the group or the same bytes. Operands are as long as the results, or scalars.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch.ops import KernelArguments, OpDef, workspace
from stitch.program import Array, Operation, Program
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.host.staging import is_direct

#: Elements of a chunk: a few arrays of this size fit in a second-level cache.
CHUNK_SIZE = 32768
#: Elements from which on chunks pay: shorter values stay in the caches anyway.
LEAST_SIZE = 4 * CHUNK_SIZE
#: Operators of one or two passes; kernels of many passes use chunks themselves.
FEW_PASSES = frozenset({
    "Abs", "Add", "And", "Div", "Equal", "Exp", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Max", "Min", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Sqrt", "Sub", "Where",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One operation of a group, with its kernel's arguments.

    `readers` are the operations that read its result; None if it is also read outside the program
    or through a view.
    """

    index: int
    definition: OpDef
    arguments: KernelArguments
    readers: frozenset[int] | None

    @property
    def out(self) -> Array:
        return self.arguments.outputs[0]

    @property
    def arrays(self) -> Iterator[Array]:
        """The operands, then the result."""
        yield from (a for a in self.arguments.inputs if a is not None)
        yield self.out


def can_join(member: Member) -> bool:
    """Whether an operation can be computed in chunks, and is long enough."""
    shape = member.out.shape
    return member.out.size >= LEAST_SIZE and all(
        a.flags.c_contiguous and (a.size == 1 or a.shape == shape) for a in member.arrays
    )


def joins(group: Sequence[Member], member: Member) -> bool:
    """Whether an operation that `can_join` may be appended to a group."""
    return not group or (group[0].out.size == member.out.size and not _overlaps((*group, member)))


def _overlaps(group: Sequence[Member]) -> bool:
    """Whether a written array partly overlaps another array of the group."""
    spans = {_span(array) for member in group for array in member.arrays}
    written = {_span(member.out) for member in group}
    return any(
        out != other and out[0] < other[0] + other[1] and other[0] < out[0] + out[1]
        for out in written
        for other in spans
    )


def _span(array: Array) -> tuple[int, int, np.dtype[Any]]:
    return array.ctypes.data, array.nbytes, array.dtype


def inner_members(group: Sequence[Member]) -> list[Member]:
    """Return the operations whose result only the group reads; without any, chunks gain nothing."""
    inside = {member.index for member in group}
    return [m for m in group if m.readers is not None and m.readers <= inside]


def steps_by_chunks(group: Sequence[Member]) -> list[Thunk]:
    """Return the steps of a group, chunk after chunk.

    Results that only the group reads are never stored as a whole: their chunks share one buffer.
    """
    buffers = _chunk_buffers(group)
    size = group[0].out.size
    steps: list[Thunk] = []
    for start in range(0, size, CHUNK_SIZE):
        part = slice(start, min(start + CHUNK_SIZE, size))
        for member in group:
            steps += member.definition.kernel(_chunk(member, part, buffers))
    return steps


def _chunk_buffers(group: Sequence[Member]) -> dict[int, Array]:
    """Return a buffer of one chunk for each result that only the group reads, by id of the array.

    A buffer is reused from its last read on, also by the operation that reads it last.
    """
    last = {m.index: max(m.readers or (m.index,)) for m in inner_members(group)}
    free: dict[np.dtype[Any], list[Array]] = {}
    used: list[tuple[int, Array]] = []
    buffers: dict[int, Array] = {}
    for member in group:
        for _, buffer in (u for u in used if u[0] <= member.index):
            free.setdefault(buffer.dtype, []).append(buffer)
        used = [u for u in used if u[0] > member.index]
        if member.index in last:
            spare = free.get(member.out.dtype)
            buffer = spare.pop() if spare else workspace(CHUNK_SIZE, member.out.dtype)
            buffers[id(member.out)] = buffer
            used.append((last[member.index], buffer))
    return buffers


def _chunk(member: Member, part: slice, buffers: Mapping[int, Array]) -> KernelArguments:
    """Return the arguments of one operation for one chunk."""

    def cut(array: Array) -> Array:
        if id(array) in buffers:
            return buffers[id(array)][: part.stop - part.start]
        return array.reshape(()) if array.size == 1 else array.reshape(-1)[part]

    inputs = tuple(None if a is None else cut(a) for a in member.arguments.inputs)
    # The memo of a chunk is separate: kernels store there what they derive from constants.
    return replace(member.arguments, inputs=inputs, outputs=(cut(member.out),), memo={})


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive operations that are computed together; `foreign`: by one `ForeignCall`."""

    operations: tuple[int, ...]
    foreign: bool = False

    @property
    def is_chunked(self) -> bool:
        return not self.foreign and len(self.operations) > 1


def units_of(
    program: Program, calls: Collection[tuple[int, ...]], apart: Collection[int] = ()
) -> tuple[Unit, ...]:
    """Divide a program into units.

    Args:
        calls: The operations of each foreign call.
        apart: Operations that form units of their own.
    """
    starts, sizes = {operations[0]: operations for operations in calls}, chunked_sizes(program)
    units: list[Unit] = []
    run: list[int] = []
    index = 0
    while index < len(program.operations):
        call = starts.get(index)
        size = None if call is not None or index in apart else sizes[index]
        if run and size != sizes[run[0]]:
            units.append(Unit(tuple(run)))
            run = []
        if call is not None:
            units.append(Unit(call, foreign=True))
        elif size is not None:
            run.append(index)
        else:
            units.append(Unit((index,)))
        index += len(call) if call is not None else 1
    return (*units, Unit(tuple(run))) if run else tuple(units)


def chunked_sizes(program: Program) -> list[int | None]:
    """Return the elements of each operation that may be computed in chunks; None for others."""
    constants = {c.value for c in program.constants}
    return [_chunked_size(program, operation, constants) for operation in program.operations]


def _chunked_size(program: Program, operation: Operation, constants: set[int]) -> int | None:
    if operation.domain or operation.op not in FEW_PASSES or len(operation.outputs) != 1:
        return None
    values = program.values
    shape = values[operation.outputs[0]].type.shape
    size = math.prod(shape)
    for value in (*operation.inputs, *operation.outputs):
        if value < 0 or not (value in constants or is_direct(values[value])):
            return None
        if values[value].type.shape != shape and math.prod(values[value].type.shape) != 1:
            return None
    return size if size >= LEAST_SIZE else None
