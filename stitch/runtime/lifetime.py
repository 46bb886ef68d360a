"""The life of a device: idle, busy, interrupted, closed, or left behind in a process by a fork.

A fork copies a device in whatever state its threads were in, without the threads: a kernel half
way, a lock that nobody gives back. So a device belongs to the process that opened it. In the child
it is closed from the first moment, and says so to whoever uses it.

Whoever uses an open one first brings to an end what others have left: half done, by an interrupt,
or in notes, by finalizers. Must not know plans or tensors.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

from stitch.errors import TaskError
from stitch.runtime.locks import quick
from stitch.runtime.queue import Deaths, TaskQueue
from stitch.runtime.recording import Binding
from stitch.runtime.values import Records, Status, ValueRecord

_alive: weakref.WeakSet[Lifetime] = weakref.WeakSet()


class Lifetime:
    """The part of a device that knows whether it may be used, and makes it ready to be.

    `lock` is held by whoever runs, plans, reads or changes what lies where. `queue_lock` is held
    for moments only, by whoever queues, and whoever changes what a call looks at: which values are
    queued, given away, ready, shared. Who takes both takes `lock` first.
    """

    def __init__(
        self,
        name: str,
        records: Records,
        deaths: Deaths,
        tasks: TaskQueue,
        queue_lock: threading.RLock,
    ) -> None:
        """Open, for this process; `name` is the machine's, `queue_lock` that of `tasks`."""
        self._name = name
        self.records, self.deaths, self.tasks = records, deaths, tasks
        self.drop, self.lost_all = deaths.dropped.append, deaths.lost_all
        self._locks = (threading.RLock(), queue_lock)
        self.lock, self.queue_lock = quick(self._locks[0]), tasks.lock
        #: While hooks run, or kernels that are not Stitch's own, the records are behind the bytes,
        #: so their thread may not use them.
        self.in_others_code = False
        self._closed = False
        #: The process that opened it.
        self._process = os.getpid()
        _alive.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be used any more (here: a fork closes it for the child)."""
        return self._closed

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

    # -- idle --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `TaskError` if it has been closed, belongs to another process, or a hook asks."""
        if self._closed:
            self.refuse()
        self.check_idle()

    def check_idle(self) -> None:
        """Raise `TaskError` if a hook, a kernel or who listens to a plan being made asks: a plan is
        half-way through, and this thread with it."""
        is_busy = self.in_others_code or self.tasks.running is not None
        if not (is_busy or not self.records.is_whole) or not _is_mine(self._locks[0]):
            return
        if is_busy and self.tasks.is_run_by_this_thread():
            raise TaskError(
                f"device {self._name!r} is in the middle of a plan: a hook cannot use it, "
                "nor can a kernel, nor a listener that hears of a plan being made",
                remedy="look at what the hook or the listener is given, and act after the run",
            )
        self.in_others_code = False
        self.mend()

    def check_whole(self) -> None:
        """Nothing is half done from now on; the lock is held."""
        if not self.records.is_whole:
            self.check_idle()

    def mend(self) -> None:
        """Bring to an end, or take back, what an interrupt has left half done."""
        self.tasks.end_run()
        if self.records.unfinished is not None:
            self.records.unfinished()
        with self.queue_lock:
            self.tasks.mend()
            self.deaths.mend(self.tasks.queued.values)

    def drain(self, *, resting: bool = True) -> None:
        """Read the notes that finalizers left: see `Deaths.read`."""
        tasks = self.tasks
        if not self.records.is_whole or tasks.running is not None:
            # What reads a value may have left the queue, and come back to it.
            self.check_idle()
        if not tasks.queued.is_whole:
            # What only half a task reads is not queued.
            with self.queue_lock:
                tasks.mend()
        self.deaths.read(tasks.queued.number, resting=resting)

    def drain_if_free(self) -> None:
        """Read the notes of finalizers, unless somebody runs; who does reads them himself."""
        lock = self._locks[0]
        if _is_mine(lock):
            return
        try:
            if lock.acquire(blocking=False):
                self.drain()
        finally:
            # An interrupt may come just after it was acquired.
            if _is_mine(lock):
                lock.release()

    # -- ready -------------------------------------------------------------------------------------

    def run_queue(
        self, fill: Callable[[], object] | None = None, at_most: int | None = None
    ) -> Binding | None:
        """`TaskQueue.run`, for those who hold the lock, after what has to come before it."""
        if self.in_others_code or self.tasks.running is not None:
            self.check_idle()
        is_empty = fill is None and self.tasks.is_idle
        self.drain(resting=not is_empty)
        return None if is_empty else self.tasks.run(fill, at_most)

    def flush(self) -> None:
        """Run everything that is queued.

        A failure while planning changes nothing but the tensors that could not be made; after a
        failure while running, finished outputs stay and what depended on the rest is failed.
        """
        with self.lock:
            if self._closed:
                self.check_process()
            self.run_queue()

    def settle(self, value: ValueRecord) -> None:
        """Make sure that a value is ready: run the queue if it is pending, raise if it is gone."""
        # What is ready, as a rule, needs no calls to say so.
        if (value.status is not Status.READY or value.consumed or self._closed
                or self.tasks.running is not None or self.in_others_code
                or not self.records.is_whole):  # fmt: skip
            with self.lock:
                self.check_open()
                if value.status is Status.PENDING and not value.consumed:
                    self.run_queue()
                value.check_usable()

    # -- left behind -------------------------------------------------------------------------------

    def leave_behind(self) -> None:
        """In the child of a fork: closed, with locks that no thread of the parent holds."""
        self.in_others_code, self._closed = False, True
        # Whoever runs past the queue looks closer now, and finds it closed.
        self.records.touch()
        for lock in self._locks:
            if not _is_mine(lock):
                lock._at_fork_reinit()  # type: ignore[attr-defined]


def _is_mine(lock: threading.RLock) -> bool:
    """Whether this thread holds it."""
    # What `threading.Condition` asks of a lock; the class does not say so.
    mine: bool = lock._is_owned()  # type: ignore[attr-defined]
    return mine


def _in_child() -> None:
    for device in tuple(_alive):
        device.leave_behind()


os.register_at_fork(after_in_child=_in_child)
