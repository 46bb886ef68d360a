"""A table of tasks that grows, as calls come in: what a task graph keeps.

Comes in: descriptors, agents and the numbers of values. Goes out: numbers of values, and a frozen
`TaskTable`. Must not know: futures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from stitch.errors import UsageError
from stitch.program import TensorDesc
from stitch.tasks.agents import Agent, TaskRow
from stitch.tasks.future import OUTSIDE
from stitch.tasks.task_table import NamedValue, TaskTable


class GrowingTable:
    """Tasks in the order in which they were added; values are numbered in that order, too.

    >>> GrowingTable().frozen("empty").tasks
    ()
    """

    __slots__ = ("descs", "inputs", "outputs", "producers", "sources", "tasks")

    def __init__(self) -> None:
        #: By the number of a value: its descriptor, and the task that makes it.
        self.descs: list[TensorDesc] = []
        self.producers: list[int] = []
        self.tasks: list[TaskRow] = []
        #: The numbers of inputs, in order; inputs and outputs by name.
        self.sources: list[int] = []
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}

    @staticmethod
    def of(table: TaskTable) -> GrowingTable:
        """What freezes to a table, with the same numbers."""
        grown = GrowingTable()
        grown.descs, grown.tasks = list(table.descs), list(table.tasks)
        grown.producers = [OUTSIDE] * len(table.descs)
        for index, task in enumerate(table.tasks):
            for number in task.outputs:
                grown.producers[number] = index
        grown.inputs, grown.outputs = dict(table.inputs), dict(table.outputs)
        grown.sources = list(grown.inputs.values())
        return grown

    def add_input(self, desc: TensorDesc, name: str | None) -> int:
        """The number of a value from outside; raises `UsageError` for a name that is taken."""
        number = len(self.descs)
        self.inputs[_fresh(name, "input", self.inputs)] = number
        self.sources.append(number)
        self.descs.append(desc)
        self.producers.append(OUTSIDE)
        return number

    def add_output(self, number: int, name: str | None) -> None:
        """Keep a value; raises `UsageError` for a name that is taken."""
        self.outputs[_fresh(name, "output", self.outputs)] = number

    def add(self, agent: Agent, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of what a task makes."""
        descs = self.descs
        made = agent.outputs([descs[number] for number in inputs])
        task, first = len(self.tasks), len(descs)
        if len(made) == 1:
            outputs: tuple[int, ...] = (first,)
            self.producers.append(task)
        else:
            outputs = tuple(range(first, first + len(made)))
            self.producers.extend([task] * len(made))
        descs.extend(made)
        self.tasks.append(TaskRow(agent, inputs, outputs))
        return outputs

    def origin_of(self, number: int) -> tuple[int, int]:
        """The task that makes a value (`OUTSIDE` for an input), and which of its outputs it is."""
        task = self.producers[number]
        if task == OUTSIDE:
            return OUTSIDE, bisect_left(self.sources, number)
        return task, number - self.tasks[task].outputs[0]

    def frozen(self, name: str) -> TaskTable:
        """The table as it is now: in it, inputs come first."""
        inputs = len(self.sources)
        if not inputs or self.sources[-1] == inputs - 1:
            numbers: Sequence[int] = range(len(self.descs))
            tasks, descs = tuple(self.tasks), tuple(self.descs)
        else:  # Inputs were added between tasks.
            order = [*self.sources, *(n for task in self.tasks for n in task.outputs)]
            numbers = renumbered = [0] * len(order)
            for new, old in enumerate(order):
                renumbered[old] = new
            at = renumbered.__getitem__
            tasks = tuple([
                TaskRow(agent, tuple(map(at, read)), tuple(map(at, made)))
                for agent, read, made in self.tasks
            ])  # fmt: skip
            descs = tuple([self.descs[old] for old in order])
        return TaskTable(
            name,
            tuple([NamedValue(word, numbers[n]) for word, n in self.inputs.items()]),
            tasks,
            tuple([NamedValue(word, numbers[n]) for word, n in self.outputs.items()]),
            descs,
        )


def _fresh(name: str | None, side: str, taken: dict[str, int]) -> str:
    chosen = f"{side}{len(taken)}" if name is None else name
    if not chosen or chosen in taken:
        why = f"another {side} has it" if chosen else "it is empty"
        raise UsageError(f"no {side} can have the name {chosen!r}: {why}",
                         expected="a name of its own")  # fmt: skip
    return chosen
