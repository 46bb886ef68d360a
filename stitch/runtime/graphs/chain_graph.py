"""The task graph of loaded programs that run one after the other.

Inputs that nothing feeds are the graph's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stitch.program import FreeNames
from stitch.runtime.loaded import LoadedProgram
from stitch.tasks import Future, TaskGraph, TaskTable

#: A slot: the number of a program, and the position among its inputs or outputs.
Slot = tuple[int, int]


def chain_graph(
    programs: Sequence[LoadedProgram],
    feeds: Sequence[Mapping[int, Slot]],
    name: str,
    results: Sequence[Slot] = (),
    owners: Sequence[str] = (),
) -> tuple[TaskTable, tuple[Slot, ...]]:
    """The graph, and the slots that its inputs are, in their order: by programs, then positions.

    `feeds`: for each program the position of an input → the output that feeds it. `results`: the
    outputs that are the graph's; those of the last program, if none are told. `owners`: what the
    programs are called where slots of one name are told apart, else as they are.
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
    """The names of slots, given the numbers of their programs, what these are called, and their own
    names: one that several programs use is told apart by its program, and by the number of the
    call where these have one name too."""
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
