"""Calls in mode parallel one after the other, and beside each other: nothing stale, nothing
overwritten, nothing compiled twice, nothing kept for ever, errors that leave no trace."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stitch
import stitch.compiler
from stitch import fractal as ops
from stitch.errors import CompileError, StitchError, TaskError, UsageError
from stitch.fractal import FractalTensor, modes


@pytest.fixture
def device() -> Iterator[stitch.Device]:
    with stitch.open_device("host") as opened:
        yield opened


@pytest.fixture
def within(device: stitch.Device) -> Iterator[stitch.Device]:
    with ops.mode("parallel", device=device):
        yield device


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled in mode parallel."""
    graphs: list[Any] = []
    compile_graph = stitch.compiler.compile_graph

    def noted(graph: Any, *rest: Any) -> Any:
        graphs.append(graph)
        return compile_graph(graph, *rest)

    monkeypatch.setattr("stitch.fractal.modes.compile_graph", noted)
    return graphs


@pytest.mark.usefixtures("within")
def test_results_stay_when_others_come() -> None:
    xs = FractalTensor([[1.0, 2.0], [3.0, 4.0]])

    def scan(xs: FractalTensor) -> Any:
        return ops.map(lambda row: ops.scan(lambda s, x: s + x, row), xs)

    whole = ops.compile(scan, xs)
    first, early = scan(xs), whole(xs)
    for k in range(5):
        scan(ops.forall(lambda x, k=k: x * k, xs))
        whole(FractalTensor([[0.0, k], [k, 0.0]], dtype="float32"))
    assert first.tolist() == early.tolist() == [[1.0, 3.0], [3.0, 7.0]]


@pytest.mark.usefixtures("within")
def test_functions_that_ask_for_whole_numbers_get_them() -> None:
    for numbers in ([1, 2, 3], [4, 5, 6]):
        xs = FractalTensor(numbers)
        assert ops.map(lambda x: x if x % 2 else x * 10, xs).tolist() == [
            x if x % 2 else x * 10 for x in numbers
        ]
        assert ops.scan(lambda s, x: s + x if x > 2 else s, xs, 0).tolist()[-1] == sum(
            x for x in numbers if x > 2
        )
        found = ops.map(lambda x, at: x * at[1], xs, FractalTensor([7, numbers[0]]))
        assert found.tolist() == [x * numbers[0] for x in numbers]


def test_weights_that_are_replaced_do_not_pile_up(
    device: stitch.Device, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]
) -> None:
    nbytes = 64 * 1024 * 4
    monkeypatch.setattr(modes, "MAX_CONSTANT_NBYTES", 3 * nbytes)
    xs, used = FractalTensor(np.ones((2, 64), np.float32)), []
    with ops.mode("parallel", device=device):
        for k in range(12):
            weights = np.full((64, 1024), k, np.float32)
            assert ops.map(lambda x, w=weights: np.max(x @ w), xs).tolist() == [64.0 * k] * 2
            used.append(sum(space.used_nbytes for space in device.memory_use().values()))
    assert len(compiled) == 12
    assert nbytes < max(used[6:]) <= max(used[:6]) < 6 * nbytes


def test_threads_share_a_device(device: stitch.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "MAX_PROGRAMS", 3)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(12):
                length = (number + turn) % 5 + 2
                with ops.mode("parallel", device=device):
                    found = ops.scan(
                        lambda s, x: s + x * number, FractalTensor(list(range(length)))
                    )
                assert found.tolist() == [number * sum(range(k + 1)) for k in range(length)]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.usefixtures("within")
def test_an_error_of_a_function_leaves_nothing_behind() -> None:
    xs = FractalTensor([[1.0, 2.0], [3.0, 4.0]])

    def broken(s: Any, x: Any) -> Any:
        raise ArithmeticError("mine")

    def double(xs: FractalTensor) -> Any:
        return ops.forall(lambda x: x * 2, xs)

    for _ in range(2):
        with pytest.raises(ArithmeticError, match="mine"):
            ops.map(lambda row: ops.scan(broken, row), xs)
        assert double(xs).tolist() == [[2.0, 4.0], [6.0, 8.0]]
        with pytest.raises(UsageError, match="must return tensors, numbers"):
            ops.map(lambda row: ops.map(lambda x: None, row), xs)
        assert double(xs).tolist() == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("name", ["parallel", "sequential"])
def test_tensors_that_escape_are_told(device: stitch.Device, name: str) -> None:
    xs, escaped = FractalTensor([1.0, 2.0]), list[Any]()

    def keep(x: Any) -> Any:
        escaped.append(x)
        return x + 1

    with ops.mode("parallel", device=device):
        assert ops.map(keep, xs).tolist() == [2.0, 3.0]
    with ops.mode(name, device=device):
        uses: list[Callable[[], Any]] = [
            lambda: escaped[0] + 1, lambda: ops.map(lambda x: x + escaped[0], xs),
            lambda: ops.scan(lambda s, x: s * escaped[0], xs),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(CompileError, match="used outside of the loop") as raised:
                use()
            assert raised.value.where and "needed after the loop" in str(raised.value)
        assert ops.map(lambda x: x * 2, xs).tolist() == [2.0, 4.0]


def test_two_devices_and_one_that_is_closed(device: stitch.Device) -> None:
    xs, double = FractalTensor([1.0, 2.0]), lambda x: x * 2
    with stitch.open_device("host") as other:
        with ops.mode("parallel", device=other):
            theirs = ops.map(double, xs)
        with ops.mode("parallel", device=device), pytest.raises(StitchError, match="another dev"):
            ops.map(double, theirs)
        assert other.kept
    assert not other.kept
    for name in ("parallel", "sequential"):
        with ops.mode(name, device=other), pytest.raises(TaskError, match="closed"):
            ops.map(double, xs)
    with ops.mode("parallel", device=device):
        assert ops.map(double, xs).tolist() == [2.0, 4.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_off_has_a_default_device_of_its_own() -> None:
    xs = FractalTensor([1.0, 2.0])
    assert ops.map(lambda x: x * 2, xs).tolist() == [2.0, 4.0]
    child = os.fork()
    if not child:
        try:
            os._exit(ops.map(lambda x: x * 2, xs).tolist() != [2.0, 4.0])
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("within")
def test_very_long_loops_and_nests() -> None:
    count = 100_000
    xs = FractalTensor(np.ones(count, np.int64))
    assert ops.fold(lambda s, x: s + x, xs).tolist() == count
    assert ops.scanr(lambda s, x: s + x, xs)[0].numpy() == count
    assert ops.reduce(lambda a, b: a + b, xs).tolist() == count
    rows = FractalTensor(np.ones(count, np.int64))
    wide = ops.map(lambda row: ops.fold(lambda s, x: s + x, row, 0), ops.split(rows, count // 5))
    assert wide.numpy().tolist() == [5] * (count // 5)


def test_a_function_may_close_over_what_a_call_before_gave(within: stitch.Device) -> None:
    rows = FractalTensor(np.arange(6, dtype=np.float32).reshape(3, 2))
    raised = ops.map(lambda row: row + 1, rows)
    for at in (0, 2):
        for times in (lambda row: row * raised[at], lambda row: raised[at] * row):  # noqa: B023
            expected = rows.numpy() * (rows.numpy()[at] + 1)
            np.testing.assert_array_equal(ops.map(times, rows).numpy(), expected)


def test_a_tensor_that_a_function_closes_over_is_read_in_its_trace(within: stitch.Device) -> None:
    held = within.tensor(np.ones(2, np.float32))

    def times(row: Any) -> Any:
        return row * held

    rows = FractalTensor(np.full((3, 2), 3, np.float32))
    for factor in (1, 5, 7):
        held = within.tensor(np.full(2, factor, np.float32))
        found = ops.map(lambda row: times(row), rows)
        np.testing.assert_array_equal(found.numpy(), rows.numpy() * factor)
    # The function itself is traced once, with the tensor that it reads then.
    assert ops.map(times, rows).numpy()[0, 0] == 21
    held = within.tensor(np.zeros(2, np.float32))
    assert ops.map(times, rows).numpy()[0, 0] == 21
