"""Check that a machine can hold a program's slots, constants and scratch, and that aliases hold."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, final

from stitch import ops
from stitch.errors import OutOfMemoryError
from stitch.machine import MachineShape, room_per_bank
from stitch.program import Operation, OperationList, Scratch, Space, Value

#: Pairs of overlapping regions to list: n regions at one address have n² pairs.
MAX_OVERLAPS = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes per bank of a slot, a constant or the scratch, and its fixed address if any."""

    kind: Literal["slot", "constant", "scratch"]
    label: str
    space: Space
    size_per_bank: int
    address: int | None = None

    def text(self) -> str:
        if self.address is None:
            return f"{self.label} ({self.size_per_bank} B per bank)"
        end = self.address + self.size_per_bank
        return f"{self.label} at [{self.address:#x}, {end:#x})"


def demands(
    body: OperationList, scratch: Scratch, machine: MachineShape,
    known: MutableMapping[int, tuple[Value, Demand]] | None = None,
) -> tuple[Demand, ...]:  # fmt: skip
    """Return everything that must be stored while a program runs; aliasing outputs need nothing.

    `known` keeps those of constants, by the index of their value, for another call with some of the
    same values. Raises `LayoutError` for a layout that the machine does not have.
    """
    slots = [(f"input {s.name!r}", s.value) for s in body.inputs]
    slots += [(f"output {s.name!r}", s.value) for s in body.outputs if s.aliases_input is None]
    listed = [_demand("slot", label, body.values[value], machine) for label, value in slots]
    for constant in body.constants:
        value = body.values[constant.value]
        found = None if known is None else known.get(constant.value)
        if found is None or found[0] is not value:
            found = value, _demand("constant", f"constant {value.name!r}", value, machine)
            if known is not None:
                known[constant.value] = found
        listed.append(found[1])
    if scratch.size_per_bank:
        base = machine.space(scratch.space).base if scratch.space is Space.L1 else None
        size = scratch.size_per_bank
        listed.append(Demand("scratch", "the scratch region", scratch.space, size, base))
    return tuple(listed)


def _demand(
    kind: Literal["slot", "constant"], label: str, value: Value, machine: MachineShape
) -> Demand:
    layout = value.desc.layout
    size = room_per_bank(value.desc, machine)
    return Demand(kind, label, layout.space, size, layout.address)


def address_problems(wanted: Sequence[Demand], machine: MachineShape) -> Iterator[str]:
    """Yield an error for each fixed address that is misaligned, out of range or overlapping."""
    fixed = sorted(
        ((d, d.address) for d in wanted if d.address is not None and d.space is not Space.HOST),
        key=lambda pair: (pair[0].space.value, pair[1], pair[0].label),
    )
    for demand, address in fixed:
        shape = machine.space(demand.space)
        if address % shape.granule:
            yield (
                f"{demand.text()} is not aligned: addresses in {demand.space.value} "
                f"are multiples of {shape.granule}"
            )
        if address < shape.base or address + demand.size_per_bank > shape.limit:
            is_low = address < shape.base
            reserved = f"[0x0, {shape.base:#x})" if is_low else f"from {shape.limit:#x} on"
            yield (
                f"{demand.text()} is out of range: {demand.space.value} is usable at "
                f"[{shape.base:#x}, {shape.limit:#x}); {reserved} is reserved"
            )
    yield from islice(_overlaps(fixed), MAX_OVERLAPS)


def use_problems(wanted: Sequence[Demand], machine: MachineShape) -> Iterator[str]:
    """Yield an error for each demand that the machine cannot hold even alone."""
    yield from address_problems(wanted, machine)
    for demand in wanted:
        capacity = machine.space(demand.space).capacity
        if demand.address is None and demand.size_per_bank > capacity:
            yield f"{demand.text()} is larger than {demand.space.value} with {capacity} B per bank"


def _overlaps(fixed: Sequence[tuple[Demand, int]]) -> Iterator[str]:
    """Yield an error for each overlapping pair; `fixed` is sorted by space and address."""
    for i, (demand, address) in enumerate(fixed):
        for at in range(i + 1, len(fixed)):
            other, there = fixed[at]
            if other.space is not demand.space or there >= address + demand.size_per_bank:
                break
            yield f"{demand.text()} and {other.text()} overlap in {demand.space.value}"


def check_capacity(wanted: Sequence[Demand], machine: MachineShape, where: str) -> None:
    """Raise `OutOfMemoryError` if a space cannot hold all of its demands at once."""
    for space in machine.spaces:
        shape = machine.space(space)
        here = sorted(
            (d for d in wanted if d.space is space), key=lambda d: (-d.size_per_bank, d.label)
        )
        needed = sum(d.size_per_bank for d in here)
        if needed <= shape.capacity:
            continue
        largest = ", ".join(d.text() for d in here[:3])
        raise OutOfMemoryError(
            f"the program does not fit {space.value} of machine {machine.name!r}",
            where=where,
            expected=(
                f"at most {shape.capacity} B per bank ({shape.capacity * shape.banks} B "
                f"over {shape.banks} banks)"
            ),
            got=(
                f"{needed} B per bank ({needed * shape.banks} B), {needed - shape.capacity} B "
                f"per bank too much; the largest: {largest}"
            ),
            remedy=_remedy(space, here, shape.capacity),
        )


def _remedy(space: Space, here: Sequence[Demand], capacity: int) -> str:
    """Suggest a remedy: slots can be stored in another space, constants and scratch cannot."""
    rest = sum(d.size_per_bank for d in here if d.kind != "slot")
    if rest <= capacity and space is Space.L1:
        return "place the biggest slots in DRAM (--set SIDE.SLOT.space=dram; in Python placement=)"
    if rest <= capacity and space is Space.DRAM:
        return (
            "place the biggest slots in the host's memory (--set SIDE.SLOT.space=host; in Python "
            "placement=), store them in a narrower type (--set SIDE.SLOT.data_type=bf16), split "
            "the module into programs, or choose a larger machine"
        )
    return "split the module into programs, or choose a larger machine"


# Alias proofs


@final
class AliasProofs:
    """Decides which outputs of an operation list may overwrite donated inputs."""

    __slots__ = ("_body", "_last_reader", "_outputs", "_writer")

    def __init__(self, body: OperationList) -> None:
        self._body = body
        self._writer: dict[int, int] = {}
        self._last_reader: dict[int, int] = {}
        for at, operation in enumerate(body.operations):
            self._writer |= dict.fromkeys(operation.outputs, at)
            self._last_reader |= dict.fromkeys(operation.inputs, at)
        self._outputs = frozenset(slot.value for slot in body.outputs)

    def read_by_writer(self, output: int) -> tuple[int, ...]:
        """Return the values read by the operation that writes an output."""
        writer = self._writer.get(self._body.outputs[output].value)
        return () if writer is None else self._body.operations[writer].inputs

    def obstacle(self, output: int, input: int) -> str | None:
        """Return why output slot `output` cannot take the buffer of input slot `input`, else None.

        Does not check shapes, layouts and ownership.
        """
        body = self._body
        written, source = body.outputs[output].value, body.inputs[input].value
        name = body.inputs[input].name
        writer = self._writer.get(written)
        if writer is None:
            return "no operation writes this output"
        operation = body.operations[writer]
        if written != operation.outputs[0]:
            return f"it is a second output of {_operation(operation, writer)}"
        if not ops.is_elementwise(operation):
            return f"{_operation(operation, writer)} writes it and is not elementwise"
        if source not in operation.inputs:
            return f"{_operation(operation, writer)} writes it without reading input {name!r}"
        last = self._last_reader[source]
        if last > writer:
            return (
                f"{_operation(body.operations[last], last)} still reads input {name!r} afterwards"
            )
        if source in self._outputs:
            return f"input {name!r} is itself an output"
        return None


def _operation(operation: Operation, index: int) -> str:
    place = f" at {operation.location}" if operation.location else ""
    op = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
    return f"operation {index} ({op}{place})"
