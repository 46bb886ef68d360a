"""Locking and validity of a device: re-entry, interrupts, close and fork.

A thread is inside a device while it holds one of its locks. Python may run other code meanwhile:
hooks, kernels, signal handlers, finalizers. If such code uses the device, it gets a `TaskError`,
since the device is in the middle of an operation.

A fork copies a device without its threads, possibly in the middle of a run and with held locks.
Therefore a device belongs to the process that opened it and is closed in the child.

Each use of an open device first completes what an interrupt left incomplete and processes the notes
of finalizers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from stitch.errors import TaskError
from stitch.live_objects import LiveObjects
from stitch.runtime.events import EventStream
from stitch.runtime.locks import Lock, held_here, quick
from stitch.runtime.queue import Reclaimer, TaskQueue
from stitch.runtime.recording import Binding
from stitch.runtime.values import Records, Status, ValueRecord

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY

_alive: LiveObjects[DeviceLocking] = LiveObjects()


class DeviceLocking:
    """The part of a device that checks whether it may be used, and makes it consistent first.

    `lock` (the run lock) protects planning, running, and changes of memory contents. `queue_lock`
    is held only briefly, to enqueue tasks and to change what a call checks: which values are
    queued, donated, ready or shared. Acquire `lock` before `queue_lock`.
    """

    events: EventStream

    def __init__(
        self,
        name: str,
        records: Records,
        deaths: Reclaimer,
        tasks: TaskQueue,
        queue_lock: threading.RLock,
    ) -> None:
        """Initialize for this process; `name` is the machine's, `queue_lock` that of `tasks`."""
        self._name = name
        self.records, self.deaths, self.tasks = records, deaths, tasks
        self.drop, self.lost_all = deaths.dropped.append, deaths.lost_all
        self._locks = (threading.RLock(), queue_lock)
        #: `quick_lock` skips the re-entry check: use it after calling `holds_run_lock`.
        self.quick_lock, self.queue_lock = quick(self._locks[0]), tasks.lock
        #: Whether this thread holds the run lock, or the queue lock.
        self.holds_run_lock, self.holds_queue_lock = (
            held_here(self._locks[0]),
            held_here(queue_lock),
        )
        #: Number of running host functions, and whether one of them has enqueued a task.
        self.calls_host = 0
        self.was_queued_inside = False
        #: Whether the device cannot be used any more (set here in the child of a fork).
        self.is_closed = False
        #: The process that opened it.
        self._process = os.getpid()
        _alive.add(self)

    def refuse(self) -> NoReturn:
        """Raise the `TaskError` for a closed device or one of another process."""
        self.check_process()
        raise TaskError(
            f"device {self._name!r} is closed",
            remedy="use it and read results before close() or the end of its `with` block, or open "
            "another device",
        )

    @property
    def is_left_behind(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raise `TaskError` in a process that did not open the device."""
        if self.is_left_behind:
            raise TaskError(
                f"device {self._name!r} belongs to process {self._process}, which opened it",
                where=f"process {os.getpid()}, forked from it",
                remedy="open a device in this process, or start processes by multiprocessing's "
                "'spawn' instead of 'fork'",
            )

    # -- access ------------------------------------------------------------------------------------

    @property
    def lock(self) -> Lock:
        """The run lock, for a `with` statement.

        Raises TaskError on re-entry, except from an event listener after the plan has finished.
        """
        if self.holds_run_lock() or self.holds_queue_lock():
            self.check_outside()
            return self._once_more()
        return self.quick_lock

    def check_may_queue(self) -> None:
        """Raise `TaskError` if this thread is inside; a host function may enqueue later tasks."""
        if self.holds_run_lock() and self.calls_host and not self.holds_queue_lock():
            self.was_queued_inside = True
        else:
            self.check_outside()

    def check_outside(self) -> None:
        """Raise `TaskError` if this thread is inside, in the middle of a plan or call."""
        if not (self.holds_run_lock() or self.holds_queue_lock()):
            return
        if self.calls_host and not self.holds_queue_lock():
            raise TaskError(
                "cannot read a tensor or wait inside a host function running on device "
                f"{self._name!r}: this would deadlock",
                remedy="pass the tensor to the function as an argument; tasks that it queues run "
                "after it has returned",
            )
        if (not self.events.is_over or self.holds_queue_lock() or self.tasks.running is not None
                or not self.records.is_consistent):  # fmt: skip
            raise _inside(self._name)

    def keep_out(self, is_out: Callable[[], bool]) -> None:
        """Make the run lock refuse worker threads, on which its holder waits.

        Args:
            is_out: Returns whether the current thread is such a worker.
        """
        self.quick_lock = quick(self._locks[0], partial(_check_out, is_out, self._name))

    @contextmanager
    def _once_more(self) -> Iterator[bool]:
        """Let an event listener use the device, whose run lock its thread holds."""
        self.events.is_over = False
        try:
            yield True
        finally:
            self.events.is_over = True

    def check_open(self) -> None:
        """Raise `TaskError` if the device is closed or belongs to another process."""
        if self.is_closed:
            self.refuse()

    def check_consistent(self) -> None:
        """Recover from an interrupt if needed; the caller holds the run lock."""
        if not self.records.is_consistent or self.tasks.running is not None:
            self.rebuild_bookkeeping()

    def rebuild_bookkeeping(self) -> None:
        """Complete or roll back what an interrupt left incomplete."""
        self.tasks.end_run()
        if self.records.pending_recovery is not None:
            self.records.pending_recovery()
        with self.queue_lock:
            self.deaths.rebuild_bookkeeping(self.tasks.queued.values)

    def drain(self, *, resting: bool = True) -> None:
        """Process the notes of finalizers: see `Reclaimer.read`."""
        # An interrupted batch may have to return to the queue: values that it reads must stay.
        self.check_consistent()
        self.deaths.read(self.tasks.queued.number, resting=resting)

    def drain_if_free(self) -> None:
        """As `drain`, unless another thread runs, which processes the notes itself."""
        lock = self._locks[0]
        if self.holds_run_lock():
            return
        try:
            if lock.acquire(blocking=False):
                self.drain()
        finally:
            # An interrupt may come just after it was acquired.
            if self.holds_run_lock():
                lock.release()

    # -- ready -------------------------------------------------------------------------------------

    def run_queue(
        self, fill: Callable[[], object] | None = None, at_most: int | None = None
    ) -> Binding | None:
        """As `TaskQueue.run`, after recovery and notes; the caller holds the run lock."""
        if self.is_closed:
            self.check_process()
        tasks, deaths = self.tasks, self.deaths
        if not self.records.is_consistent or tasks.running is not None:
            self.rebuild_bookkeeping()
        is_empty = fill is None and tasks.is_idle
        if deaths.dropped or deaths.notes.left or (deaths.resting and not is_empty):
            deaths.read(tasks.queued.number, resting=not is_empty)
        if is_empty:
            return None
        ran = tasks.run(fill, at_most)
        while self.was_queued_inside:
            # Run the tasks that host functions enqueued meanwhile.
            self.was_queued_inside = False
            tasks.run()
        return ran

    def flush(self) -> None:
        """Run everything that is queued.

        If planning fails, only the tensors that could not be computed fail. If running fails,
        completed outputs stay valid and tasks that depend on the others fail.
        """
        with self.lock:
            self.run_queue()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Run the queue, and hold the run lock within the block."""
        with self.lock:
            self.run_queue()
            yield

    def settle(self, value: ValueRecord) -> None:
        """Run the queue if a value is pending; raise `TaskError` if it was freed or failed."""
        if (value.status is not READY or value.consumed or self.is_closed
                or self.tasks.running is not None or not self.records.is_consistent):  # fmt: skip
            with self.lock:
                self.settle_now(value)

    def settle_now(self, value: ValueRecord) -> None:
        """As `settle`; the caller holds the run lock."""
        if value.status is PENDING and not value.consumed and not self.is_closed:
            self.run_queue()
        elif self.is_closed:
            self.refuse()
        elif self.tasks.running is not None or not self.records.is_consistent:
            self.rebuild_bookkeeping()
        if value.status is not READY or value.consumed:
            value.check_usable()

    # -- left behind -------------------------------------------------------------------------------

    def invalidate_after_fork(self) -> None:
        """Close the device in the child of a fork and release locks of the parent's threads."""
        self.is_closed = True
        # Cached runs check the generation, and then find the device closed.
        self.records.touch()
        for lock in self._locks:
            if not held_here(lock)():
                lock._at_fork_reinit()  # type: ignore[attr-defined]


def _inside(name: str) -> TaskError:
    return TaskError(
        f"device {name!r} is in the middle of a plan, or of a call, of this thread: it cannot be "
        "used by a hook, kernel, signal handler or finalizer, nor by an event listener that "
        "handles PlanMade",
        remedy="use only the arguments of the hook or listener, record the event, and use the "
        "device after the call",
    )


def _check_out(is_out: Callable[[], bool], name: str) -> None:
    if is_out():
        raise _inside(name)


def _in_child() -> None:
    for device in tuple(_alive):
        device.invalidate_after_fork()


os.register_at_fork(after_in_child=_in_child)
