"""Transformations, tasks, futures, and the graph that orders them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

from stitch.errors import TaskError
from stitch.program import Scratch, TensorDesc

_next_key = itertools.count(1).__next__


class TransformationKind(enum.Enum):
    """What computes a transformation: an executor runs programs, the backend copies."""

    PROGRAM = "program"
    COPY = "copy"


@dataclass(frozen=True, slots=True, eq=False)
class Transformation:
    """What an agent does to its inputs; made once per agent and shared by all of its tasks.

    `inputs` and `outputs` are the descriptors that must hold before and after. `aliases` pairs an
    output with the donated input whose buffer it takes. `key` identifies it for plan reuse.
    `seconds`: simulated time of one run on the device's machine, beside the copies that it needs.
    `constants`: how many of the inputs, the last, are constants, which their file has.
    """

    name: str
    kind: TransformationKind
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    donated: frozenset[int] = frozenset()
    aliases: tuple[tuple[int, int], ...] = ()
    scratch: Scratch | None = None
    key: int = field(default_factory=_next_key)
    seconds: float = 0.0
    constants: int = 0

    def input_name(self, index: int) -> str:
        """The name of an input slot, for messages."""
        return self.input_names[index] if index < len(self.input_names) else f"input {index}"

    def output_name(self, index: int) -> str:
        """The name of an output slot, for messages."""
        return self.output_names[index] if index < len(self.output_names) else f"output {index}"


class Future(NamedTuple):
    """A pointer at output `output` of task `task`, which is earlier in the graph."""

    task: int
    output: int


class Task(NamedTuple):
    """One invocation: a transformation, and the numbers of the values it reads and makes."""

    transformation: Transformation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TaskGraph:
    """Tasks in submission order over numbered values; a task reads only values numbered before.

    A graph never changes: `after` gives the one with a task more. The numbering depends on the
    order of calls alone, and the same task after the same graph gives the same graph for as long as
    anybody refers to it, so two stretches of the same work are one object.

    >>> TaskGraph().values
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
        self.before: TaskGraph | None = None
        self.transformation: Transformation | None = None
        self.inputs: tuple[int, ...] = ()
        self.first = 0
        #: How many tasks there are, and how many values, which are numbered from 0.
        self.length = self.values = 0
        #: The one with a task more that was asked for last, and the others that are referred to.
        self.following: TaskGraph | None = None
        self._others: WeakValueDictionary[tuple[int, ...], TaskGraph] | None = None
        self._period = -1
        self._sources: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.length

    def after(
        self, transformation: Transformation, inputs: tuple[int, ...], sources: int = 0
    ) -> TaskGraph:
        """The graph with a task more, whose first output has the number `first`; the others follow.

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
            following = TaskGraph()
            following.before, following.transformation = self, transformation
            following.inputs, following.first = inputs, first
            following.length = self.length + 1
            following.values = first + len(transformation.outputs)
            self._others[key] = following
        self.following = following
        return following

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks in order; made when asked for, as what ran before needs none."""
        tasks: list[Task] = []
        graph = self
        while graph.before is not None:
            assert graph.transformation is not None
            outputs = tuple(range(graph.first, graph.values))
            tasks.append(Task(graph.transformation, graph.inputs, outputs))
            graph = graph.before
        return tuple(reversed(tasks))

    @property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the values from outside."""
        if self._sources is None:
            made = {number for task in self.tasks for number in task.outputs}
            self._sources = tuple([n for n in range(self.values) if n not in made])
        return self._sources

    def future(self, value: int) -> Future | None:
        """Which output of which task a value is, None for one that comes from outside."""
        for index, task in enumerate(self.tasks):
            if value in task.outputs:
                return Future(index, value - task.outputs[0])
        return None

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
