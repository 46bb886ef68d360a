"""Recover after a partially executed plan: completed outputs stay valid, the others are marked
failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from stitch.errors import OutOfMemoryError
from stitch.planner import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Plan,
    Region,
    Step,
    after_steps,
    ranges_of,
)
from stitch.runtime.execution.executable import Binding, Executable, overlap
from stitch.runtime.execution.generated_code import FindPlace, Stopped, ThreadFailure
from stitch.runtime.execution.overwriting import BEGUN
from stitch.runtime.execution.task_batch import TaskBatch
from stitch.runtime.values import Records, Status, ValueRecord, effects_of
from stitch.tasks import NumberedTask

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY, FAILED = Status.PENDING, Status.READY, Status.FAILED


def place_all(values: Sequence[ValueRecord]) -> None:
    """Create the records of host arrays, so that the memory records can refer to them."""
    for value in values:
        value.place()


def finder_of(
    executable: Executable, records: Records, values: Sequence[ValueRecord]
) -> Callable[[int], ValueRecord]:
    """Return a function that maps a plan's value numbers to records, including affected values.

    Call it before anything changes: affected values are identified by their addresses.
    """
    others = executable.affected_values(records)
    if not others:
        return values.__getitem__
    return lambda number: values[number] if number < len(values) else others[number]


def after_failure(
    device: RuntimeDevice,
    binding: Binding,
    batch: TaskBatch,
    error: BaseException,
    progress: Sequence[int],
    stopped: Stopped | None = None,
) -> None:
    """Commit the completed steps of a failed run and mark the other outputs. Idempotent.

    `stopped`: the completed steps, if not simply the first `progress[0]`.
    """
    records, executable = device.records, binding.executable
    stopped = stopped or Stopped(range(progress[0]))
    plan, steps_done = stopped.plan(binding.plan)
    values = batch.values
    place_all(values)
    value_of = finder_of(executable, records, values)
    begun = progress[1] == BEGUN
    # Of a graph that failed it is not known which of its tasks have overwritten their inputs.
    is_torn = begun and binding.index in executable.captured
    if binding.slots is not None:
        # Completed outputs keep the buffers of the output slots.
        records.end_slots_at(binding.slots.buffers, with_bytes=False)
    on_threads = _failed_on_threads(binding.plan, stopped.failures)
    failed, left = _what_is_left(plan, steps_done, on_threads, error, is_torn=is_torn)
    wanted = _read_by(plan, left)
    if executable.assignment.buffers and executable.parts is not None:
        own, find = executable.assignment.buffers, partial(_found_place, device)
        there = after_steps(plan, steps_done)[1].keys()
        plan, steps_done, kept = without_own_places(plan, steps_done, own, wanted, find)
        executable.parts.bring_back(kept, device.backend)
        lost = there - after_steps(plan, steps_done)[1].keys()
        failed, left = _what_is_left(plan, steps_done, on_threads, error, lost)
        wanted = _read_by(plan, left)
    effects = effects_of(plan, device.desc_key, steps_done)
    why = {
        index: f"task {task.transformation.name!r} {_why(failed.get(index), error)}"
        for index, task in enumerate(plan.request.tasks)
        if index not in left
    }
    # Values that a failed task may have partly overwritten: if overwriting had not begun, only
    # temporary values of the same run.
    intact = frozenset() if begun else frozenset(r.value for r in plan.request.residents)
    torn = {n for n in _donated_to(plan, failed) if n not in intact}
    fail = partial(_fail, plan, batch, why, wanted, torn)
    records.apply(effects, value_of, device.lost_all, fail)
    for number in executable.unreferenced:
        value = values[number]
        if value.instances and number not in wanted and not value.kept:
            records.release(value)
    # The caller runs these tasks.
    error.__dict__["stitch_tasks_left"] = left
    records.free_unused({(b.space, b.address) for b, _ in effects.made if b.address is not None})
    records.is_consistent = True


def _found_place(device: RuntimeDevice, buffer: Buffer, taken: Sequence[Region]) -> int | None:
    """Return a free address for a buffer of a thread arena, if host memory allows it."""
    for (address,) in device.records.outside_of(ranges_of(taken), [buffer], 1):
        with suppress(OutOfMemoryError):
            what = f"what {buffer.origin} has left"
            device.host_memory.take_region(buffer.space, address, buffer.desc, what)
            return address
    return None


def _read_by(plan: Plan, tasks: Iterable[int]) -> Set[int]:
    return {number for index in tasks for number in plan.request.tasks[index].inputs}


def _donated_to(plan: Plan, tasks: Iterable[int]) -> list[int]:
    """Return the values that are donated to these tasks."""
    taking = [plan.request.tasks[index] for index in tasks]
    return [task.inputs[at] for task in taking for at in task.transformation.donated]


def _fail(
    plan: Plan, batch: TaskBatch, why: Mapping[int, str], wanted: Set[int], torn: Collection[int]
) -> None:
    """Mark the outputs of tasks that did not complete.

    Values that these would have overwritten become usable again; those in `torn` are lost, unless a
    task that still runs reads them (`wanted`). `why`: reason per task.
    """
    values = batch.values
    for index, said in why.items():
        task, call = plan.request.tasks[index], batch.call(index)
        if call is not None:
            call.stop(said)
        missing = [values[n] for n in task.outputs if values[n].status in (PENDING, FAILED)]
        for value in missing:
            value.status, value.by = FAILED, said
        if missing:
            for number in _donated_to(plan, [index]):
                if number not in torn:
                    undo_donation(values[number], task.transformation.name)
                elif number not in wanted:
                    values[number].status = Status.LOST


def undo_donation(value: ValueRecord, name: str) -> None:
    """Return a value to its handles, because the program it was donated to did not run."""
    if (
        value.consumed
        and value.by == f"donated to {name!r}"
        and value.handles
        and value.status <= READY
    ):
        value.consumed = False


def _why(own: BaseException | None, first: BaseException) -> str:
    """Return the reason for a task's failure: its own error, or the first error of the run."""
    if isinstance(own, Exception):
        return f"failed: {said_of(own) or type(own).__name__}"
    if own is not None:
        return f"was interrupted by {type(own).__name__} in the thread that ran it"
    if isinstance(first, Exception):
        return "was cancelled after a failure"
    return "was cancelled after an interrupt of the thread that ran it"


def said_of(error: BaseException) -> str:
    """Return the message of an exception; empty if `str()` raises."""
    try:
        return str(error)
    except Exception:
        return ""


def _failed_on_threads(plan: Plan, failures: Iterable[ThreadFailure]) -> dict[int, BaseException]:
    """Return the task at which each thread failed, with its error."""
    failed: dict[int, BaseException] = {}
    for failure in failures:
        steps = [plan.steps[index] for index in failure.steps]
        failed |= dict.fromkeys(_first_of(steps, plan.request.tasks), failure.error)
    return failed


def _what_is_left(
    plan: Plan, steps_done: int, on_threads: dict[int, BaseException], error: BaseException,
    lost: Collection[int] = (), *, is_torn: bool = False,
) -> tuple[dict[int, BaseException], tuple[int, ...]]:  # fmt: skip
    """Return the failed tasks with their errors, and the tasks that can still run.

    A task can run if it does not read missing values (`lost`: additional ones). After an interrupt
    nothing more is run. `is_torn`: any task may have overwritten its donated inputs.
    """
    tasks = plan.request.tasks
    finished = {number for step in plan.steps[:steps_done] for number in _tasks_of(step, tasks)}
    failed = on_threads or dict.fromkeys(_first_of(plan.steps[steps_done:], tasks), error)
    is_over = not isinstance(error, Exception)
    missing = set(lost)
    left = []
    for index, task in enumerate(tasks):
        if index in finished:
            continue
        if is_torn and task.transformation.donated:
            failed.setdefault(index, error)
        if is_over or index in failed or not missing.isdisjoint(task.inputs):
            missing.update(task.outputs)
            # Its donated inputs may be partly overwritten.
            missing.update(task.inputs[position] for position in task.transformation.donated)
        else:
            left.append(index)
    return failed, tuple(left)


def _first_of(steps: Iterable[Step], tasks: Sequence[NumberedTask]) -> list[int]:
    """Return the first task that one of these steps completes, if any."""
    return list(islice((number for step in steps for number in _tasks_of(step, tasks)), 1))


def _tasks_of(step: Step, tasks: Sequence[NumberedTask]) -> Iterator[int]:
    """Yield the task that a step completes: a program, or the copy of a `to_layout`."""
    if isinstance(step, Execute):
        yield step.task
    elif isinstance(step, Copy) and step.made != step.value:
        yield from (i for i, task in enumerate(tasks) if step.made in task.outputs)


def without_own_places(
    plan: Plan, steps_done: int, own: Collection[int], wanted: Collection[int], find: FindPlace
) -> tuple[Plan, int, list[Buffer]]:
    """Remove the buffers in thread arenas from a stopped plan, except those that tasks in `wanted`
    still read.

    The remaining ones get an address in their space: the plan's if it is free, else one from
    `find`. Those without a free address are freed.
    """
    buffers, values = after_steps(plan, steps_done)
    passing = [number for number in buffers if number in own]
    needed = set()
    for value in wanted:
        lying = [instance.buffer for instance in values.get(value, ())]
        if lying and all(number in own for number in lying):
            needed.update(lying)
    taken = [_region_of(buffers[number]) for number in buffers if number not in own]
    kept: dict[int, Buffer] = {}
    for number in passing:
        buffer = buffers[number]
        if number not in needed:
            continue
        region = _region_of(buffer)
        if any(overlap(region, other) for other in taken):
            address = find(buffer, taken)
            if address is None:
                continue
            buffer = buffer.where({number: address})
        kept[number] = buffer
        taken.append(_region_of(buffer))
    steps = [
        Allocate(kept[step.buffer.number])
        if isinstance(step, Allocate) and step.buffer.number in kept
        else step
        for step in plan.steps
    ]
    frees = [Free(number) for number in passing if number not in kept]
    steps[steps_done:steps_done] = frees
    return replace(plan, steps=tuple(steps)), steps_done + len(frees), [*kept.values()]


def _region_of(buffer: Buffer) -> Region:
    if buffer.address is None:
        return buffer.space, 0, 0
    return buffer.space, buffer.address, buffer.size_per_bank
