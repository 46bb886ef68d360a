"""Running: a binding's steps on the values of a window, and what is left where one fails.

Comes in: bindings whose guards hold, and values. Goes out: values that are ready, or failed, and
records that say so. Must not know how the binding was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from stitch.planner import Copy, Execute, Plan, Step
from stitch.runtime.backends import Thunk
from stitch.runtime.events import PlanRun, PlanStopped
from stitch.runtime.executors import quietly
from stitch.runtime.recording.code import Ran, Straight, written
from stitch.runtime.recording.observed import observed
from stitch.runtime.recording.recorded_work import Site
from stitch.runtime.recording.recording import Binding, Recording
from stitch.runtime.recording.window import Window
from stitch.runtime.values import Records, Status, ValueRecord, effects_of
from stitch.tasks import NumberedTask

# What an enumeration gives takes 40 ns each time.
PENDING, READY, FREED, FAILED = Status.PENDING, Status.READY, Status.FREED, Status.FAILED
#: Runs, at whatever places, after which a plan's steps are written out as code (about 10 us a step,
#: once).
RUNS_TO_STRAIGHTEN = 2
#: The most steps that are written out: those of longer plans are looped over, where calls weigh
#: little.
MAX_LINES = 1024


def run_binding(device: Site, binding: Binding, window: Window) -> Ran:
    """Run a plan on the values of a window, as `perform`; on failure leave what was finished."""
    values = window.values
    arrays = []
    for number in binding.recording.arrays:
        arrays.append(values[number].host_array())  # noqa: PERF401 (a call less)
    progress = [0]
    if binding.lease is None:
        arrays += binding.recording.constant_arrays
        progress = binding.bound.progress
        # What it moves lies elsewhere from that step on, whoever hears how far it came.
        stopped = partial(_after_failure, device, binding, window, KeyboardInterrupt(), progress)
        # All at once: nothing can come in between these.
        progress[0] = 0
        device.records.unfinished = stopped
        device.records.is_whole = False
    for index, box in binding.recording.boxes:
        box.call = window.agents[index]  # type: ignore[assignment]  # a call, as the plan has it
    try:
        return perform(device, binding, arrays)
    except BaseException as error:
        done = steps_done(error)
        if binding.lease is not None or done > progress[0]:
            progress[0] = done
        tell_stopped(device, binding, progress[0])
        _after_failure(device, binding, window, error, progress)
        raise


def leave_results(device: Site, binding: Binding, values: Sequence[ValueRecord], now: int) -> None:
    """The records say what a run has left; the queue's lock is held."""
    records, recording, lease = device.records, binding.recording, binding.lease
    effects = recording.effects
    records.is_whole = False
    if lease is None:
        _place(values)
        records.apply(effects, _finder(recording, records, values), device.lost_all)
    else:
        results = []
        for number in recording.own:
            results.append(values[number])  # noqa: PERF401 (a call less)
        lease.take(results, now)
        for carried in effects.carried:
            entry = values[carried.entry]
            records.hand_on(entry, values[carried.result], carried.ref)
            device.lost_all(entry)
    for number in recording.kept:
        values[number].last_used = now
    for number in recording.passing:
        value = values[number]
        if value.status is PENDING:
            value.status = FREED
        elif value.status is READY and not value.is_array:
            # The plan has left it where it was; no handle refers to it any more, or it was given
            # away.
            place = value.lease
            if value.consumed or place is None or not place.put_back(value):
                records.release(value)
                value.status = FREED
                device.lost_all(value)
    records.is_whole = True


def _place(values: Sequence[ValueRecord]) -> None:
    """Arrays of a call are places that the records speak of, too."""
    for value in values:
        value.place()


def _finder(
    recording: Recording, records: Records, values: Sequence[ValueRecord]
) -> Callable[[int], ValueRecord]:
    """The records of a plan's values by number, others than the window's included; asked for before
    anything has changed, as where they lie tells which they are."""
    others = recording.found_others(records)
    if not others:
        return values.__getitem__
    return lambda number: values[number] if number < len(values) else others[number]


def perform(device: Site, binding: Binding, arrays: Sequence[Any]) -> Ran:
    """Run the steps on arrays that have been looked at; gives their times where somebody listens.

    An exception tells how many steps were done: see `steps_done`.
    """
    straight = binding.straight
    loop: Any = None
    try:
        if straight is None or straight.observers != device.observers:
            straight = _straight(device, binding)
        if straight is not None:
            return straight.run(arrays, True)
        loop = iter(binding.bound.thunks)
        return _run_one_by_one(device, binding, arrays, loop)
    except BaseException as error:
        if straight is not None:
            done = straight.steps_done(error)
        else:
            done = 0 if loop is None else _steps_of(binding, loop.__length_hint__())
        error.__dict__.setdefault("stitch_steps_done", done)
        raise


def steps_done(error: BaseException) -> int:
    """How many steps `perform` has done before it, or what came before or after, raised this."""
    done: int = error.__dict__.pop("stitch_steps_done", 0)
    return done


def tell_run(device: Site, binding: Binding, ran: Ran) -> None:
    """Tell who listens that a plan ran, and when its steps did."""
    assert isinstance(ran, tuple)
    device.events.tell(PlanRun(binding.index, binding.plan, ran))


def tell_stopped(device: Site, binding: Binding, done: int) -> None:
    """Count and tell the steps that were done when one raised, if any."""
    if done:
        device.events.report(PlanStopped(binding.index, binding.plan, done))


def _straight(device: Site, binding: Binding) -> Straight | None:
    """The code of a binding's steps for those who observe just now; None where it is not worth
    writing yet. Calls of hooks are always written out."""
    observers = device.observers
    straight = binding.written.get(observers)
    if straight is None:
        straight = _of_another_binding(device, binding, observers)
        if straight is None and (device.hooks.bits or _is_worth_writing(binding, observers)):
            straight = _written(device, binding)
            device.code_written += 1
        if straight is not None:
            binding.written[observers] = straight
    binding.straight = straight
    return straight


def _of_another_binding(device: Site, binding: Binding, observers: int) -> Straight | None:
    """The code that was written for another binding, with the objects of this one."""
    code = binding.recording.codes.get(observers)
    if code is None:
        return None
    if code.placed is not None:
        placed = code.placed.at(binding.addresses, device.backend.region)
        return code.straight(placed, binding.tally)
    objects = code.objects(_own_thunks(binding))
    return None if objects is None else code.straight(chain.from_iterable(objects), binding.tally)


def _own_thunks(binding: Binding) -> list[Sequence[Thunk]]:
    """Those of each step that differs from binding to binding."""
    parts = binding.recording.parts
    return [] if parts is None else [binding.bound.steps[i].thunks for i in parts.varying]


def _is_worth_writing(binding: Binding, observers: int) -> bool:
    recording = binding.recording
    if observers in recording.codes:
        # Its text is another than that of an earlier binding: perhaps so is the next one's.
        is_worth = binding.tally.runs > 0
    else:
        is_worth = recording.runs_unwritten >= RUNS_TO_STRAIGHTEN
    return is_worth and len(binding.bound.thunks) <= MAX_LINES


def _written(device: Site, binding: Binding) -> Straight:
    """The code of a binding's steps; where there are no hooks, other bindings have it too."""
    recording, bound, hooks = binding.recording, binding.bound, device.hooks
    residents = {r.value: r for r in recording.plan.request.residents}
    descs = [residents[number].instances[0].desc for number in sorted(bound.argument_values)]
    kinds = [(d.layout.data_type.dtype, d.shape) for d in descs]
    write = partial(
        written, kinds=kinds, order=recording.order, tally=binding.tally,
        observers=device.observers, is_timed=device.events.active,
        calls_others=bool(hooks.bits or recording.boxes) or device.kernels_call_back,
    )  # fmt: skip
    if hooks.bits:
        return write([(thunks, False) for thunks in observed(bound, hooks)]).straight(
            (), binding.tally
        )
    varying = () if recording.parts is None else recording.parts.varying
    code = write([(s.thunks, i in varying) for i, s in enumerate(bound.steps)])
    objects = code.objects(_own_thunks(binding))
    assert objects is not None, "its own text"
    if recording.parts is not None:
        placed = recording.parts.placed(objects, binding.addresses, device.backend.region)
        code = replace(code, placed=placed)
    recording.codes[device.observers] = code
    return code.straight(chain.from_iterable(objects), binding.tally)


def _run_one_by_one(device: Site, binding: Binding, arrays: Sequence[Any], loop: Any) -> Ran:
    bound = binding.bound
    bound.arguments[:] = [arrays[rank] for rank in binding.recording.order]
    moments: list[float] = []
    try:
        if device.events.active:
            quietly(partial(run_timed, [len(step.thunks) for step in bound.steps], moments), loop)
        else:
            quietly(run_all, loop)
    finally:
        bound.arguments[:] = [None] * len(arrays)
    binding.tally.runs += 1
    binding.recording.runs_unwritten += 1
    return tuple(moments) if moments else True


def _steps_of(binding: Binding, thunks_left: int) -> int:
    """How many steps were finished when a thunk raised, with so many after it."""
    thunks_done = len(binding.bound.thunks) - thunks_left - 1
    return sum(1 for end in binding.bound.ends() if end <= thunks_done)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every step in order."""
    for step in steps:
        step()


def run_timed(
    counts: Iterable[int], moments: list[float], thunks: Iterable[Callable[[], object]]
) -> None:
    """Call every thunk in order, so many for each step; note when it began and each step ended."""
    moments.append(time.perf_counter())
    for count in counts:
        for thunk in islice(thunks, count):
            thunk()
        moments.append(time.perf_counter() if count else moments[-1])


def _after_failure(
    device: Site,
    binding: Binding,
    window: Window,
    error: BaseException,
    progress: Sequence[int],
) -> None:
    """A run has ended after as many steps as its progress says; may be called twice."""
    plan, records, steps_done = binding.plan, device.records, progress[0]
    values = window.values
    _place(values)
    value_of = _finder(binding.recording, records, values)
    if binding.lease is not None:
        # What was finished takes its places for itself, with what lies there.
        records.end_leases_at(binding.lease.buffers, with_bytes=False)
    effects = effects_of(plan, device.desc_key, steps_done)
    is_over = not isinstance(error, Exception)
    failing, left = _what_is_left(plan, steps_done, window.merged, is_over=is_over)
    wanted = {number for index in left for number in plan.request.tasks[index].inputs}
    why = {
        index: f"task {task.transformation.name!r} {_why(error, index == failing)}"
        for index, task in enumerate(plan.request.tasks)
        if index not in left
    }
    records.apply(effects, value_of, device.lost_all, partial(_fail, plan, window, why, wanted))
    for number in binding.recording.passing:
        if values[number].instances and number not in wanted:
            records.release(values[number])
    # Whoever has the window runs them.
    error.__dict__["stitch_tasks_left"] = left
    records.free_unused({(b.space, b.address) for b, _ in effects.made if b.address is not None})
    records.is_whole = True


def _fail(plan: Plan, window: Window, why: Mapping[int, str], wanted: Set[int]) -> None:
    """Outputs of tasks that were not made never will be, and what these would have overwritten is
    lost, but for what others read that run yet (`wanted`); `why`: by task."""
    values = window.values
    for index, said in why.items():
        task, call = plan.request.tasks[index], window.call(index)
        if call is not None:
            call.stop(said)
        missing = [values[n] for n in task.outputs if values[n].status in (PENDING, FAILED)]
        for value in missing:
            value.status, value.by = FAILED, said
        if missing:
            for position in task.transformation.donated:
                if task.inputs[position] not in wanted:
                    values[task.inputs[position]].status = Status.LOST


def _why(error: BaseException, is_first: bool) -> str:
    """What befell a task that was stopped, or one that came after it."""
    if isinstance(error, Exception):
        said = said_of(error) or type(error).__name__
        return f"failed: {said}" if is_first else "was cancelled after a failure"
    if is_first:
        return f"was interrupted by {type(error).__name__} in the thread that ran it"
    return "was cancelled after an interrupt of the thread that ran it"


def said_of(error: BaseException) -> str:
    """What an exception says; nothing where that raises one itself."""
    try:
        return str(error)
    except Exception:
        return ""


def _what_is_left(
    plan: Plan, steps_done: int, merged: Sequence[bool], *, is_over: bool
) -> tuple[int, tuple[int, ...]]:
    """The task that failed, and those that neither ran nor read what is missing now.

    Of a task that stands for several (`merged`) some may run yet, whatever became of the others,
    and so may those that read what it makes: all are left to who knows them. `is_over`: it was no
    failure but an interrupt, after which nothing more is run.
    """
    tasks = plan.request.tasks
    finished = {number for step in plan.steps[:steps_done] for number in _tasks_of(step, tasks)}
    failing = next(
        (number for step in plan.steps[steps_done:] for number in _tasks_of(step, tasks)),
        len(tasks),
    )
    missing: set[int] = set()
    left = []
    for index, task in enumerate(tasks):
        if index in finished:
            continue
        if not is_over and merged and (merged[index] or index != failing):
            left.append(index)
        elif is_over or index == failing or not missing.isdisjoint(task.inputs):
            missing.update(task.outputs)
            # What it would have overwritten is lost.
            missing.update(task.inputs[position] for position in task.transformation.donated)
        else:
            left.append(index)
    return failing, tuple(left)


def _tasks_of(step: Step, tasks: Sequence[NumberedTask]) -> Iterator[int]:
    """The task that a step ends: a program's run, or the copy that `to_layout` asked for."""
    if isinstance(step, Execute):
        yield step.task
    elif isinstance(step, Copy) and step.made != step.value:
        yield from (i for i, task in enumerate(tasks) if step.made in task.outputs)
