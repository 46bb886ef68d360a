"""Run the tasks of a batch one by one if it cannot be planned as a whole.

Only tasks that fail by themselves fail, with the same error for any batch; the others run.
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
    """The queue, as failure handling uses it."""

    records: Records
    lock: Lock
    queued: TaskBatch

    def run_window(self, window: TaskBatch, kept: tuple[bool, ...]) -> object:
        """Run a batch that has left the queue."""


def run_one_by_one(
    queue: Queue, window: TaskBatch, kept: Sequence[bool], error: Exception | None = None
) -> None:
    """Run each task of a batch separately; raises the first error at the end.

    `error`: why the batch could not be planned; None if one of its inputs failed.
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
            # The traceback references this frame and the caller's: do not keep their objects alive.
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
            # Interrupted: cancel the rest.
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
    """Return whether to raise `error` instead of the first error.

    Exceptions of user functions and hooks take precedence over Stitch's own, such as out of memory.
    """
    return first is None or (isinstance(first, StitchError) and not isinstance(error, StitchError))


def _cancel_from(window: TaskBatch, index: int, error: BaseException) -> None:
    """Cancel the tasks from `index` on."""
    for late, task in enumerate(window.graph.tasks[index:], index):
        _fail_task(window, late, task, error)
        for number in task.inputs:
            undo_donation(window.values[number], task.transformation.name)


def run_the_rest(
    queue: Queue, window: TaskBatch, kept: Sequence[bool], left: Sequence[int]
) -> None:
    """Run the tasks `left` of a batch, which do not depend on the one that failed, one by one.

    Outputs of those that fail are marked; the caller raises the first failure.
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
            # Its outputs record the error.
            continue
        except BaseException as problem:
            # Interrupted: cancel the rest.
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
    # Keep values that later tasks read, even without a handle.
    alone, numbers = window.alone(index, task)
    queue.run_window(alone, tuple([kept[n] or n in later or n in task.outputs for n in numbers]))


def drop_dead(queue: Queue, window: TaskBatch, kept: Sequence[bool]) -> None:
    """Free the values of a batch that are referenced neither by handles nor by the queue.

    `kept`: which were referenced when the batch left the queue.
    """
    with queue.lock:
        for value, is_kept in zip(window.values, kept, strict=True):
            in_queue = value.window == queue.queued.number
            wanted = is_kept or value.kept or in_queue
            if value.status is Status.READY and not wanted:
                queue.records.release(value)
                value.status = Status.FREED
            elif value.status is Status.LOST and value.instances:
                # Unreadable, and no task that still has to run overwrites its bytes.
                queue.records.release(value)


def reads_what_failed(window: TaskBatch) -> bool:
    """Return whether an input of the batch has failed."""
    if any(value.status > Status.READY for _, value in window.sources):
        return True
    calls = [window.call(index) for index in range(len(window.agents))]
    return any(call is not None and call.is_cancelled for call in calls)


def cancel(window: TaskBatch, error: BaseException) -> None:
    """Mark all pending outputs of a batch as failed and undo its donations."""
    for index, task in enumerate(window.graph.tasks):
        is_made = all(window.values[number].status is not Status.PENDING for number in task.outputs)
        _fail_task(window, index, task, error)
        for number in () if is_made else task.inputs:
            undo_donation(window.values[number], task.transformation.name)


def _fail_task(window: TaskBatch, index: int, task: NumberedTask, error: BaseException) -> None:
    """Mark the outputs of a failed task."""
    said = f"{type(error).__name__}: {(said_of(error) or 'no message').splitlines()[0]}"
    _mark(window, index, task, f"task {task.transformation.name!r}: {said}")


def _mark(window: TaskBatch, index: int, task: NumberedTask, why: str) -> None:
    """Mark the pending outputs of a task as failed because of `why`."""
    call = window.call(index)
    if call is not None:
        call.stop(why)
    for number in task.outputs:
        value = window.values[number]
        if value.status is Status.PENDING:
            value.status, value.by = Status.FAILED, why
