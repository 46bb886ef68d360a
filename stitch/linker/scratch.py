"""Scratch: where a program's intermediate values lie while it runs, and in which space.

Used by the compiler, and again whenever programs are joined.

Rules. Values lie dense and row-major, in their logical type, at multiples of 64 bytes. A value is
alive from the operation that makes it to its last reader, both included; an operation's outputs
never overlap its inputs, except that output 0 of an elementwise operation may take the place of an
input with its last use there and has the same bytes and the same type.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from stitch import ops
from stitch.errors import CompileError
from stitch.machine import MachineShape, round_up
from stitch.packing import Interval, pack_intervals
from stitch.program import (
    ABSENT,
    Array,
    Body,
    Constant,
    InputSlot,
    Layout,
    Operation,
    OperationList,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    host_layout,
)

#: Alignment of intermediate values inside the scratch, in bytes over all banks.
SCRATCH_ALIGNMENT = 64
#: Scratch goes to L1 if it takes at most this share of what the slots in L1 leave free.
L1_SCRATCH_SHARE = (1, 2)


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """Byte offsets of the intermediate values by index, and the bytes that they take together."""

    offsets: Mapping[int, int]
    nbytes: int


def pack_scratch(
    values: Sequence[Value], operations: Sequence[Operation], placed: Collection[int]
) -> ScratchPlan:
    """Offsets for all values that operations make and that are not `placed` elsewhere.

    `placed` holds the indices of inputs, outputs and constants. Raises `CompileError` for an
    intermediate value of a block format, which is a way of storing and not of computing.
    """
    lives = _lives(values, operations, frozenset(placed))
    owner = _share_places(values, operations, lives)
    groups: dict[int, list[int]] = {}
    for index in lives:
        groups.setdefault(owner[index], []).append(index)
    intervals = [
        Interval(
            min(lives[m].first for m in members),
            max(lives[m].last for m in members),
            round_up(max(lives[m].nbytes for m in members), SCRATCH_ALIGNMENT),
        )
        for members in groups.values()
    ]
    packing = pack_intervals(intervals)
    offsets = {
        index: offset
        for members, offset in zip(groups.values(), packing.offsets, strict=True)
        for index in members
    }
    return ScratchPlan(offsets, packing.peak_nbytes)


def _lives(
    values: Sequence[Value], operations: Sequence[Operation], placed: frozenset[int]
) -> dict[int, Interval]:
    lives: dict[int, Interval] = {}
    for moment, operation in enumerate(operations):
        for index in operation.inputs:
            if index in lives:
                lives[index] = replace(lives[index], last=moment)
        for index in operation.outputs:
            if index != ABSENT and index not in placed:
                lives[index] = Interval(moment, moment, _dense_nbytes(values[index]))
    return lives


def _dense_nbytes(value: Value) -> int:
    data_type = value.type.data_type
    if data_type.is_block:
        raise CompileError(
            f"value {value.name!r} is computed in {data_type.value}",
            expected="a type with elements of its own; block formats only store",
            remedy="compute in float32, and ask for the block format where the value is stored",
        )
    return data_type.nbytes(math.prod(value.type.shape))


def _share_places(
    values: Sequence[Value], operations: Sequence[Operation], lives: Mapping[int, Interval]
) -> dict[int, int]:
    """For each intermediate value the one whose place it takes over, at the root of the chain."""
    owner = {index: index for index in lives}
    for moment, operation in enumerate(operations):
        output = operation.outputs[0] if operation.outputs else ABSENT
        if output not in lives or not ops.is_elementwise(operation):
            continue
        for index in operation.inputs:
            if (
                index in lives
                and lives[index].last == moment
                and values[index].type == values[output].type
            ):
                owner[output] = owner[index]
                break
    return owner


def scratch_size_per_bank(nbytes: int, machine: MachineShape, space: Space) -> int:
    """Bytes per bank of a scratch of `nbytes` over all banks."""
    shape = machine.space(space)
    return round_up(-(-nbytes // shape.banks), shape.granule)


def choose_scratch(
    nbytes: int, machine: MachineShape, *, l1_slots_per_bank: int, l1_below: int | None = None
) -> Scratch:
    """The space for a scratch of `nbytes`: L1 if it is small enough, else DRAM, else the host.

    Small enough: at most half of what the slots in L1 leave of its capacity, and with `l1_below`
    (an address) wholly below it. The host serves only on a machine without device memory. Whether
    all of the program fits is `check_capacity`'s question.
    """
    if machine.l1 is not None:
        size = scratch_size_per_bank(nbytes, machine, Space.L1)
        left = max(0, machine.l1.capacity - l1_slots_per_bank)
        fits = l1_below is None or machine.l1.base + size <= l1_below
        if fits and size * L1_SCRATCH_SHARE[1] <= left * L1_SCRATCH_SHARE[0]:
            return Scratch(Space.L1, size)
    space = Space.HOST if machine.dram is None else Space.DRAM
    size = scratch_size_per_bank(nbytes, machine, space)
    return Scratch(space, size)


def place_intermediates(
    values: Sequence[Value], plan: ScratchPlan, scratch: Scratch
) -> tuple[Value, ...]:
    """The values with every intermediate one laid out at its offset in the scratch."""
    placed = list(values)
    for index, offset in plan.offsets.items():
        value = values[index]
        layout = Layout(value.type.data_type, scratch.space, address=offset)
        placed[index] = replace(value, layout=layout)
    return tuple(placed)


# --------------------------------------------------------------------------------------------------
# The body of a scan as a separate host program, which an executor prepares once.

NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})


def repeated_outputs(body: Body, states: int) -> dict[int, int]:
    """What rounds collect that is another output of the body again, a state perhaps: by number; the
    first so many are states."""
    numbers = {value: number for number, value in enumerate(body.outputs)}
    return {
        numbers[o.outputs[0]]: numbers[o.inputs[0]]
        for o in body.operations
        if o.op == "Identity" and not o.domain
        and numbers.get(o.outputs[0], -1) >= states and o.inputs[0] in numbers
    }  # fmt: skip


def program_of_body(
    listed: OperationList, index: int, states: int, known: Mapping[int, Array] = NO_ARRAYS
) -> Program:
    """The body `index` as a program; the inputs that are `known`, by their numbers, are constants,
    the others are called by their numbers. `repeated_outputs` are not made again."""
    body = listed.bodies[index]
    again = {body.outputs[number] for number in repeated_outputs(body, states)}
    operations = tuple(o for o in body.operations if again.isdisjoint(o.outputs))
    inputs = [(i, v) for i, v in enumerate(body.inputs) if v != ABSENT and i not in known]
    constants = [*body.constants, *(Constant(body.inputs[i], known[i]) for i in sorted(known))]
    fixed = {*body.inputs, *body.outputs, *(c.value for c in constants)}
    plan = pack_scratch(body.values, operations, fixed)
    scratch = Scratch(Space.HOST, plan.nbytes)
    values = list(place_intermediates(body.values, plan, scratch))
    values = [
        v if v.layout is not None else replace(v, layout=host_layout(v.type.data_type))
        for v in values
    ]
    operations, bodies = _carried(operations, listed.bodies)
    return Program(
        f"body {index} of {listed.name}",
        tuple(InputSlot(f"input {i}", v) for i, v in inputs),
        tuple(OutputSlot(f"output {i}", v) for i, v in enumerate(body.outputs) if v not in again),
        tuple(values), operations, tuple(constants), scratch, bodies=bodies,
    )  # fmt: skip


def _carried(
    operations: Sequence[Operation], bodies: Sequence[Body]
) -> tuple[tuple[Operation, ...], tuple[Body, ...]]:
    """Operations with those of the bodies that they need: a program checks all that it has."""
    needed = {o.body for o in operations}
    for index in reversed(range(len(bodies))):
        if index in needed:
            needed.update(o.body for o in bodies[index].operations)
    at = {ABSENT: ABSENT} | {old: new for new, old in enumerate(sorted(needed - {ABSENT}))}

    def moved(held: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple([o if at[o.body] == o.body else replace(o, body=at[o.body]) for o in held])

    kept = [bodies[index] for index in sorted(needed - {ABSENT})]
    return moved(operations), tuple([replace(b, operations=moved(b.operations)) for b in kept])
