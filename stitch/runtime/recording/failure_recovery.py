"""Recover after a partially executed plan: completed outputs stay valid, the others are marked
failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from stitch.errors import OutOfMemoryError
from stitch.planner import (
    Buffer,
    Copy,
    Execute,
    Plan,
    Region,
    Step,
    after_steps,
    ranges_of,
)
from stitch.runtime.recording.forked import Stopped, ThreadFailure, without_own_places
from stitch.runtime.recording.overwriting import BEGUN
from stitch.runtime.recording.recording import Binding, Executable
from stitch.runtime.recording.site import Site
from stitch.runtime.recording.task_batch import TaskBatch
from stitch.runtime.values import Records, Status, ValueRecord, effects_of
from stitch.tasks import NumberedTask

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY, FAILED = Status.PENDING, Status.READY, Status.FAILED


def place_all(values: Sequence[ValueRecord]) -> None:
    """Arrays of a call are places that the records speak of, too."""
    for value in values:
        value.place()


def finder_of(
    recording: Executable, records: Records, values: Sequence[ValueRecord]
) -> Callable[[int], ValueRecord]:
    """The records of a plan's values by number, others than the window's included; asked for before
    anything has changed, as where they lie tells which they are."""
    others = recording.affected_values(records)
    if not others:
        return values.__getitem__
    return lambda number: values[number] if number < len(values) else others[number]


def after_failure(
    device: Site,
    binding: Binding,
    window: TaskBatch,
    error: BaseException,
    progress: Sequence[int],
    stopped: Stopped | None = None,
) -> None:
    """A run has ended after as many steps as its progress says, or those that are said; may be
    called twice."""
    records, recording = device.records, binding.recording
    stopped = stopped or Stopped(range(progress[0]))
    plan, steps_done = stopped.plan(binding.plan)
    values = window.values
    place_all(values)
    value_of = finder_of(recording, records, values)
    if binding.lease is not None:
        # What was finished takes its places for itself, with what lies there.
        records.end_leases_at(binding.lease.buffers, with_bytes=False)
    which = _Which(stopped.failures, binding.plan, window.merged)
    failed, left = _what_is_left(plan, steps_done, which, error)
    wanted = _read_by(plan, left)
    if recording.assignment.buffers and recording.parts is not None:
        own, find = recording.assignment.buffers, partial(_found_place, device)
        there = after_steps(plan, steps_done)[1].keys()
        plan, steps_done, kept = without_own_places(plan, steps_done, own, wanted, find)
        recording.parts.bring_back(kept, device.backend)
        lost = there - after_steps(plan, steps_done)[1].keys()
        failed, left = _what_is_left(plan, steps_done, which, error, lost)
        wanted = _read_by(plan, left)
    effects = effects_of(plan, device.desc_key, steps_done)
    why = {
        index: f"task {task.transformation.name!r} {_why(failed.get(index), error)}"
        for index, task in enumerate(plan.request.tasks)
        if index not in left
    }
    # What a task that failed was overwriting: where that had not begun only what was made in the
    # same run, of which nothing is known.
    begun = progress[1] == BEGUN
    intact = frozenset() if begun else frozenset(r.value for r in plan.request.residents)
    torn = {n for n in _donated_to(plan, failed) if n not in intact}
    fail = partial(_fail, plan, window, why, wanted, torn)
    records.apply(effects, value_of, device.lost_all, fail)
    for number in recording.passing:
        value = values[number]
        if value.instances and number not in wanted and not value.kept:
            records.release(value)
    # Whoever has the window runs them.
    error.__dict__["stitch_tasks_left"] = left
    records.free_unused({(b.space, b.address) for b, _ in effects.made if b.address is not None})
    records.is_consistent = True


def _found_place(device: Site, buffer: Buffer, taken: Sequence[Region]) -> int | None:
    """A free address for what a thread has left, where its bytes can be had."""
    for (address,) in device.records.outside_of(ranges_of(taken), [buffer], 1):
        with suppress(OutOfMemoryError):
            what = f"what {buffer.origin} has left"
            device.host_memory.take_region(buffer.space, address, buffer.desc, what)
            return address
    return None


def _read_by(plan: Plan, tasks: Iterable[int]) -> Set[int]:
    return {number for index in tasks for number in plan.request.tasks[index].inputs}


def _donated_to(plan: Plan, tasks: Iterable[int]) -> list[int]:
    """The values that tasks take over."""
    taking = [plan.request.tasks[index] for index in tasks]
    return [task.inputs[at] for task in taking for at in task.transformation.donated]


def _fail(
    plan: Plan, window: TaskBatch, why: Mapping[int, str], wanted: Set[int], torn: Collection[int]
) -> None:
    """Outputs of tasks that were not made never will be. What these would have overwritten is as
    it was, and its handle's again; what is `torn` is lost, but for what others read that run yet
    (`wanted`). `why`: by task."""
    values = window.values
    for index, said in why.items():
        task, call = plan.request.tasks[index], window.call(index)
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
    """What was given to a program that did not run is its handle's again."""
    if (
        value.consumed
        and value.by == f"donated to {name!r}"
        and value.handles
        and value.status <= READY
    ):
        value.consumed = False


def _why(own: BaseException | None, first: BaseException) -> str:
    """What befell a task that was stopped by an error of its own, or for what came first."""
    if isinstance(own, Exception):
        return f"failed: {said_of(own) or type(own).__name__}"
    if own is not None:
        return f"was interrupted by {type(own).__name__} in the thread that ran it"
    if isinstance(first, Exception):
        return "was cancelled after a failure"
    return "was cancelled after an interrupt of the thread that ran it"


def said_of(error: BaseException) -> str:
    """What an exception says; nothing where that raises one itself."""
    try:
        return str(error)
    except Exception:
        return ""


@dataclass(frozen=True, slots=True)
class _Which:
    """What tells which tasks failed and are left: the failures in threads, the plan in the order in
    which they know its steps, and which tasks stand for several."""

    failures: Sequence[ThreadFailure]
    plan: Plan
    merged: Sequence[bool]


def _what_is_left(
    plan: Plan, steps_done: int, which: _Which, error: BaseException, lost: Collection[int] = ()
) -> tuple[dict[int, BaseException], tuple[int, ...]]:
    """The tasks that failed, with what they raised, and those that neither ran nor read what is
    missing now (`lost`: what is gone besides).

    Of a task that stands for several (`merged`) some may run yet, whatever became of the others,
    and so may those that read what it makes: all are left to who knows them. Where it was no
    failure but an interrupt, nothing more is run.
    """
    tasks = plan.request.tasks
    finished = {number for step in plan.steps[:steps_done] for number in _tasks_of(step, tasks)}
    failed: dict[int, BaseException] = {}
    for failure in which.failures:
        steps = [which.plan.steps[index] for index in failure.steps]
        failed |= dict.fromkeys(_first_of(steps, tasks), failure.error)
    if not failed:
        failed = dict.fromkeys(_first_of(plan.steps[steps_done:], tasks), error)
    is_over = not isinstance(error, Exception)
    missing = set(lost)
    left = []
    for index, task in enumerate(tasks):
        if index in finished:
            continue
        if not is_over and which.merged and (which.merged[index] or index not in failed):
            left.append(index)
        elif is_over or index in failed or not missing.isdisjoint(task.inputs):
            missing.update(task.outputs)
            # What it would have overwritten is lost.
            missing.update(task.inputs[position] for position in task.transformation.donated)
        else:
            left.append(index)
    return failed, tuple(left)


def _first_of(steps: Iterable[Step], tasks: Sequence[NumberedTask]) -> list[int]:
    """The task that ends first in these steps, if one does."""
    return list(islice((number for step in steps for number in _tasks_of(step, tasks)), 1))


def _tasks_of(step: Step, tasks: Sequence[NumberedTask]) -> Iterator[int]:
    """The task that a step ends: a program's run, or the copy that `to_layout` asked for."""
    if isinstance(step, Execute):
        yield step.task
    elif isinstance(step, Copy) and step.made != step.value:
        yield from (i for i, task in enumerate(tasks) if step.made in task.outputs)
