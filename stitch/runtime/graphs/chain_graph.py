"""The task graph of loaded programs that run in sequence.

Inputs that no output feeds are inputs of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stitch.program import FreeNames
from stitch.runtime.loaded import LoadedProgram
from stitch.tasks import Future, TaskGraph, TaskTable

#: A slot: number of a program, and position among its inputs or outputs.
Slot = tuple[int, int]


def chain_graph(
    programs: Sequence[LoadedProgram],
    feeds: Sequence[Mapping[int, Slot]],
    name: str,
    results: Sequence[Slot] = (),
    owners: Sequence[str] = (),
) -> tuple[TaskTable, tuple[Slot, ...]]:
    """Return the graph, and the slots of its inputs in order: by program, then by position.

    Args:
        programs: The programs in order.
        feeds: For each program: input position → the output that feeds it.
        name: Name of the graph.
        results: Slots of the graph's outputs; by default, the outputs of the last program.
        owners: Program names to make slot names unique; by default, the programs' names.
    """
    owners = owners or [program.name for program in programs]
    sources = tuple([
        (number, position)
        for number, program in enumerate(programs)
        for position in range(program.takes)
        if position not in feeds[number]
    ])  # fmt: skip
    graph = TaskGraph(name)
    names = _told_apart([(k, owners[k], programs[k].ports[i].name) for k, i in sources])
    inputs = {
        slot: graph.input(programs[slot[0]].program.input_desc(slot[1]), called)
        for slot, called in zip(sources, names, strict=True)
    }
    made: list[tuple[Future, ...]] = []
    for number, program in enumerate(programs):
        fed, given = feeds[number], []
        for position in range(program.takes):
            source = fed.get(position)
            if source is None:
                given.append(inputs[number, position])
            else:
                given.append(made[source[0]][source[1]])
        outputs = graph.call(program, *given)
        made.append(outputs if isinstance(outputs, tuple) else (outputs,))
    last = len(programs) - 1
    results = results or [(last, position) for position in range(len(made[last]))]
    names = _told_apart([(k, owners[k], programs[k].program.outputs[o].name) for k, o in results])
    for (number, position), called in zip(results, names, strict=True):
        graph.output(made[number][position], called)
    return graph.table(), sources


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
