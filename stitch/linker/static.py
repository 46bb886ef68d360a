"""Static linking: several programs → one, with the same results to the last bit.

What a wire becomes: the output and the input turn into one plain value. A tensor that passes
through a wire is rounded whenever its storage type narrows (logical type → stored by the producer →
stored for the consumer → logical type); each such step that changes the type becomes a `Cast`, so
nothing is rounded more or less often than before. A wire that stores a block format (bfp8, bfp4) is
refused with a `LinkError`: elements round together with their neighbours there, which no `Cast`
says; such programs stay apart and are stitched at run time.

What was whose is kept as seams: an executor that fuses operations can then compute each program as
it was apart, and give the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stitch.errors import LinkError, OutOfMemoryError
from stitch.linker.capacity import AliasProofs, address_problems, check_capacity, demands
from stitch.linker.expansion import (
    expansion_nbytes,
    live_operations,
    only_operations,
    renumbered,
    used_values,
)
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
    Seam,
    Space,
    Value,
    ValueType,
)
from stitch.tasks import MergedAgent, ProgramAgent, TaskRow, TaskTable, program_agent

# --------------------------------------------------------------------------------------------------
# Joining: programs appended one by one to a list of values and operations, wires resolved.


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
    #: The values that programs return, with or without readers.
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


# --------------------------------------------------------------------------------------------------
# The operations and outputs of each part of a linked program.


def seams_of(
    whole: OperationList,
    firsts: Sequence[int],
    given: Collection[int],
    live: Sequence[int],
    numbers: Mapping[int, int],
) -> tuple[Seam, ...]:
    """The seams of what is left of a list: `live` operations, values under their new `numbers`.

    `firsts`: where parts begin in the whole list, rising, the first at 0; `given`: the values that
    were outputs of a part, or were held by one. What another part reads was given, too. A part
    without operations is gone; one part that holds nothing is no seam.
    """
    parts = [bisect_right(firsts, index) - 1 for index in range(len(whole.operations))]
    made = {
        v: parts[index]
        for index, operation in enumerate(whole.operations)
        for v in operation.outputs
        if v != ABSENT
    }
    alive = frozenset(live)
    gave = set(given)
    gives = {slot.value for slot in whole.outputs}
    for index, operation in enumerate(whole.operations):
        for v in operation.inputs:
            if v in made and made[v] != parts[index]:
                gave.add(v)
                if index in alive:
                    gives.add(v)
            elif v in made and index not in alive:
                gave.add(v)
    held: dict[int, list[int]] = {}
    for v in sorted(gave - gives):
        if v in made and v in numbers:
            held.setdefault(made[v], []).append(numbers[v])
    begins: dict[int, int] = {}
    for now, index in enumerate(live):
        begins.setdefault(parts[index], now)
    seams = [Seam(first, tuple(held.get(part, ()))) for part, first in begins.items()]
    return tuple(seams) if len(seams) > 1 or any(seam.held for seam in seams) else ()


def link_programs(
    programs: Sequence[Program],
    wires: Sequence[Wire],
    *,
    machine: MachineShape,
    name: str,
    keep: Collection[Port] | None = None,
    strict_types: bool = False,
) -> Program:
    """One program that does what the programs do one after the other along the wires.

    `keep`: the outputs that stay outputs, None for those that feed no wire. Operations that only
    served dropped outputs go. Fixed addresses of slots that stay are kept. An alias is kept where
    it still can be proved. Raises `LinkError` for wires that do not fit, point backwards, store a
    block format, or whose slots' fixed addresses collide, and for opaque programs;
    `OutOfMemoryError` where the whole does not fit the machine.
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
    return _finish(joined, name, machine, roles.pop() if len(roles) == 1 else Role.FORWARD)


def _refuse_opaque(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.is_opaque:
            raise LinkError(
                f"program {program.name!r} is opaque: its operations are names of another "
                "compiler's, and stay in their binary",
                remedy="stitch it at run time, as it is: stitch-inspect a.ttnn b.ttb",
            )


def _finish(joined: JoinedProgram, name: str, machine: MachineShape, role: Role) -> Program:
    """Drops what no output needs, packs the scratch, proves aliases, checks that all of it fits."""
    where = f"program {name!r}"
    whole = joined.body(name)
    live = live_operations(whole)
    body = only_operations(whole, live)
    numbers = used_values(body)
    body = renumbered(body, numbers)
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
        seams_of(whole, joined.firsts, joined.given, live, numbers),
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
    """The program with those of the parts' aliases that can still be proved in the whole."""
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


# --------------------------------------------------------------------------------------------------
# Linking merged tasks into programs.


def link_tasks(table: TaskTable, machine: MachineShape, *, strict_types: bool = False) -> TaskTable:
    """The same tasks, those of merged programs as one program each: its boundaries are gone.

    Equal merged tasks become one program. What cannot be linked stays merged: members that are no
    programs, wires that store a block format, a whole that does not fit the machine, an input that
    one member takes over and another reads.
    """
    known: dict[Hashable, ProgramAgent | None] = {}
    rows = []
    for row in table.tasks:
        merged = row.agent
        if type(merged) is MergedAgent:
            key = wiring_of(merged)
            if key not in known:
                known[key] = None
                with suppress(LinkError, OutOfMemoryError):
                    known[key] = program_agent(
                        link_merged(merged, machine, strict_types=strict_types)
                    )
            agent = known[key]
            if agent is not None:
                rows.append(TaskRow(agent, linked_inputs(row), row.outputs))
                continue
        rows.append(row)
    return replace(table, tasks=tuple(rows))


def wiring_of(merged: MergedAgent) -> Hashable:
    """The same for merged tasks of the same programs, by identity, with the same wires."""
    agents = [m.agent for m in merged.members]
    programs = [id(a.program) if type(a) is ProgramAgent else id(a) for a in agents]
    return (*programs, *[(m.inputs, m.outputs) for m in merged.members], merged.kept)


def link_merged(
    merged: MergedAgent, machine: MachineShape, *, strict_types: bool = False
) -> Program:
    """The program that its members become; raises what `link_programs` does, and `LinkError` for
    members that are no programs, and for an input that one takes over and another reads."""
    programs: list[Program] = []
    for member in merged.members:
        if type(member.agent) is not ProgramAgent:
            raise LinkError(f"{member.agent.name!r} is no program", where=merged.name)
        programs.append(member.agent.program)
    if not _is_plain(merged):
        raise LinkError("one of the programs takes over what another reads", where=merged.name)
    ports: dict[int, Port] = {}
    wires = []
    for p, member in enumerate(merged.members):
        for i, number in enumerate(member.inputs):
            if number in ports:
                wires.append(Wire(*ports[number], p, i))
        ports |= {number: (p, o) for o, number in enumerate(member.outputs)}
    keep = [ports[number] for number in merged.kept]
    return link_programs(
        programs, wires, machine=machine, name=merged.name, keep=keep, strict_types=strict_types
    )


def _is_plain(merged: MergedAgent) -> bool:
    """Whether outputs stand in the order of the members, and nothing is read beside its taker."""
    reads = Counter(number for member in merged.members for number in member.inputs)
    in_order = list(merged.kept) == sorted({*merged.kept})
    return in_order and all(reads[number] == 1 for number in merged.consumes)


def linked_inputs(row: TaskRow) -> tuple[int, ...]:
    """What the slots of the program are given that a merged task has become: those of its members
    that no member feeds."""
    merged = row.agent
    assert type(merged) is MergedAgent, "a merged task"
    return tuple([
        row.inputs[number]
        for member in merged.members
        for number in member.inputs
        if number < merged.takes
    ])  # fmt: skip
