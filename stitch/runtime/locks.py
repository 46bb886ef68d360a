"""Locks: an `RLock` for `with` statements alone, in two thirds of the time, and who holds it; and
`InterruptDeferred`, which keeps Ctrl-C out of a block.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps
import _thread
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

#: As a number, and of `_signal`: looking enumerations up takes 3 us a call, a handler 0.2.
SIGINT = int(signal.SIGINT)

Lock: TypeAlias = AbstractContextManager[bool]


def quick(lock: threading.RLock, before: Callable[[], object] | None = None) -> Lock:
    """What takes and gives back this very lock in a `with` statement, 90 ns instead of 130: found
    as functions of a class, what enters and leaves need not be bound to the lock each time.

    `before` runs first and may raise. With `before` the lock is not re-entrant."""
    enter = lock.__enter__ if before is None else partial(_enter_after, before, lock)
    methods = {"__enter__": staticmethod(enter), "__exit__": staticmethod(lock.__exit__)}
    entered: Lock = type("QuickLock", (), {"__slots__": (), **methods})()
    return entered


def _enter_after(before: Callable[[], object], lock: threading.RLock) -> bool:
    before()
    try:
        return lock.__enter__()
    except BaseException:
        # An interrupt may come just after it was acquired. Nobody enters who holds it already.
        if held_here(lock)():
            lock.release()
        raise


def held_here(lock: threading.RLock) -> Callable[[], bool]:
    """What says, in 25 ns, whether the thread that asks holds this lock."""
    # What `threading.Condition` asks of a lock; the class does not say so.
    asked: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
    return asked


class InterruptDeferred:
    """A block in which Ctrl-C does not raise: the handler of SIGINT runs at its end, once however
    often the signal came.

    In threads other than the main one, where signals are never handled, it does nothing; exceptions
    that another thread sets by `PyThreadState_SetAsyncExc` are raised as they come.
    """

    __slots__ = ("_arrived", "_handler", "_note")

    def __init__(self) -> None:
        self._handler: Any = None
        #: By number the frame that a signal found: noted by C, as code of Python is interrupted.
        self._arrived: dict[int, object] = {}
        self._note = self._arrived.__setitem__

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(SIGINT)
        if callable(handler):
            self._handler = handler
            try:
                _signal.signal(SIGINT, self._note)
            except BaseException:
                self._restore()
                raise

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        try:
            self._restore()
        except BaseException:
            # Another signal's handler raised before it was done.
            self._restore()
            raise
        if self._arrived:
            # Pending: its handler runs before the next statement.
            _thread.interrupt_main()

    def _restore(self) -> None:
        # A function that was called meanwhile may have put another handler there.
        if _signal.getsignal(SIGINT) is self._note:
            _signal.signal(SIGINT, self._handler)
