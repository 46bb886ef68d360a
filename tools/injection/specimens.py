"""Two small devices that show what the harness finds: one sound, one with a bare `acquire()`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from injection.model import Array, Case


class _Counter:
    """A number behind a lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.number = 0

    def add(self) -> None:
        with self.lock:
            self.number += len([1])

    def add_barely(self) -> None:
        self.lock.acquire()
        try:
            self.number += len([1])
        finally:
            self.lock.release()

    def state(self) -> tuple[Array, ...]:
        return (np.array([self.number]),)


def sound_specimen() -> Case:
    """Nothing is broken: the interpreter delivers nothing between a lock and its `with`."""
    counter = _Counter()
    return Case((counter.add,), _Probe(counter.lock), lambda: None, state=counter.state)


def bare_specimen() -> Case:
    """Broken behind its `acquire()`: the lock is held for ever."""
    counter = _Counter()
    return Case((counter.add_barely,), _Probe(counter.lock), lambda: None, state=counter.state)


class _Probe:
    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __call__(self) -> None:
        with self._lock:
            pass


SPECIMENS: dict[str, Callable[[], Case]] = {
    "sound_specimen": sound_specimen,
    "bare_specimen": bare_specimen,
}
