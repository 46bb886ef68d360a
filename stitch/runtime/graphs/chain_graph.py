"""The task graph of loaded programs that run one after the other.

Comes in: programs, and which outputs feed which inputs. Goes out: the table of their graph. Inputs
that nothing feeds are the graph's own. Must not know how it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stitch.runtime.loaded import LoadedProgram
from stitch.tasks import Future, TaskGraph, TaskTable

#: A slot: the number of a program, and the position among its inputs or outputs.
Slot = tuple[int, int]


def chain_graph(
    programs: Sequence[LoadedProgram],
    feeds: Sequence[Mapping[int, Slot]],
    name: str,
    results: Sequence[Slot] = (),
) -> tuple[TaskTable, tuple[Slot, ...]]:
    """The graph, and the slots that its inputs are, in their order: by programs, then positions.

    `feeds`: for each program the position of an input → the output that feeds it. `results`: the
    outputs that are the graph's; those of the last program, if none are told.
    """
    sources = tuple([
        (number, position)
        for number, program in enumerate(programs)
        for position in range(program.takes)
        if position not in feeds[number]
    ])  # fmt: skip
    graph = TaskGraph(name)
    names = _told_apart(programs, sources)
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
    for number, position in results or [(last, o) for o in range(len(made[last]))]:
        graph.output(made[number][position])
    return graph.table(), sources


def _told_apart(programs: Sequence[LoadedProgram], slots: Sequence[Slot]) -> list[str]:
    """The names of inputs; one that several programs use is told apart by its program, and by the
    number of the call where these have one name too."""
    names = [programs[number].ports[position].name for number, position in slots]
    owners = [programs[number].name for number, _ in slots]
    times, times_in = Counter(names), Counter(zip(owners, names, strict=True))
    apart = []
    for name, owner, (number, _) in zip(names, owners, slots, strict=True):
        if times_in[owner, name] > 1:
            apart.append(f"{owner}.{number}.{name}")
        else:
            apart.append(name if times[name] == 1 else f"{owner}.{name}")
    return apart
