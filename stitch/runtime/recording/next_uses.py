"""Next uses, learned: when what a task has used or made is read again, told by what came before.

Comes in: windows that are planned. Goes out: for values that live on, the tasks that read them
next, as far as that can be known. What followed a use of the same slot of the same transformation
is taken to follow it again; of the stretches of tasks before it that are remembered the longest
that is alike decides. A wrong prediction costs bytes, never results. Must not know: plans, places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stitch.runtime.recording.window import Window
from stitch.runtime.values import ValueRecord
from stitch.tasks import Task

#: How many tasks, the one that uses a value among them, are compared: the longest first.
DEPTHS = (64, 16, 4, 1)
#: Distances that are remembered, and values whose last use is.
MAX_DISTANCES = 1 << 13
MAX_VALUES = 1 << 10
#: Tasks that ran again since something was planned, of which the last ones count.
MAX_REPLAYED = 1 << 9

#: A slot of a task after so many others: a hash of the tasks, and the slot (an output's is
#: negative).
_Context: TypeAlias = tuple[int, int]
#: Tasks from a number on, and the values that they speak of.
_Stretch: TypeAlias = "tuple[int, Sequence[Task], Sequence[ValueRecord | None]]"


@dataclass(frozen=True, slots=True)
class _Use:
    """The last use of a value: at which task of all (`at`), after what, and what the value's record
    says of when it was used."""

    at: int
    contexts: tuple[_Context, ...]
    last_used: int


class NextUses:
    """What one device has learned: from work that is new and, once tensors have had to give way,
    from all that is planned or bound to other places. What runs again it notes at most."""

    def __init__(self) -> None:
        #: Rises where something came otherwise than predicted: what was planned before was planned
        #: by less.
        self.version = 0
        #: Whether tensors have had to give way.
        self.is_wanted = False
        self._distances: dict[_Context, int] = {}
        self._last: dict[ValueRecord, _Use] = {}
        self._recent: tuple[int, ...] = ()
        #: What ran again since something was planned, and how many tasks that are.
        self._replayed: deque[_Stretch] = deque()
        self._tasks = 0

    def note(self, window: Window) -> None:
        """A window runs without being planned; it is looked at when another is."""
        # An array of a call would live on here.
        values = [None if value.is_array else value for value in window.values]
        self._replayed.append((window.number, window.graph.tasks, values))
        self._tasks += len(window.agents)
        while self._tasks > MAX_REPLAYED:
            self._tasks -= len(self._replayed.popleft()[1])

    def learn(self, window: Window) -> None:
        """Look at a window that is about to be planned, and at those that ran again before it."""
        now = window.number, window.graph.tasks, window.values
        surprises = [self._learn(*stretch) for stretch in (*self._replayed, now)]
        self._replayed.clear()
        self._tasks = 0
        self.version += any(surprises)
        living = [(v, use) for v, use in self._last.items() if v.handles and not v.is_array]
        self._last = dict(living[-MAX_VALUES:])
        for context in list(self._distances)[: max(0, len(self._distances) - MAX_DISTANCES)]:
            del self._distances[context]

    def _learn(
        self, start: int, tasks: Sequence[Task], values: Sequence[ValueRecord | None]
    ) -> bool:
        """Whether a stretch of tasks reads something otherwise than predicted."""
        is_surprising, end = False, start + len(tasks)
        for at, task in enumerate(tasks, start):
            self._recent = (*self._recent[1 - DEPTHS[0] :], task.transformation.key)
            before = [hash(self._recent[-depth:]) for depth in DEPTHS]
            slots = [*enumerate(task.inputs), *((~o, n) for o, n in enumerate(task.outputs))]
            for slot, number in slots:
                value = values[number]
                if value is None:
                    continue
                use = self._use(value, start)
                if use is not None and use.at < at and slot >= 0:
                    distance = at - use.at
                    is_surprising |= self._distance(use) != distance
                    for context in use.contexts:
                        # The least recently learned goes first.
                        self._distances.pop(context, None)
                        self._distances[context] = distance
                self._last.pop(value, None)
                self._last[value] = _Use(at, tuple([(h, slot) for h in before]), end)
        return is_surprising

    def predicted(
        self, window: Window, kept: Sequence[bool], others: Mapping[int, ValueRecord]
    ) -> tuple[tuple[int, int], ...]:
        """(Value, task of the window or after it that reads it next) for the values that live on,
        where that is known; `others`: by their numbers, those that no task of the window uses."""
        now, end = window.number, window.end
        living = {n: value for n, value in enumerate(window.values) if kept[n]} | dict(others)
        found = []
        for number, value in living.items():
            use = self._use(value, now)
            distance = None if use is None else self._distance(use)
            # What should have come is about to, for as long again; then it was wrong.
            if use is not None and distance is not None and end < use.at + 2 * distance:
                found.append((number, max(use.at + distance, end) - now))
        return tuple(found)

    def _use(self, value: ValueRecord, now: int) -> _Use | None:
        """The last use of a value before a task; one that was not seen is taken to be like the last
        that was."""
        use = self._last.get(value)
        if use is None or value.last_used <= use.last_used or value.last_used > now:
            return use
        return _Use(use.at + value.last_used - use.last_used, use.contexts, value.last_used)

    def _distance(self, use: _Use) -> int | None:
        return next((self._distances[c] for c in use.contexts if c in self._distances), None)
