"""The life of a device: idle, busy, interrupted, closed, or left behind in a process by a fork.

A thread is inside a device from where it takes one of its locks to where it gives it back. Python
may call others in between: hooks, kernels, signal handlers, finalizers. They find the device half
way, and are told so: no thread comes in twice. What the device calls itself takes no lock anew.

A fork copies a device in whatever state its threads were in, without the threads: a kernel half
way, a lock that nobody gives back. So a device belongs to the process that opened it. In the child
it is closed from the first moment, and says so to whoever uses it.

Whoever uses an open one first brings to an end what others have left: half done, by an interrupt,
or in notes, by finalizers.
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
from stitch.runtime.queue import Done, Reclaimer, TaskQueue
from stitch.runtime.values import Records, Status, ValueRecord

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY

_alive: LiveObjects[DeviceLocking] = LiveObjects()


class DeviceLocking:
    """The part of a device that knows whether it may be used, and makes it ready to be.

    `lock` is held by whoever runs, plans, reads or changes what lies where. `queue_lock` is held
    for moments only, by whoever queues, and whoever changes what a call looks at: which values are
    queued, given away, ready, shared. Who takes both takes `lock` first.
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
        """Open, for this process; `name` is the machine's, `queue_lock` that of `tasks`."""
        self._name = name
        self.records, self.deaths, self.tasks = records, deaths, tasks
        self.drop, self.lost_all = deaths.dropped.append, deaths.lost_all
        self._locks = (threading.RLock(), queue_lock)
        #: `quick_lock` is for those who have asked `holds_run_lock` themselves.
        self.quick_lock, self.queue_lock = quick(self._locks[0]), tasks.lock
        #: Whether this thread holds the first lock, or the second.
        self.holds_run_lock, self.holds_queue_lock = (
            held_here(self._locks[0]),
            held_here(queue_lock),
        )
        #: How many host functions it is running, and whether one of them has queued something.
        self.calls_host = 0
        self.was_queued_inside = False
        #: Whether it cannot be used any more (here: a fork closes it for the child).
        self.is_closed = False
        #: The process that opened it.
        self._process = os.getpid()
        _alive.add(self)

    def refuse(self) -> NoReturn:
        """It is closed, or belongs to another process: raise the `TaskError` that says so."""
        self.check_process()
        raise TaskError(
            f"device {self._name!r} is closed",
            remedy="use it and read results before close() or the end of its `with` block, or open "
            "another device",
        )

    @property
    def is_left_behind(self) -> bool:
        """Whether another process opened it, of which this one is a child."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raise `TaskError` in a process that did not open the device."""
        if self.is_left_behind:
            raise TaskError(
                f"device {self._name!r} belongs to process {self._process}, which opened it",
                where=f"process {os.getpid()}, made from it by a fork",
                remedy="open a device in this process, or start processes by multiprocessing's "
                "'spawn' instead of 'fork'",
            )

    # -- who comes in ------------------------------------------------------------------------------

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
        """Raise `TaskError` where this thread is inside, but for a host function, which may queue
        what runs after it."""
        if self.holds_run_lock() and self.calls_host and not self.holds_queue_lock():
            self.was_queued_inside = True
        else:
            self.check_outside()

    def check_outside(self) -> None:
        """Raise `TaskError` where this thread is inside: a plan or a call is half-way through."""
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
        """Refuse threads for whose end those wait that are inside; `is_out` says whether the one
        that asks is such a thread."""
        self.quick_lock = quick(self._locks[0], partial(_check_out, is_out, self._name))

    @contextmanager
    def _once_more(self) -> Iterator[bool]:
        """A listener uses the device: no other thread can meanwhile."""
        self.events.is_over = False
        try:
            yield True
        finally:
            self.events.is_over = True

    def check_open(self) -> None:
        """Raise `TaskError` if it has been closed, or belongs to another process."""
        if self.is_closed:
            self.refuse()

    def check_consistent(self) -> None:
        """Nothing is half done from now on; the lock is held, so what is was interrupted."""
        if not self.records.is_consistent or self.tasks.running is not None:
            self.rebuild_bookkeeping()

    def rebuild_bookkeeping(self) -> None:
        """Bring to an end, or take back, what an interrupt has left half done."""
        self.tasks.end_run()
        if self.records.pending_recovery is not None:
            self.records.pending_recovery()
        with self.queue_lock:
            self.tasks.rebuild_bookkeeping()
            self.deaths.rebuild_bookkeeping(self.tasks.queued.values)

    def drain(self, *, resting: bool = True) -> None:
        """Read the notes that finalizers left: see `Reclaimer.read`."""
        # What reads a value may have left the queue, and come back to it.
        self.check_consistent()
        self._read_notes(resting=resting)

    def _read_notes(self, *, resting: bool) -> None:
        tasks = self.tasks
        if not tasks.queued.is_whole:
            # What only half a task reads is not queued.
            with self.queue_lock:
                tasks.rebuild_bookkeeping()
        self.deaths.read(tasks.queued.number, resting=resting)

    def drain_if_free(self) -> None:
        """Read the notes of finalizers, unless another thread runs, which reads them itself."""
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
    ) -> Done | None:
        """`TaskQueue.run`, for those who hold the lock, after what has to come before it."""
        if self.is_closed:
            self.check_process()
        tasks, deaths = self.tasks, self.deaths
        if not self.records.is_consistent or tasks.running is not None:
            self.rebuild_bookkeeping()
        is_empty = fill is None and tasks.is_idle
        if deaths.dropped or deaths.notes.left or (deaths.resting and not is_empty):
            self._read_notes(resting=not is_empty)
        if is_empty:
            return None
        ran = tasks.run(fill, at_most)
        while self.was_queued_inside:
            # What host functions have queued meanwhile.
            self.was_queued_inside = False
            tasks.run()
        return ran

    def flush(self) -> None:
        """Run everything that is queued.

        A failure while planning changes nothing but the tensors that could not be made; after a
        failure while running, finished outputs stay and what depended on the rest is failed.
        """
        with self.lock:
            self.run_queue()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within, all that was queued has run, and nobody else comes in."""
        with self.lock:
            self.run_queue()
            yield

    def settle(self, value: ValueRecord) -> None:
        """Make sure that a value is ready: run the queue if it is pending, raise if it is gone."""
        if (value.status is not READY or value.consumed or self.is_closed
                or self.tasks.running is not None or not self.records.is_consistent):  # fmt: skip
            with self.lock:
                self.settle_now(value)

    def settle_now(self, value: ValueRecord) -> None:
        """As `settle`, for those who hold the lock."""
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
        """In the child of a fork: closed, with locks that no thread of the parent holds."""
        self.is_closed = True
        # Whoever runs past the queue looks closer now, and finds it closed.
        self.records.touch()
        for lock in self._locks:
            if not held_here(lock)():
                lock._at_fork_reinit()  # type: ignore[attr-defined]


def _inside(name: str) -> TaskError:
    return TaskError(
        f"device {name!r} is in the middle of a plan, or of a call, of this thread: a hook cannot "
        "use it, nor can a kernel, a signal handler or a finalizer, nor a listener that hears of a "
        "plan being made",
        remedy="look at what the hook or the listener is given, note what has happened, and act "
        "after the call",
    )


def _check_out(is_out: Callable[[], bool], name: str) -> None:
    if is_out():
        raise _inside(name)


def _in_child() -> None:
    for device in tuple(_alive):
        device.invalidate_after_fork()


os.register_at_fork(after_in_child=_in_child)
