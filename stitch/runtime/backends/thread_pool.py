"""The thread pool of a device: threads that run functions beside the caller, and wait.

A thread has a NumPy error state of its own, and knows neither plans nor devices. It begins when it
is first given something, and ends with its device: when that is closed or dropped, or the
interpreter exits. In the child of a fork there are none, and the device is closed.

Whoever gives something waits until all have ended, whatever happens to him meanwhile: what runs
beside him writes to the bytes of plans. An interrupt is raised then. What is given is given by one
call of C, so what was interrupted before it was known to be given is found by asking behind it.
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
    """One run of a function: what came of it."""

    __slots__ = ("_arrays", "_ended", "error", "function", "is_done", "is_over", "result")

    def __init__(self, function: ThreadFunction, arrays: Sequence[Any]) -> None:
        self.function, self._arrays = function, arrays
        self._ended = threading.Lock()
        self._ended.acquire()
        self.result: Any = None
        #: What it raised.
        self.error: BaseException | None = None
        #: Whether it came to its end, and whether nothing of it runs any more.
        self.is_done = self.is_over = False

    def run(self) -> None:
        """Call the function; raises nothing."""
        try:
            self.result = self.function(self._arrays)
            self.is_done = True
        except BaseException as error:
            self.error = error
        self._arrays = ()
        self.is_over = True
        self._ended.release()

    def wait(self) -> None:
        """Wait until it is over; may be interrupted, and asked again."""
        while not self.is_over:
            self._ended.acquire()


Given: TypeAlias = "SimpleQueue[ThreadRun | None]"


class ThreadPool:
    """The threads of one device, those that there are."""

    __slots__ = ("__weakref__", "_given", "_own", "_threads")

    def __init__(self) -> None:
        #: By thread; what a thread is given it takes in order, and ends with None.
        self._given: list[Given] = []
        self._threads: list[threading.Thread] = []
        #: What threads these are.
        self._own: set[int] = set()
        # Threads refer to their queues only, so an unreferenced device is collected.
        weakref.finalize(self, _end, self._given)

    def beside(
        self, functions: Sequence[ThreadFunction], arrays: Sequence[Any]
    ) -> Sequence[ThreadRun]:
        """Run the first function here, the others each on a thread of its own, all with the same
        arrays; what came of each, when all are over. Raises interrupts of the caller alone."""
        runs = [ThreadRun(function, arrays) for function in functions]
        own, *others = runs
        if len(self._given) < len(others):
            with suppress(RuntimeError):
                # The system has no more threads: this one takes the turns of those.
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
            # One that came while the other was noted.
            own.error = own.error or interrupt
            self.rest()
        return runs

    def rest(self) -> None:
        """Wait until all that was given is over, however often that is interrupted; the last
        interrupt is raised then."""
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
                # An interrupt, or no more threads: nobody would give it anything, or take it.
                self._given[:] = [each for each in self._given if each is not given]
                given.put(None)
                raise

    def run_here(self) -> bool:
        """Whether the thread that asks is one of these."""
        return threading.get_ident() in self._own

    def close(self) -> None:
        """Wait for what runs, and end all threads; twice does no harm."""
        _end(self._given)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def forget(self) -> None:
        """In the child of a fork: there are no threads."""
        self._given.clear()
        self._threads.clear()


def _nothing(_: Sequence[Any]) -> None:
    pass


def _serve(given: Given, own: set[int]) -> None:
    """The life of a thread; it notes that it is one of these."""
    ident = threading.get_ident()
    own.add(ident)
    ignore_errors()
    while True:
        run = given.get()
        if run is None:
            own.discard(ident)
            return
        run.run()
        # What it was given is its device's.
        del run


def _end(given: list[Given]) -> None:
    while given:
        given.pop().put(None)
