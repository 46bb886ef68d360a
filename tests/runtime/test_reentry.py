"""A signal handler, finalizer or trace function that uses the device that its thread is using is
refused or served, and the interrupted call gives the right result.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array
from tests.support.stitched_models import integers, one, scaled

X = integers()
DOUBLED, HALVED = scaled("doubled", 2.0), scaled("halved", 0.5)
BOTH = (X * 2 + 1) * 0.5 + 1


def expect(found: Array, expected: Array) -> None:
    np.testing.assert_array_equal(found, expected)


class Desk:
    """A device with two programs and pipelines, and what a visitor may try; counts what came of
    it."""

    def __init__(self) -> None:
        self.device = stitch.open_device("tiny")
        self.a, self.b = self.device.load(DOUBLED), self.device.load(HALVED)
        self.pipe, self.other = stitch.Pipeline([self.a, self.b]), stitch.Pipeline([self.b])
        self.kept = one(self.a(X))
        self.refused = self.served = 0
        for _ in range(4):
            self.work()
            for visit in self.visits():
                visit()

    def work(self) -> None:
        expect(one(self.pipe(X)).numpy(), BOTH)
        expect(one(self.b(one(self.a(X)))).numpy(), BOTH)

    def visits(self) -> tuple[Callable[[], object], ...]:
        return (
            lambda: expect(one(self.other(X)).numpy(), X * 0.5 + 1),
            lambda: expect(one(self.pipe(-X)).numpy(), 1.5 - X),
            lambda: expect(one(self.a(self.kept)).numpy(), (X * 2 + 1) * 2 + 1),
            lambda: expect(self.kept.numpy(), X * 2 + 1), lambda: self.device.load(DOUBLED),
            lambda: expect(np.from_dlpack(self.kept), X * 2 + 1), self.device.explain,
            self.device.memory_report,
        )  # fmt: skip

    def visit(self, *_: object) -> None:
        for visit in self.visits():
            try:
                visit()
                self.served += 1
            except stitch.TaskError as error:
                assert "in the middle of a plan, or of a call" in str(error)
                self.refused += 1

    def check(self) -> None:
        """All is as if nobody had come."""
        self.work()
        for visit in self.visits():
            visit()
        self.device.close()


def test_handlers_of_real_signals_use_the_device_that_they_interrupt() -> None:
    desk = Desk()
    problems: list[BaseException] = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            desk.visit()
        except BaseException as error:
            problems.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        # Again only when the last has been served: slow machines get on as well.
        while not problems and (desk.refused < 40 or desk.served < 8):
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
            desk.work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert problems == []
    desk.check()


def at_each_line(act: Callable[[], object], visit: Callable[[], object]) -> int:
    """Run `act`; a trace function calls `visit` before each line of the runtime; how often."""
    times = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal times
        if "/stitch/runtime/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            times += 1
            visit()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return times


@pytest.mark.parametrize("what", ["pipeline", "calls", "first call"])
def test_a_trace_function_uses_the_device_before_each_line(what: str) -> None:
    desk = Desk()
    fresh = stitch.Pipeline([desk.a, desk.a])
    acts: dict[str, Callable[[], object]] = {
        "pipeline": lambda: expect(one(desk.pipe(X)).numpy(), BOTH),
        "calls": lambda: expect(one(desk.b(one(desk.a(X)))).numpy(), BOTH),
        "first call": lambda: expect(one(fresh(X)).numpy(), (X * 2 + 1) * 2 + 1),
    }
    numbers = iter(range(10**6))

    def visit() -> None:
        # A first call has many lines.
        if what != "first call" or next(numbers) % 29 == 0:
            desk.visit()

    assert at_each_line(acts[what], visit) > 10
    assert desk.refused > 0
    desk.check()


def test_finalizers_and_weak_references_use_the_device_in_whose_call_they_are_called() -> None:
    desk = Desk()
    heard: list[str] = []

    def hear(_: object) -> None:
        heard.append("reference")
        desk.visit()

    class Thing:
        def __del__(self) -> None:
            heard.append("finalizer")
            desk.visit()

    def hook(context: object) -> None:
        thing = Thing()
        watched = weakref.ref(thing, hear)
        del thing
        assert watched() is None

    end = desk.device.hooks.register(before_program=hook)
    expect(one(desk.pipe(X)).numpy(), BOTH)
    end()
    assert heard == ["finalizer", "reference"] * 2 or heard == ["reference", "finalizer"] * 2
    assert desk.refused == 4 * len(desk.visits()) and not desk.served
    gc.collect()
    desk.check()


def test_closing_in_the_middle_of_a_call_is_refused_and_nothing_is_closed() -> None:
    desk = Desk()
    said: list[str] = []

    def hook(context: object) -> None:
        with pytest.raises(stitch.TaskError, match="of a call, of this thread") as error:
            desk.device.close()
        said.append(str(error.value))

    end = desk.device.hooks.register(before_program=hook)
    expect(one(desk.pipe(X)).numpy(), BOTH)
    end()
    assert len(said) == 2 and not desk.device.is_closed
    desk.check()


def test_another_thread_started_by_a_hook_may_queue() -> None:
    desk = Desk()
    results: list[stitch.Tensor] = []

    def hook(context: object) -> None:
        thread = threading.Thread(target=lambda: results.append(one(desk.a(X))))
        thread.start()
        thread.join()

    end = desk.device.hooks.register(before_program=hook)
    expect(one(desk.pipe(X)).numpy(), BOTH)
    end()
    for result in results:
        expect(result.numpy(), X * 2 + 1)
    desk.check()


def test_an_argument_that_reads_the_device_is_read_before_the_call_begins() -> None:
    desk = Desk()

    class Lazy:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
            return one(desk.a(X)).numpy()

    for call in (desk.pipe, stitch.Pipeline([desk.a, desk.b])):
        expect(one(call(Lazy())).numpy(), ((X * 2 + 1) * 2 + 1) * 0.5 + 1)
    own = desk.device.tensor(X)
    desk.device.write(own, Lazy())
    expect(own.numpy(), X * 2 + 1)
    desk.device.write(own, desk.kept)
    expect(own.numpy(), X * 2 + 1)
    desk.check()
