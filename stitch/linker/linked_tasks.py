"""Merged tasks of programs become programs: aggregation, and then static linking.

Comes in: a table of tasks, and a machine's memory shape. Goes out: the same table, in which every
merged task whose members are all programs is one program, where they can be linked. Must not know:
devices.
"""

from __future__ import annotations

from collections import Counter
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
    known: dict[tuple[object, ...], ProgramAgent | None] = {}
    rows = []
    for row in table.tasks:
        merged = row.agent
        if type(merged) is MergedAgent:
            programs = [m.agent.program for m in merged.members if type(m.agent) is ProgramAgent]
            if len(programs) == len(merged.members) and _is_plain(merged):
                wiring = tuple([(m.inputs, m.outputs) for m in merged.members])
                key = (*map(id, programs), wiring, merged.kept)
                if key not in known:
                    known[key] = _linked(merged, programs, machine, strict_types)
                agent = known[key]
                if agent is not None:
                    rows.append(TaskRow(agent, _inputs(row, merged), row.outputs))
                    continue
        rows.append(row)
    return replace(table, tasks=tuple(rows))


def _is_plain(merged: MergedAgent) -> bool:
    """Whether outputs stand in the order of the members, and nothing is read beside its taker."""
    reads = Counter(number for member in merged.members for number in member.inputs)
    in_order = list(merged.kept) == sorted({*merged.kept})
    return in_order and all(reads[number] == 1 for number in merged.consumes)


def _linked(
    merged: MergedAgent, programs: list[Program], machine: MachineShape, strict_types: bool
) -> ProgramAgent | None:
    ports: dict[int, Port] = {}
    wires = []
    for p, member in enumerate(merged.members):
        for i, number in enumerate(member.inputs):
            if number in ports:
                wires.append(Wire(*ports[number], p, i))
        ports |= {number: (p, o) for o, number in enumerate(member.outputs)}
    keep = [ports[number] for number in merged.kept]
    try:
        whole = link_programs(
            programs, wires, machine=machine, name=merged.name, keep=keep,
            strict_types=strict_types,
        )  # fmt: skip
    except (LinkError, OutOfMemoryError):
        return None
    return program_agent(whole)


def _inputs(row: TaskRow, merged: MergedAgent) -> tuple[int, ...]:
    """What the linked program's slots are given: those of the members that no member feeds."""
    return tuple([
        row.inputs[number]
        for member in merged.members
        for number in member.inputs
        if number < merged.takes
    ])  # fmt: skip
