"""Inter-op threads: independent sections run concurrently, with the results of one thread."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, UsageError
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.report import ChromeTrace
from stitch.runtime import Event, PlanRun
from stitch.runtime.backends import ThreadPool, ThreadRun
from stitch.runtime.executors import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
)
from stitch.runtime.executors.host import NumpyExecutor
from tests.support.handle_world import fate
from tests.support.short_threads import shorten
from tests.support.stitched_models import consuming, integers, one, scaled

#: Two of these take 200 us by their counts.
N = 256
MACHINE = "wormhole_n150"


class Meeting(Executor):
    """Every program waits, in the middle of its run, for so many to be there."""

    name = "meeting"
    supports_threads = True

    def __init__(self, count: int, seconds: float = 60.0) -> None:
        self.within = NumpyExecutor()
        self.barrier = threading.Barrier(count, timeout=seconds)
        self.threads: set[int] = set()
        self.at_end: Any = None

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        return Waiting(self, self.within.prepare(program, machine, workspace), program.name)

    def host_bytes(self, program: Program) -> ProgramBytes:
        return self.within.host_bytes(program)


class Waiting(PreparedProgram):
    def __init__(self, executor: Meeting, prepared: PreparedProgram, name: str) -> None:
        self.executor, self.prepared, self.name = executor, prepared, name

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        bound = self.prepared.bind(inputs, outputs, scratch)
        return BoundProgram((self.wait, *bound.steps, self.end), (), {}, 0)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        return Waiting(self.executor, self.prepared.on_thread(workspace), self.name)

    def wait(self) -> None:
        self.executor.threads.add(threading.get_ident())
        self.executor.barrier.wait()

    def end(self) -> None:
        if self.executor.at_end is not None:
            self.executor.at_end(self.name)


def product(x: Any, w: Any) -> Any:
    return x @ w


@pytest.fixture(scope="module")
def products() -> stitch.CompiledModel:
    x = np.ones((N, N), np.float32)
    return stitch.compile(product, (x, x), target=MACHINE)


@pytest.fixture
def arrays() -> list[Array]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((N, N)).astype(np.float32) for _ in range(6)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    until = time.monotonic() + 30
    while any(t.name.startswith("stitch thread") for t in threading.enumerate()):
        assert time.monotonic() < until, "an inter-op thread lives on"
        time.sleep(0.01)


def forks_of(device: stitch.Device) -> list[PlanRun]:
    runs: list[PlanRun] = []

    def note(event: Event) -> None:
        if isinstance(event, PlanRun):
            runs.append(event)

    device.events.subscribe(note)
    return runs


@pytest.mark.parametrize("inter_op_threads", [0, -1, True, 1.5, "2", None, 257, 10**9])
def test_inter_op_threads_are_a_positive_whole_number(inter_op_threads: Any) -> None:
    with pytest.raises(UsageError) as caught:
        stitch.open_device("tiny", inter_op_threads=inter_op_threads)
    assert "inter_op_threads" in str(caught.value)
    assert repr(inter_op_threads) in str(caught.value)


@pytest.mark.parametrize("inter_op_threads", [2, 3])
def test_so_many_programs_are_in_the_middle_of_their_runs_at_once(
    inter_op_threads: int, products: stitch.CompiledModel, arrays: list[Array]
) -> None:
    executor = Meeting(inter_op_threads)
    with stitch.open_device(
        MACHINE, executor=executor, inter_op_threads=inter_op_threads
    ) as device:
        assert device.inter_op_threads == inter_op_threads
        loaded = device.load(products)
        # One program, so many times: each with kernels of its own.
        results = [one(loaded(arrays[i], arrays[i + 1])) for i in range(inter_op_threads)]
        device.wait()
        assert len(executor.threads) == inter_op_threads
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result.numpy(), arrays[i] @ arrays[i + 1])


def test_pipelines_calls_and_held_results_are_the_same_on_two(
    products: stitch.CompiledModel, arrays: list[Array]
) -> None:
    def used(inter_op_threads: int) -> list[bytes]:
        with stitch.open_device(MACHINE, inter_op_threads=inter_op_threads) as device:
            loaded, held, seen = device.load(products), [], []
            pipeline = stitch.Pipeline([loaded])
            state = device.tensor(arrays[0])
            for i in range(6):
                a, b = loaded(arrays[i % 6], state), loaded(state, arrays[(i + 1) % 6])
                c = loaded(a, arrays[2])
                held.append(b)
                state = one(loaded(c, arrays[3]))
                seen += [one(c).numpy().tobytes(), state.numpy().tobytes()]
                seen.append(one(pipeline(arrays[0], arrays[1])).numpy().tobytes())
            seen += [one(each).numpy().tobytes() for each in held]
            seen.append(str(device.account().total.copies).encode())
            return seen

    assert used(1) == used(2)


def test_what_is_overwritten_is_overwritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shorten(monkeypatch)
    with stitch.open_device("tiny", inter_op_threads=3) as device:
        double = device.load(consuming("double", 2.0))
        states = [device.tensor(integers(start=i)) for i in range(3)]
        for _ in range(5):
            states = [one(double(state)) for state in states]
            device.wait()
        for i, state in enumerate(states):
            np.testing.assert_array_equal(state.numpy(), integers(start=i) * 32)
    assert not found, "what overwrites values is completed whatever is raised, so it has one thread"


def test_errors_of_numpy_are_ignored_in_every_thread_and_reported_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shorten(monkeypatch)
    huge = np.full((4, 64), 3e38, np.float32)
    with warnings.catch_warnings(), stitch.open_device("tiny", inter_op_threads=2) as device:
        warnings.simplefilter("error")
        a = device.load(scaled("a", 2e10))
        for _ in range(3):
            y, z = one(a(huge)), one(a(-huge))
            assert np.isposinf(y.numpy()).all()
            assert np.isneginf(z.numpy()).all()
        with pytest.raises(RuntimeWarning):
            np.float32(3e38) * np.float32(10)
    assert found


def test_host_functions_run_in_order_on_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, seen = shorten(monkeypatch), list[tuple[int, int]]()

    @stitch.task()
    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    with stitch.open_device("tiny", inter_op_threads=2) as device:
        a = device.load(scaled("a", 2.0))
        for i in range(4):
            kept = [a(integers()), a(integers(start=1))]
            device.call(note, 2 * i)
            kept += [a(integers()), a(integers(start=1))]
            device.call(note, 2 * i + 1)
            device.wait()
            del kept
    assert seen == [(i, threading.get_ident()) for i in range(8)]
    assert found


def test_events_and_traces_tell_the_thread(
    products: stitch.CompiledModel, arrays: list[Array]
) -> None:
    with stitch.open_device(MACHINE, inter_op_threads=2) as device:
        trace, loaded, runs = ChromeTrace(device), device.load(products), forks_of(device)
        results = [loaded(*arrays[:2]), loaded(*arrays[2:4])]
        device.wait()
        (run,) = runs
        assert {thread for _, _, thread in run.spans()} == {0, 1}
        assert all(start <= end for start, end, _ in run.spans())
        assert max(end for _, end, _ in run.spans()) <= run.began_seconds + run.seconds
        for thread in range(2):
            ends = [(start, end) for start, end, where in run.spans() if where == thread]
            assert all(a[1] <= b[0] for a, b in pairwise(ends))
        lines = trace.as_json()["traceEvents"]
        trace.close()
        names = {line["args"]["name"] for line in lines if line["name"] == "thread_name"}
        assert {
            "inter-op thread 0", "inter-op thread 1", "thread 1: runs",
            "thread 1, inter-op thread 1: runs",
        } <= names  # fmt: skip
        tracks = {(line["pid"], line["tid"]) for line in lines if line.get("cat") == "task"}
        assert len(tracks) == 2
        assert "2 inter-op threads: 2 sections ran concurrently" in device.explain()
        del results


@pytest.mark.parametrize(
    ("options", "why"),
    [({"debug": True}, "debug mode"), ({"executor": "null"}, "'null'"), ({}, "100 us")],
)
def test_explain_says_why_nothing_ran_concurrently(options: dict[str, Any], why: str) -> None:
    with stitch.open_device("tiny", inter_op_threads=2, **options) as device:
        a = device.load(scaled("a", 2.0))
        results = [a(integers()), a(integers())]
        device.wait()
        assert "2 inter-op threads, no work ran concurrently: " in device.explain()
        assert why in device.explain()
        del results


def test_an_interrupted_wait_for_threads_goes_on() -> None:
    threads, main, done, came = ThreadPool(), threading.get_ident(), [], []

    def interrupt(*_: object) -> None:
        came.append(1)
        raise KeyboardInterrupt

    def until_main_waits() -> None:
        while sys._current_frames()[main].f_code is not ThreadRun.wait.__code__:
            time.sleep(0.001)

    def wake(_: object) -> None:
        for number in range(3):
            until_main_waits()
            # One that comes just before the lock is waited for does not end the wait.
            while len(came) == number:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.05)
        until_main_waits()
        done.append(1)

    runs: list[ThreadRun] = []
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs += threads.beside([len, wake], [])
            if isinstance(runs[0].error, KeyboardInterrupt):
                raise runs[0].error
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1] and len(came) >= 3
    threads.close()


def test_a_device_that_is_never_closed_keeps_no_process(products: stitch.CompiledModel) -> None:
    text = f"""
import gc, os, threading, time, numpy as np, stitch
x = np.ones(({N}, {N}), np.float32)
model = stitch.compile(lambda x, w: x @ w, (x, x), target={MACHINE!r})
device = stitch.open_device({MACHINE!r}, inter_op_threads=2)
loaded = device.load(model)
kept = loaded(x, x), loaded(x, x + 1)
device.wait()
child = os.fork()
if not child:
    try:
        device.memory_use()
    except stitch.StitchError:
        pass
    with stitch.open_device({MACHINE!r}, inter_op_threads=2) as own:
        again = own.load(model)
        mine = again(x, x), again(x, x)
        own.wait()
    os._exit(int(mine is None))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(kept[1].numpy()[0, 0])
other = stitch.open_device({MACHINE!r}, inter_op_threads=2)
loaded = other.load(model)
kept = kept, loaded(x, x), loaded(x, x)
other.wait()
assert threading.active_count() == 3
del other, loaded, kept
while threading.active_count() > 2:
    gc.collect()
    time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(2.0 * N)


def test_without_system_threads_one_thread_runs_everything(
    products: stitch.CompiledModel, arrays: list[Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with stitch.open_device(MACHINE, inter_op_threads=2) as device:
        loaded = device.load(products)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        results = [one(loaded(*arrays[:2])), one(loaded(*arrays[2:4]))]
        np.testing.assert_array_equal(results[0].numpy(), arrays[0] @ arrays[1])
        np.testing.assert_array_equal(results[1].numpy(), arrays[2] @ arrays[3])


class Broken(StitchError):
    """What a kernel raises."""


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_a_failure_in_a_thread_is_raised_once_all_have_ended(
    which: str, arrays: list[Array]
) -> None:
    x = np.ones((N, N), np.float32)
    models = {
        name: stitch.compile(product, (x, x), target=MACHINE, name=name) for name in ("a", "b", "c")
    }
    ended: list[str] = []

    def end(name: str) -> None:
        if name == which or which == "both":
            raise Broken(f"{name} is broken")
        # The other one is told long before.
        time.sleep(0.2)
        ended.append(name)

    executor = Meeting(2)
    with stitch.open_device(MACHINE, executor=executor, inter_op_threads=2) as device:
        a, b = device.load(models["a"]), device.load(models["b"])
        y, z = one(a(*arrays[:2])), one(b(*arrays[2:4]))
        executor.at_end = end
        with pytest.raises(Broken, match="b is broken" if which == "b" else "a is broken"):
            device.wait()
        assert ended == [name for name in ("a", "b") if which not in (name, "both")]
        for name, result, right in (("a", y, arrays[:2]), ("b", z, arrays[2:4])):
            if name in ended:
                np.testing.assert_array_equal(result.numpy(), right[0] @ right[1])
            else:
                with pytest.raises(StitchError, match=f"failed: {name} is broken"):
                    result.numpy()


def test_an_interrupt_waits_for_the_other_thread(
    products: stitch.CompiledModel, arrays: list[Array]
) -> None:
    executor, main = Meeting(2), threading.get_ident()
    ended = []

    def end(_: str) -> None:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        time.sleep(0.2)
        ended.append(1)

    with stitch.open_device(MACHINE, executor=executor, inter_op_threads=2) as device:
        loaded = device.load(products)
        y, z = one(loaded(*arrays[:2])), one(loaded(*arrays[2:4]))
        executor.at_end = end
        with pytest.raises(KeyboardInterrupt):
            device.wait()
        assert ended == [1]
        executor.at_end = None
        lost = [t for t in (y, z) if "interrupted" in fate(t)]
        assert len(lost) == 1
        y, z = one(loaded(*arrays[:2])), one(loaded(*arrays[2:4]))
        np.testing.assert_array_equal(y.numpy(), arrays[0] @ arrays[1])
        del lost
