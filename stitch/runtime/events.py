"""What the runtime tells whoever asks: one stream of events, silent while nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stitch.planner import Plan


@dataclass(frozen=True, slots=True)
class PlanMade:
    """A new plan was made; `index` numbers the plans of a device."""

    index: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan ran, whether new or replayed."""

    index: int
    began_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A tensor was read by the host."""

    nbytes: int
    desc: str


Event: TypeAlias = PlanMade | PlanRun | ReadBack
Subscriber = Callable[[Event], object]


class EventStream:
    """Subscribers of one device; `active` is False while there is none."""

    __slots__ = ("_changed", "_subscribers", "active")

    def __init__(self, changed: Callable[[], None]) -> None:
        self._subscribers: list[Subscriber] = []
        self._changed = changed
        self.active = False

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(event)` from now on; returns what ends the subscription."""
        self._subscribers.append(subscriber)
        self.active = True
        self._changed()

        def unsubscribe() -> None:
            self._subscribers.remove(subscriber)
            self.active = bool(self._subscribers)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell everybody."""
        for subscriber in tuple(self._subscribers):
            subscriber(event)


Moment: TypeAlias = Literal[
    "before_program", "after_program", "before_operation", "after_operation"
]
