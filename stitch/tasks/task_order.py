"""The order of tasks: which must have run before which, and whether that is possible at all.

Comes in: a `TaskTable`. Goes out: for each task, those before it. An edge says: what it reads is
made there (read after write), or was still read there, before it is overwritten here (write after
read). Of two tasks that overwrite, the later reads what the earlier made (write after write).
"""

from __future__ import annotations

from stitch.tasks.task_table import TaskTable


def producers_of(table: TaskTable) -> dict[int, int]:
    """The task that makes each value; what comes from outside has none."""
    return {number: i for i, task in enumerate(table.tasks) for number in task.outputs}


def predecessors_of(table: TaskTable) -> list[tuple[int, ...]]:
    """For each task those that must have run before it, each once, in linear time."""
    producers = producers_of(table)
    consumed = {
        task.inputs[i] for task in table.tasks for i in task.agent.consumes if i < len(task.inputs)
    }
    readers: dict[int, list[int]] = {}
    before: list[tuple[int, ...]] = []
    for index, task in enumerate(table.tasks):
        found = dict.fromkeys([producers[n] for n in task.inputs if n in producers])
        for i in task.agent.consumes:
            if i < len(task.inputs):
                found |= dict.fromkeys(readers.get(task.inputs[i], ()))
        for number in task.inputs:
            if number in consumed:
                readers.setdefault(number, []).append(index)
        found.pop(index, None)
        before.append(tuple(found))
    return before


def cycle_of(before: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Tasks that wait for each other in a circle; nothing where there is none."""
    waiting = [len(earlier) for earlier in before]
    after: list[list[int]] = [[] for _ in before]
    for index, earlier in enumerate(before):
        for task in earlier:
            after[task].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    while ready:
        for index in after[ready.pop()]:
            waiting[index] -= 1
            if not waiting[index]:
                ready.append(index)
    stuck = next((index for index, count in enumerate(waiting) if count), None)
    if stuck is None:
        return ()
    path: dict[int, None] = {}
    while stuck not in path:
        path[stuck] = None
        stuck = next(task for task in before[stuck] if waiting[task])
    walked = list(path)
    return tuple(reversed(walked[walked.index(stuck) :]))
