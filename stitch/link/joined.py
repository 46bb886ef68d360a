"""Joining: programs appended one by one to a list of values and operations, wires resolved.

Comes in: programs in run order and checked wires. Goes out: the parts of the whole, not yet placed.
Must not know: machines, scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stitch.errors import LinkError
from stitch.link.check import output_name
from stitch.link.wires import Port, SharedInput, Wire
from stitch.ops.element_types import onnx_code
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Value,
    ValueType,
)


@dataclass(slots=True)
class JoinedProgram:
    """The program under construction; lives only while `link_programs` runs."""

    programs: Sequence[Program]
    wires: Sequence[Wire]
    shared: Sequence[SharedInput]
    kept: frozenset[Port]
    fed: frozenset[Port]
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    inputs: list[InputSlot] = field(default_factory=list)
    outputs: list[OutputSlot] = field(default_factory=list)
    #: The slot index, in the whole, of each input that comes from outside.
    slots: dict[Port, int] = field(default_factory=dict)
    #: The plain value behind each output, before its storage rounds it.
    made: dict[Port, int] = field(default_factory=dict)
    aliases: dict[int, Port] = field(default_factory=dict)
    casts: dict[tuple[int, DataType], int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    slot_names: set[tuple[str, str]] = field(default_factory=set)

    def add(self, index: int) -> None:
        """Appends program `index`."""
        program = self.programs[index]
        where = {}
        sources = {w.input: w for w in self.wires if w.consumer == index}
        again = {pair.again: pair.first for pair in self.shared}
        for i, slot in enumerate(program.inputs):
            value = program.values[slot.value]
            if i in sources:
                where[slot.value] = self._through(sources[i], value)
            elif (index, i) in again:
                where[slot.value] = self._share(again[index, i], (index, i), slot)
            else:
                where[slot.value] = self._value(program, value)
                self.slots[index, i] = len(self.inputs)
                name = self._slot_name("input", program, slot.name)
                self.inputs.append(replace(slot, name=name, value=where[slot.value]))
        for constant in program.constants:
            where[constant.value] = self._value(program, program.values[constant.value])
            self.constants.append(replace(constant, value=where[constant.value]))
        self._add_operations(index, program, where)

    def _add_operations(self, index: int, program: Program, where: dict[int, int]) -> None:
        ports = {slot.value: o for o, slot in enumerate(program.outputs)}
        read = {v for operation in program.operations for v in operation.inputs}
        for operation in program.operations:
            for v in operation.outputs:
                if v == ABSENT:
                    continue
                value = program.values[v]
                if (
                    v in ports
                    and (index, ports[v]) in self.kept
                    and not self._splits((index, ports[v]), value)
                ):
                    where[v] = self._value(program, value)
                    continue
                if v in ports and v in read and _rounds(value):
                    raise LinkError(
                        f"{output_name(program, ports[v])} is stored as "
                        f"{value.desc.layout.data_type.value} and read inside its own program",
                        remedy="recompile it: the compiler gives such an output its own value",
                    )
                where[v] = self._value(program, replace(value, layout=None))
            inputs = tuple(ABSENT if v == ABSENT else where[v] for v in operation.inputs)
            outputs = tuple(ABSENT if v == ABSENT else where[v] for v in operation.outputs)
            self.operations.append(replace(operation, inputs=inputs, outputs=outputs))
        for o, slot in enumerate(program.outputs):
            self.made[index, o] = where[slot.value]
            if (index, o) in self.kept:
                self._add_output((index, o), program, slot, where[slot.value])

    def _splits(self, port: Port, value: Value) -> bool:
        """Whether a kept output is rounded by its storage, and a consumer needs it unrounded."""
        return port in self.fed and _rounds(value)

    def _add_output(self, port: Port, program: Program, slot: OutputSlot, value: int) -> None:
        original = program.values[slot.value]
        if self._splits(port, original):
            stored = self._value(program, original)
            self.operations.append(Operation("Identity", (value,), (stored,)))
            value = stored
        if slot.aliases_input is not None:
            self.aliases[len(self.outputs)] = (port[0], slot.aliases_input)
        name = self._slot_name("output", program, slot.name)
        self.outputs.append(OutputSlot(name, value))

    def _through(self, wire: Wire, target: Value) -> int:
        """The value that a wire delivers: the output, cast through every storage type on it."""
        producer = self.programs[wire.producer]
        source = producer.values[producer.outputs[wire.output].value]
        value = self.made[wire.producer, wire.output]
        for data_type in (
            source.desc.layout.data_type,
            target.desc.layout.data_type,
            target.type.data_type,
        ):
            value = self._cast(producer, value, data_type)
        return value

    def _cast(self, program: Program, value: int, data_type: DataType) -> int:
        before = self.values[value]
        if before.type.data_type is data_type:
            return value
        found = self.casts.get((value, data_type))
        if found is None:
            kind = ValueType(before.type.shape, data_type)
            name = f"{before.name}.{data_type.short}"
            found = self._value(program, Value(name, kind))
            attributes = {"to": onnx_code(data_type)}
            self.operations.append(Operation("Cast", (value,), (found,), attributes))
            self.casts[value, data_type] = found
        return found

    def _share(self, first: Port, again: Port, slot: InputSlot) -> int:
        at = self.slots[again] = self.slots[first]
        # Once any of the programs was given the tensor for good, the caller has parted with it.
        if slot.ownership is Ownership.DONATE:
            self.inputs[at] = replace(self.inputs[at], ownership=Ownership.DONATE)
        return self.inputs[at].value

    def _value(self, program: Program, value: Value) -> int:
        name = _free_name(value.name, program.name, self.names.__contains__)
        self.names.add(name)
        self.values.append(replace(value, name=name))
        return len(self.values) - 1

    def _slot_name(self, side: str, program: Program, name: str) -> str:
        free = _free_name(name, program.name, lambda n: (side, n) in self.slot_names)
        self.slot_names.add((side, free))
        return free


def _rounds(value: Value) -> bool:
    """Whether storing the value changes its type, and so perhaps its bits."""
    return value.desc.layout.data_type is not value.type.data_type


def _free_name(name: str, prefix: str, taken: Callable[[str], bool]) -> str:
    """The name itself, else with the program's name before it, else numbered."""
    if not taken(name):
        return name
    longer = f"{prefix}.{name}"
    free, number = longer, 1
    while taken(free):
        number += 1
        free = f"{longer}.{number}"
    return free
