"""A window: the stretch of tasks that is queued, its numbered values, and who asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.program import TensorDesc
from stitch.runtime.queue.exposure import Bytes, forget_stale_copies
from stitch.runtime.recording import Agent, Key
from stitch.runtime.values import Places, Store, ValueRecord
from stitch.tasks import TaskGraph, Transformation


class Window:
    """The queue of a device between two runs; `number` tells windows apart.

    While it runs, the next one fills: `value.window` and `value.number` then speak of that one, so
    who runs this one goes by the numbers in it.
    """

    __slots__ = (
        "agents", "given_up", "graph", "is_planned", "number", "reads_exposed", "reads_failed",
        "sources", "values",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        #: Whether others may have written to a source's bytes.
        self.reads_exposed = False
        #: Whether the one before it failed when tasks of this one may have asked for its results.
        self.reads_failed = False
        #: Whether what runs it is known: an interrupt before that leaves it in the queue.
        self.is_planned = False
        #: Values that somebody freed while it ran.
        self.given_up: list[ValueRecord] = []
        self.graph = TaskGraph()
        #: Every value by its number, the ones that existed before with theirs, and the agent of
        #: each task.
        self.values: list[ValueRecord] = []
        self.sources: list[tuple[int, ValueRecord]] = []
        self.agents: list[Agent | None] = []

    def append(
        self,
        device: Store,
        what: Transformation,
        agent: Agent | None,
        inputs: Sequence[ValueRecord],
        outputs: Sequence[tuple[TensorDesc, int]],
    ) -> list[ValueRecord]:
        """Queue a task; gives the pending values of its outputs (descriptors and their keys)."""
        made = [ValueRecord(device, desc, key) for desc, key in outputs]
        for value in made:
            value.by = what.name
        self._add(what, agent, inputs, made)
        return made

    def _add(self, what: Transformation, agent: Agent | None, inputs: Sequence[ValueRecord],
             made: Sequence[ValueRecord]) -> None:  # fmt: skip
        graph, now = self.graph, self.number
        for value in inputs:
            if value.window != now:
                if value.is_exposed:
                    self.reads_exposed = True
                value.window = now
                value.number = number = graph.source()
                self.values.append(value)
                self.sources.append((number, value))
        number = graph.add(what, tuple([value.number for value in inputs]))
        self.agents.append(agent)
        for value in made:
            value.number, value.window = number, now
            number += 1
        self.values += made

    def go_on(self, later: Window) -> None:
        """It has not run after all: what was queued behind it meanwhile is queued in it."""
        for number, value in enumerate(self.values):
            value.number, value.window = number, self.number
        for task, agent in zip(later.graph.tasks, later.agents, strict=True):
            inputs = [later.values[number] for number in task.inputs]
            made = [later.values[number] for number in task.outputs]
            self._add(task.transformation, agent, inputs, made)
        self.reads_exposed |= later.reads_exposed
        self.reads_failed |= later.reads_failed

    def alone(self, index: int) -> tuple[Window, list[int]]:
        """One of its tasks as a window that was never queued; and the numbers that the values of
        that one have in this."""
        task, made = self.graph.tasks[index], Window(self.number)
        made.reads_exposed = self.reads_exposed
        numbers = list(dict.fromkeys(task.inputs))
        for number in numbers:
            made.sources.append((made.graph.source(), self.values[number]))
        inputs = tuple([numbers.index(number) for number in task.inputs])
        made.graph.add(task.transformation, inputs)
        made.agents.append(self.agents[index])
        numbers += task.outputs
        made.values += [self.values[number] for number in numbers]
        return made, numbers

    def kept(self) -> tuple[bool, ...]:
        """For each value whether somebody can still read it."""
        return tuple([value.handles > 0 and not value.consumed for value in self.values])

    def forget_stale_copies(self, device: Bytes) -> None:
        """Look at the bytes that others may have written since the device copied them."""
        for _, value in self.sources:
            if value.is_exposed and len(value.instances) > 1:
                forget_stale_copies(device, value)

    def key(self, kept: tuple[bool, ...]) -> Key:
        """What two windows have in common that one plan serves, up to places."""
        return (self.graph.key(), kept, tuple([value.signature() for _, value in self.sources]))

    def places(self) -> Places:
        """Where the sources lie, those apart that are arrays of a call."""
        return tuple([
            (number, value.places())
            for number, value in self.sources
            if not value.is_array
        ])  # fmt: skip
