"""Loading: a program of a binary becomes an agent of a device, its constants get addresses.

A file may claim anything. The `ttb` room has checked it and the program's structure; here operators
and the machine are known as well, so types are inferred anew, every intermediate value must lie in
the scratch, and an output may lie on an input only where that is proved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from stitch.errors import CompileError, FormatError, IncompatibleError, OutOfMemoryError, Problem
from stitch.linker import (
    SCRATCH_ALIGNMENT,
    AliasProofs,
    address_problems,
    demands,
    expanded,
    use_problems,
)
from stitch.machine import (
    Machine,
    MachineShape,
    machine_names,
    program_seconds,
    room_per_bank,
)
from stitch.ops import infer_operation, is_elementwise, operators
from stitch.program import ABSENT, Body, Operation, Program
from stitch.runtime.loaded import Home, LoadedProgram
from stitch.runtime.values import ConstantRecord, Reader, Records, dispose, hold_constant
from stitch.ttb import Binary, state_names


def load_program(
    device: Home, machine: Machine, records: Records, binary: Binary, which: int | str,
    where: str | None = None,
) -> LoadedProgram:  # fmt: skip
    """See `Device.load`; `where` is the binary's file. Nothing stays reserved where it fails."""
    missing = machine.shape.shortcomings(binary.machine)
    if missing:
        raise IncompatibleError(
            f"a binary compiled for {binary.machine.name!r} does not run on "
            f"{machine.name!r}: " + "; ".join(missing),
            where=where,
            remedy=_remedy(machine.name, binary),
        )
    program = binary.program(which)
    _refuse_opaque(program, device, where)
    check_program(program, machine.shape)
    _check_use(program, binary, machine, where)
    if device.backend.executor.computes:
        device.backend.executor.check(program, machine.shape)
    kept: list[ConstantRecord] = []
    seconds = simulated_seconds(program, machine)
    loaded = LoadedProgram(device, program, lambda: binary.verify_segments(program), kept, seconds)
    loaded.state_names = state_names(binary, program)
    if loaded.state_names:
        loaded.binary = binary
    # From here on a finalizer releases the program's memory, also after an error.
    device.await_unloading(loaded)
    reader = Reader(loaded.transformation.key, program.name)
    for constant, crc32 in zip(program.constants, binary.crc32_of(program), strict=False):
        value = program.values[constant.value]
        hold_constant(
            records, loaded.device, value.type, value.desc, constant.data, crc32, value.name,
            reader, kept,
        )  # fmt: skip
    try:
        _place(list(dict.fromkeys(kept)), device, records, program.name)
    except Exception:
        dispose(records, kept, reader)
        raise
    return loaded


def _refuse_opaque(program: Program, device: Home, where: str | None) -> None:
    """Nothing here computes operations that are names only; without data, their plans run."""
    executor = device.backend.executor
    if executor.computes and program.is_opaque:
        raise IncompatibleError(
            f"program {program.name!r} is opaque: its operations are names of another compiler's, "
            "which no executor computes",
            where=where,
            expected="the executor 'null', which plans it without data",
            got=f"the executor {executor.name!r}",
            remedy="stitch-run --executor=null (or --dry_run), stitch-inspect, or "
            "open_device(executor='null')",
        )


def _check_use(program: Program, binary: Binary, machine: Machine, where: str | None) -> None:
    """Raise `IncompatibleError` naming all that a program uses for which the machine has no place;
    what has none on the very machine that it was compiled for either is found when it runs."""
    compiled_for = binary.machine
    wanted = demands(program, program.scratch, machine.shape)
    problems_of = address_problems if compiled_for == machine.shape else use_problems
    found = tuple(problems_of(wanted, machine.shape))
    if found:
        raise IncompatibleError(
            f"program {program.name!r}, compiled for {compiled_for.name!r}, does not fit "
            f"{machine.name!r}",
            where=where,
            problems=tuple(Problem("use", f"program {program.name}", text) for text in found),
            remedy=_remedy(machine.name, binary),
        )


def _place(constants: Sequence[ConstantRecord], device: Home, records: Records, name: str) -> None:
    """Constants that no other program holds get places; where others have the room now, the first
    run of the program takes it, if what lies there may leave."""
    shape = device.backend.machine.shape
    blocks = [(c.desc.layout.space, room_per_bank(c.desc, shape), c.address) for c in constants]
    try:
        for constant, (_, size, address) in zip(constants, blocks, strict=True):
            if len(constant.readers) > 1:
                continue  # What runs knows where it lies.
            buffer = records.reserve(constant.desc, size, address, constant.by)
            assert buffer.address is not None
            memory = device.backend.spaces[buffer.space]
            # Its bytes are never written, and its padding is looked at when it leaves.
            memory.fill_padding(constant.desc, buffer.address, shape)
            records.attach(constant, buffer, 0)
            records.is_consistent = True
    except OutOfMemoryError as error:
        if not device.spills:
            error.where = f"loading {name!r}, and spill=False keeps every constant in its space"
            error.remedy = (
                "drop other programs or tensors, or open_device(spill=True): programs "
                "take turns then"
            )
            raise
        records.check_fits_alone(blocks)


def simulated_seconds(program: Program, machine: Machine) -> float:
    """What one run of a program takes on a machine; 0 where that describes no compute rates, or
    where nothing says what its operations compute."""
    return 0.0 if program.is_opaque else program_seconds(expanded(program), machine)


def _remedy(here: str, binary: Binary) -> str:
    """What makes both fit: targets and devices that exist under these names; for a binary of
    another compiler the machine that its own file describes."""
    if binary.origin is not None:
        return (
            "run it on the machine that its file describes: stitch-run without --device, "
            "open_device(binary.origin.machine); or compile it again, with its own compiler, for "
            f"{here!r}"
        )
    known, there = machine_names(), binary.machine.name
    device = f", or run it on {there!r}" if there in known else ""
    if here not in known:
        return (
            "compile it with --target=FILE, or compile(..., target=FILE), the .yaml or .ttsys that "
            f"describes this machine{device}"
        )
    return f"compile it with --target={here}{device} (in Python: compile(..., target={here!r}))"


def check_program(program: Program, machine: MachineShape) -> None:
    """Raise `CompileError` for types that do not follow, `FormatError` for values whose places do
    not go together; both also of what its bodies come to, written out."""
    check_types(program, program.name, program.bodies)
    if program.bodies:
        written = expanded(program)
        check_types(written, program.name, written.bodies)
        # What is left are the bodies of scans, which run as they are.
        for index, body in enumerate(written.bodies):
            check_types(body, f"{program.name}, body {index}", written.bodies)
        _refuse(program, "the bodies of program {}, written out, do not fit its scratch",
                scratch_problems(written, machine))  # fmt: skip
    _refuse(program, "the intermediate values of program {} do not lie in its scratch",
            scratch_problems(program, machine))  # fmt: skip
    _refuse(program, "program {} overwrites what it still reads", alias_problems(program))


def _refuse(program: Program, what: str, problems: Iterator[Problem]) -> None:
    found = tuple(problems)
    if found:
        raise FormatError(
            what.format(repr(program.name)),
            problems=found[:16],
            remedy="compile the module again",
        )


def alias_problems(program: Program) -> Iterator[Problem]:
    """Every output that takes the buffer of an input without a proof that this harms nobody."""
    aliased = [at for at, slot in enumerate(program.outputs) if slot.aliases_input is not None]
    proofs = AliasProofs(program) if aliased else None
    for at in aliased:
        slot = program.outputs[at]
        assert proofs is not None and slot.aliases_input is not None
        obstacle = proofs.obstacle(at, slot.aliases_input)
        if obstacle is not None:
            source = program.inputs[slot.aliases_input].name
            yield Problem("unproved_alias", f"output {at} ({slot.name})",
                          f"it may not lie on input {source!r}: {obstacle}")  # fmt: skip


def check_types(program: Program | Body, name: str, bodies: Sequence[Body]) -> None:
    """Infer every operation's types anew and compare; raises `CompileError` naming both. `bodies`:
    those that operations may carry."""
    constants = {constant.value: constant.data for constant in program.constants}
    for index, operation in enumerate(program.operations):
        if operation.is_opaque:
            continue  # Its types are what the program says.
        if operation.is_foreign:
            _check_foreign(operation, index, name)
            continue
        where = operation.location or f"operation {index} of {name!r}"
        operands = [None if i == ABSENT else program.values[i].type for i in operation.inputs]
        known = [constants.get(i) for i in operation.inputs]
        inferred = infer_operation(operation, operands, known, where, bodies)
        for value, kind in zip(operation.outputs, inferred, strict=False):
            if value != ABSENT and program.values[value].type != kind:
                raise CompileError(
                    f"{operation.op} does not make what the program says",
                    where=where,
                    expected=kind.text(),
                    got=program.values[value].type.text(),
                    remedy="compile the module again",
                )


_DEFINED = frozenset((definition.domain, definition.name) for definition in operators())


def _check_foreign(operation: Operation, index: int, name: str) -> None:
    """Raise `FormatError` for a foreign operator of a name that Stitch defines: passes and
    executors would take it for that one."""
    if (operation.domain, operation.op) in _DEFINED or operation.body != ABSENT:
        raise FormatError(
            f"{operation.title} is marked as a foreign operator of opset {operation.opset}",
            where=operation.location or f"operation {index} of {name!r}",
            expected="an operator that Stitch does not define, without a body",
            remedy="compile the module again",
        )


def scratch_problems(program: Program, machine: MachineShape) -> Iterator[Problem]:
    """Every intermediate value that leaves the scratch, or overlaps another that is still read.

    Kernels write elements where they lie, so each value starts at a multiple of 64 bytes. The
    output of an elementwise operation may take the very place of an input that dies with it. Where
    opaque operations keep theirs, nothing says: their scratch is what they take together.
    """
    scratch = program.scratch
    room = scratch.size_per_bank * machine.space(scratch.space).banks
    slots = {s.value for s in program.inputs} | {s.value for s in program.outputs}
    last_read = {i: n for n, o in enumerate(program.operations) for i in o.inputs}
    alive: list[tuple[int, int, int]] = []  # (start, end, value), by start
    for number, operation in enumerate(program.operations):
        if operation.is_opaque:
            continue
        born = [v for v in operation.outputs if v != ABSENT and v not in slots]
        dying = [e for e in alive if last_read.get(e[2], number) == number] if born else []
        elementwise = bool(dying) and is_elementwise(operation)
        for value in born:
            where = f"value {value} ({program.values[value].name})"
            desc = program.values[value].desc
            start = desc.layout.address
            if start is None or not desc.layout.is_dense or desc.layout.space is not scratch.space:
                yield Problem("scratch_form", where, f"{desc.text()} is no place in the scratch")
                continue
            if start % SCRATCH_ALIGNMENT:
                wanted = f"byte {start}, expected a multiple of {SCRATCH_ALIGNMENT}"
                yield Problem("scratch_alignment", where, wanted)
                continue
            end = start + desc.layout.data_type.nbytes(desc.elements)
            if end > room:
                yield Problem("scratch_bounds", where, f"bytes [{start}, {end}) of {room}")
                continue
            if elementwise:
                for entry in dying:
                    if entry[:2] == (start, end) and entry in alive:
                        alive.remove(entry)
            at = bisect_left(alive, (start, end, value))
            for other in alive[max(0, at - 1) : at + 1]:
                if other[0] < end and start < other[1]:
                    name = program.values[other[2]].name
                    yield Problem("scratch_overlap", where, f"{name!r} is still read there")
            if end > start:
                insort(alive, (start, end, value))
        alive = [e for e in alive if last_read.get(e[2], -1) > number]
