"""`ChromeTrace`: what a device does, as a Chrome trace (Perfetto and chrome://tracing open it).

Comes in: a device's events. Goes out: the trace as plain data. Two tracks: the plans' steps on the
simulated clock, one after the other, and the runs on the wall clock. It changes nothing. While the
device works events are only kept: the trace is made of them when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import Any

from stitch.planner import Allocate, Copy, Execute, Free, Plan, Relocate
from stitch.report.explanation import WRITTEN, totals_json
from stitch.runtime import (
    Event,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    RuntimeDevice,
    Totals,
    Written,
    totals_of,
)

#: Events of a trace that are kept; beyond this the oldest go, so that a long run does not fill the
#: memory.
MAX_EVENTS = 200_000
#: Events of a device after which it is looked whether old ones go.
_LOOK_AFTER = 1024
#: Plans whose totals are remembered while lines are made.
_MAX_PLANS = 512
_SIMULATED, _WALL = 1, 2


class ChromeTrace:
    """Subscribes to a device until `close`; `as_json` gives what was seen so far."""

    def __init__(self, device: RuntimeDevice) -> None:
        self._machine = device.machine.name
        self._period = device.history.period_from_now()
        self._limit, self._look_after = MAX_EVENTS, _LOOK_AFTER
        self._seen: deque[Event] = deque()
        #: What came before those that are kept, and how many lines of the trace those make that
        #: have been counted.
        self._before = _Lines(self._limit)
        self._counted = self._lines = 0
        self.close = device.events.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        self._seen.append(event)
        if len(self._seen) - self._counted >= self._look_after:
            self._let_go()

    def _let_go(self) -> None:
        """Drop what makes none of the last lines."""
        seen = self._seen
        self._lines += sum(_count(seen[-i]) for i in range(1, len(seen) - self._counted + 1))
        while seen and self._lines - _count(seen[0]) >= self._limit:
            self._lines -= _count(seen[0])
            self._before.skip(seen.popleft())
        self._counted = len(seen)

    def as_json(self) -> dict[str, Any]:
        """The trace in the JSON object form; times in microseconds.

        `otherData` adds up all copies since it began, those of events that are gone as well.
        """
        titles = ((_SIMULATED, f"{self._machine} (simulated time)"), (_WALL, "host (wall time)"))
        names: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": track, "tid": 1, "args": {"name": title}}
            for track, title in titles
        ]
        lines = self._before.followed_by(tuple(self._seen))
        return {
            "traceEvents": names + list(lines.kept), "displayTimeUnit": "ns",
            "otherData": totals_json(self._period, lines.total)
            | {"older_events_left_out": lines.added - len(lines.kept)},
        }  # fmt: skip


def _count(event: Event) -> int:
    """How many lines of a trace an event makes."""
    if isinstance(event, PlanRun):
        return 1 + len(event.plan.steps)
    if isinstance(event, PlanStopped):
        return min(event.steps_done, len(event.plan.steps))
    return int(not isinstance(event, PlanMade))


class _Lines:
    """The lines that events make, in their order; the last so many are kept."""

    def __init__(self, limit: int) -> None:
        self.kept: deque[dict[str, Any]] = deque(maxlen=limit)
        self.added = 0
        self.total = Totals()
        self._clock = 0.0
        self._start: float | None = None
        self._last = 0.0
        #: What a run of a plan adds up to, by its index: that takes longer to find than all else.
        self._totals: dict[int, Totals] = {}

    def followed_by(self, events: Iterable[Event]) -> _Lines:
        """These lines and those of later events; this object stays as it is."""
        lines = copy(self)
        lines.kept, lines._totals = self.kept.copy(), {}
        for event in events:
            lines.add(event)
        return lines

    def skip(self, event: Event) -> None:
        """Count the lines of one more event, and keep none."""
        self._add_up(event)
        self.added += _count(event)
        if isinstance(event, Written):
            self._clock += event.seconds
        elif isinstance(event, PlanRun | PlanStopped):
            done = event.steps_done if isinstance(event, PlanStopped) else None
            for step in event.plan.steps[:done]:
                if isinstance(step, Copy | Relocate):
                    self._clock += step.seconds
                elif isinstance(step, Execute):
                    self._clock += event.plan.request.tasks[step.task].transformation.seconds

    def _add_up(self, event: Event) -> None:
        if not isinstance(event, PlanRun):
            self.total += totals_of(event)
            return
        totals = self._totals.get(event.index)
        if totals is None:
            if len(self._totals) >= _MAX_PLANS:
                self._totals.clear()
            totals = self._totals[event.index] = totals_of(event)
        self.total += totals
        if self._start is None:
            self._start = event.began_seconds
        self._last = event.began_seconds - self._start + event.seconds

    def add(self, event: Event) -> None:
        """The lines of one more event."""
        self._add_up(event)
        if isinstance(event, PlanRun):
            self._run(event)
        elif isinstance(event, PlanStopped):
            for step in event.plan.steps[: event.steps_done]:
                self._step(step, event.plan, event.index)
        elif isinstance(event, Written):
            self._copied("write", event.seconds, 1, event.nbytes, source="host",
                         target=event.desc.text(), reason=WRITTEN)  # fmt: skip
        elif isinstance(event, ReadBack):
            self._add("read", "read", _WALL, self._last, None, nbytes=event.nbytes,
                      tensor=event.desc.text())  # fmt: skip

    def _run(self, event: PlanRun) -> None:
        assert self._start is not None
        began, plan = event.began_seconds - self._start, event.plan
        names = [task.transformation.name for task in plan.request.tasks]
        self._add(f"plan {event.index}", "run", _WALL, began, event.seconds, tasks=names)
        for step in plan.steps:
            self._step(step, plan, event.index)

    def _step(self, step: Any, plan: Plan, index: int) -> None:
        at = self._clock
        if isinstance(step, Copy):
            source, target = step.source.desc.text(), step.target.desc.text()
            self._copied(step.kind, step.seconds, 1, step.nbytes, plan=index, source=source,
                         target=target, reason=step.reason)  # fmt: skip
        elif isinstance(step, Relocate):
            kind = "move" if step.stage is None else "bounce"
            self._copied(kind, step.seconds, step.count, step.nbytes, plan=index,
                         space=step.space.value, reason=step.reason)  # fmt: skip
        elif isinstance(step, Execute):
            what = plan.request.tasks[step.task].transformation
            self._add(what.name, "program", _SIMULATED, at, what.seconds, plan=index,
                      task=step.task)  # fmt: skip
            self._clock += what.seconds
        elif isinstance(step, Allocate):
            buffer = step.buffer
            self._add("allocate", "memory", _SIMULATED, at, None, plan=index,
                      space=buffer.space.value, address=buffer.address,
                      size_per_bank=buffer.size_per_bank, tensor=buffer.origin)  # fmt: skip
        elif isinstance(step, Free):
            self._add("free", "memory", _SIMULATED, at, None, plan=index, buffer=step.buffer)

    def _copied(
        self, name: str, seconds: float, copies: int, nbytes: int, **arguments: Any
    ) -> None:
        """So many copies at one go, on the simulated clock."""
        self._add(name, "copy", _SIMULATED, self._clock, seconds, copies=copies, nbytes=nbytes,
                  **arguments)  # fmt: skip
        self._clock += seconds

    def _add(
        self, name: str, kind: str, track: int, at: float, seconds: float | None, **arguments: Any
    ) -> None:
        """A complete event, or, without a duration, an instant. Trace times are microseconds."""
        event: dict[str, Any] = {
            "name": name, "cat": kind, "ph": "i" if seconds is None else "X", "pid": track,
            "tid": 1, "ts": at * 1e6, "args": arguments,
        }  # fmt: skip
        event |= {"s": "t"} if seconds is None else {"dur": seconds * 1e6}
        self.kept.append(event)
        self.added += 1
