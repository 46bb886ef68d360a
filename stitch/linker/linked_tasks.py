"""Merged tasks of programs become programs: aggregation, and then static linking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace

from stitch.errors import LinkError, OutOfMemoryError
from stitch.linker.static import link_programs
from stitch.linker.wires import Port, Wire
from stitch.machine import MachineShape
from stitch.program import Program
from stitch.tasks import MergedAgent, ProgramAgent, TaskRow, TaskTable, program_agent


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
