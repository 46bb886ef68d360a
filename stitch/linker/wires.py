"""Wires between the slots of several programs, and the checks that they are sound."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    """The wires of a chain: each program's outputs feed the next one's activations, in order.

    `outside`: names of activations (a mask) that no output feeds.

    Where their numbers differ, activations take the outputs of their name instead, each from the
    nearest program before that has one, which need not be the one before: so values go around
    programs that do not use them. Then too every activation is fed and every output used, but for
    the ends of the chain, and for outputs that replace a state of their own program. Raises
    `LinkError` for neighbours that fit neither way (see `wire`).
    """
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
    """(Output, input) pairs of two neighbours, by position among the activations that are fed."""
    given = handed_on(producer)
    if len(fed) == len(activations(consumer)) or len(fed) != len(given):
        return wire(producer, consumer, strict_types=strict_types)
    pairs = zip(fed, given, strict=True)
    names = {consumer.inputs[i].name: producer.outputs[o].name for i, o in pairs}
    return wire(producer, consumer, names, strict_types=strict_types, partial=True)


def _fed(producer: Program | None, program: Program, outside: Collection[str]) -> list[int]:
    """The activations that outputs feed: those not from outside, and one more if it is clear which.

    What a chain hands on may bear the name of what enters it; then its shape has to tell.
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
    """A wire for every activation behind the first program; None if a slot has no partner."""
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
    """Raises `LinkError` where the slots of a wire do not fit."""
    producer, consumer = programs[link.producer], programs[link.consumer]
    check_link(
        producer.output_desc(link.output),
        consumer.input_desc(link.input),
        output=output_name(producer, link.output),
        input=input_name(consumer, link.input),
        strict_types=strict_types,
    )


def check_fits(programs: Sequence[Program], wires: Iterable[Wire], strict_types: bool) -> None:
    """Raises one `LinkError` where slots of wires do not fit, with both descriptors of each."""
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
    """Raises one `LinkError` with every wire that does not fit."""
    problems: list[str] = []
    taken: set[Port] = set()
    for link in wires:
        if not _exists(programs, (link.producer, link.output), "outputs") or not _exists(
            programs, (link.consumer, link.input), "inputs"
        ):
            problems.append(f"{link} points at no slot")
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
                f"{target.text()}), whose rounding no operation can repeat"
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
    """Raises `LinkError` for ports that are no outputs."""
    missing = sorted(p for p in ports if not _exists(programs, p, "outputs"))
    if missing:
        raise LinkError(f"there are no outputs {missing} to keep")
