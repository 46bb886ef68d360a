"""Run the steps of a binding on the values of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from stitch.runtime.backends import Thunk
from stitch.runtime.events import PlanRun, PlanStopped
from stitch.runtime.execution.executable import Binding
from stitch.runtime.execution.generated_code import (
    Code,
    GeneratedRunner,
    Ran,
    Stopped,
    written,
)
from stitch.runtime.execution.overwriting import COMPLETE, UNTOUCHED, OverwritingRun, observed
from stitch.runtime.execution.recovery import after_failure, finder_of, place_all
from stitch.runtime.execution.task_batch import TaskBatch
from stitch.runtime.executors import with_fp_errors_ignored
from stitch.runtime.values import ArgumentRecord, Status, ValueRecord

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

# Module-level aliases: an enum attribute lookup costs 40 ns.
READY, FREED = Status.READY, Status.FREED
#: Runs after which code is generated (about 10 us per step, once).
RUNS_TO_STRAIGHTEN = 2
#: Longer plans are run by a loop: the call overhead matters less there.
MAX_LINES = 1024
#: Captured bindings of an executable: each has a graph of its own.
MAX_GRAPHS = 8


def run_binding(device: RuntimeDevice, binding: Binding, batch: TaskBatch) -> Ran:
    """Run a plan on the values of a batch and update the records; on failure keep completed
    outputs."""
    values, executable = batch.values, binding.executable
    arrays = []
    for number in executable.arrays:
        value = values[number]
        arrays.append(value.array if type(value) is ArgumentRecord else value.host_array())
    progress: list[int] | None = None
    if binding.slots is None:
        arrays += executable.constant_arrays
        progress = binding.bound.progress
    elif executable.overwrites:
        progress = binding.bound.progress
    if progress is not None:
        # Recovery must know the progress, since moved and overwritten values change during the run.
        interrupted = partial(_stopped, device, binding, batch, KeyboardInterrupt(), progress)
        # Atomic: no call in between.
        progress[0], progress[1] = 0, UNTOUCHED
        device.records.pending_recovery = interrupted
        device.records.is_consistent = False
    for index, box in executable.boxes:
        box.call = batch.agents[index]  # type: ignore[assignment]  # a call, as the plan has it
    try:
        ran = perform(device, binding, arrays)
    except BaseException as error:
        stopped = stopped_by(error)
        if progress is None:
            progress = [0, UNTOUCHED]
        if binding.slots is None and len(stopped.steps) < progress[0]:
            stopped = Stopped(range(progress[0]))
        progress[0] = len(stopped.steps)
        _stopped(device, binding, batch, error, progress, stopped)
        tell_stopped(device, binding, stopped)
        raise
    with device.queue_lock:
        leave_results(device, binding, values, batch.end)
        device.tasks.has_run(batch)
    return ran


def _stopped(
    device: RuntimeDevice, binding: Binding, batch: TaskBatch, error: BaseException,
    progress: list[int], stopped: Stopped | None = None,
) -> None:  # fmt: skip
    """Recover after a run that raised or was interrupted; idempotent.

    If everything was overwritten already, the results are committed.
    """
    if progress[1] == COMPLETE:
        leave_results(device, binding, batch.values, batch.end)
    else:
        after_failure(device, binding, batch, error, progress, stopped)


def leave_results(
    device: RuntimeDevice, binding: Binding, values: Sequence[ValueRecord], now: int
) -> None:
    """Update the records after a run; the queue lock is held. Idempotent.

    Nobody refers to the intermediate values of a batch, so their records are left as they are.
    """
    records, executable, slots = device.records, binding.executable, binding.slots
    records.is_consistent = False
    results = []
    for number in executable.own:
        results.append(values[number])  # noqa: PERF401 (a call less)
    if slots is not None:
        slots.take(results, now)
        for carried in executable.effects.carried:
            entry = values[carried.entry]
            records.hand_on(entry, values[carried.result], carried.ref)
            device.lost_all(entry)
    else:
        place_all(values)
        effects = executable.effects
        records.apply(effects, finder_of(executable, records, values), device.lost_all)
        for value in results:
            value.last_used = now
    for number in executable.kept:
        values[number].last_used = now
    for number in executable.passing:
        value = values[number]
        if value.status is READY:
            # Still in memory, but unreferenced or donated: release it.
            place = value.slots
            if value.consumed or place is None or not place.release_value(value):
                records.release(value)
                value.status = FREED
                device.lost_all(value)
    # Atomic: no call in between.
    if executable.overwrites:
        records.pending_recovery = None
    records.is_consistent = True


def perform(device: RuntimeDevice, binding: Binding, arrays: Sequence[Any]) -> Ran:
    """Run the steps on checked arrays; returns the times of steps if listeners want them.

    An exception records the completed steps: see `stopped_by`.
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
            stopped = straight.stopped(error)
        else:
            count = 0 if loop is None else _steps_of(binding, loop.__length_hint__())
            stopped = Stopped(range(count))
        error.__dict__.setdefault("stitch_stopped", stopped)
        raise


def stopped_by(error: BaseException) -> Stopped:
    """Return the steps that `perform` completed before it raised `error`."""
    stopped: Stopped = error.__dict__.pop("stitch_stopped", Stopped())
    return stopped


def tell_run(device: RuntimeDevice, binding: Binding, ran: Ran) -> None:
    """Report a run and the times of its steps to the listeners."""
    assert isinstance(ran, tuple)
    forks = binding.executable.assignment.forks
    # With hooks it ran on one thread.
    forks = forks if len(ran) > 1 + len(binding.plan.steps) else ()
    run = PlanRun(binding.index, binding.plan, ran, forks)
    if device.backend.executor.captures:
        binding.tally.time(run.seconds)
    device.events.tell(run)


def tell_stopped(device: RuntimeDevice, binding: Binding, stopped: Stopped) -> None:
    """Count and report the steps completed before an exception, if any."""
    if stopped.steps:
        device.events.report(PlanStopped(binding.index, binding.plan, stopped.steps))


def _straight(device: RuntimeDevice, binding: Binding) -> GeneratedRunner | OverwritingRun | None:
    """Return the code of a binding for the current observers; None if generating it does not pay
    yet.

    Hooks always use generated code. Plans that overwrite values use `OverwritingRun` instead: an
    exception could come between two calls of Python code.
    """
    observers = device.observers
    straight = binding.written.get(observers)
    if device.backend.executor.captures and _may_capture(device, binding):
        if binding.tally.runs < RUNS_TO_STRAIGHTEN:
            # Libraries prepare themselves in runs before the capture.
            return _overwriting(device, binding) if binding.executable.overwrites else None
        straight = _captured(device, binding)
        if straight is not None:
            binding.written[observers] = straight
    if straight is None and binding.executable.overwrites:
        straight = binding.written[observers] = _overwriting(device, binding)
    if straight is None:
        straight = _of_another_binding(device, binding, observers)
        if straight is None and (device.hooks.bits or _is_worth_writing(binding, observers)):
            straight = _written(device, binding)
            device.code_written += 1
        if straight is not None:
            binding.written[observers] = straight
    binding.straight = straight
    return straight


def _overwriting(
    device: RuntimeDevice, binding: Binding, captured: Sequence[Sequence[Thunk]] | None = None
) -> OverwritingRun:
    bound, hooks = binding.bound, device.hooks
    if captured is not None:
        steps = captured
    else:
        steps = observed(bound, hooks) if hooks.bits else [step.thunks for step in bound.steps]
    return OverwritingRun(
        binding.plan, bound, steps, binding.executable.order, binding.tally, device.backend,
        device.observers, clock=_clock(device, binding),
        calls_others=_calls_others(device, binding), is_captured=captured is not None,
    )  # fmt: skip


def _may_capture(device: RuntimeDevice, binding: Binding) -> bool:
    """Return whether the launches of a binding are to be captured: they are at fixed addresses, and
    nothing is observed."""
    captured = binding.executable.captured
    is_watched = device.observers or device.backend.debug or binding.slots is None
    return not is_watched and binding.index not in captured and len(captured) < MAX_GRAPHS


def _captured(device: RuntimeDevice, binding: Binding) -> GeneratedRunner | OverwritingRun | None:
    """Return the code of a binding with its launches captured; None if nothing was."""
    binding.executable.captured.add(binding.index)
    steps = device.backend.executor.captured([step.thunks for step in binding.bound.steps])
    if steps is None:
        return None
    if binding.executable.overwrites:
        return _overwriting(device, binding, steps)
    if sum(map(len, steps)) > MAX_LINES:
        return None
    return _writer(device, binding)([(thunks, False) for thunks in steps]).straight(
        (), binding.tally
    )


def _of_another_binding(
    device: RuntimeDevice, binding: Binding, observers: int
) -> GeneratedRunner | None:
    """Return the code generated for another binding, with the objects of this one."""
    code = binding.executable.codes.get(observers)
    if code is None:
        return None
    if code.placed is not None:
        placed = code.placed.at(binding.addresses, device.backend.region)
        return code.straight(placed, binding.tally)
    objects = code.objects(_own_thunks(binding))
    return None if objects is None else code.straight(chain.from_iterable(objects), binding.tally)


def _calls_others(device: RuntimeDevice, binding: Binding) -> bool:
    """Return whether a binding calls hooks, host functions or user kernels."""
    return bool(device.hooks.bits or binding.executable.boxes) or device.kernels_call_back


def _clock(device: RuntimeDevice, binding: Binding) -> Callable[[], float] | None:
    """Return the clock for the times of steps, if listeners want them, and of the first runs on a
    card."""
    executor = device.backend.executor
    is_first = executor.captures and binding.tally.runs < RUNS_TO_STRAIGHTEN
    return executor.clock if device.events.active or is_first else None


def _own_thunks(binding: Binding) -> list[Sequence[Thunk]]:
    """Return the thunks of each step that differs between bindings."""
    parts = binding.executable.parts
    return [] if parts is None else [binding.bound.steps[i].thunks for i in parts.varying]


def _is_worth_writing(binding: Binding, observers: int) -> bool:
    executable = binding.executable
    if executable.assignment.forks:
        # Without generated code they would run on one thread.
        return True
    if observers in executable.codes:
        # The text differs from an earlier binding's; the next one's may differ again.
        is_worth = binding.tally.runs > 0
    else:
        is_worth = executable.runs_unwritten >= RUNS_TO_STRAIGHTEN
    return is_worth and len(binding.bound.thunks) <= MAX_LINES


def _written(device: RuntimeDevice, binding: Binding) -> GeneratedRunner:
    """Generate the code of a binding; without hooks, other bindings share it."""
    executable, bound, hooks = binding.executable, binding.bound, device.hooks
    write = _writer(device, binding)
    if hooks.bits:
        return write([(thunks, False) for thunks in observed(bound, hooks)]).straight(
            (), binding.tally
        )
    varying = () if executable.parts is None else executable.parts.varying
    code = write(
        [(s.thunks, i in varying) for i, s in enumerate(bound.steps)],
        forks=executable.assignment.forks, threads=device.backend.threads,
    )  # fmt: skip
    objects = code.objects(_own_thunks(binding))
    assert objects is not None, "its own text"
    if executable.parts is not None:
        placed = executable.parts.placed(objects, binding.addresses, device.backend.region)
        code = replace(code, placed=placed)
    executable.codes[device.observers] = code
    return code.straight(chain.from_iterable(objects), binding.tally)


def _writer(device: RuntimeDevice, binding: Binding) -> partial[Code]:
    """Return `written` with what the code checks, counts and reports."""
    executable, bound = binding.executable, binding.bound
    residents = {r.value: r for r in executable.plan.request.residents}
    descs = [residents[number].instances[0].desc for number in sorted(bound.argument_values)]
    kinds = [(d.layout.data_type.dtype, d.shape) for d in descs]
    return partial(
        written, kinds=kinds, order=executable.order, tally=binding.tally,
        observers=device.observers, clock=_clock(device, binding),
        calls_others=_calls_others(device, binding),
    )  # fmt: skip


def _run_one_by_one(
    device: RuntimeDevice, binding: Binding, arrays: Sequence[Any], loop: Any
) -> Ran:
    bound = binding.bound
    bound.arguments[:] = [arrays[rank] for rank in binding.executable.order]
    moments: list[float] = []
    try:
        is_timed = device.events.active or device.backend.executor.captures
        clock = _clock(device, binding) if is_timed else None
        if clock is not None:
            counts = [len(step.thunks) for step in bound.steps]
            with_fp_errors_ignored(run_timed, clock, counts, moments, loop)
        else:
            with_fp_errors_ignored(run_all, loop)
    finally:
        bound.arguments[:] = [None] * len(arrays)
    binding.tally.runs += 1
    binding.executable.runs_unwritten += 1
    return tuple(moments) if moments else True


def _steps_of(binding: Binding, thunks_left: int) -> int:
    """Return the number of completed steps when a thunk raised, with `thunks_left` after it."""
    thunks_done = len(binding.bound.thunks) - thunks_left - 1
    return sum(1 for end in binding.bound.ends() if end <= thunks_done)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every step in order."""
    for step in steps:
        step()


def run_timed(
    clock: Callable[[], float], counts: Iterable[int], moments: list[float],
    thunks: Iterable[Callable[[], object]],
) -> None:  # fmt: skip
    """Call all thunks in order, and record the start and the end of each step."""
    moments.append(clock())
    for count in counts:
        for thunk in islice(thunks, count):
            thunk()
        moments.append(clock() if count else moments[-1])
