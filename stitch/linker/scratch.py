"""Pack a program's intermediate values into its scratch, and choose the scratch's space.

Values are dense and row-major, in their logical type, at multiples of 64 bytes. A value is live
from its producer to its last reader, both included. Outputs of an operation never overlap its
inputs, except that output 0 of an elementwise operation may reuse the bytes of an input of the same
type that it is the last to read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from stitch import ops
from stitch.errors import CompileError
from stitch.machine import MachineShape, round_up
from stitch.packing import IntervalPacker
from stitch.program import (
    ABSENT,
    Array,
    Body,
    Constant,
    DataType,
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

#: Alignment of intermediate values in the scratch, in bytes over all banks.
SCRATCH_ALIGNMENT = 64
#: Scratch is in L1 if it takes at most this share of the L1 that slots leave free.
L1_SCRATCH_SHARE = (1, 2)


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """Byte offsets of the intermediate values, and the size of the scratch, over all banks."""

    offsets: Mapping[int, int]
    nbytes: int


def pack_scratch(
    values: Sequence[Value], operations: Sequence[Operation], placed: Collection[int]
) -> ScratchPlan:
    """Pack all results of operations that are not `placed` (inputs, outputs and constants).

    Raises `CompileError` for an intermediate value of a block format.
    """
    return ScratchPacker(operations, placed).pack(values)


class ScratchPacker:
    """Packs the intermediate values of operations, for any shapes of these values.

    Args:
        operations: The operations in run order.
        placed: Values that are not intermediate: inputs, outputs and constants.
    """

    __slots__ = ("_lives", "_pairs", "_sharing")

    def __init__(self, operations: Sequence[Operation], placed: Collection[int]) -> None:
        #: The first and the last moment of each intermediate value.
        self._lives: dict[int, tuple[int, int]] = {}
        for moment, operation in enumerate(operations):
            for index in operation.inputs:
                if index in self._lives:
                    self._lives[index] = self._lives[index][0], moment
            for index in operation.outputs:
                if index != ABSENT and index not in placed:
                    self._lives[index] = moment, moment
        #: Results, each with an operand whose bytes it may reuse if it has their type.
        self._pairs: list[tuple[int, int]] = []
        for moment, operation in enumerate(operations):
            output = operation.outputs[0] if operation.outputs else ABSENT
            if output in self._lives and ops.is_elementwise(operation):
                self._pairs += [
                    (output, index) for index in operation.inputs
                    if index in self._lives and self._lives[index][1] == moment
                ]  # fmt: skip
        self._sharing: _Sharing | None = None

    def pack(self, values: Sequence[Value]) -> ScratchPlan:
        """Pack the intermediate values; raises what `pack_scratch` raises."""
        kinds = [(values[index].type, values[source].type) for index, source in self._pairs]
        are_equal = [kind is other or kind == other for kind, other in kinds]
        sharing = self._sharing
        if sharing is None or sharing.are_equal != are_equal:
            self._sharing = sharing = self._share(are_equal)
        #: By type, of which many values share one, the bytes of a value.
        sizes: dict[int, int] = {}
        listed: list[int] = []
        for index in sharing.roots:
            value = values[index]
            nbytes = sizes.get(id(value.type))
            if nbytes is None:
                nbytes = sizes[id(value.type)] = round_up(_dense_nbytes(value), SCRATCH_ALIGNMENT)
            listed.append(nbytes)
        packing = sharing.packer.pack(listed)
        offsets = dict(zip(sharing.roots, packing.offsets, strict=True))
        return ScratchPlan({i: offsets[r] for i, r in sharing.owner.items()}, packing.peak_nbytes)

    def _share(self, are_equal: list[bool]) -> _Sharing:
        """Return which values reuse the bytes of others if some pairs have equal types."""
        chosen: dict[int, int] = {}
        for (index, source), is_equal in zip(self._pairs, are_equal, strict=True):
            if is_equal:
                chosen.setdefault(index, source)
        owner: dict[int, int] = {}
        merged: dict[int, tuple[int, int]] = {}
        for index, (first, last) in self._lives.items():
            if index in chosen:
                owner[index] = root = owner[chosen[index]]
                # A chain has one type, and its last value lives longest.
                merged[root] = merged[root][0], last
            else:
                owner[index] = index
                merged[index] = first, last
        return _Sharing(are_equal, owner, list(merged), IntervalPacker(list(merged.values())))


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Which intermediate values reuse the bytes of others.

    Attributes:
        are_equal: For each pair of a result and an operand whether their types are equal.
        owner: By value, the one whose bytes it reuses, the first of a chain.
        roots: The values that have bytes of their own.
        packer: Packs these.
    """

    are_equal: list[bool]
    owner: Mapping[int, int]
    roots: Sequence[int]
    packer: IntervalPacker


def _dense_nbytes(value: Value) -> int:
    data_type = value.type.data_type
    if data_type.is_block:
        raise CompileError(
            f"intermediate value {value.name!r} has the block format {data_type.value}",
            expected="a type with separate elements: block formats are for storage only",
            remedy="compute in float32, and use the block format for inputs and outputs",
        )
    return data_type.nbytes(math.prod(value.type.shape))


def scratch_size_per_bank(nbytes: int, machine: MachineShape, space: Space) -> int:
    """Return the bytes per bank of a scratch of `nbytes` over all banks."""
    shape = machine.space(space)
    return round_up(-(-nbytes // shape.banks), shape.granule)


def choose_scratch(
    nbytes: int, machine: MachineShape, *, l1_slots_per_bank: int, l1_below: int | None = None
) -> Scratch:
    """Choose the space of a scratch: L1 if it is small enough, else DRAM, else the host.

    Small enough is at most half of the L1 that slots leave free, and below address `l1_below`.
    Does not check that the whole program fits; see `check_capacity`.
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
    values: Sequence[Value], plan: ScratchPlan, scratch: Scratch,
    names: Sequence[str] | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """Return the values with layouts at their offsets in the scratch for intermediate ones.

    `names`: new names of all values; those of the other ones are not used.
    """
    placed = list(values)
    #: Layouts are checked when they are made: values at one offset share them.
    layouts: dict[tuple[DataType, int], Layout] = {}
    for index, offset in plan.offsets.items():
        value = values[index]
        data_type = value.type.data_type
        layout = layouts.get((data_type, offset))
        if layout is None:
            layout = Layout(data_type, scratch.space, address=offset)
            layouts[data_type, offset] = layout
        name = value.name if names is None else names[index]
        placed[index] = Value(name, value.type, layout)
    return tuple(placed)


# Bodies of scans as host programs

NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})


def repeated_outputs(body: Body, states: int) -> dict[int, int]:
    """Return the collected outputs that are copies of another output: their numbers to its number.

    The first `states` outputs are states.
    """
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
    """Return a body as a host program, without its `repeated_outputs`.

    Args:
        listed: The operation list with the bodies.
        index: The body.
        states: The number of its outputs that are states.
        known: Data of inputs, by number, that become constants.
    """
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
    """Return operations with the bodies that they need, renumbered."""
    needed = {o.body for o in operations}
    for index in reversed(range(len(bodies))):
        if index in needed:
            needed.update(o.body for o in bodies[index].operations)
    at = {ABSENT: ABSENT} | {old: new for new, old in enumerate(sorted(needed - {ABSENT}))}

    def moved(held: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple([o if at[o.body] == o.body else replace(o, body=at[o.body]) for o in held])

    used = [bodies[index] for index in sorted(needed - {ABSENT})]
    return moved(operations), tuple([replace(b, operations=moved(b.operations)) for b in used])
