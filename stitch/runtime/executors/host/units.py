"""Which operations of a program are computed together on the host.

Comes in: a program, and what foreign calls compute of it. Goes out: units, in the program's
order: those calls, runs of long elementwise operations, and every other operation by itself. Must
not know where values lie.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from stitch.ops import lookup
from stitch.program import Operation, Program
from stitch.runtime.executors.host.chunks import FEW_PASSES, LEAST_SIZE
from stitch.runtime.executors.host.staging import is_direct


@dataclass(frozen=True, slots=True)
class Unit:
    """Operations, one after the other in the program, that are computed together.

    A `foreign` unit is one `ForeignCall`, which knows dense arrays only and keeps what only the
    unit reads inside; a `group` goes chunk by chunk.
    """

    operations: tuple[int, ...]
    foreign: bool = False

    @property
    def group(self) -> bool:
        """Whether its operations are computed chunk by chunk."""
        return not self.foreign and len(self.operations) > 1


def units_of(
    program: Program, calls: Collection[tuple[int, ...]], apart: Collection[int] = ()
) -> tuple[Unit, ...]:
    """The units of a program; `calls` are the operations of foreign calls, call by call.

    Those `apart` are each by itself.
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
    """The elements of each operation that may be computed by chunks; None for others."""
    constants = {c.value for c in program.constants}
    return [_chunked_size(program, operation, constants) for operation in program.operations]


def _chunked_size(program: Program, operation: Operation, constants: set[int]) -> int | None:
    if operation.domain or operation.op not in FEW_PASSES or len(operation.outputs) != 1:
        return None
    if not lookup(operation.op).elementwise or operation.outputs[0] < 0:
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
