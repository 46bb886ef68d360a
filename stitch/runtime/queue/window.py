"""A window: the stretch of tasks that is queued, its numbered values, and who asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.program import TensorDesc
from stitch.runtime.queue.exposure import Bytes, forget_stale_copies
from stitch.runtime.recording import Agent, Key
from stitch.runtime.values import Places, Store, ValueRecord
from stitch.tasks import TaskGraph, Transformation


class Window:
    """The queue of a device between two runs; `number` tells windows apart."""

    __slots__ = ("agents", "graph", "number", "reads_exposed", "sources", "values")

    def __init__(self, number: int) -> None:
        self.number = number
        #: Whether others may have written to a source's bytes.
        self.reads_exposed = False
        self.graph = TaskGraph()
        #: Every value by its number, the ones that existed before, and the agent of each task.
        self.values: list[ValueRecord] = []
        self.sources: list[ValueRecord] = []
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
        graph, now = self.graph, self.number
        for value in inputs:
            if value.window != now:
                if value.is_exposed:
                    self.reads_exposed = True
                value.window = now
                value.number = graph.source()
                self.values.append(value)
                self.sources.append(value)
        number = graph.add(what, tuple([value.number for value in inputs]))
        self.agents.append(agent)
        made = []
        for desc, key in outputs:
            value = ValueRecord(device, desc, key)
            value.number, value.window, value.by = number, now, what.name
            number += 1
            made.append(value)
        self.values += made
        return made

    def kept(self) -> tuple[bool, ...]:
        """For each value whether somebody can still read it."""
        return tuple([value.handles > 0 and not value.consumed for value in self.values])

    def forget_stale_copies(self, device: Bytes) -> None:
        """Look at the bytes that others may have written since the device copied them."""
        for value in self.sources:
            if value.is_exposed and len(value.instances) > 1:
                forget_stale_copies(device, value)

    def key(self, kept: tuple[bool, ...]) -> Key:
        """What two windows have in common that one plan serves, up to places."""
        return (self.graph.key(), kept, tuple([value.signature() for value in self.sources]))

    def places(self) -> Places:
        """Where the sources lie, those apart that are arrays of a call."""
        return tuple([
            (value.number, value.places())
            for value in self.sources
            if not value.is_array
        ])  # fmt: skip
