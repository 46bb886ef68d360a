"""Futures and tasks: the values of a task graph and the work that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from stitch.program import TensorDesc
from stitch.tasks.agents import Agent, TaskRow
from stitch.tasks.host_calls import InputPlace, OutputPlace
from stitch.tasks.host_functions import Handle

if TYPE_CHECKING:
    from stitch.tasks.task_graph import TaskGraph

#: The producer of a graph's inputs.
OUTSIDE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Future(Handle):
    """A value of a task graph, perhaps pending: an output of a task, or an input."""

    graph: TaskGraph
    #: The values of a graph are numbered in the order in which they were added.
    number: int

    @property
    def desc(self) -> TensorDesc:
        """Return its shape and layout."""
        return self.graph.desc_of(self.number)

    @property
    def task(self) -> int:
        """Return the index of its task, `OUTSIDE` for an input of the graph."""
        return self.graph.origin_of(self.number)[0]

    @property
    def output(self) -> int:
        """Return the index of the output of its task, or of the graph's input."""
        return self.graph.origin_of(self.number)[1]

    @property
    def function_queue(self) -> TaskGraph:
        """Return the graph, which queues host functions that are called with it."""
        return self.graph

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Future):
            return NotImplemented
        return other.graph is self.graph and other.number == self.number

    def __hash__(self) -> int:
        return hash((id(self.graph), self.number))

    def __repr__(self) -> str:
        task, output = self.graph.origin_of(self.number)
        where = f"input {output}" if task == OUTSIDE else f"output {output} of task {task}"
        return f"<Future {where}: {self.desc.text()}>"


@dataclass(frozen=True, slots=True)
class Task:
    """Inputs, a transformation, and outputs."""

    graph: TaskGraph
    #: The indices of its tasks in the graph: one, or those of a composition.
    indices: tuple[int, ...]
    agent: Agent
    inputs: tuple[Future, ...]
    outputs: tuple[Future, ...]

    @property
    def name(self) -> str:
        """Return its name."""
        return self.agent.name

    @property
    def device(self) -> str | None:
        """Return the device that it is placed on, None if it names none."""
        return self.graph.device_of(self.indices[0])

    @property
    def places(self) -> dict[Future, InputPlace | OutputPlace]:
        """Return the position of each future among its inputs and outputs."""
        found: dict[Future, InputPlace | OutputPlace] = {}
        for i, future in enumerate(self.inputs):
            found.setdefault(future, InputPlace(i))
        return found | {future: OutputPlace(i) for i, future in enumerate(self.outputs)}


class TaskList(Sequence[Task]):
    """The tasks of a graph, created on access."""

    __slots__ = ("_graph", "_rows")

    def __init__(self, graph: TaskGraph, rows: Sequence[TaskRow]) -> None:
        self._graph, self._rows = graph, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[which] for which in range(len(self._rows))[index]]
        row = self._rows[index]
        which = range(len(self._rows))[index]
        return Task(
            self._graph, (which,), row.agent, self._futures(row.inputs), self._futures(row.outputs)
        )

    def _futures(self, numbers: Sequence[int]) -> tuple[Future, ...]:
        return tuple([Future(self._graph, number) for number in numbers])
