"""Real signals at random times of a call, and work on devices that goes on after them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random
from types import FrameType
from typing import Any, ClassVar, Self

import numpy as np

import stitch
from stitch.errors import TaskError
from stitch.machine import load_machine
from stitch.program import Array, Layout, Ownership, Space, TensorDesc
from tests.support.handle_world import Training, must_fail
from tests.support.random_scripts import check_empty
from tests.support.random_work import F32, HOST

#: What a device says whose bookkeeping an interrupt has left incomplete.
INCONSISTENT = "interrupted while updating its records"
#: Seconds that another thread is waited for after an interrupt.
PATIENCE = 60
#: Signals that one device takes, where it is used again.
LIFETIME = 50
SHAPE = (8, 16)


# Signals.


class _SignalEvent(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int),
                ("rest", ctypes.c_char * 48))  # fmt: skip


class _TimerTimes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))


class SignalTimer:
    """A timer of the kernel that sends a signal to this process: unlike a thread or a process that
    sends it, it needs neither the interpreter's lock nor a free core."""

    _CLOCK_MONOTONIC = 1

    def __init__(self, number: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, number, 0, b"")
        made = self._library.timer_create(
            self._CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )
        if made:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, seconds: float) -> None:
        """Send the signal after so many seconds; never for 0."""
        times = _TimerTimes(0, 0, 0, int(seconds * 1e9))
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        self._library.timer_delete(self._timer)


class Signals:
    """Sends one signal at a random time of a call.

    Attributes:
        count: Signals that arrived during calls.
    """

    def __init__(self, number: int, on_arrival: Callable[[], object], draw: Random) -> None:
        self._number, self._on_arrival, self._draw = number, on_arrival, draw
        self._is_armed = False
        #: What a call takes at most, as far as it is known.
        self._seconds = 0.05
        self.count = 0

    def __enter__(self) -> Self:
        # Python ignores what is raised in a callback of garbage collection: an interrupt that came
        # in hypothesis's would be lost, and its traceback kept with all that was in use.
        self._callbacks, gc.callbacks[:] = gc.callbacks[:], []
        self._timer = SignalTimer(self._number)
        self._before = signal.signal(self._number, self._arrives)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.close()
        signal.signal(self._number, self._before)
        gc.callbacks[:] = self._callbacks

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.count += 1
            self._on_arrival()

    def during(self, call: Callable[[], object]) -> BaseException | None:
        """Call with a signal at a random time of it, if it is not over before; what it raised."""
        raised: BaseException | None = None
        count, began = self.count, time.perf_counter()
        delay = self._draw.uniform(0, 1.25 * self._seconds)
        try:
            self._is_armed = True
            self._timer.set(max(1e-6, delay))
            call()
            self._is_armed = False
        except BaseException as error:
            raised = error.with_traceback(None)
        self._is_armed = False
        self._timer.set(0)
        if self.count == count:
            # On a busy machine the shortest call is the one that tells how long it takes.
            self._seconds = min(self._seconds, time.perf_counter() - began)
        return raised


def interrupt() -> None:
    """What Python's own handler of Ctrl-C does."""
    raise KeyboardInterrupt


# Work.


@cache
def layer(name: str, machine: str = "tiny") -> bytes:
    """A file of `y = x w + b`; small whole numbers, so that every order gives one sum."""
    builder = stitch.ComputationGraphBuilder(name)
    x = builder.input("x", SHAPE, "float32")
    w, b = builder.parameter("w", WEIGHTS[0]), builder.parameter("b", WEIGHTS[1])
    builder.output("y", builder.op("Gemm", x, w, b))
    placement = ("input.x.space=l1", "output.y.space=l1")
    return stitch.compile(builder.build(), target=machine, placement=placement).encode()


@cache
def doubling(rows: int, ownership: Ownership = Ownership.BORROW) -> bytes:
    """A file of `y = 2 x`, over the bytes of x where it is donated."""
    builder = stitch.ComputationGraphBuilder("doubling")
    builder.output("y", builder.input("x", (rows, 16), "float32", ownership=ownership) * 2)
    placement = ("input.x.space=l1", "output.y.space=l1")
    return stitch.compile(builder.build(), target="tiny", placement=placement).encode()


@stitch.task(returns=TensorDesc(SHAPE, Layout(F32, HOST)))
def negated(x: Array) -> Array:
    return -x


def whole(start: int, shape: tuple[int, ...] = SHAPE) -> Array:
    """Small whole numbers."""
    return np.random.default_rng(start).integers(-2, 3, shape).astype(np.float32)


WEIGHTS = whole(1, (16, 16)), whole(2, (16,))


def after(layers: int, x: Array) -> Array:
    """What layers compute, by plain NumPy."""
    for _ in range(layers):
        x = x @ WEIGHTS[0] + WEIGHTS[1]
    return x


def same(found: Any, expected: Array) -> None:
    if np.asarray(found).tobytes() != expected.tobytes():
        raise AssertionError("other bytes than expected")


class Work(ABC):
    """Work on a device, some of whose handles are held; a call of `act` is what is interrupted."""

    #: Whether further calls are interrupted on the same device.
    lasts: ClassVar[bool] = True

    def __init__(self) -> None:
        self.device = stitch.open_device("tiny")
        self.program = self.device.load(layer("held"))
        given = self.device.tensor(whole(11))
        result = self.program(whole(12))
        self.device.wait()
        self.held: list[tuple[stitch.Tensor, Array]] = [
            (given, whole(11)), (result, after(1, whole(12))), (given[4:], whole(11)[4:])
        ]  # fmt: skip
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Load what the work needs, and run it until it is settled."""

    @abstractmethod
    def act(self) -> None:
        """The call that is interrupted; raises where its result is wrong."""

    def recover(self) -> None:
        """What a caller does after an interrupt, and what must hold then."""
        self.device.wait()

    def probe(self) -> None:
        same(self.program(whole(13)).numpy(), after(1, whole(13)))

    def visit(self) -> None:
        """What a signal handler may try: the right results, or a `TaskError`."""
        for tensor, expected in self.held:
            same(tensor.numpy(), expected)
        self.probe()
        self.device.memory_use()

    def check(self) -> None:
        """Raise unless another thread can use the device, held handles read what they held, and
        the same work can be done again."""
        problems: list[BaseException] = []

        def other() -> None:
            try:
                self.probe()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "another thread hangs"
        if problems:
            raise problems.pop()
        for tensor, expected in self.held:
            same(tensor.numpy(), expected)
        self.recover()
        self.act()

    def release(self) -> None:
        """Drop everything but the device."""
        self.__dict__ = {"device": self.device}

    def close(self) -> None:
        """Raise if dropping everything leaves something behind, or the device does not close."""
        self.release()
        gc.collect()
        check_empty(self.device)
        self.device.close()

    def close_inconsistent(self) -> None:
        """The device says what happened, closes, and leaks nothing."""
        must_fail(self.probe, INCONSISTENT)
        self.device.close()
        self.release()
        gc.collect()
        check_empty(self.device)


class FirstCall(Work):
    """A program that is loaded, planned, bound and run."""

    lasts = False

    def prepare(self) -> None:
        self.file = layer("first")

    def act(self) -> None:
        same(self.device.load(self.file)(whole(1)).numpy(), after(1, whole(1)))


class Calls(Work):
    """Calls that feed each other, whose results are held for a while."""

    def prepare(self) -> None:
        self.second, self.ring = self.device.load(layer("second")), list[stitch.Tensor]()
        for _ in range(8):
            self.act()

    def act(self) -> None:
        result = self.second(self.program(self.second(whole(1))))
        self.ring.append(result)
        del self.ring[:-3]
        same(result.numpy(), after(3, whole(1)))

    def recover(self) -> None:
        for result in self.ring:
            if result.is_allocated:
                same(result.numpy(), after(3, whole(1)))


class PipelineCalls(Work):
    """A settled pipeline of two programs."""

    def prepare(self) -> None:
        self.pipeline = stitch.Pipeline([self.program, self.device.load(layer("second"))])
        for _ in range(4):
            self.act()

    def act(self) -> None:
        same(self.pipeline(whole(1)).numpy(), after(2, whole(1)))


class DonatingCalls(Work):
    """A settled pipeline that overwrites what it is given."""

    def prepare(self) -> None:
        donating = self.device.load(doubling(8, Ownership.DONATE))
        self.pipeline = stitch.Pipeline([donating])
        for _ in range(4):
            self.act()

    def act(self) -> None:
        state = self.pipeline(self.pipeline(whole(1)))
        same(self.pipeline(state).numpy(), 8 * whole(1))


class GraphCalls(Work):
    """A prepared task graph of programs, a host function and a copy."""

    def prepare(self) -> None:
        graph = stitch.TaskGraph()
        x = graph.input(TensorDesc(SHAPE, Layout(F32, HOST)), "x")
        middle = graph.host(negated, graph.call(self.program, x))
        graph.output(graph.copy(graph.call(self.program, middle), Layout(F32, Space.DRAM)))
        self.prepared = self.device.prepare(graph)
        for _ in range(4):
            self.act()

    def act(self) -> None:
        same(self.prepared(whole(1)).numpy(), after(1, -after(1, whole(1))))


class Moves(Work):
    """A call whose plan moves buffers between holes."""

    lasts = False
    ROWS = 160

    def prepare(self) -> None:
        self.large = self.device.load(doubling(192))
        desc = TensorDesc((self.ROWS, 16), Layout(F32, Space.L1))
        tensors = [self.device.empty(desc) for _ in range(5)]
        for number, tensor in enumerate(tensors):
            self.device.write(tensor, whole(number, desc.shape))
        self.held += [(tensors[n], whole(n, desc.shape)) for n in (1, 3)]

    def act(self) -> None:
        same(self.large(whole(1, (192, 16))).numpy(), 2 * whole(1, (192, 16)))


class TrainingSteps(Work):
    """Steps of a settled training: its weights are those before or after a step."""

    settled: ClassVar[int] = 4

    def prepare(self) -> None:
        self.count = 0
        self.training = Training(self.device, load_machine("tiny"))
        for _ in range(self.settled):
            self.act()

    def act(self) -> None:
        self.count += 7
        self.training.step(self.count)

    def recover(self) -> None:
        training = self.training
        training.optimizer.zero_grad()
        found = training.weights()
        *stepped, _ = training.after(self.count)
        if not np.array_equal(found[0], training.w) or not np.array_equal(found[1], training.b):
            training.w, training.b = stepped
        training.check()

    def release(self) -> None:
        self.training.close()
        super().release()


class WholeSteps(TrainingSteps):
    """The same by `TrainingInstance.step`."""

    def act(self) -> None:
        self.count += 7
        w, b, loss = self.training.after(self.count)
        found = self.training.instance.step([self.training.batch(self.count)])
        self.training.w, self.training.b = w, b
        assert found == [loss]


class FirstTrainingStep(TrainingSteps):
    """A step before its programs are settled."""

    lasts = False
    settled = 1


#: How many of 20,000 interrupts each work takes.
WORKS: dict[type[Work], int] = {
    FirstCall: 1500, Calls: 5500, PipelineCalls: 4500, DonatingCalls: 2500, GraphCalls: 2300,
    Moves: 500, TrainingSteps: 2000, WholeSteps: 1000, FirstTrainingStep: 200,
}  # fmt: skip


def interrupted(kind: type[Work], count: int, draw: Random) -> Counter[str]:
    """Interrupt a work so often; how often the device worked on, or said that it is inconsistent.

    Raises `AssertionError`, or what was raised, where it did neither.
    """
    seen: Counter[str] = Counter()
    with Signals(signal.SIGINT, interrupt, draw) as signals:
        work = kind()
        while signals.count < count:
            before = signals.count
            raised = signals.during(work.act)
            is_told = isinstance(raised, TaskError) and INCONSISTENT in str(raised)
            assert raised is None or is_told or isinstance(raised, KeyboardInterrupt), repr(raised)
            if signals.count > before:
                seen["raised" if raised else "swallowed"] += 1
            del raised
            try:
                work.check()
                seen["works on"] += signals.count > before
                is_sound = True
            except TaskError as error:
                if INCONSISTENT not in str(error):
                    raise
                del error
                seen["inconsistent"] += 1
                is_sound = False
            if not is_sound:
                work.close_inconsistent()
            elif not kind.lasts or signals.count % LIFETIME == 0:
                work.close()
            else:
                continue
            work = kind()
        work.close()
    return seen


def visited(kind: type[Work], count: int, draw: Random, *, closes: bool) -> None:
    """Use the device, or close it, in a signal handler at random times of a work: what the handler
    reads is right or refused, and the work goes on."""
    works: list[Work] = []
    problems: list[BaseException] = []

    def visit() -> None:
        try:
            works[0].device.close() if closes else works[0].visit()
        except TaskError:
            return
        except BaseException as error:
            problems.append(error)

    with Signals(signal.SIGUSR1, visit, draw) as signals:
        while signals.count < count:
            works[:] = works or [kind()]
            raised = signals.during(works[0].act)
            if problems:
                raise problems[0]
            device = works[0].device
            assert raised is None or (device.is_closed and isinstance(raised, TaskError)), raised
            del raised
            if device.is_closed:
                works.pop().release()
            else:
                works[0].check()
                if not kind.lasts:
                    works.pop().close()
        if works:
            works.pop().close()
