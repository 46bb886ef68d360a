"""The thread pool of a device.

Each thread has its own NumPy error state. It starts on first use and ends when the device is closed
or dropped, or the interpreter exits. In the child of a fork there are no threads, and the device is
closed.

The caller always waits until all functions have ended, since they write to the memory of plans; an
interrupt is raised afterwards. Work is submitted by one C call, so after an interrupt the caller
finds all submitted work by submitting a marker and waiting for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from stitch.runtime.executors import ignore_errors

ThreadFunction: TypeAlias = Callable[[Sequence[Any]], Any]


class ThreadRun:
    """One run of a function, and its result."""

    __slots__ = ("_arrays", "_ended", "error", "function", "is_done", "is_over", "result")

    def __init__(self, function: ThreadFunction, arrays: Sequence[Any]) -> None:
        self.function, self._arrays = function, arrays
        self._ended = threading.Lock()
        self._ended.acquire()
        self.result: Any = None
        #: The exception that it raised.
        self.error: BaseException | None = None
        #: Whether it completed, and whether it has ended in any way.
        self.is_done = self.is_over = False

    def run(self) -> None:
        """Call the function; never raises."""
        try:
            self.result = self.function(self._arrays)
            self.is_done = True
        except BaseException as error:
            self.error = error
        self._arrays = ()
        self.is_over = True
        self._ended.release()

    def wait(self) -> None:
        """Wait for the end; may be interrupted and called again."""
        while not self.is_over:
            self._ended.acquire()


Given: TypeAlias = "SimpleQueue[ThreadRun | None]"


class ThreadPool:
    """The threads of one device, started on demand."""

    __slots__ = ("__weakref__", "_given", "_own", "_threads")

    def __init__(self) -> None:
        #: Queue per thread; None ends the thread.
        self._given: list[Given] = []
        self._threads: list[threading.Thread] = []
        #: Identifiers of its threads.
        self._own: set[int] = set()
        # Threads reference only their queues, so an unreferenced device is collected.
        weakref.finalize(self, _end, self._given)

    def beside(
        self, functions: Sequence[ThreadFunction], arrays: Sequence[Any]
    ) -> Sequence[ThreadRun]:
        """Run the first function here and the others on threads, all with the same arrays.

        Returns:
            One `ThreadRun` per function, after all have ended. Exceptions are stored there, also
            interrupts of the caller.
        """
        runs = [ThreadRun(function, arrays) for function in functions]
        own, *others = runs
        if len(self._given) < len(others):
            with suppress(RuntimeError):
                # No more threads available: the caller runs those functions.
                self._begin(len(others))
        threads = len(self._given)
        try:
            try:
                for given, run in zip(self._given, others):  # noqa: B905 (as many as there are)
                    given.put(run)
                for run in own, *others[threads:]:
                    run.run()
                for run in others:
                    run.wait()
            except BaseException as interrupt:
                own.error = own.error or interrupt
                self.rest()
        except BaseException as interrupt:
            # Another interrupt, during the handling of the first.
            own.error = own.error or interrupt
            self.rest()
        return runs

    def rest(self) -> None:
        """Wait until all submitted work has ended, despite interrupts; the last interrupt is raised
        afterwards."""
        interrupt: BaseException | None = None
        for given in tuple(self._given):
            behind = ThreadRun(_nothing, ())
            given.put(behind)
            while not behind.is_over:
                try:
                    behind.wait()
                except BaseException as error:
                    interrupt = error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    def _begin(self, count: int) -> None:
        for number in range(len(self._given) + 1, count + 1):
            given: Given = SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(given, self._own), name=f"stitch thread {number}", daemon=True
            )
            try:
                thread.start()
                self._given.append(given)
                self._threads.append(thread)
            except BaseException:
                # Interrupted, or no more threads: end a thread that was started.
                self._given[:] = [each for each in self._given if each is not given]
                given.put(None)
                raise

    def run_here(self) -> bool:
        """Return whether the current thread belongs to this pool."""
        return threading.get_ident() in self._own

    def close(self) -> None:
        """Wait for running work and end all threads. Idempotent."""
        _end(self._given)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def forget(self) -> None:
        """In the child of a fork: drop the threads."""
        self._given.clear()
        self._threads.clear()


def _nothing(_: Sequence[Any]) -> None:
    pass


def _serve(given: Given, own: set[int]) -> None:
    """Run a thread: call submitted functions until None arrives."""
    ident = threading.get_ident()
    own.add(ident)
    ignore_errors()
    while True:
        run = given.get()
        if run is None:
            own.discard(ident)
            return
        run.run()
        # Do not keep the device alive.
        del run


def _end(given: list[Given]) -> None:
    while given:
        given.pop().put(None)
