"""Running: a binding's steps on the values of a window, and what is left where one fails.

Comes in: bindings whose guards hold, and values. Goes out: values that are ready, or failed, and
records that say so. Must not know how the binding was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.planner import Execute
from stitch.runtime.effects import effects_of
from stitch.runtime.events import PlanStopped
from stitch.runtime.hooked import run_hooked
from stitch.runtime.recordings import Binding
from stitch.runtime.state import Status, ValueRecord
from stitch.runtime.straight import MAX_LINES, straight_code

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
        lease.take([values[number] for number, _ in effects.changed])
        lease.last_run = now
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
            records.release(value)
    records.free_unused({(b.space, b.address) for b, _ in effects.made if b.address is not None})
