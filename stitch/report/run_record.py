"""Records of runs: a device's plans and allocator events as JSON, and their replay.

One JSON object:

    {"stitch": "run", "version": 2,
     "machine": Machine,
     "plans": {"1": Plan, ...},            frozen data, see `frozen_json`
     "events": [{"event": "reserve", "space", "address", "size_per_bank", "origin"},
                {"event": "free", "space", "address", "size_per_bank"},      both outside any plan
                {"event": "run", "plan", "used": {space: bytes per bank afterwards}},
                {"event": "stopped", "plan", "steps"},             a plan that failed after these
                {"event": "write", "nbytes", "desc", "seconds"},   the host overwrote a tensor
                {"event": "read", "nbytes", "desc"}],
     "totals": {"period", "programs", "copies", "nbytes", "entries", "seconds",
                "program_seconds"}}

`Footprint.own_nbytes` defines the size of a copy. Allocations outside plans are found by comparing
the allocators before and after each plan. Older records lack `origin` and `seconds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

from stitch.argument_kinds import instance_of, takes
from stitch.errors import FormatError, StitchError, TaskError
from stitch.frozen_json import from_plain, read_json, shown, to_plain
from stitch.machine import Machine
from stitch.memory import Allocator
from stitch.planner import WARNINGS, Allocate, Buffer, Cost, Free, Plan, Relocate, check_plan
from stitch.program import Space
from stitch.report.explanation import (
    Place,
    totals_json,
    touched_at_start,
    touched_buffers,
)
from stitch.runtime import (
    Event,
    Lying,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    RuntimeDevice,
    Totals,
    Written,
    totals_of,
)
from stitch.tasks import TransformationKind

VERSION = 2
RUN_FILE = "record, which stitch-run --record=FILE writes"
Sizes = dict[Place, int]


#: Events after which a recorder converts them.
_BATCH = 1 << 14
#: The buffers in the spaces.
_Contents: TypeAlias = tuple[Lying, ...]
_Entry: TypeAlias = dict[str, Any]


class _KnownPlan(NamedTuple):
    """What is needed of a plan at each of its runs."""

    started: Sizes
    ended: Sizes
    totals: Totals


class Recorder:
    """Records the events of a device until `close`.

    Create it before programs are loaded, so that it records their constants. While the device
    works it only keeps what happened: the entries of the record are made in batches.
    """

    @takes(device=instance_of("a device", RuntimeDevice))
    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._watch = device.watch_memory()
        self._plans: dict[int, Plan] = {}
        self._known: dict[int, _KnownPlan] = {}
        #: Events, and of a run its plan's index and the contents of the spaces after it.
        self._seen: list[tuple[int, _Contents] | PlanStopped | Written | ReadBack] = []
        self._events: list[_Entry] = []
        self._total = Totals()
        self._period = device.history.period_from_now()
        #: The contents after the last entry.
        self._now: _Contents = ()
        #: Each contents once; the entries of a run, by its plan and the contents around it.
        self._contents: dict[_Contents, _Contents] = {}
        self._entries: dict[tuple[int, int, int], tuple[_Entry, ...]] = {}
        self._change_to(_allocated(device))
        self.close = device.events.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PlanRun):
            self._plans[event.index] = event.plan
            self._seen.append((event.index, self._watch.now()))
        elif not isinstance(event, PlanMade):
            self._seen.append(event)
        if len(self._seen) >= _BATCH:
            self._convert()

    def _convert(self) -> None:
        """Make the entries of what was seen."""
        seen, self._seen = self._seen, []
        for one in seen:
            if isinstance(one, tuple):
                self._add_run(one[0], self._contents.setdefault(one[1], one[1]))
                continue
            self._total += totals_of(one)
            if isinstance(one, PlanStopped):
                self._plans[one.index] = one.plan
                done = one.steps_done if isinstance(one.steps, range) else [*one.steps]
                entry: _Entry = {"event": "stopped", "plan": one.index, "steps": done}
            else:
                kind = "write" if isinstance(one, Written) else "read"
                entry = {"event": kind, "nbytes": one.nbytes, "desc": one.desc.text()}
                if isinstance(one, Written):
                    entry["seconds"] = one.seconds
            self._events.append(entry)

    def _add_run(self, index: int, after: _Contents) -> None:
        known = self._known.get(index)
        if known is None:
            plan = self._plans[index]
            known = self._known[index] = _KnownPlan(
                _sizes(touched_at_start(plan)), _sizes(touched_buffers(plan, plan.final_buffers)),
                totals_of(PlanRun(index, plan, ())),
            )  # fmt: skip
        self._total += known.totals
        # Both are among the keys of `_contents`, so their ids are theirs alone.
        key = index, id(self._now), id(after)
        entries = self._entries.get(key)
        if entries is None:
            entries = self._entries[key] = (*self._entries_of_run(index, known, after),)
        self._events += entries
        self._now = after

    def _entries_of_run(self, index: int, known: _KnownPlan, after: _Contents) -> Iterator[_Entry]:
        """Yield the entries of a run with the changes around it, outside of its plan."""
        now, later = _placed(self._now), _placed(after)
        started, ended = known.started, known.ended
        before = {p: size for p, size in later.items() if p not in ended} | started
        names = {each.place: each.origin for each in (*after, *self._now)}
        yield from _changes(now, before, names)
        within = {p: size for p, size in before.items() if p not in started} | ended
        used = {space.value: 0 for space in self._device.machine.shape.spaces}
        for (space, _), size in within.items():
            used[space.value] += size
        yield {"event": "run", "plan": index, "used": used}
        # Unreferenced buffers are released after the plan.
        yield from _changes(within, later, names)

    def _change_to(self, now: _Contents) -> None:
        """Add the changes since the last entry."""
        now = self._contents.setdefault(now, now)
        names = {each.place: each.origin for each in now}
        self._events += _changes(_placed(self._now), _placed(now), names)
        self._now = now

    def text(self) -> str:
        """Run the queue and return the record."""
        record, total = self._snapshot()
        body = {
            "stitch": "run",
            "version": VERSION,
            "machine": to_plain(record.machine),
            "plans": {str(index): to_plain(plan) for index, plan in record.plans.items()},
            "events": record.events,
            "totals": totals_json(self._period, total),
        }
        return json.dumps(body) + "\n"

    def record(self) -> RunRecord:
        """Return the contents of the record so far; runs nothing."""
        with self._device.lock:
            return self._at_rest()[0]

    def _snapshot(self) -> tuple[RunRecord, Totals]:
        with self._device.at_rest():
            return self._at_rest()

    def _at_rest(self) -> tuple[RunRecord, Totals]:
        self._convert()
        self._change_to(_allocated(self._device))
        total = self._total
        cost = Cost(total.copies, total.nbytes, total.seconds, total.program_seconds)
        return RunRecord(self._device.machine, dict(self._plans), (*self._events,), cost), total


def _changes(old: Sizes, new: Sizes, names: Mapping[Place, str]) -> Iterator[_Entry]:
    """Yield the buffers that were freed and allocated outside plans, frees first."""
    for kind, here, there in (("free", old, new), ("reserve", new, old)):
        changed = [place for place, size in here.items() if there.get(place) != size]
        for space, address in sorted(changed, key=lambda place: (place[0].value, place[1])):
            entry = {"event": kind, "space": space.value, "address": address,
                     "size_per_bank": here[space, address]}  # fmt: skip
            if kind == "reserve":
                entry["origin"] = names.get((space, address), "")
            yield entry


def _sizes(buffers: Mapping[Place, Buffer]) -> Sizes:
    return {place: buffer.size_per_bank for place, buffer in buffers.items()}


def _placed(contents: _Contents) -> Sizes:
    return {(each.space, each.address): each.size for each in contents}


def _allocated(device: RuntimeDevice) -> _Contents:
    return tuple([
        Lying(space, address, size, origin)
        for space, use in device.memory_use().items()
        for address, size, origin in use.buffers
    ])  # fmt: skip


# Replay: the allocator events of a record on fresh allocators.


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a record; `cost` is the total."""

    machine: Machine
    plans: Mapping[int, Plan]
    events: tuple[Mapping[str, Any], ...]
    cost: Cost


def read_record(text: str) -> RunRecord:
    """Parse a record; raise `FormatError` with the location of the first defect."""
    return record_of(read_json(text, RUN_FILE))


def record_of(body: Any) -> RunRecord:
    """Return the record of parsed JSON; see `read_record`."""
    if not isinstance(body, dict) or body.get("stitch") != "run":
        raise FormatError("this is no record", expected="what stitch-run --record=FILE writes")
    if body.get("version") != VERSION:
        raise FormatError(
            "the record has another version", expected=str(VERSION), got=str(body.get("version"))
        )
    plans, events = body.get("plans"), body.get("events")
    if not isinstance(plans, dict) or not isinstance(events, list):
        raise FormatError("malformed record", expected="`plans`, a mapping, and `events`, a list")
    machine = from_plain(Machine, body.get("machine"), "machine")
    _check_machine(machine)
    numbered: dict[int, Plan] = {}
    for index, plan in plans.items():
        if not index.isdecimal():
            raise FormatError("the key of a plan is not a number", where="plans", got=shown(index))
        numbered[int(index)] = from_plain(Plan, plan, f"plans.{index}")
        if numbered[int(index)].request.machine != machine:
            raise FormatError(
                "the plan has another machine than the record", where=f"plans.{index}"
            )
        _check_tasks(numbered[int(index)], f"plans.{index}")
    if not all(isinstance(event, dict) for event in events):
        raise FormatError("an event is not a mapping", where="events")
    return RunRecord(machine, numbered, tuple(events), cost_of(body.get("totals")))


def cost_of(totals: Any) -> Cost:
    """Return the cost in totals of a file; raise `FormatError` for other data."""
    names = [field.name for field in fields(Cost)]
    if isinstance(totals, dict):
        totals = {name: totals[name] for name in names if name in totals}
    cost = from_plain(Cost, totals, "totals")
    for name in names:
        if not 0 <= getattr(cost, name) < math.inf:
            raise FormatError(
                "invalid count", where=f"totals.{name}", expected="a finite number of at least 0",
                got=repr(getattr(cost, name))[:60],
            )  # fmt: skip
    return cost


def _check_machine(machine: Machine) -> None:
    """Raise `FormatError` for spaces that no allocator supports."""
    for space in machine.shape.spaces:
        s = machine.shape.space(space)
        if s.banks < 1 or s.alignment < 1 or s.granule < 1 or not 0 <= s.base <= s.limit < 1 << 40:
            raise FormatError(
                "invalid space", where=f"machine.shape.{space.value}", got=str(s)[:200]
            )


def _check_tasks(plan: Plan, where: str) -> None:
    """Raise `FormatError` for a task whose values do not match the slots of its transformation."""
    for number, task in enumerate(plan.request.tasks):
        slots = task.transformation
        # A copy has no slots.
        takes = 1 if slots.kind is TransformationKind.COPY else len(slots.inputs)
        if len(task.inputs) != takes or len(task.outputs) != len(slots.outputs):
            raise FormatError(
                "the values of a task do not match the slots of its transformation",
                where=f"{where}.request.tasks[{number}]",
                expected=f"{takes} inputs, {len(slots.outputs)} outputs",
                got=f"{len(task.inputs)} inputs, {len(task.outputs)} outputs",
            )


@dataclass(frozen=True, slots=True)
class Replayed:
    """The counts of a replay in which every address was as recorded."""

    machine: str
    events: int
    runs: int
    allocations: int
    frees: int
    moves: int


def replay(text: str) -> Replayed:
    """Replay the allocator events of a record on new allocators, with plans that are checked.

    Raises `FormatError` for text that is not a record, `TaskError` with the first event whose
    addresses differ, or whose plan is not sound.
    """
    return replay_record(read_record(text))


def replay_record(record: RunRecord, *, are_sound: bool = False) -> Replayed:
    """Replay a parsed record; raises as `replay`. `are_sound`: its plans were checked."""
    replayed = _Replay(record)
    if are_sound:
        replayed.sound.update(record.plans)
    for number, event in enumerate(record.events):
        try:
            replayed.event(event)
        except FormatError as error:
            error.where = error.where or f"event {number}"
            raise
        except StitchError as error:
            raise TaskError(
                f"the replay differs from the record: {error.what}",
                where=f"event {number} ({event_text(event)})",
                expected=error.expected,
                got=error.got,
            ) from error
    return Replayed(record.machine.name, len(record.events), **replayed.counts)


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event in one line, for errors."""
    words = " ".join(f"{k}={v}" for k, v in event.items() if k != "used")
    return " ".join(words.split())[:120]


class _Replay:
    """New allocators, and the counts of replayed events."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        shape = record.machine.shape
        self._allocators = {space: Allocator.of(shape.space(space)) for space in shape.spaces}
        self.sound: set[int] = set()
        self.counts = {"runs": 0, "allocations": 0, "frees": 0, "moves": 0}

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "run":
            self._run(event)
        elif kind == "reserve":
            space, address, size = self._region(event)
            self._allocator(space).alloc_at(address, size)
            self.counts["allocations"] += 1
        elif kind == "free":
            self._free(*self._region(event))
            self.counts["frees"] += 1
        elif kind not in ("read", "write", "stopped"):
            raise FormatError(
                "unknown event", expected="reserve, free, run, stopped, write, read",
                got=repr(kind)[:60],
            )  # fmt: skip

    def _region(self, event: Mapping[str, Any]) -> tuple[Space, int, int]:
        address, size = event.get("address"), event.get("size_per_bank")
        try:
            space = Space(event.get("space"))
        except ValueError as error:
            raise FormatError(f"{event.get('space')!r} is no space") from error
        if type(address) is not int or type(size) is not int:
            raise FormatError(
                "an event lacks `address` or `size_per_bank`", where=event_text(event)
            )
        return space, address, size

    def _allocator(self, space: Space) -> Allocator:
        if space not in self._allocators:
            raise TaskError(f"machine {self._record.machine.name!r} has no {space.value}")
        return self._allocators[space]

    def _free(self, space: Space, address: int, size: int) -> None:
        allocator = self._allocator(space)
        granules, unit = allocator.size_of(address), allocator.alignment
        if granules is None or granules != max(unit, -(-size // unit) * unit):
            raise TaskError(
                f"{space.value} {address:#x} is not live with {size} B per bank",
                expected=f"a live buffer of {size} B per bank",
                got="no live buffer" if granules is None else f"{granules} B per bank",
            )
        allocator.free(address)

    def _run(self, event: Mapping[str, Any]) -> None:
        index = event.get("plan")
        plan = self._record.plans.get(index) if isinstance(index, int) else None
        if plan is None or index is None:
            raise FormatError("the record lacks the plan of a run", where=event_text(event))
        if index not in self.sound:
            problem = next((p for p in check_plan(plan) if p.kind not in WARNINGS), None)
            if problem is not None:
                raise TaskError(f"the plan is not sound: {problem}")
            self.sound.add(index)
        for space, address, size in plan.free_regions:
            if not self._allocator(space).is_free(address, size):
                raise TaskError(
                    f"{space.value} {address:#x} is not free with {size} B per bank",
                    expected="a free region when the plan starts",
                )
        # The checker has followed the steps: only the buffers at both ends are left to compare.
        for (space, address), buffer in touched_at_start(plan).items():
            self._free(space, address, buffer.size_per_bank)
        for (space, address), buffer in touched_buffers(plan, plan.final_buffers).items():
            self._allocator(space).alloc_at(address, buffer.size_per_bank)
        self._count(plan)
        wanted = event.get("used")
        used = {space.value: a.used_nbytes for space, a in self._allocators.items()}
        if wanted != used:
            raise TaskError("the bytes in use differ", expected=str(wanted), got=str(used))

    def _count(self, plan: Plan) -> None:
        """Count a run, and the steps of its plan in memory spaces."""
        self.counts["runs"] += 1
        made = [step.buffer for step in plan.steps if isinstance(step, Allocate)]
        placed = {b.number for b in (*plan.request.buffers, *made) if b.address is not None}
        for step in plan.steps:
            if isinstance(step, Allocate):
                self.counts["allocations"] += step.buffer.number in placed
            elif isinstance(step, Free):
                self.counts["frees"] += step.buffer in placed
            elif isinstance(step, Relocate):
                self.counts["moves"] += len(step.targets)
