"""The life of a device: open, closed, busy with hooks, or left behind in another process by a fork.

A fork copies a device in whatever state its threads were in, without the threads: a kernel half
way, a lock that nobody gives back. So a device belongs to the process that opened it. In the child
it is closed from the first moment, and says so to whoever uses it. Must not know plans or tensors.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import NoReturn

from stitch.errors import TaskError
from stitch.runtime.queue import Window

_alive: weakref.WeakSet[Lifetime] = weakref.WeakSet()


class Lifetime:
    """The part of a device that knows whether it may be used.

    `lock` is held by whoever runs, plans, reads or changes what lies where. `queue_lock` is held
    for moments only, by whoever queues, and whoever changes what a call looks at: which values are
    queued, given away, ready, shared. Who takes both takes `lock` first.
    """

    def __init__(self, name: str) -> None:
        """Open, for this process; `name` is the machine's."""
        self._name = name
        self.lock, self.queue_lock = threading.RLock(), threading.RLock()
        #: While hooks run, or kernels that are not Stitch's own, the records are behind the bytes,
        #: so their thread may not use them.
        self.in_others_code = False
        #: What has left the queue and is planned or run.
        self.running: Window | None = None
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

    def is_mine(self) -> bool:
        """Whether this thread holds `lock`."""
        # What `threading.Condition` asks of it; the class does not say so.
        mine: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return mine

    def leave_behind(self) -> None:
        """In the child of a fork: closed, with locks that no thread of the parent holds."""
        self.lock, self.queue_lock = threading.RLock(), threading.RLock()
        self.in_others_code, self._closed = False, True


def _in_child() -> None:
    for device in tuple(_alive):
        device.leave_behind()


os.register_at_fork(after_in_child=_in_child)
