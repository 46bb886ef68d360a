"""Load a program of a binary onto a device: validate it and allocate its constants.

A file may contain anything. `ttb` has checked the file and the program's structure; here, with the
operators and the machine known, types are inferred again, intermediate values must be inside the
scratch, and an output may alias an input only with a proof.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
    known_machines,
    program_seconds,
    room_per_bank,
)
from stitch.ops import infer_operation, is_defined, is_elementwise
from stitch.program import ABSENT, Body, Operation, Program, operation_forms
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.values import ConstantRecord, Reader, dispose, hold_constant
from stitch.ttb import Binary, state_names

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


def load_program(
    device: RuntimeDevice, binary: Binary, which: int | str, where: str | None = None
) -> LoadedProgram:
    """See `Device.load`; `where` is the binary's file. Reserves nothing if it fails."""
    machine = device.machine
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
    # No operations of an opaque program have a model of their time.
    seconds = 0.0 if program.is_opaque else program_seconds(expanded(program), machine)
    loaded = LoadedProgram(device, program, lambda: binary.verify_segments(program), kept, seconds)
    loaded.state_names = state_names(binary, program)
    if loaded.state_names:
        loaded.binary = binary
    reader = Reader(loaded.transformation.key, program.name)

    def unload() -> None:
        device.plan_cache.forget(reader.key)
        dispose(device.records, kept, reader)

    # Called once the program is unreferenced, also after an error.
    device.deaths.await_end(loaded, unload)
    for constant, crc32 in zip(program.constants, binary.crc32_of(program), strict=False):
        value = program.values[constant.value]
        hold_constant(
            device, value.type, value.desc, constant.data, crc32, value.name, reader, kept
        )
    try:
        _place(list(dict.fromkeys(kept)), device, program.name)
    except Exception:
        dispose(device.records, kept, reader)
        raise
    return loaded


def _refuse_opaque(program: Program, device: RuntimeDevice, where: str | None) -> None:
    """Raise `IncompatibleError` for an opaque program, unless the executor computes no data."""
    executor = device.backend.executor
    if executor.computes and program.is_opaque:
        raise IncompatibleError(
            f"program {program.name!r} is opaque: it has operations of another compiler, "
            "which no executor implements",
            where=where,
            expected="the executor 'null', which plans it without data",
            got=f"the executor {executor.name!r}",
            remedy="stitch-run --executor=null (or --dry_run), stitch-inspect, or "
            "open_device(executor='null')",
        )


def _check_use(program: Program, binary: Binary, machine: Machine, where: str | None) -> None:
    """Raise `IncompatibleError` with all memory that a program uses and the machine lacks.

    On the machine that it was compiled for, only addresses are checked; other shortages show when
    it runs.
    """
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


def _place(constants: Sequence[ConstantRecord], device: RuntimeDevice, name: str) -> None:
    """Allocate the constants that no other program has allocated.

    If memory is short and `spill` is on, the first run of the program evicts other tensors.
    """
    shape, records = device.machine.shape, device.records
    blocks = [(c.desc.layout.space, room_per_bank(c.desc, shape), c.address) for c in constants]
    try:
        for constant, (_, size, address) in zip(constants, blocks, strict=True):
            if len(constant.readers) > 1:
                continue  # Allocated already, or evicted.
            buffer = records.reserve(constant.desc, size, address, constant.by)
            assert buffer.address is not None
            memory = device.backend.spaces[buffer.space]
            # Constants are never overwritten, but their padding is checked when they are released.
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


def _remedy(here: str, binary: Binary) -> str:
    """Return the advice for an incompatible binary: matching targets and devices."""
    if binary.origin is not None:
        return (
            "run it on the machine that its file describes: stitch-run without --device, "
            "open_device(binary.origin.machine); or compile it again, with its own compiler, for "
            f"{here!r}"
        )
    known, there = known_machines(), binary.machine.name
    device = f", or run it on {there!r}" if there in known else ""
    if here not in known:
        return (
            "compile it with --target=FILE, or compile(..., target=FILE), the .yaml or .ttsys that "
            f"describes this machine{device}"
        )
    return f"compile it with --target={here}{device} (in Python: compile(..., target={here!r}))"


def check_program(program: Program, machine: MachineShape) -> None:
    """Validate types and memory of a program, including its bodies after expansion.

    Raises:
        CompileError: A type differs from the inferred one.
        FormatError: Values overlap, leave the scratch, or alias an input without a proof.
    """
    check_types(program, program.name, program.bodies)
    if program.bodies:
        written = expanded(program)
        check_types(written, program.name, written.bodies)
        # Only bodies of scans remain; they run unexpanded.
        for index, body in enumerate(written.bodies):
            check_types(body, f"{program.name}, body {index}", written.bodies)
        _refuse(program, "the expanded bodies of program {} do not fit its scratch",
                scratch_problems(written, machine))  # fmt: skip
    _refuse(program, "the intermediate values of program {} are not inside its scratch",
            scratch_problems(program, machine))  # fmt: skip
    _refuse(program, "program {} overwrites what it still reads", alias_problems(program))


def _refuse(program: Program, what: str, problems: Iterator[Problem]) -> None:
    found = tuple(problems)
    if found:
        raise FormatError(
            what.format(repr(program.name)),
            problems=found[:16],
            remedy='compile the module again; for compilers: docs/format.md, "What a writer does"',
        )


def alias_problems(program: Program) -> Iterator[Problem]:
    """Yield every output that aliases an input without a proof that this is safe."""
    aliased = [at for at, slot in enumerate(program.outputs) if slot.aliases_input is not None]
    proofs = AliasProofs(program) if aliased else None
    for at in aliased:
        slot = program.outputs[at]
        assert proofs is not None and slot.aliases_input is not None
        obstacle = proofs.obstacle(at, slot.aliases_input)
        if obstacle is not None:
            source = program.inputs[slot.aliases_input].name
            yield Problem("unproved_alias", f"output {at} ({slot.name})",
                          f"it must not alias input {source!r}: {obstacle}")  # fmt: skip


def check_types(program: Program | Body, name: str, bodies: Sequence[Body]) -> None:
    """Infer the types of all operations again and compare them with the program's.

    Args:
        program: The program or body.
        name: Its name, for messages.
        bodies: The bodies that its operations may refer to.

    Raises:
        CompileError: A type differs; names both.
    """
    constants = {constant.value: constant.data for constant in program.constants}
    if isinstance(program, Program):
        forms = program.forms
    else:
        forms = operation_forms(program.values, program.operations, program.constants)
    for index, (operation, form) in enumerate(zip(program.operations, forms, strict=True)):
        if CHECKED in form.known:
            continue
        if operation.is_opaque:
            continue  # Nothing to infer: the program declares its types.
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
                    f"the output type of {operation.op} differs from the inferred one",
                    where=where,
                    expected=kind.text(),
                    got=program.values[value].type.text(),
                    remedy="compile the module again",
                )
        form.known[CHECKED] = True


#: A fact of forms of operations whose results have the inferred types.
CHECKED = "has inferred types"


def _check_foreign(operation: Operation, index: int, name: str) -> None:
    """Raise `FormatError` for a foreign operator with the name of one that Stitch defines, since
    passes and executors would confuse the two."""
    if is_defined(operation.op, operation.domain) or operation.body != ABSENT:
        raise FormatError(
            f"{operation.title} is marked as a foreign operator of opset {operation.opset}",
            where=operation.location or f"operation {index} of {name!r}",
            expected="an operator that Stitch does not define, without a body",
            remedy="compile the module again",
        )


def scratch_problems(program: Program, machine: MachineShape) -> Iterator[Problem]:
    """Yield every intermediate value that leaves the scratch or overlaps a live one.

    Each value starts at a multiple of 64 bytes. The output of an elementwise operation may have the
    address of an input that is read for the last time. Opaque operations do not state addresses and
    are skipped.
    """
    scratch = program.scratch
    room = scratch.size_per_bank * machine.space(scratch.space).banks
    slots = {s.value for s in program.inputs} | {s.value for s in program.outputs}
    last_read = {i: n for n, o in enumerate(program.operations) for i in o.inputs}
    alive: list[tuple[int, int, int]] = []  # (start, end, value), by start
    ending: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # By last reader.
    for number, operation in enumerate(program.operations):
        outputs = () if operation.is_opaque else operation.outputs
        born = [v for v in outputs if v != ABSENT and v not in slots]
        dying = list(ending[number]) if born else []
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
                    if entry[:2] == (start, end):
                        _discard(alive, entry)
            at = bisect_left(alive, (start, end, value))
            for other in alive[max(0, at - 1) : at + 1]:
                if other[0] < end and start < other[1]:
                    name = program.values[other[2]].name
                    yield Problem("scratch_overlap", where, f"{name!r} is still read there")
            if end > start:
                insort(alive, (start, end, value))
                ending[last_read.get(value, number)].append((start, end, value))
        for entry in ending[number]:
            _discard(alive, entry)


def _discard(alive: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> None:
    """Remove an entry from a sorted list if it is there."""
    at = bisect_left(alive, entry)
    if alive[at : at + 1] == [entry]:
        del alive[at]
