"""Composition: two tasks become one, and whole graphs of tasks graphs of fewer.

T2 after T1 is a task: its inputs are X1 and those of X2 that T1 does not make (each once), its
transformation is that of T1 and then that of T2, its outputs are Y2 and those of Y1 that a task
else refers to.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from stitch.argument_kinds import ArgumentKind, instance_of, takes
from stitch.errors import TaskError
from stitch.tasks.agents import MergedAgent, TaskRow
from stitch.tasks.future import Future, Task
from stitch.tasks.task_graph import TaskGraph
from stitch.tasks.task_table import NamedValue, TaskTable
from stitch.tasks.validation import edges_of

# --------------------------------------------------------------------------------------------------
# Convex sets of tasks: no path leaves the set and returns.

#: Edges of a task: those before it, and whether the edge may vanish.
Edges = Sequence[dict[int, bool]]
#: Rounds of joining; each is linear, and few are ever needed.
MAX_ROUNDS = 16


class _Sets:
    """Disjoint sets of tasks; the smallest task represents its set."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, task: int) -> int:
        parent = self.parent
        while parent[task] != task:
            parent[task] = task = parent[parent[task]]
        return task

    def join(self, one: int, other: int) -> None:
        a, b = self.find(one), self.find(other)
        self.parent[max(a, b)] = min(a, b)


def groups_of(before: Edges) -> list[int]:
    """Return for each task the smallest task of its set; `before[t]` has only smaller tasks."""
    sets = _Sets(len(before))
    levels = [0] * len(before)
    for task, edges in enumerate(before):
        levels[task] = max(
            (levels[earlier] + (not vanishes) for earlier, vanishes in edges.items()), default=0
        )
    for task, edges in enumerate(before):
        for earlier, vanishes in edges.items():
            if vanishes and levels[earlier] == levels[task]:
                sets.join(earlier, task)
    for _ in range(MAX_ROUNDS):
        if not (_join_neighbours(before, sets) or _join_neighbours(before, sets, forward=False)):
            break
    return [sets.find(task) for task in range(len(before))]


def _join_neighbours(before: Edges, sets: _Sets, *, forward: bool = True) -> bool:
    """Join sets with the only set that comes before them (or after them); whether any did.

    The neighbours are those of one moment: of two sets that are each other's only neighbours and
    of chains of such sets all join, and a chain of them in a set is a path that stays inside.
    """
    find = sets.find
    #: The only neighbour of a set; -1 for several.
    only: dict[int, int] = {}
    stays: set[tuple[int, int]] = set()
    for task, edges in enumerate(before):
        mine = find(task)
        for earlier, vanishes in edges.items():
            theirs = find(earlier)
            if theirs == mine:
                continue
            here, there = (mine, theirs) if forward else (theirs, mine)
            if only.setdefault(here, there) != there:
                only[here] = -1
            if not vanishes:
                stays.add((here, there))
    joined = False
    for here, there in only.items():
        if there >= 0 and (here, there) not in stays:
            sets.join(here, there)
            joined = True
    return joined


def members_of(groups: Sequence[int]) -> dict[int, list[int]]:
    """Return the tasks of each set, in order; the sets by their first tasks."""
    members: dict[int, list[int]] = {}
    for task, group in enumerate(groups):
        members.setdefault(group, []).append(task)
    return members


def order_of_groups(before: Edges, groups: Sequence[int]) -> list[int]:
    """Return the sets in topological order, by their first tasks."""
    waiting = TopologicalSorter[int]()
    for task, edges in enumerate(before):
        group = groups[task]
        waiting.add(group, *{groups[other] for other in edges} - {group})
    waiting.prepare()
    ready: list[int] = []
    order = []
    while waiting:
        for group in waiting.get_ready():
            heapq.heappush(ready, group)
        group = heapq.heappop(ready)
        order.append(group)
        waiting.done(group)
    return order


_TASK = instance_of("a Task", Task)
_BRANCHES = ArgumentKind('"stop" or "keep"', lambda value: value in ("stop", "keep"))
_KINDS = ArgumentKind('"any" or "same"', lambda value: value in ("any", "same"))


@takes(first=_TASK, second=_TASK)
def compose(first: Task, second: Task) -> Task:
    """Return the task that runs `first` and then `second`.

    Raises `TaskError` for tasks of two graphs or devices, for a common task, if `first` depends on
    `second`, and if another task depends on `first` and precedes `second`.
    """
    graph = first.graph
    if second.graph is not graph or not isinstance(graph, TaskGraph):
        raise TaskError("tasks of two task graphs cannot become one",
                        expected=repr(first.graph), got=repr(second.graph))  # fmt: skip
    both = f"{first.name!r} and {second.name!r}"
    indices = sorted({*first.indices, *second.indices})
    if len(indices) < len(first.indices) + len(second.indices):
        raise TaskError(f"tasks {both} cannot become one: a task is in both of them")
    if first.device != second.device:
        raise TaskError(f"tasks {both} cannot become one: they are on different devices",
                        got=f"{first.device} and {second.device}")  # fmt: skip
    rows = graph.rows
    _check_convex(first, second, rows)
    inside = {*indices}
    final = {future.number for future in second.outputs}
    readers = {n for i, row in enumerate(rows) if i not in inside for n in row.inputs}
    readers.update(future.number for future in graph.outputs.values())
    merged = merge_rows([rows[index] for index in indices], readers | final)
    return Task(
        graph, tuple(indices), merged.agent,
        tuple([Future(graph, number) for number in merged.inputs]),
        tuple([Future(graph, number) for number in merged.outputs]),
    )  # fmt: skip


@takes(graph=instance_of("a TaskGraph", TaskGraph), branches=_BRANCHES, kinds=_KINDS)
def aggregate(graph: TaskGraph, branches: str = "stop", *, kinds: str = "any") -> TaskGraph:
    """The same graph with fewer tasks: those whose values only pass between them become one.

    `branches`: `"stop"`: a task is the last of its merged one where two others read one of its
    outputs; `"keep"` merges any convex set. `kinds="same"` merges programs with programs, host
    functions with host functions and copies with copies only. Tasks of different devices stay
    apart. What an output of the graph or another task reads stays an output. Raises `TaskError` for
    a graph that cannot run.
    """
    table = graph.table()
    before = edges_of(table.tasks)
    return TaskGraph.of(_rewritten(table, before, _groups(table, before, branches, kinds)))


def merge_rows(rows: Sequence[TaskRow], kept: Container[int]) -> TaskRow:
    """Merge tasks in run order; `kept` are the values that stay outputs."""
    if len(rows) == 1:
        return rows[0]
    made = {number for row in rows for number in row.outputs}
    inputs = list(dict.fromkeys([n for row in rows for n in row.inputs if n not in made]))
    local = {number: i for i, number in enumerate(inputs)}
    members: list[TaskRow] = []
    count = len(inputs)

    def add(member: TaskRow, read: tuple[int, ...]) -> range:
        nonlocal count
        new = range(count, count + len(member.outputs))
        members.append(TaskRow(member.agent, read, tuple(new)))
        count = new.stop
        return new

    for row in rows:
        read = tuple([local[number] for number in row.inputs])
        if type(row.agent) is MergedAgent:
            inner = list(read)
            for member in row.agent.members:
                inner.extend(add(member, tuple([inner[n] for n in member.inputs])))
            new: Sequence[int] = [inner[number] for number in row.agent.kept]
        else:
            new = add(row, read)
        local.update(zip(row.outputs, new, strict=True))
    outputs = tuple([number for row in rows for number in row.outputs if number in kept])
    agent = MergedAgent(len(inputs), tuple(members), tuple([local[n] for n in outputs]))
    return TaskRow(agent, tuple(inputs), outputs)


def _check_convex(first: Task, second: Task, rows: Sequence[TaskRow]) -> None:
    """Raise `TaskError` where a path leads from the second to the first, or leaves both between."""
    inside = {*first.indices, *second.indices}
    start, end = min(inside), max(inside) + 1
    behind: set[int] = set()
    both = f"{first.name!r} and {second.name!r}"
    for index, edges in enumerate(edges_of(rows[:end])[start:], start):
        if index not in inside:
            if not edges.keys().isdisjoint(inside | behind):
                behind.add(index)
            continue
        between = min(edges.keys() & behind, default=None)
        if between is not None:
            raise TaskError(
                f"tasks {both} cannot become one: task {between} ({rows[between].agent.name}) has "
                "to run after a part of them and before another",
                remedy="compose it with them",
            )
        if index in first.indices and not edges.keys().isdisjoint(second.indices):
            raise TaskError(
                f"tasks {both} cannot become one: {first.name!r} has to run after {second.name!r}",
                remedy="compose them the other way round",
            )


def _groups(
    table: TaskTable, before: list[dict[int, bool]], branches: str, kinds: str
) -> list[int]:
    tasks = table.tasks
    # Of one task that reads a value twice, the two are one reference.
    readers = Counter(number for task in tasks for number in {*task.inputs})
    ends = [
        branches == "stop" and any(readers[number] > 1 for number in task.outputs) for task in tasks
    ]
    kind = [
        (table.device_of(i), _kind(task) if kinds == "same" else None)
        for i, task in enumerate(tasks)
    ]
    edges = [
        {
            other: kind[other] == kind[task]
            and (branches == "keep" or (passes and not ends[other]))
            for other, passes in earlier.items()
        }
        for task, earlier in enumerate(before)
    ]
    return groups_of(edges)


def _kind(task: TaskRow) -> type:
    agent = task.agent
    return type(agent.members[0].agent if type(agent) is MergedAgent else agent)


def _rewritten(table: TaskTable, before: list[dict[int, bool]], groups: list[int]) -> TaskTable:
    """Return the table with each set of tasks as one task, in topological order."""
    members, kept = members_of(groups), _kept(table, before, groups)
    numbers = {value.value: i for i, value in enumerate(table.inputs)}
    rows: list[TaskRow] = []
    order = order_of_groups(before, groups)
    for group in order:
        row = merge_rows([table.tasks[task] for task in members[group]], kept)
        for number in row.outputs:
            numbers[number] = len(numbers)
        rows.append(TaskRow(
            row.agent, tuple([numbers[n] for n in row.inputs]),
            tuple([numbers[n] for n in row.outputs]),
        ))  # fmt: skip
    return replace(
        table, tasks=tuple(rows), descs=tuple([table.descs[number] for number in numbers]),
        devices=tuple(map(table.device_of, order)) if table.devices else (),
        inputs=tuple([NamedValue(name, numbers[n]) for name, n in table.inputs]),
        outputs=tuple([NamedValue(name, numbers[n]) for name, n in table.outputs]),
    )  # fmt: skip


def _kept(table: TaskTable, before: list[dict[int, bool]], groups: list[int]) -> set[int]:
    """The values that stay outputs: of the graph, of the last tasks, or read by another set."""
    kept = {value.value for value in table.outputs}
    group_of = {n: groups[i] for i, task in enumerate(table.tasks) for n in task.outputs}
    read: set[int] = set()
    for i, task in enumerate(table.tasks):
        read.update(task.inputs)
        kept.update(n for n in task.inputs if group_of.get(n, groups[i]) != groups[i])
    inner = {
        other for i, edges in enumerate(before) for other in edges if groups[other] == groups[i]
    }
    for i, task in enumerate(table.tasks):
        if i not in inner:
            kept.update(n for n in task.outputs if n not in read)
    return kept
