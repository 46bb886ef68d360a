"""Transformations, tasks, futures, and the graph that orders them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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

    Values come from outside (`source`) or from a task (`add`). The numbering depends on the order
    of calls alone, so two stretches of the same work have the same `key`.

    >>> graph = TaskGraph()
    >>> graph.source()
    0
    """

    __slots__ = ("_calls", "_count", "_keys")

    def __init__(self) -> None:
        self._count = 0
        self._keys: list[tuple[int, ...]] = []
        self._calls: list[tuple[Transformation, tuple[int, ...], int]] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks in order; made when asked for, as a replayed plan needs only the key."""
        return tuple(
            Task(what, inputs, tuple(range(first, first + len(what.outputs))))
            for what, inputs, first in self._calls
        )

    @property
    def values(self) -> int:
        """How many values there are, numbered from 0."""
        return self._count

    def source(self) -> int:
        """Number a value that exists before the graph runs."""
        number = self._count
        self._count = number + 1
        return number

    def add(self, transformation: Transformation, inputs: tuple[int, ...], sources: int = 0) -> int:
        """Append a task and return the number of its first output; the others follow it.

        Before it so many `sources` are numbered. Raises `TaskError` for a future that points at
        nothing earlier; whatever it raises, the graph is unchanged.
        """
        first = self._count + sources
        for number in inputs:
            if not 0 <= number < first:
                raise TaskError(
                    f"task {transformation.name!r} refers to a value that no earlier task makes",
                    expected=f"values 0 to {first - 1}",
                    got=str(inputs),
                )
        count, calls = first + len(transformation.outputs), [(transformation, inputs, first)]
        # The first output's number says which inputs are sources, and when they were numbered.
        keys = [(transformation.key, first, *inputs)]
        # All at once: nothing can come in between these.
        self._count = count
        self._calls += calls
        self._keys += keys
        return first

    def future(self, value: int) -> Future | None:
        """Which output of which task a value is, None for one that comes from outside."""
        for index, task in enumerate(self.tasks):
            if value in task.outputs:
                return Future(index, value - task.outputs[0])
        return None

    def key(self) -> tuple[tuple[int, ...], ...]:
        """What two graphs have in common when they ask for the same work on the same references."""
        return tuple(self._keys)

    def period(self) -> int:
        """The least p ≤ half the length such that task i and i+p transform alike; else 0."""
        keys = [part[0] for part in self._keys]
        return least_period(keys)

    def clear(self) -> None:
        """Forget all tasks and values."""
        self._count = 0
        self._keys.clear()
        self._calls.clear()


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
