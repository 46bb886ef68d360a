"""The event stream of a device: history counts events, subscribers receive them.

All reports derive from these events: `explain`, memory peaks and result files from the history,
traces from the events. `Footprint.own_nbytes` defines how copies and bytes count. In the steady
state no events are sent: without subscribers, replayed plans only count their runs.
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


# Not frozen: it is created at each run, and a frozen dataclass takes three times as long.
@dataclass(slots=True)
class PlanRun:
    """A plan ran, whether new or replayed.

    `moments`, in seconds of `perf_counter`: the start and the end of each step; then, for each of
    the `forks`, when all threads had ended and when each began.
    """

    index: int
    plan: Plan
    moments: tuple[float, ...]
    forks: tuple[Fork, ...] = ()

    @property
    def began_seconds(self) -> float:
        """The start of the first step."""
        return self.moments[0]

    @property
    def seconds(self) -> float:
        """The duration of the whole run."""
        return max(self.moments) - self.moments[0]

    def spans(self) -> list[tuple[float, float, int]]:
        """Return start, end and thread of each step."""
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
    """A plan failed after some of its steps; the copies that these made remain.

    `steps` are the numbers of the completed steps: the first ones if the plan ran on one thread.
    """

    index: int
    plan: Plan
    steps: Sequence[int]

    @property
    def steps_done(self) -> int:
        """The number of completed steps."""
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Written:
    """The host overwrote a tensor in a space: one copy from the host."""

    desc: TensorDesc
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The host read a tensor of a space into an array of `nbytes` bytes.

    `moments`, in seconds of `perf_counter`: the request, the tensor ready (the queue had run), the
    array returned.
    """

    desc: TensorDesc
    nbytes: int
    moments: tuple[float, float, float]


Event: TypeAlias = PlanMade | PlanRun | PlanStopped | Written | ReadBack
#: Events about something finished. A union in `isinstance` would be built for each event.
_FINISHED = (PlanRun, Written, ReadBack)
Subscriber = Callable[[Event], object]
#: Bit in `RuntimeDevice.observers`: runs are timed for listeners.
TIMES = 1
#: Limit for nested events, caused by listeners that use the device.
MAX_NESTED = 8


class _Telling(threading.local):
    """Depth of nested event delivery in this thread."""

    depth = 0


class EventStream:
    """The events of one device; `active` is False while only the history listens."""

    __slots__ = ("_changed", "_count", "_subscribers", "_telling", "active", "is_over")

    def __init__(self, count: Subscriber, changed: Callable[[], None]) -> None:
        """Initialize. `count` receives each reported event first; `changed` is called when
        subscribers change."""
        self._count = count
        self._subscribers: tuple[Subscriber, ...] = ()
        self._changed = changed
        self._telling = _Telling()
        self.active = False
        #: Whether the event being delivered is about something finished, so that listeners may use
        #: the device.
        self.is_over = False

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(event)` for each event; returns a function that unsubscribes."""
        CALLABLE.check("events.subscribe", "subscriber", subscriber)
        # A unique object: unsubscribing twice must not remove another subscription of the same
        # function.
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
            # Interrupted: the caller has no function to unsubscribe with.
            unsubscribe()
            raise
        return unsubscribe

    def report(self, event: Event) -> None:
        """Count an event and send it to the subscribers."""
        self._count(event)
        self.tell(event)

    def tell(self, event: Event) -> None:
        """Send a counted event to the subscribers.

        Raises:
            TaskError: A listener caused events in response to its own events, too many levels deep.
        """
        depth = self._telling.depth
        if depth == MAX_NESTED:
            raise TaskError(
                f"an event listener causes endless events: for each {type(event).__name__} it uses "
                "the device, which sends another event",
                remedy="ignore events that the listener causes, or record the event and act later",
            )
        try:
            self._telling.depth = depth + 1
            self.is_over = isinstance(event, _FINISHED)
            for subscriber in self._subscribers:
                subscriber(event)
        finally:
            self.is_over = False
            self._telling.depth = depth


Moment: TypeAlias = Literal[
    "before_program", "after_program", "before_operation", "after_operation"
]
