"""Stretches: the tasks of a queue in submission order, the same object for the same work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from stitch.errors import TaskError
from stitch.tasks.transformation import Transformation


class NumberedTask(NamedTuple):
    """One invocation: a transformation, and the numbers of the values it reads and makes."""

    transformation: Transformation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def gone(self) -> frozenset[int]:
        """The positions of the inputs that are gone afterwards."""
        return self.transformation.donated


class TaskSequence:
    """Tasks in submission order over numbered values; a task reads only values numbered before.

    A stretch never changes: `after` gives the one with a task more. The numbering depends on the
    order of calls alone, and the same task after the same stretch gives the same one for as long as
    anybody refers to it, so the same work is one object.

    >>> TaskSequence().values
    0
    """

    __slots__ = (
        "__weakref__", "_others", "_period", "_sources", "before", "first", "following", "inputs",
        "length", "transformation", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        """Nothing to be done yet."""
        #: What comes before its last task, and that: what it does to which values, and the number
        #: of its first output.
        self.before: TaskSequence | None = None
        self.transformation: Transformation | None = None
        self.inputs: tuple[int, ...] = ()
        self.first = 0
        #: How many tasks there are, and how many values, which are numbered from 0.
        self.length = self.values = 0
        #: The one with a task more that was asked for last, and the others that are referred to.
        self.following: TaskSequence | None = None
        self._others: WeakValueDictionary[tuple[int, ...], TaskSequence] | None = None
        self._period = -1
        self._sources: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.length

    def after(
        self, transformation: Transformation, inputs: tuple[int, ...], sources: int = 0
    ) -> TaskSequence:
        """The stretch with a task more; its first output has the number `first`, the others follow.

        Before that so many `sources` are numbered, values from outside. Raises `TaskError` for a
        future that points at nothing earlier.
        """
        first, following = self.values + sources, self.following
        if (
            following is not None
            and following.transformation is transformation
            and following.first == first
            and following.inputs == inputs
        ):
            return following
        for number in inputs:
            if not 0 <= number < first:
                raise TaskError(
                    f"task {transformation.name!r} refers to a value that no earlier task makes",
                    expected=f"values 0 to {first - 1}",
                    got=str(inputs),
                )
        if self._others is None:
            self._others = WeakValueDictionary()
        # The first output's number says which inputs are sources, and when they were numbered.
        key = (transformation.key, first, *inputs)
        following = self._others.get(key)
        if following is None:
            following = TaskSequence()
            following.before, following.transformation = self, transformation
            following.inputs, following.first = inputs, first
            following.length = self.length + 1
            following.values = first + len(transformation.outputs)
            self._others[key] = following
        self.following = following
        return following

    @property
    def tasks(self) -> tuple[NumberedTask, ...]:
        """The tasks in order; made when asked for, as what ran before needs none."""
        tasks: list[NumberedTask] = []
        graph = self
        while graph.before is not None:
            assert graph.transformation is not None
            outputs = tuple(range(graph.first, graph.values))
            tasks.append(NumberedTask(graph.transformation, graph.inputs, outputs))
            graph = graph.before
        return tuple(reversed(tasks))

    def taken_over(self) -> set[int]:
        """The numbers of the inputs whose buffers an output of their task takes over."""
        taken, graph = set(), self
        while graph.before is not None:
            assert graph.transformation is not None
            taken.update([graph.inputs[at] for _, at in graph.transformation.aliases])
            graph = graph.before
        return taken

    @property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the values from outside."""
        if self._sources is None:
            made = {number for task in self.tasks for number in task.outputs}
            self._sources = tuple([n for n in range(self.values) if n not in made])
        return self._sources

    def has(self, transformation: int) -> bool:
        """Whether one of its tasks does what the transformation with this key does."""
        return any(task.transformation.key == transformation for task in self.tasks)

    def period(self) -> int:
        """The least p ≤ half the length such that task i and i+p transform alike; else 0."""
        if self._period < 0:
            self._period = least_period([task.transformation.key for task in self.tasks])
        return self._period


def least_period(items: Sequence[int]) -> int:
    """The least period of a sequence that repeats at least twice, else 0.

    >>> least_period([1, 2, 1, 2, 1])
    2
    >>> least_period([1, 2, 3])
    0
    """
    failure = [0] * len(items)
    matched = 0
    for i in range(1, len(items)):
        while matched and items[i] != items[matched]:
            matched = failure[matched - 1]
        if items[i] == items[matched]:
            matched += 1
        failure[i] = matched
    if not items:
        return 0
    period = len(items) - failure[-1]
    return period if 2 * period <= len(items) else 0
