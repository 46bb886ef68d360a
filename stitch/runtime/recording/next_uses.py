"""Next uses, learned: when what a task has used or made is read in L1 again, told by what came
before.

What followed a use of the same slot of the same transformation is taken to follow it again; of the
stretches of tasks before it that are remembered the longest that is alike decides. A wrong
prediction costs bytes, never results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from stitch.program import Space
from stitch.runtime.recording.task_batch import TaskBatch
from stitch.runtime.values import ValueRecord
from stitch.tasks import TaskSequence

#: How many tasks, the one that uses a value among them, are compared: the longest first.
DEPTHS = (64, 16, 4, 1)
#: Distances that are remembered, and values whose last use is.
MAX_DISTANCES = 1 << 13
MAX_VALUES = 1 << 10
#: Tasks that were noted since something was learned, of which the last ones count.
MAX_NOTED = 1 << 9

#: A slot of a task after so many others: a hash of the tasks, and the slot (an output's is
#: negative).
_Context: TypeAlias = tuple[int, int]
#: Tasks from a number to before another, and the values that they speak of.
_Stretch: TypeAlias = "tuple[int, int, TaskSequence, Sequence[ValueRecord | None]]"


@dataclass(frozen=True, slots=True)
class _Use:
    """The last use of a value in L1, or its making: at which task of all (`at`), after what, and
    what the value's record says of when it was used."""

    at: int
    contexts: tuple[_Context, ...]
    last_used: int


class NextUses:
    """What one device has learned. Until tensors have to give way it only notes what is planned;
    from then on it notes what runs again, and learns where something is planned."""

    def __init__(self) -> None:
        #: Rises where something came otherwise than predicted: what was planned before was planned
        #: by less.
        self.version = 0
        #: Whether tensors have had to give way.
        self.is_wanted = False
        self._distances: dict[_Context, int] = {}
        self._last: dict[ValueRecord, _Use] = {}
        self._recent: tuple[int, ...] = ()
        #: What is not looked at yet, and how many tasks that are.
        self._noted: deque[_Stretch] = deque()
        self._tasks = 0

    def note(self, window: TaskBatch) -> None:
        """A window is about to run."""
        # An array of a call would live on here.
        values = [None if value.is_array else value for value in window.values]
        self._noted.append((window.number, window.end, window.graph, values))
        self._tasks += len(window.agents)
        while self._tasks > MAX_NOTED and len(self._noted) > 1:
            start, end, _, _ = self._noted.popleft()
            self._tasks -= end - start

    def learn(self) -> None:
        """Look at what was noted, if next uses are wanted."""
        if not self.is_wanted:
            return
        told: dict[tuple[_Context, ...], int | None] = {}
        for stretch in self._noted:
            self._learn(*stretch, told)
        self._noted.clear()
        self._tasks = 0
        # What is learned once and unlearned at once, where work begins anew, changes nothing.
        self.version += any(self._distance(after) != distance for after, distance in told.items())
        living = [(v, use) for v, use in self._last.items() if v.handles]
        self._last = dict(living[-MAX_VALUES:])
        for context in list(self._distances)[: max(0, len(self._distances) - MAX_DISTANCES)]:
            del self._distances[context]

    def _learn(
        self, start: int, end: int, graph: TaskSequence, values: Sequence[ValueRecord | None],
        told: dict[tuple[_Context, ...], int | None],
    ) -> None:  # fmt: skip
        """Learn from a stretch of tasks; `told`: what was predicted for what it reads."""
        for at, task in enumerate(graph.tasks, start):
            self._recent = (*self._recent[1 - DEPTHS[0] :], task.transformation.key)
            before = [hash(self._recent[-depth:]) for depth in DEPTHS]
            # A copy to another layout reads a tensor wherever it lies.
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
                        # The least recently learned goes first.
                        self._distances.pop(context, None)
                        self._distances[context] = distance
                self._last.pop(value, None)
                self._last[value] = _Use(at, tuple([(h, slot) for h in before]), end)

    def expected(self, window: TaskBatch) -> list[ValueRecord]:
        """The values of which it is known when they are read in L1 next."""
        known = self._distances.keys()
        likely = [v for v, use in self._last.items() if not known.isdisjoint(use.contexts)]
        return [value for value in likely if self.next_use(window, value) < inf]

    def predicted(
        self, window: TaskBatch, kept: Sequence[bool], others: Mapping[int, ValueRecord]
    ) -> tuple[tuple[int, int], ...]:
        """(Value, task of the window or after it that reads it in L1 next) for the values that
        live on, where that is known; `others`: by their numbers, those that no task of the window
        uses."""
        living = {n: value for n, value in enumerate(window.values) if kept[n]} | dict(others)
        uses = [(number, self.next_use(window, value)) for number, value in living.items()]
        return tuple([(number, int(use) - window.number) for number, use in uses if use < inf])

    def next_use(self, window: TaskBatch, value: ValueRecord) -> float:
        """The task after a window that reads a value in L1 next, as predicted; infinity: not
        known."""
        end, use = window.end, self._use(value, window.number)
        distance = None if use is None else self._distance(use.contexts)
        # What should have come is about to, for as long again; then it was wrong.
        if use is None or distance is None or end >= use.at + 2 * distance:
            return inf
        return max(use.at + distance, end)

    def _use(self, value: ValueRecord, now: int) -> _Use | None:
        """The last use of a value before a task; one that was not seen is taken to be like the last
        that was."""
        use = self._last.get(value)
        if use is None or value.last_used <= use.last_used or value.last_used > now:
            return use
        return _Use(use.at + value.last_used - use.last_used, use.contexts, value.last_used)

    def _distance(self, contexts: Sequence[_Context]) -> int | None:
        return next((self._distances[c] for c in contexts if c in self._distances), None)
