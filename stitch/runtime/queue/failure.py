"""When a window cannot be planned as a whole: its tasks run alone, and only those that cannot fail.

So a task that does not fit fails the same whatever the window, and nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from stitch.errors import StitchError
from stitch.runtime.locks import Lock
from stitch.runtime.recording import TaskBatch, said_of, undo_donation
from stitch.runtime.values import Records, Status
from stitch.tasks import NumberedTask


class Queue(Protocol):
    """The queue, as those know it who have tasks to run again one by one."""

    records: Records
    lock: Lock
    queued: TaskBatch

    def run_window(self, window: TaskBatch, kept: tuple[bool, ...]) -> object:
        """Run a window that is not in the queue any more."""


def run_one_by_one(
    queue: Queue, window: TaskBatch, kept: Sequence[bool], error: Exception | None = None
) -> None:
    """Run each task of a window in a window of its own; raises the first error at the end.

    `error`: why it could not be planned; None where a source of it was never made.
    """
    tasks, values = window.graph.tasks, window.values
    if error is not None and len(tasks) == 1:
        _fail_task(window, 0, tasks[0], error)
        for number in tasks[0].inputs:
            undo_donation(values[number], tasks[0].transformation.name)
        drop_dead(queue, window, kept)
        try:
            raise error
        finally:
            # Its traceback holds this frame, and so the caller's: what they hold would be held.
            del error
    first: Exception | None = None
    last_use = {v: i for i, task in enumerate(tasks) for v in task.inputs}
    later = set(last_use)
    for index, task in enumerate(tasks):
        later.difference_update([v for v in task.inputs if last_use[v] == index])
        try:
            _run_alone(queue, window, kept, index, task, later)
        except Exception as problem:
            if says_more(problem, first):
                first = problem
        except BaseException as problem:
            # An interrupt: nobody will run the rest.
            _cancel_from(window, index, problem)
            drop_dead(queue, window, kept)
            raise
    drop_dead(queue, window, kept)
    if first is not None:
        try:
            raise first
        finally:
            del first, error


def says_more(error: Exception, first: Exception | None) -> bool:
    """Whether an error is raised rather than the first that there was: what a function or a hook
    raised says more than that something found no room."""
    return first is None or (isinstance(first, StitchError) and not isinstance(error, StitchError))


def _cancel_from(window: TaskBatch, index: int, error: BaseException) -> None:
    """The tasks from one on will not run."""
    for late, task in enumerate(window.graph.tasks[index:], index):
        _fail_task(window, late, task, error)
        for number in task.inputs:
            undo_donation(window.values[number], task.transformation.name)


def run_the_rest(
    queue: Queue, window: TaskBatch, kept: Sequence[bool], left: Sequence[int]
) -> None:
    """Run the tasks of a window that do not depend on the one that failed, each by itself.

    What fails among them is marked; the first failure is the one that is raised.
    """
    if not left:
        return
    tasks = window.graph.tasks
    last_use = {number: index for index in left for number in tasks[index].inputs}
    later = set(last_use)
    for index in left:
        task = tasks[index]
        later.difference_update([v for v in task.inputs if last_use[v] == index])
        try:
            _run_alone(queue, window, kept, index, task, later)
        except Exception:
            # Its outputs say what happened.
            continue
        except BaseException as problem:
            # An interrupt: nobody will run the rest.
            for late in left:
                _fail_task(window, late, tasks[late], problem)
            drop_dead(queue, window, kept)
            raise
    drop_dead(queue, window, kept)


def _run_alone(
    queue: Queue, window: TaskBatch, kept: Sequence[bool], index: int, task: NumberedTask,
    later: Set[int],
) -> None:  # fmt: skip
    values = window.values
    inputs = [values[number] for number in task.inputs]
    broken = next((v.by for v in inputs if v.status > Status.FREED), None)
    call = window.call(index)
    if broken is None and call is not None:
        broken = call.is_cancelled
    if broken is not None:
        _mark(window, index, task, f"task {task.transformation.name!r} was cancelled: {broken}")
        return
    # What later tasks read is held for them, also where its handle is gone.
    alone, numbers = window.alone(index, task)
    queue.run_window(alone, tuple([kept[n] or n in later or n in task.outputs for n in numbers]))


def drop_dead(queue: Queue, window: TaskBatch, kept: Sequence[bool]) -> None:
    """Free what nobody wants: neither when the window left the queue, nor now (a donation that did
    not happen is taken back), nor what is in the queue."""
    with queue.lock:
        for value, is_kept in zip(window.values, kept, strict=True):
            in_queue = value.window == queue.queued.number
            wanted = is_kept or value.kept or in_queue
            if value.status is Status.READY and not wanted:
                queue.records.release(value)
                value.status = Status.FREED
            elif value.status is Status.LOST and value.instances:
                # Nobody can read it, and no task that did not run has taken its bytes.
                queue.records.release(value)


def reads_what_failed(window: TaskBatch) -> bool:
    """Whether something that its tasks read was never made."""
    if any(value.status > Status.READY for _, value in window.sources):
        return True
    calls = [window.call(index) for index in range(len(window.agents))]
    return any(call is not None and call.is_cancelled for call in calls)


def cancel(window: TaskBatch, error: BaseException) -> None:
    """What was queued in it and has not run never will."""
    for index, task in enumerate(window.graph.tasks):
        is_made = all(window.values[number].status is not Status.PENDING for number in task.outputs)
        _fail_task(window, index, task, error)
        for number in () if is_made else task.inputs:
            undo_donation(window.values[number], task.transformation.name)


def _fail_task(window: TaskBatch, index: int, task: NumberedTask, error: BaseException) -> None:
    """Mark what a task could not make, as it failed."""
    said = f"{type(error).__name__}: {(said_of(error) or 'no message').splitlines()[0]}"
    _mark(window, index, task, f"task {task.transformation.name!r}: {said}")


def _mark(window: TaskBatch, index: int, task: NumberedTask, why: str) -> None:
    """Say of what a task could not make why that is."""
    call = window.call(index)
    if call is not None:
        call.stop(why)
    for number in task.outputs:
        value = window.values[number]
        if value.status is Status.PENDING:
            value.status, value.by = Status.FAILED, why
