"""`ChromeTrace`: what a device does, as a Chrome trace (Perfetto and chrome://tracing open it).

Comes in: a device's events. Goes out: the trace as plain data. Two tracks: the plans' steps on the
simulated clock, one after the other, and the runs on the wall clock. It changes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from stitch.planner import Allocate, Copy, Execute, Free, Plan, Relocate
from stitch.report.explanation import WRITTEN, totals_json
from stitch.runtime import (
    Device,
    Event,
    PlanRun,
    PlanStopped,
    ReadBack,
    Totals,
    Written,
    totals_of,
)

#: Events kept; beyond this the oldest go, so that a long run does not fill the memory.
MAX_EVENTS = 200_000
_SIMULATED, _WALL = 1, 2


class ChromeTrace:
    """Subscribes to a device until `close`; `as_json` gives what was seen so far."""

    def __init__(self, device: Device) -> None:
        self._machine = device.machine.name
        self._period = device.history.period_from_now()
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._clock = 0.0
        self._start: float | None = None
        self._last = 0.0
        self._added = 0
        self._total = Totals()
        self.close = device.events.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        self._total += totals_of(event)
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
        if self._start is None:
            self._start = event.began_seconds
        began = event.began_seconds - self._start
        self._last = began + event.seconds
        plan = event.plan
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
            name = plan.request.tasks[step.task].transformation.name
            self._add(name, "program", _SIMULATED, at, 0.0, plan=index, task=step.task)
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
        self._events.append(event)
        self._added += 1

    def as_json(self) -> dict[str, Any]:
        """The trace in the JSON object form; times in microseconds.

        `otherData` adds up all copies since it began, those of events that are gone as well.
        """
        titles = ((_SIMULATED, f"{self._machine} (simulated time)"), (_WALL, "host (wall time)"))
        names: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": track, "tid": 1, "args": {"name": title}}
            for track, title in titles
        ]
        return {
            "traceEvents": names + list(self._events), "displayTimeUnit": "ns",
            "otherData": totals_json(self._period, self._total)
            | {"older_events_left_out": self._added - len(self._events)},
        }  # fmt: skip
