"""Joining: programs appended one by one to a list of values and operations, wires resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stitch.errors import LinkError
from stitch.linker.wires import Port, Wire
from stitch.ops import onnx_code
from stitch.program import (
    ABSENT,
    BodyPool,
    Constant,
    Contents,
    DataType,
    FreeNames,
    InputSlot,
    Operation,
    OperationList,
    OutputSlot,
    Program,
    Value,
    ValueType,
)


@dataclass(slots=True)
class JoinedProgram:
    """The program under construction; lives only while `link_programs` runs."""

    programs: Sequence[Program]
    wires: Sequence[Wire]
    kept: frozenset[Port]
    fed: frozenset[Port]
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    bodies: BodyPool = field(default_factory=BodyPool)
    contents: Contents = field(default_factory=Contents)
    inputs: list[InputSlot] = field(default_factory=list)
    outputs: list[OutputSlot] = field(default_factory=list)
    #: The slot index, in the whole, of each input that comes from outside.
    slots: dict[Port, int] = field(default_factory=dict)
    #: The plain value behind each output, before its storage rounds it.
    made: dict[Port, int] = field(default_factory=dict)
    aliases: dict[int, Port] = field(default_factory=dict)
    casts: dict[tuple[int, DataType], int] = field(default_factory=dict)
    #: Where parts begin: programs, or theirs if they were linked, and each operation of a wire.
    firsts: list[int] = field(default_factory=list)
    #: The values that programs gave, whoever reads them.
    given: set[int] = field(default_factory=set)
    names: FreeNames = field(default_factory=FreeNames)
    slot_names: dict[str, FreeNames] = field(
        default_factory=lambda: {"input": FreeNames(), "output": FreeNames()}
    )
    #: The wires to each program, by input.
    feeding: dict[int, dict[int, Wire]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for wire in self.wires:
            self.feeding.setdefault(wire.consumer, {})[wire.input] = wire

    def add(self, index: int) -> None:
        """Appends program `index`."""
        program = self.programs[index]
        where = {}
        sources = self.feeding.get(index, {})
        for i, slot in enumerate(program.inputs):
            value = program.values[slot.value]
            if i in sources:
                where[slot.value] = self._through(sources[i], value)
            else:
                where[slot.value] = self._value(program, value)
                self.slots[index, i] = len(self.inputs)
                name = self._slot_name("input", program, slot.name)
                self.inputs.append(replace(slot, name=name, value=where[slot.value]))
        for constant in program.constants:
            where[constant.value] = self._constant(program, constant)
        self._add_operations(index, program, where)

    def body(self, name: str) -> OperationList:
        """All that was appended."""
        return OperationList(
            name, tuple(self.inputs), tuple(self.outputs), tuple(self.values),
            tuple(self.operations), tuple(self.constants), bodies=tuple(self.bodies.bodies),
        )  # fmt: skip

    def _add_operations(self, index: int, program: Program, where: dict[int, int]) -> None:
        ports = {slot.value: (index, o) for o, slot in enumerate(program.outputs)}
        read = {v for operation in program.operations for v in operation.inputs}
        bodies = self.bodies.add_all(program.bodies)
        firsts = {0, *(seam.first for seam in program.seams)}
        for number, operation in enumerate(program.operations):
            if number in firsts:
                self._begin_part()
            numbers: dict[int, int] = {ABSENT: ABSENT}
            for v in operation.outputs:
                if v != ABSENT:
                    stays = v in ports and ports[v] in self.kept and ports[v] not in self.fed
                    numbers[v] = self._made(program, program.values[v], ports.get(v), stays)
            inputs = tuple(ABSENT if v == ABSENT else where[v] for v in operation.inputs)
            outputs = tuple(numbers[v] for v in operation.outputs)
            body = bodies[operation.body]
            self.operations.append(replace(operation, inputs=inputs, outputs=outputs, body=body))
            for v, here in numbers.items():
                where[v] = here
                if v in ports and v in read:
                    where[v] = self._as_stored(program, program.values[v], here)
                if v in ports:
                    self.made[ports[v]] = here
        self.given.update(self.made[port] for port in ports.values())
        self.given.update(where[v] for seam in program.seams for v in seam.held)
        for o, slot in enumerate(program.outputs):
            if (index, o) in self.kept:
                self._add_output((index, o), program, slot, self.made[index, o])

    def _made(self, program: Program, value: Value, port: Port | None, stays: bool) -> int:
        """A value that an operation makes: an output with its layout, or a plain value."""
        if stays or (port in self.kept and not _rounds(value)):
            return self._value(program, value)
        return self._value(program, replace(value, layout=None))

    def _as_stored(self, program: Program, value: Value, here: int) -> int:
        """What an operation reads that reads an output of its own program: what is stored."""
        if not _rounds(value) or self.values[here].layout is not None:
            return here
        stored = value.desc.layout.data_type
        if stored.is_block:
            raise LinkError(
                f"an output of program {program.name!r} ({value.desc.text()}) is read inside it",
                remedy="recompile it: the compiler gives such an output a value of its own",
            )
        return self._cast(program, self._cast(program, here, stored), value.type.data_type)

    def _add_output(self, port: Port, program: Program, slot: OutputSlot, value: int) -> None:
        original = program.values[slot.value]
        # It is rounded by its storage, and a consumer needs it unrounded.
        if port in self.fed and _rounds(original):
            stored = self._value(program, original)
            self._begin_part()
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
            self._begin_part()
            value = self._cast(producer, value, data_type)
        return value

    def _begin_part(self) -> None:
        """The next operation begins another part."""
        if not self.firsts or self.firsts[-1] < len(self.operations):
            self.firsts.append(len(self.operations))

    def _cast(self, program: Program, value: int, data_type: DataType) -> int:
        before = self.values[value]
        if before.type.data_type is data_type:
            return value
        number = self.casts.get((value, data_type))
        if number is None:
            kind = ValueType(before.type.shape, data_type)
            name = f"{before.name}.{data_type.short}"
            number = self._value(program, Value(name, kind))
            attributes = {"to": onnx_code(data_type)}
            self.operations.append(Operation("Cast", (value,), (number,), attributes))
            self.casts[value, data_type] = number
        return number

    def _constant(self, program: Program, constant: Constant) -> int:
        """The value of a constant: that of another with the same bytes and descriptor, if any."""
        value = program.values[constant.value]
        number = self.contents.number(constant.data, (value.type, value.layout))
        if number == len(self.constants):
            here = self._value(program, value)
            self.constants.append(replace(constant, value=here))
        return self.constants[number].value

    def _value(self, program: Program, value: Value) -> int:
        self.values.append(replace(value, name=self.names.free(value.name, program.name)))
        return len(self.values) - 1

    def _slot_name(self, side: str, program: Program, name: str) -> str:
        return self.slot_names[side].free(name, program.name)


def _rounds(value: Value) -> bool:
    """Whether storing the value changes its type, and so perhaps its bits."""
    return value.desc.layout.data_type is not value.type.data_type
