"""Simulated time of steps on several devices, by discrete events.

A device runs its steps one after the other, in the given order, each as soon as all values that it
reads are there. A link carries one value at a time, in the order in which they are made; a value
crosses to a device once, however many of its steps read it. Values that no step makes are there
from the beginning.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from stitch.errors import UsageError
from stitch.mesh.schedules import Action, Schedule, check_schedule
from stitch.mesh.specification import MachineSpecification

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Step(Generic[K]):
    """What a device does without a pause.

    Attributes:
        key: Names the step, once among all steps.
        seconds: How long it takes.
        reads: Values that must be there before; any hashable names.
        makes: Values that are there afterwards, with the bytes that travel to other devices.
        after: Steps of any device that must have ended before.
    """

    key: K
    seconds: float
    reads: tuple[Hashable, ...] = ()
    makes: tuple[tuple[Hashable, int], ...] = ()
    after: tuple[K, ...] = ()


class Span(NamedTuple):
    """When and where a step ran, in simulated seconds."""

    device: str
    start: float
    end: float


class Transfer(NamedTuple):
    """A value that crossed a link, in simulated seconds."""

    value: Hashable
    source: str
    target: str
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline(Generic[K]):
    """The steps of a simulated run in the order in which they began, and what crossed links."""

    spans: Mapping[K, Span]
    transfers: tuple[Transfer, ...]

    @property
    def makespan(self) -> float:
        """Return the seconds until the last step ends."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @property
    def busy(self) -> Mapping[str, float]:
        """Return the seconds in which each device that has steps runs one."""
        seconds: dict[str, float] = {}
        for device, start, end in self.spans.values():
            seconds[device] = seconds.get(device, 0.0) + end - start
        return seconds

    @property
    def bubble_share(self) -> float:
        """Return the share of the devices' time in which they wait, from 0 to 1."""
        busy, whole = self.busy, self.makespan
        return 1 - sum(busy.values()) / (len(busy) * whole) if whole else 0.0


def simulate(
    steps: Mapping[str, Sequence[Step[K]]], specification: MachineSpecification,
    movement: Callable[[str, str, int], float] | None = None,
) -> Timeline[K]:  # fmt: skip
    """Simulate the steps of each device, in their order.

    Args:
        movement: The seconds of so many bytes from one device to another; default: of its links.

    Raises:
        UsageError: A device is unknown, a step or value has two makers, or devices wait for each
            other.
    """
    return _Simulation(steps, specification, movement).run()


def _makers(steps: Mapping[str, Sequence[Step[K]]]) -> Mapping[Hashable, str]:
    """Return the device that makes each value."""
    makers: dict[Hashable, str] = {}
    keys: set[K] = set()
    for device, order in steps.items():
        for step in order:
            if step.key in keys:
                raise UsageError(f"two steps are called {step.key!r}")
            keys.add(step.key)
            for value, _ in step.makes:
                if value in makers:
                    raise UsageError(f"step {step.key!r} makes {value!r}, as a step before it does")
                makers[value] = device
    return makers


class _Simulation(Generic[K]):
    """One simulation. Events are ends of steps and arrivals of values."""

    def __init__(
        self, steps: Mapping[str, Sequence[Step[K]]], specification: MachineSpecification,
        movement: Callable[[str, str, int], float] | None,
    ) -> None:  # fmt: skip
        self._movement = movement or (lambda a, b, n: specification.link(a, b).seconds(n))
        self._waiting = {device: deque(order) for device, order in steps.items()}
        self._is_busy = dict.fromkeys(steps, False)
        self._ended: set[K] = set()
        self._link_free: dict[tuple[str, str], float] = {}
        makers = _makers(steps)
        #: The other devices that read a value.
        self._readers: dict[Hashable, dict[str, None]] = {}
        #: The values that are there, by device.
        self._present: dict[str, set[Hashable]] = {}
        for device, order in steps.items():
            specification.entry(device)
            reads = [value for step in order for value in step.reads]
            self._present[device] = {value for value in reads if value not in makers}
            for value in reads:
                if makers.get(value, device) != device:
                    self._readers.setdefault(value, {})[device] = None
        #: (time, number, device, step that ends there, or else value that arrives there).
        self._events: list[tuple[float, int, str, Step[K] | None, Hashable]] = []
        self._added = 0
        self._spans: dict[K, Span] = {}
        self._transfers: list[Transfer] = []

    def run(self) -> Timeline[K]:
        for device in self._waiting:
            self._start(device, 0.0)
        while self._events:
            time, _, device, step, value = heapq.heappop(self._events)
            if step is None:
                self._present[device].add(value)
            else:
                self._is_busy[device] = False
                self._ended.add(step.key)
                for made, nbytes in step.makes:
                    self._present[device].add(made)
                    for reader in self._readers.get(made, ()):
                        self._send(made, nbytes, device, reader, time)
            # Steps of other devices may come after this one.
            for each in self._waiting:
                self._start(each, time)
        stuck = [
            f"{device!r} at {order[0].key!r}" for device, order in self._waiting.items() if order
        ]
        if stuck:
            raise UsageError("the devices wait for each other: " + ", ".join(stuck))
        return Timeline(self._spans, tuple(self._transfers))

    def _start(self, device: str, time: float) -> None:
        """Begin the next step of a device if it is idle and all values are there."""
        order = self._waiting[device]
        if not order or self._is_busy[device]:
            return
        step = order[0]
        if self._present[device].issuperset(step.reads) and self._ended.issuperset(step.after):
            order.popleft()
            self._is_busy[device] = True
            self._spans[step.key] = Span(device, time, time + step.seconds)
            self._push(time + step.seconds, device, step, None)

    def _send(self, value: Hashable, nbytes: int, source: str, target: str, time: float) -> None:
        """Send a value as soon as its link is free."""
        ends = (source, target)
        start = max(time, self._link_free.get(ends, 0.0))
        end = start + self._movement(source, target, nbytes)
        self._link_free[ends] = end
        self._transfers.append(Transfer(value, source, target, nbytes, start, end))
        self._push(end, target, None, value)

    def _push(self, time: float, device: str, step: Step[K] | None, value: Hashable) -> None:
        """Add an event; events of one time are taken in the order in which they were added."""
        self._added += 1
        heapq.heappush(self._events, (time, self._added, device, step, value))


def simulate_schedule(
    orders: Schedule,
    specification: MachineSpecification,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    nbytes: Sequence[int] = (),
) -> Timeline[Action]:
    """Simulate a schedule, its orders on the first devices of a specification.

    Args:
        orders: The schedule.
        specification: The devices and links.
        forward_seconds: The seconds of each stage for one micro-batch.
        backward_seconds: The same of its backward.
        nbytes: The bytes that one micro-batch passes from each stage but the last to the next, and
            that its gradient passes back; default: none.

    Raises:
        UsageError: The schedule has more devices than the specification, or is not sound.

    >>> from stitch.mesh.schedules import schedule
    >>> two = MachineSpecification.of(2, "tiny")
    >>> line = simulate_schedule(schedule("gpipe", 2, 3), two, [1.0, 1.0], [2.0, 2.0])
    >>> round(line.makespan, 3), round(line.bubble_share, 3)
    (12.0, 0.25)
    """
    if len(orders) > len(specification.devices):
        raise UsageError(
            f"a schedule of {len(orders)} devices on {len(specification.devices)} of the machine "
            f"specification {specification.name!r}"
        )
    check_schedule(orders)
    stages = len(forward_seconds)
    sizes = list(nbytes) or [0] * (stages - 1)

    def step(action: Action) -> Step[Action]:
        stage, _, is_backward = action
        seconds = (backward_seconds if is_backward else forward_seconds)[stage]
        # The value that it makes has its name; it passes the cut behind or before the stage.
        cut = stage - 1 if is_backward else stage
        size = sizes[cut] if 0 <= cut < len(sizes) else 0
        return Step(action, seconds, action.needs(stages), ((action, size),))

    named = zip(specification.devices, orders, strict=False)
    return simulate({device: [step(action) for action in order] for device, order in named},
                    specification)  # fmt: skip
