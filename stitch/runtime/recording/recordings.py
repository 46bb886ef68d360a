"""Cache of executables by the work that they do.

The key is the tasks, the signatures of the sources, and which values are kept; executables of one
key differ in what was in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.planner import ranges_of
from stitch.runtime.recording.recording import Executable, PlanKey
from stitch.runtime.values import Forms, Ranges, Records
from stitch.tasks import TaskSequence

#: Limits for cached keys, and for executables per key.
MAX_KINDS = 512
MAX_VARIANTS = 64


class Recordings:
    """The executables of a device by key; the least recently used key is evicted first."""

    def __init__(self, records: Records) -> None:
        self._records = records
        #: By task sequence: few keys share one.
        self._kinds: dict[TaskSequence, tuple[PlanKey, ...]] = {}
        #: Counts lookups.
        self._now = 0
        #: Cached working regions of all executables.
        self._works: Ranges | None = None
        #: Counters; constant in the steady state.
        self.plans_made = self.made = self.bindings_made = 0

    @property
    def kinds(self) -> int:
        """The number of keys."""
        return len(self._all())

    def _all(self) -> list[PlanKey]:
        """Return a copy as a list: a garbage collection may run finalizers that use the device."""
        return [kind for kinds in list(self._kinds.values()) for kind in kinds]

    def of(self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms) -> Sequence[Executable]:
        """Return the executables of a key, newest first."""
        for kind in self._kinds.get(graph, ()):
            if kind.kept == kept and kind.forms == forms:
                kind.last_used = self._now = self._now + 1
                return kind.recordings
        return ()

    def recent(
        self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms, generation: int
    ) -> Executable | None:
        """Return the executable that ran last for a sequence, if it can run again at once."""
        recent: Executable | None = graph.recent
        if recent is None or recent.generation != generation:
            return None
        kind = recent.kind
        if kind is None or kind.kept != kept or kind.forms != forms:
            return None
        kind.last_used = self._now = self._now + 1
        return recent

    def works(self) -> Ranges:
        """Return the working regions of all executables."""
        if self._works is None:
            recordings = [recording for kind in self._all() for recording in kind.recordings]
            self._works = ranges_of(part for each in recordings for part in each.works_in)
        return self._works

    def add(
        self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms, recording: Executable
    ) -> None:
        """Cache an executable."""
        self._works = None
        kinds = self._kinds.get(graph, ())
        kind = next((k for k in kinds if k.kept == kept and k.forms == forms), None)
        if kind is None:
            kind = PlanKey(graph, kept, forms, [], self._now)
            self._kinds[graph] = (*kinds, kind)
        recording.kind = kind
        kind.recordings.insert(0, recording)
        self.made += 1
        for old in kind.recordings[MAX_VARIANTS:]:
            self._drop(old)
        del kind.recordings[MAX_VARIANTS:]
        if self.kinds > MAX_KINDS:
            self._forget([min(self._all(), key=lambda kind: kind.last_used)])

    def forget(self, transformation: int) -> None:
        """Drop the executables that run an unloaded transformation."""
        self._forget([kind for kind in self._all() if kind.graph.has(transformation)])

    def clear(self) -> None:
        """Drop all executables."""
        self._forget(self._all())

    def _forget(self, kinds: Sequence[PlanKey]) -> None:
        for kind in kinds:
            for recording in kind.recordings:
                self._drop(recording)
            # Last: an interrupted call can be repeated.
            others = tuple([k for k in self._kinds.get(kind.graph, ()) if k is not kind])
            if others:
                self._kinds[kind.graph] = others
            else:
                self._kinds.pop(kind.graph, None)

    def _drop(self, recording: Executable) -> None:
        self._works = None
        recording.is_dropped, recording.generation = True, -1
        if recording.kind is not None and recording.kind.graph.recent is recording:
            recording.kind.graph.recent = None
        # Free its parts: a pipeline may still refer to the executable.
        recording.claim = None
        if recording.parts is not None:
            recording.parts.clear()
        recording.codes.clear()
        if recording.alone is not None:
            recording.alone.drop()
            recording.alone = None
        for lease in tuple(recording.leases):
            self._records.end_lease(lease)
