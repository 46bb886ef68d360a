"""Running: a binding's steps on the values of a window, and what is left where one fails.

Comes in: bindings whose guards hold, and values. Goes out: values that are ready, or failed, and
records that say so. Must not know how the binding was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.planner import Copy, Execute, Plan, Step
from stitch.runtime.events import PlanStopped
from stitch.runtime.recording.code import MAX_LINES, straight_code
from stitch.runtime.recording.hooked import run_hooked
from stitch.runtime.recording.recordings import Binding
from stitch.runtime.values import Status, ValueRecord, effects_of
from stitch.tasks import Task

if TYPE_CHECKING:
    from stitch.runtime.device import Device

#: Runs after which a plan's steps are written out as code (about 10 us a step, once).
RUNS_TO_STRAIGHTEN = 3


def run_binding(device: Device, binding: Binding, values: Sequence[ValueRecord], now: int) -> None:
    """Run a plan on the values of a window; on failure leave what was finished."""
    records, recording, lease = device.records, binding.recording, binding.lease
    value_of: Callable[[int], ValueRecord] = values.__getitem__
    if recording.bystander_values:
        others = recording.found_bystanders(records)
        value_of = lambda n: values[n] if n < len(values) else others[n]  # noqa: E731
    run_steps(device, binding, [values[number].host_array() for number in binding.arrays],
              values, value_of)  # fmt: skip
    effects = recording.effects
    if lease is None:
        records.apply(effects, value_of, device.note_gone)
    else:
        lease.take([values[number] for number, _ in effects.own], now)
        for carried in effects.carried:
            entry = values[carried.entry]
            records.hand_on(entry, values[carried.result], carried.ref)
            device.note_gone(entry)
    pending, ready, freed = Status.PENDING, Status.READY, Status.FREED
    for value in values:
        value.last_used = now
        if value.status is pending:
            value.status = freed
        elif not value.is_array and not value.kept and value.status is ready:
            # The plan has left it where it was; no handle refers to it any more.
            records.release(value)
            value.status = freed
            device.constant_cache.forget(value)


def run_steps(
    device: Device,
    binding: Binding,
    arrays: Sequence[Any],
    values: Sequence[ValueRecord],
    value_of: Callable[[int], ValueRecord],
) -> None:
    """The steps alone, and what is left where one fails."""
    try:
        perform(device, binding, arrays)
    except BaseException as error:
        done: int = error.__dict__.pop("stitch_steps_done", 0)
        _after_failure(device, binding, values, value_of, done, error)
        raise


def perform(device: Device, binding: Binding, arrays: Sequence[Any]) -> None:
    """Run the steps; an exception carries how many were done, as `stitch_steps_done`."""
    steps: Any = None
    try:
        straight = binding.straight
        if straight is not None and not device.hooks.active:
            ran = device.quiet.run(straight.run, arrays)
            if ran:
                return
        steps = iter(binding.bound.thunks)
        _run_one_by_one(device, binding, arrays, steps)
    except BaseException as error:
        error.__dict__.setdefault("stitch_steps_done", _steps_done(binding, steps, error))
        raise


def _run_one_by_one(device: Device, binding: Binding, arrays: Sequence[Any], steps: Any) -> None:
    bound, tally = binding.bound, binding.tally
    bound.arguments[:] = [arrays[rank] for rank in binding.order]
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
    wanted = 2 if binding.recording.is_written else RUNS_TO_STRAIGHTEN
    if binding.straight is None and tally.runs >= wanted:
        write_out(device, binding)


def write_out(device: Device, binding: Binding) -> None:
    """Give a binding the code of its steps."""
    if len(binding.bound.thunks) > MAX_LINES:
        return
    residents = {r.value: r for r in binding.plan.request.residents}
    descs = [residents[number].instances[0].desc for number in binding.arrays]
    kinds = [(d.layout.data_type.dtype, d.shape) for d in descs]
    binding.straight = straight_code(binding.bound.thunks, kinds, binding.order, binding.tally)
    binding.recording.is_written = True
    device.code_written += 1


def _steps_done(binding: Binding, steps: Any, error: BaseException) -> int:
    """How many steps were finished when one raised; `steps`: the loop's iterator, if it was one."""
    if steps is None:
        assert binding.straight is not None
        thunks_done = binding.straight.steps_done(error)
    else:
        thunks_done = max(0, len(binding.bound.thunks) - steps.__length_hint__() - 1)
    return binding.steps_of(thunks_done)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every step in order."""
    for step in steps:
        step()


def _after_failure(
    device: Device,
    binding: Binding,
    values: Sequence[ValueRecord],
    value_of: Callable[[int], ValueRecord],
    steps_done: int,
    error: BaseException,
) -> None:
    plan, records = binding.plan, device.records
    if steps_done:
        device.events.report(PlanStopped(binding.index, plan, steps_done))
    if binding.lease is not None:
        # What was finished takes its places for itself, with what lies there.
        records.end_lease(binding.lease, with_bytes=False)
    effects = effects_of(plan, device.desc_key, steps_done)
    records.apply(effects, value_of, device.note_gone)
    failing, left = _what_is_left(plan, steps_done, is_over=not isinstance(error, Exception))
    wanted = {number for index in left for number in plan.request.tasks[index].inputs}
    for index, task in enumerate(plan.request.tasks):
        if index in left:
            continue
        name = task.transformation.name
        is_made = all(values[number].status is not Status.PENDING for number in task.outputs)
        for number in task.outputs:
            value = values[number]
            if value.status is Status.PENDING:
                why = f"failed: {error}" if index == failing else "was cancelled after a failure"
                value.status = Status.FAILED
                value.by = f"task {name!r} {why}"
        if not is_made:
            for position in task.transformation.donated:
                values[task.inputs[position]].status = Status.LOST
    for number, value in enumerate(values):
        if not value.kept and value.instances and number not in wanted:
            records.release(value)
    # Whoever has the window runs them.
    error.__dict__["stitch_tasks_left"] = left
    records.free_unused({(b.space, b.address) for b, _ in effects.made if b.address is not None})


def _what_is_left(plan: Plan, steps_done: int, *, is_over: bool) -> tuple[int, tuple[int, ...]]:
    """The task that failed, and those that neither ran nor read what is missing now.

    `is_over`: it was no failure but an interrupt, after which nothing more is run.
    """
    tasks = plan.request.tasks
    finished = {made for step in plan.steps[:steps_done] for made in _tasks_of(step, tasks)}
    failing = next(
        (made for step in plan.steps[steps_done:] for made in _tasks_of(step, tasks)), len(tasks)
    )
    missing: set[int] = set()
    left = []
    for index, task in enumerate(tasks):
        if index in finished:
            continue
        if is_over or index == failing or not missing.isdisjoint(task.inputs):
            missing.update(task.outputs)
            # What it would have overwritten is lost.
            missing.update(task.inputs[position] for position in task.transformation.donated)
        else:
            left.append(index)
    return failing, tuple(left)


def _tasks_of(step: Step, tasks: Sequence[Task]) -> Iterator[int]:
    """The task that a step ends: a program's run, or the copy that `to_layout` asked for."""
    if isinstance(step, Execute):
        yield step.task
    elif isinstance(step, Copy) and step.made != step.value:
        yield from (i for i, task in enumerate(tasks) if step.made in task.outputs)
