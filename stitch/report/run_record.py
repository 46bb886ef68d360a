"""Records: a device's plans and allocator events as JSON (`replay` runs them again).

It changes nothing. The form, one JSON object:

    {"stitch": "run", "version": 2,
     "machine": Machine,
     "plans": {"1": Plan, ...},            frozen data, see `frozen_json`
     "events": [{"event": "reserve", "space", "address", "size_per_bank"},   outside any plan
                {"event": "free", "space", "address", "size_per_bank"},      outside any plan
                {"event": "run", "plan", "used": {space: bytes per bank afterwards}},
                {"event": "stopped", "plan", "steps"},                a plan that failed after these
                {"event": "write", "nbytes", "desc"},              the host overwrote a tensor
                {"event": "read", "nbytes", "desc"}],
     "totals": {"period", "programs", "copies", "nbytes", "entries", "seconds",
                "program_seconds"}}

What a copy and its bytes are: `Footprint.own_nbytes`. Version 1 had neither totals,
writes, nor plans that stopped; older records of version 2 have moves of earlier results
({"event": "move", "space", "address", "target", "size_per_bank", "nbytes"}).

What happens outside plans is found by comparing the allocators: see `allocations`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stitch.argument_kinds import takes
from stitch.planner import Buffer, Plan
from stitch.report.allocations import Place, assign_arenas, own_at_start
from stitch.report.explanation import totals_json
from stitch.report.frozen_json import to_plain
from stitch.report.reported_device import DEVICE
from stitch.runtime import (
    Event,
    PlanRun,
    PlanStopped,
    ReadBack,
    RuntimeDevice,
    Totals,
    Written,
    totals_of,
)

VERSION = 2
Sizes = dict[Place, int]


class Recorder:
    """Subscribes to a device until `close`; `text` is the record so far.

    Subscribe before programs are loaded, so that their constants are seen.
    """

    @takes(device=DEVICE)
    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._plans: dict[int, Plan] = {}
        self._events: list[dict[str, Any]] = []
        self._total = Totals()
        self._period = device.history.period_from_now()
        self._known: Sizes = {}
        self._known = self._differences(_allocated(device))
        self.close = device.events.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        self._total += totals_of(event)
        if isinstance(event, PlanRun):
            self._plans[event.index] = event.plan
            plan, after = event.plan, _allocated(self._device)
            started, ended = (
                _sizes(own_at_start(plan)),
                _sizes(assign_arenas(plan, plan.final_buffers)),
            )
            before = {p: size for p, size in after.items() if p not in ended} | started
            self._differences(before)
            self._known = {p: size for p, size in before.items() if p not in started} | ended
            used = {space.value: 0 for space in self._device.machine.shape.spaces}
            for (space, _), size in self._known.items():
                used[space.value] += size
            self._events.append({"event": "run", "plan": event.index, "used": used})
            # What no handle refers to any more goes when the plan has run.
            self._known = self._differences(after)
        elif isinstance(event, PlanStopped):
            self._plans[event.index] = event.plan
            done = event.steps_done if isinstance(event.steps, range) else [*event.steps]
            stopped = {"event": "stopped", "plan": event.index, "steps": done}
            self._events.append(stopped)
        elif isinstance(event, Written | ReadBack):
            kind = "write" if isinstance(event, Written) else "read"
            self._events.append({"event": kind, "nbytes": event.nbytes, "desc": event.desc.text()})

    def _differences(self, now: Sizes) -> Sizes:
        """Notes what was freed and taken since the last event, frees first."""
        for kind, here, there in (("free", self._known, now), ("reserve", now, self._known)):
            for (space, address), size in sorted(here.items(), key=lambda i: (i[0][0].value, i[0])):
                if there.get((space, address)) != size:
                    self._events.append(
                        {"event": kind, "space": space.value, "address": address,
                         "size_per_bank": size}
                    )  # fmt: skip
        return now

    def text(self) -> str:
        """The record; runs the queue first."""
        with self._device.at_rest():
            self._known = self._differences(_allocated(self._device))
            plans, events, total = dict(self._plans), list(self._events), self._total
        body = {
            "stitch": "run",
            "version": VERSION,
            "machine": to_plain(self._device.machine),
            "plans": {str(index): to_plain(plan) for index, plan in plans.items()},
            "events": events,
            "totals": totals_json(self._period, total),
        }
        return json.dumps(body) + "\n"


def _sizes(buffers: Mapping[Place, Buffer]) -> Sizes:
    return {place: buffer.size_per_bank for place, buffer in buffers.items()}


def _allocated(device: RuntimeDevice) -> Sizes:
    return {
        (space, address): size
        for space, use in device.memory_use().items()
        for address, size, _ in use.buffers
    }
