"""What a device does, as one stream of events: its history adds them up, subscribers hear them.

Every report comes from here: `explain`, the memory's peaks and a result file from the history,
traces and recordings from the events. A copy and its bytes are what `Footprint.own_nbytes` says.
In the steady state nothing is sent: plans that run again count themselves while nobody listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from stitch.argument_kinds import CALLABLE
from stitch.errors import TaskError
from stitch.planner import Fork, Plan
from stitch.program import TensorDesc


@dataclass(frozen=True, slots=True)
class PlanMade:
    """A new plan was made; `index` numbers the plans of a device."""

    index: int
    plan: Plan


# Not frozen: it is made at each run, and that would take three times as long.
@dataclass(slots=True)
class PlanRun:
    """A plan ran, whether new or replayed.

    `moments`: when it began, and when each of its steps had ended, in seconds of `perf_counter`;
    then, for each of its `forks`, when all threads had ended, and when each began.
    """

    index: int
    plan: Plan
    moments: tuple[float, ...]
    forks: tuple[Fork, ...] = ()

    @property
    def began_seconds(self) -> float:
        """When its first step began."""
        return self.moments[0]

    @property
    def seconds(self) -> float:
        """What all of its steps took."""
        return max(self.moments) - self.moments[0]

    def spans(self) -> list[tuple[float, float, int]]:
        """When each step began, when it had ended, and the thread that it ran on."""
        count = 1 + len(self.plan.steps)
        now, *ends = self.moments[:count]
        others = iter(self.moments[count:])
        spans: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * len(ends)
        before = 0
        for fork in (*self.forks, None):
            for index in range(before, len(ends) if fork is None else fork.start):
                spans[index] = now, ends[index], 0
                now = ends[index]
            if fork is not None:
                joined = next(others)
                for thread, steps in enumerate(fork.threads):
                    now = next(others)
                    for step in steps:
                        spans[step] = now, ends[step], thread
                        now = ends[step]
                now, before = joined, fork.stop
        return spans


@dataclass(frozen=True, slots=True)
class PlanStopped:
    """A plan failed after some of its steps, whose copies stay: the first ones, where it ran on one
    thread; `steps` are their numbers."""

    index: int
    plan: Plan
    steps: Sequence[int]

    @property
    def steps_done(self) -> int:
        """How many there were."""
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Written:
    """The host overwrote a tensor of a space: one copy from the host."""

    desc: TensorDesc
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The host read a tensor of a space; `nbytes` are those of the array that it got.

    `moments`: when it asked, when the tensor was ready (what was queued had run), and when it had
    the array, in seconds of `perf_counter`.
    """

    desc: TensorDesc
    nbytes: int
    moments: tuple[float, float, float]


Event: TypeAlias = PlanMade | PlanRun | PlanStopped | Written | ReadBack
Subscriber = Callable[[Event], object]
#: The bit, among those of a device's observers, that tells that runs are timed for listeners.
TIMES = 1
#: Events that a listener may cause while it hears of one that it caused while it heard of one …
MAX_NESTED = 8


class _Telling(threading.local):
    """How many events this thread is being told of, each while it heard of the one before."""

    depth = 0


class EventStream:
    """The events of one device; `active` is False while nobody but the history listens."""

    __slots__ = ("_changed", "_count", "_subscribers", "_telling", "active", "is_over")

    def __init__(self, count: Subscriber, changed: Callable[[], None]) -> None:
        """`count` takes what is reported, before it is told; `changed` is called for a listener."""
        self._count = count
        self._subscribers: tuple[Subscriber, ...] = ()
        self._changed = changed
        self._telling = _Telling()
        self.active = False
        #: Whether listeners hear just now of something that is over, so that they may use the
        #: device in whose middle they are told.
        self.is_over = False

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(event)` from now on; returns what ends the subscription."""
        CALLABLE.check("events.subscribe", "subscriber", subscriber)
        # Something of its own: who ends this subscription twice ends no other of the same function.
        own = partial(subscriber)

        def unsubscribe() -> None:
            others = tuple([each for each in self._subscribers if each is not own])
            self._subscribers = others
            self.active = bool(others)
            self._changed()

        try:
            self._subscribers = (*self._subscribers, own)
            self.active = True
            self._changed()
        except BaseException:
            # An interrupt: nobody has what would end it.
            unsubscribe()
            raise
        return unsubscribe

    def report(self, event: Event) -> None:
        """Something happened: it is counted, and everybody is told."""
        self._count(event)
        self.tell(event)

    def tell(self, event: Event) -> None:
        """Tell everybody of something that has been counted; raises `TaskError` where a listener
        answers whatever it hears with more of the same."""
        depth = self._telling.depth
        if depth == MAX_NESTED:
            raise TaskError(
                f"a listener that hears of {type(event).__name__} uses its device, which tells it "
                "of that, so it uses its device again",
                remedy="let it act on what others do only, or note the event and act afterwards",
            )
        try:
            self._telling.depth = depth + 1
            self.is_over = isinstance(event, PlanRun | Written | ReadBack)
            for subscriber in self._subscribers:
                subscriber(event)
        finally:
            self.is_over = False
            self._telling.depth = depth


Moment: TypeAlias = Literal[
    "before_program", "after_program", "before_operation", "after_operation"
]
