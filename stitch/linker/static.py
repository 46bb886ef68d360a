"""Static linking: several programs into one, with the same results to the last bit.

A wire's output and input become one value. Each change of type on a wire (logical type, storage of
the producer, storage of the consumer, logical type) becomes a `Cast`, so values are rounded exactly
as before. Wires that store a block format (bfp8, bfp4) are refused, as no `Cast` reproduces their
rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from stitch.errors import LinkError
from stitch.linker.capacity import AliasProofs, address_problems, check_capacity, demands
from stitch.linker.expansion import expansion_nbytes, remove_dead_code
from stitch.linker.scratch import choose_scratch, pack_scratch, place_intermediates
from stitch.linker.wires import Port, Wire, check_ports, check_wires
from stitch.machine import MachineShape
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
    Role,
    Scratch,
    Space,
    Value,
    ValueType,
)

#: A longer name of joined program names is replaced by the first name and a count.
LONGEST_NAME = 64


@dataclass(slots=True)
class JoinedProgram:
    """The linked program under construction: programs appended one by one, wires resolved."""

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
    #: The input slot of each input that is not wired.
    slots: dict[Port, int] = field(default_factory=dict)
    #: The value of each output, before its storage rounds it.
    unrounded: dict[Port, int] = field(default_factory=dict)
    aliases: dict[int, Port] = field(default_factory=dict)
    casts: dict[tuple[int, DataType], int] = field(default_factory=dict)
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
        """Append program `index`."""
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
        return OperationList(
            name, tuple(self.inputs), tuple(self.outputs), tuple(self.values),
            tuple(self.operations), tuple(self.constants), bodies=tuple(self.bodies.bodies),
        )  # fmt: skip

    def _add_operations(self, index: int, program: Program, where: dict[int, int]) -> None:
        ports = {slot.value: (index, o) for o, slot in enumerate(program.outputs)}
        read = {v for operation in program.operations for v in operation.inputs}
        bodies = self.bodies.add_all(program.bodies)
        for operation in program.operations:
            numbers: dict[int, int] = {ABSENT: ABSENT}
            for v in operation.outputs:
                if v != ABSENT:
                    stays = v in ports and ports[v] in self.kept and ports[v] not in self.fed
                    numbers[v] = self._result(program, program.values[v], ports.get(v), stays)
            inputs = tuple(ABSENT if v == ABSENT else where[v] for v in operation.inputs)
            outputs = tuple(numbers[v] for v in operation.outputs)
            body = bodies[operation.body]
            self.operations.append(replace(operation, inputs=inputs, outputs=outputs, body=body))
            for v, here in numbers.items():
                where[v] = here
                if v in ports and v in read:
                    where[v] = self._as_stored(program, program.values[v], here)
                if v in ports:
                    self.unrounded[ports[v]] = here
        for o, slot in enumerate(program.outputs):
            if (index, o) in self.kept:
                self._add_output((index, o), program, slot, self.unrounded[index, o])

    def _result(self, program: Program, value: Value, port: Port | None, stays: bool) -> int:
        """Add the result of an operation: an output with its layout, or an intermediate value."""
        if stays or (port in self.kept and not _rounds(value)):
            return self._value(program, value)
        return self._value(program, replace(value, layout=None))

    def _as_stored(self, program: Program, value: Value, here: int) -> int:
        """Return the stored value of an output, for readers in its own program."""
        if not _rounds(value) or self.values[here].layout is not None:
            return here
        stored = value.desc.layout.data_type
        if stored.is_block:
            raise LinkError(
                f"an output of program {program.name!r} ({value.desc.text()}) is read inside it",
                remedy="recompile it: the compiler gives such an output a separate value",
            )
        return self._cast(program, self._cast(program, here, stored), value.type.data_type)

    def _add_output(self, port: Port, program: Program, slot: OutputSlot, value: int) -> None:
        original = program.values[slot.value]
        # The output is rounded by its storage, and a consumer reads the unrounded value.
        if port in self.fed and _rounds(original):
            stored = self._value(program, original)
            self.operations.append(Operation("Identity", (value,), (stored,)))
            value = stored
        if slot.aliases_input is not None:
            self.aliases[len(self.outputs)] = (port[0], slot.aliases_input)
        name = self._slot_name("output", program, slot.name)
        self.outputs.append(OutputSlot(name, value))

    def _through(self, wire: Wire, target: Value) -> int:
        """Cast an output through every storage type of a wire; return the consumer's value."""
        producer = self.programs[wire.producer]
        source = producer.values[producer.outputs[wire.output].value]
        value = self.unrounded[wire.producer, wire.output]
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
        """Add a constant; return an existing one with the same bytes and descriptor, if any."""
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
    """Whether storing the value changes its type."""
    return value.desc.layout.data_type is not value.type.data_type


def link_programs(
    programs: Sequence[Program],
    wires: Sequence[Wire],
    *,
    machine: MachineShape,
    name: str | None = None,
    keep: Collection[Port] | None = None,
    strict_types: bool = False,
) -> Program:
    """Link programs, in run order, into one; remove what only dropped outputs need.

    Fixed addresses of remaining slots stay, and aliases that can still be proved.

    Args:
        name: The program's name; by default the programs' names, joined.
        keep: The outputs that remain outputs; by default those that feed no wire.

    Raises:
        LinkError: Wires that do not fit, lead backwards or store a block format; colliding fixed
            addresses; opaque programs.
        OutOfMemoryError: The linked program does not fit the machine.
    """
    _refuse_opaque(programs)
    check_wires(programs, wires, strict_types)
    fed = {(w.producer, w.output) for w in wires}
    if keep is None:
        kept = {
            (p, o)
            for p, program in enumerate(programs)
            for o in range(len(program.outputs))
            if (p, o) not in fed
        }
    else:
        kept = set(keep)
        check_ports(kept, programs)
    joined = JoinedProgram(programs, wires, frozenset(kept), frozenset(fed))
    for index in range(len(programs)):
        joined.add(index)
    roles = {program.role for program in programs}
    name = _joined_name(programs) if name is None else name
    return _finish(joined, name, machine, roles.pop() if len(roles) == 1 else Role.FORWARD)


def _joined_name(programs: Sequence[Program]) -> str:
    name = "_".join(program.name for program in programs)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{programs[0].name}_and_{len(programs) - 1}_more"


def _refuse_opaque(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.is_opaque:
            raise LinkError(
                f"program {program.name!r} is opaque: Stitch does not define its operations, "
                "which belong to another compiler",
                remedy="stitch it at run time: stitch-inspect a.ttnn b.ttb",
            )


def _finish(joined: JoinedProgram, name: str, machine: MachineShape, role: Role) -> Program:
    """Eliminate dead code, pack the scratch, prove aliases, and check that everything fits."""
    where = f"program {name!r}"
    body = remove_dead_code(joined.body(name))
    plan = pack_scratch(body.values, body.operations, body.placed_values())
    everything = demands(body, Scratch(Space.HOST, 0), machine)
    slots = [d for d in everything if d.space is Space.L1]
    scratch = choose_scratch(
        expansion_nbytes(body, plan),
        machine,
        l1_slots_per_bank=sum(d.size_per_bank for d in slots),
        l1_below=min((d.address for d in slots if d.address is not None), default=None),
    )
    values = place_intermediates(body.values, plan, scratch)
    program = Program(
        name, body.inputs, body.outputs, values, body.operations, body.constants, scratch, role,
        bodies=body.bodies,
    )  # fmt: skip
    program = _with_aliases(program, joined)
    wanted = demands(program, scratch, machine)
    problems = list(address_problems(wanted, machine))
    if problems:
        raise LinkError(
            "the fixed addresses of these programs collide:\n  - " + "\n  - ".join(problems),
            where=where,
            remedy="stitch them at run time instead: they need these regions at different times",
        )
    check_capacity(wanted, machine, where)
    return program


def _with_aliases(program: Program, joined: JoinedProgram) -> Program:
    """Return the program with the aliases that can still be proved."""
    outputs = list(program.outputs)
    taken: set[int] = set()
    proofs = AliasProofs(program)
    for output, port in joined.aliases.items():
        slot = joined.slots.get(port)
        if slot is None or slot in taken:
            continue
        ours = program.values[outputs[output].value]
        theirs = program.values[program.inputs[slot].value]
        if ours.layout == theirs.layout and proofs.obstacle(output, slot) is None:
            outputs[output] = replace(outputs[output], aliases_input=slot)
            taken.add(slot)
    return replace(program, outputs=tuple(outputs))
