"""Recordings by the work that they do.

A kind of work is the same tasks on values of the same forms, of which the same are kept; its
recordings differ in what was in their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stitch.planner import ranges_of
from stitch.runtime.recording.recording import Executable
from stitch.runtime.values import Forms, Ranges, Records
from stitch.tasks import TaskSequence

#: Kinds of work that are kept, and recordings of one kind (they differ in what was in their way).
MAX_KINDS = 512
MAX_VARIANTS = 64


@dataclass(slots=True, eq=False)
class PlanKey:
    """A kind of work: tasks, which values are kept, the sources' forms; and the recordings of it,
    the last one made first."""

    graph: TaskSequence
    kept: tuple[bool, ...]
    forms: Forms
    recordings: list[Executable]
    #: When it was last asked for.
    last_used: int = 0


class Recordings:
    """The recordings of a device by the work that they do; kinds least recently used go first."""

    def __init__(self, records: Records) -> None:
        self._records = records
        #: By their tasks: of one graph there are few.
        self._kinds: dict[TaskSequence, tuple[PlanKey, ...]] = {}
        #: How often one was asked for.
        self._now = 0
        #: Where they work, once somebody has asked.
        self._works: Ranges | None = None
        #: How many plans, recordings and bindings were made; in the steady state all stand still.
        self.plans_made = self.made = self.bindings_made = 0

    @property
    def kinds(self) -> int:
        """How many kinds of work there are recordings of."""
        return len(self._all())

    def _all(self) -> list[PlanKey]:
        """A list of its own: a collection in between may finish what uses the device."""
        return [kind for kinds in list(self._kinds.values()) for kind in kinds]

    def of(self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms) -> Sequence[Executable]:
        """The recordings of a kind of work, the last one made first."""
        for kind in self._kinds.get(graph, ()):
            if kind.kept == kept and kind.forms == forms:
                kind.last_used = self._now = self._now + 1
                return kind.recordings
        return ()

    def works(self) -> Ranges:
        """Where all of them work."""
        if self._works is None:
            recordings = [recording for kind in self._all() for recording in kind.recordings]
            self._works = ranges_of(part for each in recordings for part in each.works_in)
        return self._works

    def add(
        self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms, recording: Executable
    ) -> None:
        """Keep a recording for the next time."""
        self._works = None
        kinds = self._kinds.get(graph, ())
        kind = next((k for k in kinds if k.kept == kept and k.forms == forms), None)
        if kind is None:
            kind = PlanKey(graph, kept, forms, [], self._now)
            self._kinds[graph] = (*kinds, kind)
        kind.recordings.insert(0, recording)
        self.made += 1
        for old in kind.recordings[MAX_VARIANTS:]:
            self._drop(old)
        del kind.recordings[MAX_VARIANTS:]
        if self.kinds > MAX_KINDS:
            self._forget([min(self._all(), key=lambda kind: kind.last_used)])

    def forget(self, transformation: int) -> None:
        """Drop what runs a transformation whose agent is gone."""
        self._forget([kind for kind in self._all() if kind.graph.has(transformation)])

    def clear(self) -> None:
        """Drop all recordings."""
        self._forget(self._all())

    def _forget(self, kinds: Sequence[PlanKey]) -> None:
        for kind in kinds:
            for recording in kind.recordings:
                self._drop(recording)
            # Only now: what an interrupt leaves is found the next time.
            others = tuple([k for k in self._kinds.get(kind.graph, ()) if k is not kind])
            if others:
                self._kinds[kind.graph] = others
            else:
                self._kinds.pop(kind.graph, None)

    def _drop(self, recording: Executable) -> None:
        self._works = None
        recording.is_dropped, recording.generation = True, -1
        # A pipeline may remember the recording for some time yet.
        recording.claim = None
        if recording.parts is not None:
            recording.parts.clear()
        recording.codes.clear()
        if recording.alone is not None:
            recording.alone.drop()
            recording.alone = None
        for lease in tuple(recording.leases):
            self._records.end_lease(lease)
