"""Several threads on one device, and devices in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import stitch
from stitch.program import DataType, Layout, Space
from stitch.runtime import LoadedProgram
from tests.support.stitched_models import integers, one, scaled, used

ROUNDS = 60
DRAM = Layout(DataType.FLOAT32, Space.DRAM)


def together(*work: Callable[[], None]) -> None:
    """Run functions at the same time; raise the first thing that one of them raised."""
    problems: list[BaseException] = []
    ready = threading.Barrier(len(work))

    def guarded(function: Callable[[], None]) -> None:
        try:
            ready.wait()
            function()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def chain(a: LoadedProgram, b: LoadedProgram, offset: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(ROUNDS):
            x = integers(start=offset + i)
            h = one(a(x))
            y = one(b(h))
            np.testing.assert_array_equal(y.numpy(), (x * 2 + 1) * 3 + 1)
            np.testing.assert_array_equal(h.numpy(), x * 2 + 1)

    return run


@pytest.mark.parametrize("window", [1, 4, 64])
def test_two_threads_share_a_device(window: int) -> None:
    with stitch.open_device("tiny", window=window, debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        base = used(device)
        together(chain(a, b, 0), chain(a, b, 1000), chain(a, b, 2000))
        assert used(device) == base


def test_two_devices_in_two_threads_are_independent() -> None:
    work = []
    with stitch.open_device("tiny") as left, stitch.open_device("tiny", debug=True) as right:
        for offset, device in enumerate((left, right)):
            a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
            work.append(chain(a, b, offset))
        together(*work)
        del a, b, work


def test_threads_share_a_pipeline_and_never_each_others_results() -> None:
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))])

        def run(offset: int) -> Callable[[], None]:
            def work() -> None:
                for i in range(ROUNDS * 3):
                    x = integers(start=offset + i)
                    result = one(pipeline(x))
                    np.testing.assert_array_equal(result.numpy(), (x * 2 + 1) * 3 + 1)

            return work

        together(*(run(1000 * i) for i in range(3)))


def test_handles_may_die_in_any_thread() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        base = used(device)
        handles = [one(a(integers(start=i))) for i in range(20)]

        def drop() -> None:
            while handles:
                handles.pop()

        def work() -> None:
            for i in range(20):
                x = integers(start=i)
                np.testing.assert_array_equal(one(a(x)).numpy(), x * 2 + 1)

        together(drop, work)
        assert used(device) == base


def test_reports_beside_eight_computing_threads_are_of_one_moment_and_do_not_wait() -> None:
    with stitch.open_device("tiny", window=3) as device:
        programs = [device.load(scaled(n, 2.0, placement=("input.x.space=l1",))) for n in "ab"]
        pipeline, computing, enough = stitch.Pipeline(programs[:1]), 8, 9
        looked: list[int] = []

        def compute(offset: int) -> Callable[[], None]:
            def work() -> None:
                nonlocal computing
                i = 0
                # At least so often, and until somebody has looked often enough meanwhile.
                while i < 150 or (len(looked) < enough and i < 6000):
                    # Shapes of plans vary, so that there are always new ones.
                    held = [one(programs[k % 2](integers(start=i))) for k in range(i % 4)]
                    x = integers(start=offset + i)
                    np.testing.assert_array_equal(one(pipeline(x)).numpy(), x * 2 + 1)
                    if i % 5 == offset % 5:
                        device.to_layout(device.tensor(integers((1 + i, 8 + offset % 7))), DRAM)
                    del held[:1]
                    i += 1
                computing -= 1

            return work

        def look() -> None:
            while computing:
                account = device.account()
                assert account.total.copies == account.writes_seen
                assert account.total.nbytes == account.nbytes_seen
                assert device.explain().startswith("tiny: ")
                views = device.memory_views()
                for view in views.values():
                    taken = sum(e["size"] for e in view["block_table"] if e["allocated"])
                    assert taken == view["total_bytes_allocated_per_bank"]
                device.memory_report()
                assert all(times for _, times in device.account().plans)
                tensor = one(programs[0](integers()))
                assert repr(tensor) and tensor.layout and tensor.address is not None
                looked.append(1)

        together(look, *(compute(100 * i) for i in range(8)))
        # Nobody who looks is kept waiting until the others are done.
        assert len(looked) >= enough
