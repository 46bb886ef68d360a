"""Wires between the slots of several programs, and their checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from stitch.errors import LinkError
from stitch.linker.link_check import (
    activations,
    check_link,
    handed_on,
    input_name,
    output_name,
    wire,
)
from stitch.program import Program

#: A slot of one of the programs: (index of the program, index of the slot).
Port = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wire:
    """An output that feeds an input of a later program; all four are indices."""

    producer: int
    output: int
    consumer: int
    input: int


def chain_wires(
    programs: Sequence[Program], *, strict_types: bool = False, outside: Collection[str] = ()
) -> tuple[Wire, ...]:
    """Wire a chain: each program's outputs feed the next one's activations by position.

    If their numbers differ, activations take outputs by name instead, from the nearest earlier
    program that has one. Either way every activation after the first program is fed and every
    output before the last program is used, except outputs that replace states.

    Args:
        outside: Names of activations (a mask) that no output feeds.

    Raises:
        LinkError: Neighbours that cannot be wired (see `wire`).
    """
    try:
        return _chain(programs, strict_types, outside)
    except LinkError as error:
        with suppress(LinkError):
            _chain(programs[::-1], strict_types, outside)
            order = ", ".join(program.name for program in reversed(programs))
            error.remedy = f"give the programs in the order that fits: {order}"
        raise


def _chain(
    programs: Sequence[Program], strict_types: bool, outside: Collection[str]
) -> tuple[Wire, ...]:
    """Return the wires of `chain_wires` in this order."""
    neighbours = list(pairwise(programs))
    fed = [_fed(a, b, outside) for a, b in zip([None, *programs], programs, strict=False)]
    if any(len(handed_on(a)) != len(taken) for a, taken in zip(programs, fed[1:], strict=False)):
        wires = _wires_by_name(programs, fed)
        if wires is not None:
            for link in wires:
                check_wire(programs, link, strict_types)
            return wires
    return tuple(
        Wire(p, output, p + 1, taken)
        for p, (a, b) in enumerate(neighbours)
        for output, taken in _neighbours(a, b, fed[p + 1], strict_types)
    )


def _neighbours(
    producer: Program, consumer: Program, fed: Sequence[int], strict_types: bool
) -> Sequence[tuple[int, int]]:
    """Return the (output, input) pairs of neighbours, by position among the fed activations."""
    matches = len(fed) == len(handed_on(producer))
    return wire(producer, consumer, fed=fed if matches else None, strict_types=strict_types)


def _fed(producer: Program | None, program: Program, outside: Collection[str]) -> list[int]:
    """Return the activations that outputs feed.

    A single output may feed an activation with an outside name; then its shape decides.
    """
    wanted = activations(program)
    fed = [i for i in wanted if program.inputs[i].name not in outside]
    given = [] if producer is None else handed_on(producer)
    if producer is None or len(given) != 1 or fed:
        return fed
    shape = producer.output_desc(given[0]).shape
    fitting = [i for i in wanted if program.input_desc(i).shape == shape]
    return fitting if len(fitting) == 1 else wanted


def _wires_by_name(
    programs: Sequence[Program], fed: Sequence[Sequence[int]]
) -> tuple[Wire, ...] | None:
    """Wire every activation after the first program by name; None if a slot has no partner."""
    sources: dict[str, Port] = {}
    wires: list[Wire] = []
    for p, program in enumerate(programs):
        for i in fed[p] if p else ():
            source = sources.get(program.inputs[i].name)
            if source is None:
                return None
            wires.append(Wire(*source, p, i))
        sources |= {slot.name: (p, o) for o, slot in enumerate(program.outputs)}
    used = {(link.producer, link.output) for link in wires}
    given = {(p, o) for p, a in enumerate(programs[:-1]) for o in handed_on(a)}
    return tuple(wires) if given <= used else None


def check_wire(programs: Sequence[Program], link: Wire, strict_types: bool) -> None:
    """Raise `LinkError` if the slots of a wire do not fit."""
    producer, consumer = programs[link.producer], programs[link.consumer]
    check_link(
        producer.output_desc(link.output),
        consumer.input_desc(link.input),
        output=output_name(producer, link.output),
        input=input_name(consumer, link.input),
        strict_types=strict_types,
    )


def check_fits(programs: Sequence[Program], wires: Iterable[Wire], strict_types: bool) -> None:
    """Raise one `LinkError` for all wires whose slots do not fit."""
    found: list[LinkError] = []
    for link in wires:
        try:
            check_wire(programs, link, strict_types)
        except LinkError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise LinkError(
            f"{len(found)} wires do not fit:\n  - "
            + "\n  - ".join(error.sentence() for error in found),
            remedy=found[0].remedy,
        )


def check_wires(programs: Sequence[Program], wires: Sequence[Wire], strict_types: bool) -> None:
    """Raise one `LinkError` for all wires that static linking cannot resolve."""
    problems: list[str] = []
    taken: set[Port] = set()
    for link in wires:
        if not _exists(programs, (link.producer, link.output), "outputs") or not _exists(
            programs, (link.consumer, link.input), "inputs"
        ):
            problems.append(f"{link} refers to a slot that does not exist")
            continue
        producer, consumer = programs[link.producer], programs[link.consumer]
        given, wanted = output_name(producer, link.output), input_name(consumer, link.input)
        if link.producer >= link.consumer:
            problems.append(f"{given} cannot feed {wanted}, which runs before it")
        if (link.consumer, link.input) in taken:
            problems.append(f"{wanted} is fed twice")
        taken.add((link.consumer, link.input))
        source, target = producer.output_desc(link.output), consumer.input_desc(link.input)
        try:
            check_wire(programs, link, strict_types)
        except LinkError as error:
            problems.append(f"{error.what} (expected {error.expected}, got {error.got})")
        if source.layout.data_type.is_block or target.layout.data_type.is_block:
            problems.append(
                f"{given} feeds {wanted} through a block format ({source.text()} to "
                f"{target.text()}), whose rounding no operation reproduces"
            )
    if problems:
        raise LinkError(
            "these programs cannot be linked into one:\n  - " + "\n  - ".join(problems),
            where=", ".join(f"{i}: {p.name}" for i, p in enumerate(programs)),
            remedy="stitch them at run time instead, or change the wires",
        )


def _exists(programs: Sequence[Program], port: Port, side: str) -> bool:
    if not 0 <= port[0] < len(programs):
        return False
    program = programs[port[0]]
    return 0 <= port[1] < len(program.inputs if side == "inputs" else program.outputs)


def check_ports(ports: Collection[Port], programs: Sequence[Program]) -> None:
    """Raise `LinkError` for ports that are not outputs."""
    missing = sorted(p for p in ports if not _exists(programs, p, "outputs"))
    if missing:
        raise LinkError(f"outputs {missing} to keep do not exist")
