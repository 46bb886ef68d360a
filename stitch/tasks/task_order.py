"""The order of tasks: which must have run before which, and whether that is possible at all.

An edge says: what it reads is made there (read after write), or was still read there, before it is
overwritten here (write after read). Of two tasks that overwrite, the later reads what the earlier
made (write after write).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Protocol


class Ordered(Protocol):
    """A task, by the numbers of the values that it reads and makes."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """What it reads."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """What it makes."""

    @property
    def gone(self) -> frozenset[int]:
        """The positions of the inputs that are gone afterwards."""


def producers_of(tasks: Sequence[Ordered]) -> dict[int, int]:
    """The task that makes each value; what comes from outside has none."""
    return {number: i for i, task in enumerate(tasks) for number in task.outputs}


def edges_of(tasks: Sequence[Ordered]) -> list[dict[int, bool]]:
    """For each task those that must have run before it, and whether a value passes between them.

    Takes time linear in what the tasks read.
    """
    producers = producers_of(tasks)
    consumed = {task.inputs[i] for task in tasks for i in task.gone if i < len(task.inputs)}
    readers: dict[int, list[int]] = {}
    before: list[dict[int, bool]] = []
    for index, task in enumerate(tasks):
        found: dict[int, bool] = {}
        if consumed:
            for i in task.gone:
                if i < len(task.inputs):
                    found |= dict.fromkeys(readers.get(task.inputs[i], ()), False)
            for number in task.inputs:
                if number in consumed:
                    readers.setdefault(number, []).append(index)
        for number in task.inputs:
            maker = producers.get(number)
            if maker is not None:
                found[maker] = True
        found.pop(index, None)
        before.append(found)
    return before


def cycle_of(before: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Tasks that wait for each other in a circle; nothing where there is none."""
    try:
        TopologicalSorter(dict(enumerate(before))).prepare()
    except CycleError as error:
        return tuple(error.args[1][:-1])
    return ()
