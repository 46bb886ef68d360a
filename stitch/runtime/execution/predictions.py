"""Predictions of the next uses of values in L1, and the evictions that are based on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from typing import TypeAlias

from stitch.planner import PlanRequest
from stitch.program import Space
from stitch.runtime.execution.task_batch import TaskBatch
from stitch.runtime.values import Place, Records, ValueRecord
from stitch.tasks import TaskSequence

#: Lengths of the compared task sequences, which end with the task that uses a value; longest first.
DEPTHS = (64, 16, 4, 1)
#: Limits for stored distances, and for values with a stored last use.
MAX_DISTANCES = 1 << 13
MAX_VALUES = 1 << 10
#: Limit for tasks recorded since the last learning; the most recent ones are kept.
MAX_NOTED = 1 << 9

#: A task slot in context: a hash of the task sequence, and the slot (outputs are negative).
_Context: TypeAlias = tuple[int, int]
#: A recorded range of tasks (start, end), their sequence and values.
_Stretch: TypeAlias = "tuple[int, int, TaskSequence, Sequence[ValueRecord | None]]"


@dataclass(frozen=True, slots=True)
class _Use:
    """The last L1 use or creation of a value: task number (`at`), contexts, and the record's
    `last_used`."""

    at: int
    contexts: tuple[_Context, ...]
    last_used: int


class NextUses:
    """The predictions of one device.

    Until something is evicted it only records planned batches. From then on it records every batch,
    and learns when something is planned.
    """

    def __init__(self) -> None:
        #: Increases when a prediction was wrong: older plans used different predictions.
        self.version = 0
        #: Whether a tensor was evicted.
        self.is_wanted = False
        self._distances: dict[_Context, int] = {}
        self._last: dict[ValueRecord, _Use] = {}
        self._recent: tuple[int, ...] = ()
        #: Recorded batches not learned from yet, and their number of tasks.
        self._noted: deque[_Stretch] = deque()
        self._tasks = 0

    def note(self, batch: TaskBatch) -> None:
        """Record a batch that is about to run."""
        # Do not keep host arrays of calls alive.
        values = [None if value.is_array else value for value in batch.values]
        self._noted.append((batch.number, batch.end, batch.graph, values))
        self._tasks += len(batch.agents)
        while self._tasks > MAX_NOTED and len(self._noted) > 1:
            start, end, _, _ = self._noted.popleft()
            self._tasks -= end - start

    def learn(self) -> None:
        """Learn from the recorded batches if predictions are needed."""
        if not self.is_wanted:
            return
        told: dict[tuple[_Context, ...], int | None] = {}
        for stretch in self._noted:
            self._learn(*stretch, told)
        self._noted.clear()
        self._tasks = 0
        # Compare at the end: temporary changes, as at the start of new work, do not count.
        self.version += any(self._distance(after) != distance for after, distance in told.items())
        living = [(v, use) for v, use in self._last.items() if v.handles]
        self._last = dict(living[-MAX_VALUES:])
        for context in list(self._distances)[: max(0, len(self._distances) - MAX_DISTANCES)]:
            del self._distances[context]

    def _learn(
        self, start: int, end: int, graph: TaskSequence, values: Sequence[ValueRecord | None],
        told: dict[tuple[_Context, ...], int | None],
    ) -> None:  # fmt: skip
        """Learn from a range of tasks; collects the earlier predictions in `told`."""
        for at, task in enumerate(graph.tasks, start):
            self._recent = (*self._recent[1 - DEPTHS[0] :], task.transformation.key)
            before = [hash(self._recent[-depth:]) for depth in DEPTHS]
            # Layout conversions read a tensor from any space: they are not L1 uses.
            inputs = enumerate(task.transformation.inputs)
            wanted = {slot for slot, desc in inputs if desc.layout.space is Space.L1}
            slots = [*enumerate(task.inputs), *((~o, n) for o, n in enumerate(task.outputs))]
            for slot, number in slots:
                value = values[number]
                if value is None:
                    continue
                use = self._use(value, start)
                if slot >= 0 and slot not in wanted:
                    if use is not None:
                        self._last[value] = replace(use, last_used=end)
                    continue
                if use is not None and use.at < at and slot >= 0:
                    distance = at - use.at
                    told.setdefault(use.contexts, self._distance(use.contexts))
                    for context in use.contexts:
                        # Reinsert: LRU order.
                        self._distances.pop(context, None)
                        self._distances[context] = distance
                self._last.pop(value, None)
                self._last[value] = _Use(at, tuple([(h, slot) for h in before]), end)

    def expected(self, batch: TaskBatch) -> list[ValueRecord]:
        """Return the values with a predicted next L1 use."""
        known = self._distances.keys()
        likely = [v for v, use in self._last.items() if not known.isdisjoint(use.contexts)]
        return [value for value in likely if self.next_use(batch, value) < inf]

    def predicted(
        self, batch: TaskBatch, kept: Sequence[bool], others: Mapping[int, ValueRecord]
    ) -> tuple[tuple[int, int], ...]:
        """Return (value, task that reads it in L1 next) for values with a prediction.

        Task numbers are relative to the batch. `others`: values by number that no task of the batch
        uses.
        """
        living = {n: value for n, value in enumerate(batch.values) if kept[n]} | dict(others)
        uses = [(number, self.next_use(batch, value)) for number, value in living.items()]
        return tuple([(number, int(use) - batch.number) for number, use in uses if use < inf])

    def next_use(self, batch: TaskBatch, value: ValueRecord) -> float:
        """Return the task after a batch that is predicted to read a value in L1 next; infinity if
        unknown."""
        end, use = batch.end, self._use(value, batch.number)
        distance = None if use is None else self._distance(use.contexts)
        # An overdue use stays predicted for one more distance; then the prediction was wrong.
        if use is None or distance is None or end >= use.at + 2 * distance:
            return inf
        return max(use.at + distance, end)

    def _use(self, value: ValueRecord, now: int) -> _Use | None:
        """Return the last use of a value before task `now`; an unrecorded use is assumed similar to
        the last recorded one."""
        use = self._last.get(value)
        if use is None or value.last_used <= use.last_used or value.last_used > now:
            return use
        return _Use(use.at + value.last_used - use.last_used, use.contexts, value.last_used)

    def _distance(self, contexts: Sequence[_Context]) -> int | None:
        return next((self._distances[c] for c in contexts if c in self._distances), None)


#: Limit for replanning the same work because predictions have changed.
MAX_TRIES = 64


class EvictionPrediction:
    """The unused L1 buffers that could have been evicted, in order of predicted next use.

    The number of replans because of changed predictions is limited.
    """

    __slots__ = ("_in_order", "_knowledge", "_tries")
    _tries: int

    def __init__(
        self, request: PlanRequest, knowledge: int, before: Iterable[EvictionPrediction | None]
    ) -> None:
        """`knowledge`: version of the predictions; `before`: predictions of earlier executables of
        the same work."""
        self._knowledge = knowledge
        tries = [foresight._tries for foresight in before if foresight is not None]
        self._tries = max(0, min([MAX_TRIES, *tries]) - 1)
        used = {value for task in request.tasks for value in task.inputs}
        later = {value: use for value, use in request.later if value not in used}
        # Only unpinned L1 buffers can be evicted.
        places = {b.number: (b.space, b.address) for b in request.buffers
                  if b.space is Space.L1 and b.address is not None and not b.pinned}  # fmt: skip
        uses = [
            (later[resident.value], places[instance.buffer])
            for resident in request.residents
            if resident.value in later
            for instance in resident.instances
            if instance.buffer in places
        ]
        uses.sort(key=itemgetter(0))
        self._in_order: tuple[Place, ...] = tuple(dict.fromkeys([place for _, place in uses]))

    def holds(
        self, records: Records, knowledge: int, next_use: Callable[[ValueRecord], float]
    ) -> bool:
        """Return whether the evictions are still right: the predicted order of uses is
        unchanged."""
        if not self._tries:
            return True
        if self._knowledge != knowledge:
            return False
        live, last = records.buffers, 0.0
        for place in self._in_order:
            buffer = live.get(place)
            if buffer is None or not buffer.users:
                return False
            use = min(map(next_use, buffer.users))
            if use < last:
                return False
            last = use
        return True
