"""Task sequences: the tasks of a queue in submission order, interned: equal work is one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
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

    A sequence is immutable: `append` returns the one with a task more. The numbering depends on the
    order of calls alone, and the same task after the same sequence gives the same one for as long
    as anybody refers to it, so the same work is one object.

    >>> TaskSequence().values
    0
    """

    __slots__ = (
        "__weakref__", "_others", "_period", "_sources", "before", "first", "following", "inputs",
        "length", "recent", "transformation", "values",
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
        #: What its device ran last for it, which is looked at first.
        self.recent: Any = None
        self._period = -1
        self._sources: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.length

    def after(
        self, transformation: Transformation, inputs: tuple[int, ...], sources: int = 0
    ) -> TaskSequence:
        """Return the sequence with a task more; its first output has the number `first`, the others
        follow.

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


# --------------------------------------------------------------------------------------------------
# Repetitions: a sequence cut into equal sequences, which share one plan.

#: Tasks that equal pieces have, at most, unless a period has more.
PIECE = 64
#: So many equal pieces there are at least: of fewer none would be planned less.
LEAST_PIECES = 3
#: What is shorter than this is not cut.
SHORTEST = LEAST_PIECES * PIECE


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The tasks `[start, stop)` of a sequence as one that starts from nothing.

    `numbers`: for each of its values the number in the whole. `read_later`: whether a task after it
    reads that value.
    """

    graph: TaskSequence
    start: int
    stop: int
    numbers: tuple[int, ...]
    read_later: tuple[bool, ...]


def cuts_of(graph: TaskSequence, nothing: TaskSequence) -> tuple[Cut, ...]:
    """The pieces of a sequence that repeats; () of one that does not, or is shorter than
    `SHORTEST`.

    `nothing`: the sequence without tasks that it comes after, as its pieces do.
    """
    if graph.length < SHORTEST:
        return ()
    tasks = graph.tasks
    start, stop, size = _repetition(_alike(tasks))
    if not size:
        return ()
    last_read = {number: at for at, task in enumerate(tasks) for number in task.inputs}
    cuts = dict.fromkeys([0, *range(start, stop + 1, size), len(tasks)])
    return tuple([_piece(tasks, *ends, nothing, last_read) for ends in pairwise(cuts)])


def _alike(tasks: Sequence[NumberedTask]) -> list[int]:
    """For each task a number, the same for tasks that do the same to values in the same relation:
    each last read or made by the same slot of a task so many tasks before."""
    numbers: dict[object, int] = {}
    touched: dict[int, tuple[int, int]] = {}
    alike = []
    for at, (what, inputs, outputs) in enumerate(tasks):
        relation: list[object] = [what.key]
        for slot, number in enumerate(inputs):
            before = touched.get(number)
            relation.append(None if before is None else (at - before[0], before[1]))
            touched[number] = at, slot
        for slot, number in enumerate(outputs):
            touched[number] = at, ~slot
        alike.append(numbers.setdefault(tuple(relation), len(numbers)))
    return alike


def _repetition(items: Sequence[int]) -> tuple[int, int, int]:
    """Where items around the middle begin and end to repeat, in pieces of a length; a length of 0:
    they do not, or there would be too few pieces.

    >>> _repetition([7] + 99 * [1, 2, 3] + [8])
    (1, 298, 57)
    >>> _repetition([*range(300)])[2]
    0
    """
    start, stop = len(items) // 4, len(items) - len(items) // 4
    period = least_period(items[start:stop])
    if not period:
        return 0, 0, 0
    while start and items[start - 1] == items[start - 1 + period]:
        start -= 1
    while stop < len(items) and items[stop] == items[stop - period]:
        stop += 1
    length = stop - start
    sizes = range(max(1, PIECE // period) * period, PIECE * 3 // 4, -period)
    # What is left over is planned for itself.
    size = min(sizes or (period,), key=lambda size: length % size)
    return (start, stop, size) if length // size >= LEAST_PIECES else (0, 0, 0)


def _piece(
    tasks: Sequence[NumberedTask], start: int, stop: int, nothing: TaskSequence,
    last_read: dict[int, int],
) -> Cut:  # fmt: skip
    graph = nothing
    at: dict[int, int] = {}
    for what, inputs, outputs in tasks[start:stop]:
        fresh = [number for number in dict.fromkeys(inputs) if number not in at]
        for number in fresh:
            at[number] = len(at)
        graph = graph.after(what, tuple([at[number] for number in inputs]), len(fresh))
        for number in outputs:
            at[number] = len(at)
    read_later = tuple([last_read.get(number, -1) >= stop for number in at])
    return Cut(graph, start, stop, tuple(at), read_later)
