"""Records: a device's plans and allocator events as JSON (`replay` runs them again).

Comes in: a device's events. Goes out: text. It changes nothing. The form, one JSON object:

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

What happens outside plans (constants that take their places, handles that are dropped) is found by
comparing the allocators before and after each plan with what the plan itself does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from stitch.memory import LENT_ADDRESSES
from stitch.planner import Buffer, Plan
from stitch.program import Space
from stitch.report.explanation import totals_json
from stitch.report.frozen_json import to_plain
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
Place = tuple[Space, int]
Sizes = dict[Place, int]


class Recorder:
    """Subscribes to a device until `close`; `text` is the record so far.

    Subscribe before programs are loaded, so that their constants are seen.
    """

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
            after = _allocated(self._device)
            before = self._differences(_before(event.plan, after))
            self._known = _ended(event.plan, before)
            used = {space.value: 0 for space in self._device.machine.shape.spaces}
            for (space, _), size in self._known.items():
                used[space.value] += size
            self._events.append({"event": "run", "plan": event.index, "used": used})
            # What no handle refers to any more goes when the plan has run.
            self._known = self._differences(after)
        elif isinstance(event, PlanStopped):
            self._plans[event.index] = event.plan
            stopped = {"event": "stopped", "plan": event.index, "steps": event.steps_done}
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


def _allocated(device: RuntimeDevice) -> Sizes:
    return {
        (space, address): size
        for space, use in device.memory_use().items()
        for address, size, _ in use.buffers
    }


def _before(plan: Plan, after: Sizes) -> Sizes:
    """What was allocated before a plan ran, from what is allocated afterwards."""
    started, ended = _own(plan, plan.request.buffers), _own(plan, plan.final_buffers)
    return {place: size for place, size in after.items() if place not in ended} | started


def _ended(plan: Plan, before: Sizes) -> Sizes:
    """What is allocated when a plan has run, before anything is let go of."""
    started, ended = _own(plan, plan.request.buffers), _own(plan, plan.final_buffers)
    return {place: size for place, size in before.items() if place not in started} | ended


def _own(plan: Plan, buffers: Iterable[Buffer]) -> Sizes:
    """Those of the buffers that a plan reads, moves, frees or makes."""
    others = {b.number for b in plan.request.buffers} - plan.touched
    return {
        _place(b): b.size_per_bank
        for b in buffers
        if b.address is not None and b.address < LENT_ADDRESSES and b.number not in others
    }


def _place(buffer: Buffer) -> Place:
    assert buffer.address is not None
    return buffer.space, buffer.address
