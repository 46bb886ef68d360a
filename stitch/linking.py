"""`link`: join programs of several binaries into one program in a new binary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

from stitch.argument_kinds import (
    BOOL,
    MAPPING,
    TEXT,
    ArgumentKind,
    either,
    optional,
    several,
    takes,
)
from stitch.errors import IncompatibleError, UsageError
from stitch.linker import (
    Port,
    ProgramNames,
    SlotWord,
    Wire,
    Wiring,
    chain_in_words,
    link_programs,
    wires_in_words,
)
from stitch.machine import MachineShape, load_machine
from stitch.model import PRODUCER, ModelOfBinary, ModelSession
from stitch.program import Program
from stitch.report import MACHINE
from stitch.runtime import LoadedProgram
from stitch.ttb import SOURCE, Binary
from stitch.ttb import load as load_binary

_ANY_SOURCE: Final = either(
    SOURCE, ArgumentKind("a program", lambda value: isinstance(value, Program | LoadedProgram))
)
_SOURCES = several("a list of paths, bytes, binaries, models or programs", _ANY_SOURCE)
_WORDS = several("a list", ArgumentKind("anything", lambda _: True))


@dataclass(frozen=True, slots=True)
class LinkPart:
    """A program to link, with its origin.

    Attributes:
        machine: The machine it was compiled for, None for a program without a binary.
        label: Its file's name without folder and suffix.
        source: Its name in errors.
        target: How its machine was specified.
    """

    program: Program
    machine: MachineShape | None = None
    label: str = ""
    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LinkedModel(ModelOfBinary):
    """Programs that were linked into one: save it, load it on a device, or call it."""

    binary: Binary
    target: str
    executor: str | None = None
    session: ModelSession = field(default_factory=ModelSession, repr=False)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run on the device of the inputs, else on the shared device of the target.

        Returns one tensor, or a tuple of them.
        """
        return self.session.call(self, arguments, named)

    @property
    def program(self) -> Program:
        """The linked program."""
        return self.binary.programs[0]


@takes(
    programs=_SOURCES, wiring=optional(either(TEXT, MAPPING, _WORDS)), name=optional(TEXT),
    keep=either(TEXT, _WORDS), strict_types=BOOL, target=optional(MACHINE),
)  # fmt: skip
def link(
    programs: Iterable[Any],
    wiring: Wiring | None = None,
    *,
    name: str | None = None,
    keep: str | Iterable[SlotWord] = (),
    strict_types: bool = False,
    target: Any = None,
) -> LinkedModel:
    """Link programs, in the order in which they run, into one program with bit-identical results.

    Args:
        programs: Paths, bytes, binaries or models, of which the first program is used, or programs
            themselves, also loaded ones.
        wiring: None for a chain; texts such as `"a.y=b.x"`; or a mapping from inputs to outputs:
            `{("b", "x"): ("a", "y")}`. A program is given by its name, file name or index, a slot
            by name or index. Slots that are not wired stay inputs and outputs.
        keep: Wired outputs that also stay outputs of the linked program.
        strict_types: Require equal data types of wired slots.
        target: The machine (default: that of the first binary).

    Raises:
        LinkError: Wired slots do not match; the text has both descriptors.
        UsageError: A name is unknown, or the wiring has a cycle.
        IncompatibleError: The programs were compiled for different machines.
        OutOfMemoryError: The linked program does not fit.

    >>> from stitch import compile, trace
    >>> import numpy as np
    >>> x = np.ones((2, 2), np.float32)
    >>> double = compile(lambda x: x + x, [x], target="tiny", name="double")
    >>> linked = link([double, double], name="four_times")
    >>> np.asarray(linked(x)).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    parts = [_part(source) for source in programs]
    names = ProgramNames([part.program for part in parts], [part.label for part in parts])
    if wiring is None:
        wires = chain_in_words(names, strict_types=strict_types)
    else:
        wires = wires_in_words(names, wiring, strict_types=strict_types)
    keep = (keep,) if isinstance(keep, str) else keep
    kept_ports = [names.port(word, "output", "keep") for word in keep]
    machine = None if target is None else load_machine(target)
    return link_parts(
        parts, wires, name=name, keep=kept_ports, strict_types=strict_types,
        machine=None if machine is None else machine.shape,
        target="" if machine is None else machine.name if machine is target else str(target),
    )  # fmt: skip


def link_parts(
    parts: Sequence[LinkPart], wires: Sequence[Wire], *, name: str | None = None,
    keep: Collection[Port] = (), strict_types: bool = False, machine: MachineShape | None = None,
    target: str = "",
) -> LinkedModel:  # fmt: skip
    """As `link`, for parts and wires by index."""
    if not parts:
        raise UsageError("link() was called without programs", expected="at least one program")
    first = next((part for part in parts if part.machine is not None), None)
    whose = "the target is"
    if machine is None:
        if first is None or first.machine is None:
            raise UsageError(
                "the machine is unknown: programs without a binary do not name it",
                remedy="link(..., target=NAME), or link binaries",
            )
        machine, target, whose = first.machine, first.target, f"{first.source} for"
    _check_machines(parts, machine, whose)
    fed = {(wire.producer, wire.output) for wire in wires}
    free = [(p, o) for p, part in enumerate(parts) for o in range(len(part.program.outputs))
            if (p, o) not in fed]  # fmt: skip
    program = link_programs(
        [part.program for part in parts],
        wires,
        machine=machine,
        name=name,
        keep={*free, *keep},
        strict_types=strict_types,
    )
    return LinkedModel(Binary((program,), machine, PRODUCER), target or machine.name)


def _part(source: Any) -> LinkPart:
    """Return a program with its machine; check its constants' checksums, which the linked file
    replaces.

    Raises `FormatError` if they are damaged.
    """
    if isinstance(source, Program):
        return LinkPart(source, source=f"program {source.name!r}")
    if isinstance(source, LoadedProgram):
        source.verify()
        machine = source.device.machine
        where = f"program {source.name!r} of {source.device!r}"
        return LinkPart(source.program, machine.shape, source=where, target=machine.name)
    binary = getattr(source, "binary", source)
    label = ""
    if isinstance(binary, str | PathLike):
        label = Path(binary).stem
    where = str(binary) if label else ""
    if not isinstance(binary, Binary):
        binary = load_binary(binary)
    program = binary.programs[0]
    binary.verify_segments(program)
    target = getattr(source, "target", "")
    return LinkPart(program, binary.machine, label, where or f"program {program.name!r}", target)


def _check_machines(parts: Sequence[LinkPart], machine: MachineShape, whose: str) -> None:
    """Raise `IncompatibleError` for a part whose machine `machine` cannot replace."""
    for part in parts:
        missing = () if part.machine is None else machine.shortcomings(part.machine)
        if part.machine is not None and missing:
            raise IncompatibleError(
                f"{part.source} was compiled for {part.machine.name!r}, {whose} "
                f"{machine.name!r}: " + "; ".join(missing),
                remedy="compile both for the same machine",
            )
