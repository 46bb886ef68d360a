"""Cut a placed task graph into pieces: convex sets of tasks of one device.

Pieces are runs of a topological order of the tasks, chosen so that the device changes rarely. A
value that another piece reads is an output of its piece, complete when the piece ends. A task that
overwrites a value (a donated input, a host function that updates) runs in its piece after, or in a
piece behind, all other readers of the value on any device. So a carrier that runs the pieces of
each device in order, and sends copies of the outputs, needs no further ordering: no task sees bytes
that another device overwrites.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.tasks import NamedValue, TaskRow, TaskTable, edges_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Tasks of one device that no path leaves and comes back into; what one message runs.

    Attributes:
        number: Its position in the topological order of the pieces.
        device: The device of its tasks.
        table: Its tasks as a graph of their own, without devices; the inputs and outputs are named
            `v{number}` by the numbers of the values in the whole graph.
        inputs: The number in the whole graph of each input, ascending.
        outputs: The number in the whole graph of each output, ascending: the values that another
            piece reads, or that the graph outputs.
        tasks: The numbers of its tasks in the whole graph, ascending.
    """

    number: int
    device: str
    table: TaskTable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tasks: tuple[int, ...]


def pieces_of(table: TaskTable, where: Sequence[str]) -> tuple[Piece, ...]:
    """Cut a table into pieces in topological order, as few as the order by device changes gives.

    For two devices no cut has fewer pieces. Tasks of one device that are ready together are in one
    piece, whether or not values pass between them.

    Args:
        table: A graph that can run (`TaskGraph.table`).
        where: The device of each task.
    """
    groups = _groups(table, where)
    piece_of = {task: at for at, (_, tasks) in enumerate(groups) for task in tasks}
    maker = {number: task for task, row in enumerate(table.tasks) for number in row.outputs}
    leaving = {number for _, number in table.outputs}
    for task, row in enumerate(table.tasks):
        leaving.update(
            n for n in row.inputs if n in maker and piece_of[maker[n]] != piece_of[task]
        )  # fmt: skip
    return tuple(
        [_piece(table, at, device, tasks, leaving) for at, (device, tasks) in enumerate(groups)]
    )


def _groups(table: TaskTable, where: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the device and the tasks of each piece.

    From a device, take all tasks that are ready, and those that become ready by them. The next
    device is the one with the ready task that has the most device changes behind it.
    """
    before = edges_of(table.tasks)
    after: list[list[int]] = [[] for _ in before]
    for task, edges in enumerate(before):
        for earlier in edges:
            after[earlier].append(task)
    #: The most device changes on a path that begins with a task.
    changes = [0] * len(before)
    for task in reversed(range(len(before))):
        for later in after[task]:
            changes[task] = max(changes[task], changes[later] + (where[later] != where[task]))
    missing = [len(edges) for edges in before]
    #: Heaps of the ready tasks by device, those with the most changes first.
    ready: dict[str, list[tuple[int, int]]] = {}
    for task, edges in enumerate(before):
        if not edges:
            heapq.heappush(ready.setdefault(where[task], []), (-changes[task], task))
    groups = []
    while ready:
        device = min(ready, key=lambda name: ready[name][0])
        open_tasks = [task for _, task in ready.pop(device)]
        tasks = []
        while open_tasks:
            task = open_tasks.pop()
            tasks.append(task)
            for later in after[task]:
                missing[later] -= 1
                if missing[later]:
                    continue
                if where[later] == device:
                    open_tasks.append(later)
                else:
                    heapq.heappush(ready.setdefault(where[later], []), (-changes[later], later))
        groups.append((device, sorted(tasks)))
    return groups


def _piece(
    table: TaskTable, number: int, device: str, tasks: Sequence[int], leaving: set[int]
) -> Piece:
    rows = [table.tasks[task] for task in tasks]
    made = [value for row in rows for value in row.outputs]
    inputs = tuple(sorted({value for row in rows for value in row.inputs}.difference(made)))
    outputs = tuple(sorted(leaving.intersection(made)))
    own = {value: at for at, value in enumerate((*inputs, *made))}
    return Piece(
        number, device,
        TaskTable(
            f"{table.name} piece {number}".strip(),
            tuple([NamedValue(f"v{value}", own[value]) for value in inputs]),
            tuple([
                TaskRow(agent, tuple([own[n] for n in read]), tuple([own[n] for n in results]))
                for agent, read, results in rows
            ]),
            tuple([NamedValue(f"v{value}", own[value]) for value in outputs]),
            tuple([table.descs[value] for value in own]),
        ),
        inputs, outputs, tuple(tasks),
    )  # fmt: skip
