"""Plans that can run again: what must hold before, what to do, and the cache that finds them.

The check before a replay is constant where each space holds the very buffers that it held when the
plan was made, and proportional to the plan otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.budget import Claim
from stitch.planner import Execute, Plan
from stitch.runtime.backend import BoundPlan
from stitch.runtime.effects import Effects, Place, effects_of
from stitch.runtime.events import PlanStopped
from stitch.runtime.history import Tally
from stitch.runtime.hooked import run_hooked
from stitch.runtime.records import Picture, Records
from stitch.runtime.state import Status, ValueRecord
from stitch.runtime.straight import MAX_LINES, Straight, straight_code

if TYPE_CHECKING:
    from stitch.memory import Allocator
    from stitch.runtime.device import Device
    from stitch.runtime.window import Key

#: Kinds of work whose plans are kept, and plans kept for one kind (they differ in placements).
MAX_KINDS = 512
MAX_VARIANTS = 8
#: Runs after which a plan's steps are written out as code (about 10 us a step, once).
RUNS_TO_STRAIGHTEN = 3


@dataclass(frozen=True, slots=True)
class Bystander:
    """A buffer that the plan touches although no task of the window uses it."""

    place: Place
    users: tuple[object, ...]


@dataclass(slots=True, eq=False)
class ReadyPlan:
    """A bound plan with its preconditions and effects; `tally` counts how often it ran."""

    index: int
    bound: BoundPlan
    effects: Effects
    tokens: tuple[tuple[Allocator, int], ...]
    bystanders: tuple[Bystander, ...]
    #: Where the record of a bystander's value is found: value → (place, position among users).
    bystander_values: dict[int, tuple[Place, int]]
    tally: Tally
    #: What the records' `changes` were when it had last run; -1 where it may not repeat so.
    after: int = -1
    #: Its steps as one function, once it has run a few times.
    straight: Straight | None = None
    #: What it takes of the host's memory for as long as it can run.
    claim: Claim | None = None

    @property
    def plan(self) -> Plan:
        """The plan that this is."""
        return self.bound.plan

    def steps_of(self, thunks_done: int) -> int:
        """How many steps are done when so many thunks are."""
        return sum(1 for step in self.bound.steps if step.stop <= thunks_done)

    def repeats(self, records: Records) -> bool:
        """Whether nothing was allocated or freed since its last run, whose buffers are parked."""
        if self.after != records.changes:
            return False
        parked = records.parked
        for place in self.effects.places:  # noqa: SIM110
            if place not in parked:
                return False
        return True

    def holds(self, records: Records) -> bool:
        """Whether the regions that it takes are free and the bystanders are as they were."""
        if self.bystanders and not self.bystanders_hold(records):
            return False
        for allocator, token in self.tokens:
            if allocator.token != token:
                break
        else:
            return True
        return all(
            records.allocators[space].is_free(address, size)
            for space, address, size in self.bound.plan.free_regions
        )

    def bystanders_hold(self, records: Records) -> bool:
        """Whether the buffers that it touches outside its window are as they were."""
        for bystander in self.bystanders:
            buffer = records.buffers.get(bystander.place)
            if buffer is None or tuple(map(signature, buffer.users)) != bystander.users:
                return False
        return True


def signature(value: ValueRecord) -> tuple[object, ...]:
    """What a plan that touches a bystander's buffer depends on."""
    return (value.signature(), value.kept)


class PlanCache:
    """Ready plans by the work that they do; the least recently used kinds of work go first."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Key, list[ReadyPlan]] = OrderedDict()
        #: What was asked for last: comparing takes less time than looking up.
        self._last: tuple[Key | None, list[ReadyPlan]] = (None, [])
        #: How many plans have been made; in the steady state it stands still.
        self.made = 0

    @property
    def kinds(self) -> int:
        """How many kinds of work have plans."""
        return len(self._kinds)

    def find(self, key: Key, records: Records) -> ReadyPlan | None:
        """A plan for this work whose preconditions hold."""
        last, variants = self._last
        if key != last:
            found = self._kinds.get(key)
            if found is None:
                return None
            self._kinds.move_to_end(key)
            variants = found
            self._last = (key, found)
        if records.parked:
            for ready in variants:
                if ready.repeats(records):
                    return ready
            records.sweep()
        for ready in variants:
            if ready.holds(records):
                return ready
        return None

    def variants(self, key: Key) -> Sequence[ReadyPlan]:
        """All plans for this work, whether their preconditions hold or not."""
        return self._kinds.get(key, ())

    def add(self, key: Key, ready: ReadyPlan) -> None:
        """Keep a plan for the next time."""
        variants = self._kinds.setdefault(key, [])
        variants.insert(0, ready)
        del variants[MAX_VARIANTS:]
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        self._last = (key, variants)

    def ready(
        self, bound: BoundPlan, picture: Picture, records: Records, first_free: int
    ) -> ReadyPlan:
        """A bound plan with its preconditions, taken from the picture that it was made from."""
        plan = bound.plan
        in_window = {
            i.buffer for r in plan.request.residents if r.value < first_free for i in r.instances
        }
        touched: list[Place] = []
        for number in sorted(plan.touched - in_window):
            buffer = plan.request.buffers[number]
            if buffer.address is not None:
                touched.append((buffer.space, buffer.address))
        effects = effects_of(plan, records.desc_key)
        wanted = {v for v, _ in effects.changed} | set(effects.gone)
        values: dict[int, tuple[Place, int]] = {}
        for number, value in picture.bystanders.items():
            if number in wanted:
                # A host array has its first instance outside the spaces.
                record = next(i.buffer for i in value.instances if i.buffer.address is not None)
                assert record.address is not None
                values[number] = ((record.space, record.address), record.users.index(value))
                touched.append((record.space, record.address))
        bystanders = tuple(
            Bystander(place, tuple(map(signature, records.buffers[place].users)))
            for place in dict.fromkeys(touched)
        )
        used = {space for space, _, _ in plan.free_regions}
        tokens = tuple((a, a.token) for s, a in records.allocators.items() if s in used)
        self.made += 1
        tally = Tally(plan, bound.staging_nbytes)
        return ReadyPlan(self.made, bound, effects, tokens, bystanders, values, tally)

    def forget(self, transformation: int) -> None:
        """Drop the plans that run a transformation whose agent is gone."""
        stale = [key for key in self._kinds if any(part[0] == transformation for part in key[0])]
        for key in stale:
            del self._kinds[key]
        self._last = (None, [])

    def clear(self) -> None:
        """Drop all plans."""
        self._kinds.clear()
        self._last = (None, [])


def run_plan(device: Device, ready: ReadyPlan, values: Sequence[ValueRecord], now: int) -> None:
    """Run a plan on the values of a window; on failure leave what was finished."""
    records = device.records
    value_of: Callable[[int], ValueRecord] = values.__getitem__
    if ready.bystander_values:
        found = _bystanders(ready, records)
        value_of = lambda n: values[n] if n < len(values) else found[n]  # noqa: E731
    arrays = [values[number].host_array() for number in ready.bound.argument_values]
    steps: Any = None
    try:
        if ready.straight is not None and not device.hooks.active:
            device.quiet.run(ready.straight.run, arrays)
        else:
            steps = iter(ready.bound.thunks)
            _run_steps(device, ready, arrays, steps)
    except BaseException as error:
        done = _steps_done(ready, steps, error)
        _after_failure(device, ready, values, value_of, done, error)
        raise
    records.apply(ready.effects, value_of, device.note_gone)
    ready.after = records.changes if ready.effects.is_simple and not ready.bystanders else -1
    pending, freed = Status.PENDING, Status.FREED
    for value in values:
        value.last_used = now
        if value.status is pending:
            value.status = freed


def _run_steps(device: Device, ready: ReadyPlan, arrays: list[Any], steps: Any) -> None:
    """Run step by step; a plan that does so again and again gets straight-line code."""
    bound, tally = ready.bound, ready.tally
    bound.arguments[:] = arrays
    try:
        if device.hooks.active:
            device.in_hooks = True
            try:
                with np.errstate(all="ignore"):
                    run_hooked(bound, device.hooks)
            finally:
                device.in_hooks = False
        else:
            device.quiet.run(run_all, steps)
    finally:
        bound.arguments[:] = [None] * len(arrays)
    tally.runs += 1
    if (
        ready.straight is None
        and tally.runs >= RUNS_TO_STRAIGHTEN
        and len(bound.thunks) <= MAX_LINES
    ):
        order = range(len(arrays))
        ready.straight = straight_code(bound.thunks, [None] * len(arrays), order, tally)


def _steps_done(ready: ReadyPlan, steps: Any, error: BaseException) -> int:
    done: int | None = error.__dict__.pop("stitch_steps_done", None)
    if done is not None:
        return done
    if steps is None:
        assert ready.straight is not None
        thunks_done = ready.straight.steps_done(error)
    else:
        thunks_done = len(ready.bound.thunks) - steps.__length_hint__() - 1
    return ready.steps_of(thunks_done)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every step in order."""
    for step in steps:
        step()


def _bystanders(ready: ReadyPlan, records: Records) -> dict[int, ValueRecord]:
    return {
        number: records.buffers[place].users[position]
        for number, (place, position) in ready.bystander_values.items()
    }


def _after_failure(
    device: Device,
    ready: ReadyPlan,
    values: Sequence[ValueRecord],
    value_of: Any,
    steps_done: int,
    error: BaseException,
) -> None:
    plan = ready.plan
    if steps_done:
        device.events.report(PlanStopped(ready.index, plan, steps_done))
    effects = effects_of(plan, device.desc_key, steps_done)
    device.records.apply(effects, value_of, device.note_gone)
    finished = {s.task for s in plan.steps[:steps_done] if isinstance(s, Execute)}
    failing = next(
        (s.task for s in plan.steps[steps_done:] if isinstance(s, Execute)), len(plan.request.tasks)
    )
    for index, task in enumerate(plan.request.tasks):
        name = task.transformation.name
        for number in task.outputs:
            value = values[number]
            if value.status is Status.PENDING:
                why = f"failed: {error}" if index == failing else "was cancelled after a failure"
                value.status = Status.FAILED
                value.by = f"task {name!r} {why}"
        if index not in finished:
            for position in task.transformation.donated:
                values[task.inputs[position]].status = Status.LOST
    for value in values:
        if not value.kept and value.instances:
            device.records.release(value)
    device.records.free_unused(
        {(b.space, b.address) for b, _ in effects.made if b.address is not None}
    )
