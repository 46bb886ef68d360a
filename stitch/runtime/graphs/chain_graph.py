"""The task graph of programs that run in sequence.

Inputs that no output feeds are inputs of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stitch.program import FreeNames
from stitch.tasks import Future, HasProgram, TaskGraph

#: A slot: number of a program, and position among its inputs or outputs.
Slot = tuple[int, int]


def chain_graph(
    programs: Sequence[HasProgram],
    feeds: Sequence[Mapping[int, Slot]],
    name: str,
    results: Sequence[Slot] = (),
    owners: Sequence[str] = (),
) -> tuple[TaskGraph, tuple[Slot, ...]]:
    """Return the graph, and the slots of its inputs in order: by program, then by position.

    Args:
        programs: Loaded programs, or others that a task graph calls, in order.
        feeds: For each program: input position → the output that feeds it.
        name: Name of the graph.
        results: Slots of the graph's outputs; by default, the outputs of the last program.
        owners: Program names to make slot names unique; by default, the programs' names.
    """
    parts = [source.program for source in programs]
    owners = owners or [part.name for part in parts]
    sources = tuple([
        (number, position)
        for number, part in enumerate(parts)
        for position in range(len(part.inputs))
        if position not in feeds[number]
    ])  # fmt: skip
    graph = TaskGraph(name)
    names = _told_apart([(k, owners[k], parts[k].inputs[i].name) for k, i in sources])
    inputs = {
        slot: graph.input(parts[slot[0]].input_desc(slot[1]), called)
        for slot, called in zip(sources, names, strict=True)
    }
    made: list[tuple[Future, ...]] = []
    for number, source in enumerate(programs):
        fed, given = feeds[number], []
        for position in range(len(parts[number].inputs)):
            feed = fed.get(position)
            given.append(inputs[number, position] if feed is None else made[feed[0]][feed[1]])
        outputs = graph.call(source, *given)
        made.append(outputs if isinstance(outputs, tuple) else (outputs,))
    last = len(parts) - 1
    results = results or [(last, position) for position in range(len(made[last]))]
    names = _told_apart([(k, owners[k], parts[k].outputs[o].name) for k, o in results])
    for (number, position), called in zip(results, names, strict=True):
        graph.output(made[number][position], called)
    return graph, sources


def _told_apart(slots: Sequence[tuple[int, str, str]]) -> list[str]:
    """Return unique names for slots, given as (program number, program name, slot name).

    A name used by several programs is qualified with the program's name, and with its number if
    that is not unique.
    """
    times = Counter(name for _, _, name in slots)
    times_in = Counter((owner, name) for _, owner, name in slots)
    free, apart = FreeNames(), []
    for number, owner, name in slots:
        if times_in[owner, name] > 1:
            called = f"{owner}.{number}.{name}"
        else:
            called = name if times[name] == 1 else f"{owner}.{name}"
        apart.append(free.free(called, owner))
    return apart
