"""Locks: an `RLock` for `with` statements alone, in two thirds of the time, and who holds it.

Must not know what it guards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

Lock: TypeAlias = AbstractContextManager[bool]


def quick(lock: threading.RLock, before: Callable[[], object] | None = None) -> Lock:
    """What takes and gives back this very lock in a `with` statement, 90 ns instead of 130: found
    as functions of a class, what enters and leaves need not be bound to the lock each time.

    `before` is called first, and may raise; then nobody may enter who holds the lock already."""
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
