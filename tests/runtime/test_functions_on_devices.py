"""Host functions on a device: access rights, order, failures."""

from __future__ import annotations

import gc
import pickle
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, TaskError, UsageError
from stitch.program import Array, DataType, TensorDesc, host_layout
from stitch.runtime import HostResult
from stitch.tasks import task
from tests.support.stitched_models import one, scaled, several, tiny, used

SHAPE = (4, 64)
DESC = TensorDesc(SHAPE, host_layout(DataType.FLOAT32))
X = np.arange(256, dtype=np.float32).reshape(SHAPE)
MACHINES = ("host", "tiny")


@task(returns=DESC)
def double(x: Array) -> Array:
    return x * 2


@task(returns=DESC, writes="out")
def subtract(x: Array, y: Array, out: Array) -> None:
    np.subtract(x, y, out=out)


@task(updates="x")
def increment(x: Array, by: float = 1.0) -> None:
    x += by


@task(returns=DESC, writes="out")
def blend(x: Array, by: float, y: Array, out: Array, plus: float = 0.0) -> None:
    np.add(x * by, y + plus, out=out)


@task()
def named(name: str, *more: Any) -> tuple[Any, ...]:
    return (name, *more)


# -- arrays by permission --------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("window", (1, 8, 64))
def test_reads_writes_updates_between_programs(machine: str, window: int) -> None:
    binary = scaled("a", 3.0, target="tiny" if machine == "tiny" else "host")
    with stitch.open_device(machine, window=window) as device:
        a = device.load(binary)
        y = a(X)
        z = device.call(subtract, device.call(double, y), X)
        w = one(device.call(increment, z, by=2.0))
        assert w.is_pending is (window > 1)
        np.testing.assert_array_equal(one(a(w)).numpy(), ((3 * X + 1) * 2 - X + 2) * 3 + 1)
        assert not one(z).is_allocated and one(y).is_allocated


def test_what_is_read_is_not_written() -> None:
    @task(returns=DESC)
    def scribble(x: Array) -> Array:
        x += 1
        return x

    with stitch.open_device("host") as device:
        x = device.tensor(X)
        with pytest.raises(ValueError, match="read-only"):
            one(device.call(scribble, x)).numpy()
        np.testing.assert_array_equal(x.numpy(), X)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_read_cannot_be_made_writable(machine: str) -> None:
    """It changed the tensor that the function read: silently wrong values."""

    @task(returns=DESC)
    def insist(x: Array) -> Array:
        x.flags.writeable = True
        x += 100
        return x

    with stitch.open_device(machine) as device:
        x = device.tensor(X)
        for _ in range(2):
            with pytest.raises(ValueError, match="WRITEABLE"):
                one(device.call(insist, x)).numpy()
        np.testing.assert_array_equal(x.numpy(), X)


def test_an_argument_that_a_function_passes_on_is_captured() -> None:
    """It is read-only, and yet its bytes are the device's, which change."""
    kept = []

    @task(reads="x")
    def give_on(x: Array) -> None:
        kept.append(one(device.call(double, x)))

    with stitch.open_device("host", window=8) as device:
        x = device.tensor(X)
        device.call(give_on, x)
        device.wait()
        device.write(x, X + 7)
        np.testing.assert_array_equal(kept[0].numpy(), X * 2)


def test_an_array_is_captured_at_the_call() -> None:
    with stitch.open_device("host") as device:
        given = X.copy()
        y = one(device.call(double, given))
        given[:] = 0
        np.testing.assert_array_equal(y.numpy(), X * 2)
        z = one(device.call(increment, given))
        np.testing.assert_array_equal(z.numpy(), np.ones(SHAPE, np.float32))
        assert not given.any()


def test_an_update_comes_after_those_that_read_before() -> None:
    with stitch.open_device("tiny") as device:
        x = device.tensor(X)
        before = device.call(double, x)
        after = one(device.call(increment, x))
        again = one(device.call(increment, after))
        np.testing.assert_array_equal(one(before).numpy(), X * 2)
        np.testing.assert_array_equal(again.numpy(), X + 2)
        with pytest.raises(TaskError, match="donated to 'increment'"):
            x.numpy()


def test_a_result_has_the_described_layout() -> None:
    binary = scaled("a", 3.0, placement=("input.x.space=l1", "output.y.space=l1"))
    with stitch.open_device("tiny") as device:
        a = device.load(binary)
        in_l1 = a.program.input_desc(0)

        @task(returns=in_l1)
        def ramp() -> Array:
            return X

        x = one(device.call(ramp))
        assert x.layout == in_l1.layout.without_address()
        np.testing.assert_array_equal(one(a(x)).numpy(), 3 * X + 1)
        assert any("to_layout" in line for line in device.explain().splitlines())


def test_blocks_are_read_as_float32() -> None:
    with stitch.open_device("tiny") as device:
        layout = device.tensor(np.ones((32, 32), np.float32)).layout
        x = device.tensor(np.full((32, 32), 2, np.float32))
        blocks = x.to_layout(
            stitch.Layout(DataType.BFP8, stitch.Space.DRAM, (32, 32), layout.memory_layout)
        )
        desc = TensorDesc((32, 32), host_layout(DataType.FLOAT32))
        kind = task(returns=desc)(lambda x: x + np.float32(x.dtype == np.float32))
        np.testing.assert_array_equal(one(device.call(kind, blocks)).numpy(), 3)


# -- what has no descriptor ------------------------------------------------------------------------


def test_results_are_handed_on_before_they_are_there() -> None:
    with stitch.open_device("host") as device:
        first = device.call(named, "first", 1)
        second = device.call(named, "second", first, first)
        assert isinstance(second, HostResult) and second.is_pending
        assert second.result() == ("second", ("first", 1), ("first", 1))
        assert repr(first) == "<HostResult of named ready>"
        with pytest.raises(TypeError, match="cannot pickle a HostResult"):
            pickle.dumps(first)


def test_repeated_calls_share_one_plan_for_all_arguments() -> None:
    with stitch.open_device("host") as device:
        x = device.tensor(X)
        for i in range(40):
            y = one(device.call(increment, device.call(double, x), by=float(i)))
            np.testing.assert_array_equal(y.numpy(), X * 2 + i)
        for i in range(40):
            assert device.call(named, "n", i).result() == ("n", i)
        for i in range(3):
            y = one(device.call(blend, x, float(i), X + i, 2.0))
            np.testing.assert_array_equal(y.numpy(), X * i + X + i + 2)
            y = one(device.call(blend, X, 3.0, x))
            np.testing.assert_array_equal(y.numpy(), X * 4)
        # The first brings x into a space.
        assert device.statistics().plans_made == 5


def test_the_null_executor_calls_nothing() -> None:
    with stitch.open_device("tiny", executor="null") as device:
        result = device.call(named, "x")
        device.call(double, X)
        device.wait()
        with pytest.raises(TaskError, match="null executor computes no data"):
            result.result()


# -- failures --------------------------------------------------------------------------------------


def failing(x: Array) -> Array:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rounds", (1, 5))
def test_a_failure_keeps_its_traceback_and_stops_only_what_depends_on_it(
    machine: str, rounds: int
) -> None:
    fails = task(returns=DESC)(failing)
    with stitch.open_device(machine) as device:
        x = device.tensor(X)
        one(device.call(double, x)).numpy()
        before = used(device)
        for _ in range(rounds):
            independent = one(device.call(double, x))
            failed = one(device.call(fails, x))
            dependent = one(device.call(double, failed))
            late = one(device.call(double, x))
            objects = device.call(named, "kept")
            with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
                device.wait()
            assert "in failing" in "".join(traceback.format_tb(caught.value.__traceback__))
            assert any("host function 'failing'" in note for note in caught.value.__notes__)
            np.testing.assert_array_equal(independent.numpy(), X * 2)
            np.testing.assert_array_equal(late.numpy(), X * 2)
            assert objects.result() == ("kept",)
            with pytest.raises(TaskError, match="task 'failing' failed: on purpose"):
                failed.numpy()
            with pytest.raises(TaskError, match="task 'double' was cancelled"):
                dependent.numpy()
            del independent, failed, dependent, late, objects, caught
        assert used(device) == before


class Log:
    """Host functions that note their names, one of which fails."""

    def __init__(self) -> None:
        self.called: list[str] = []

        @task(returns=DESC)
        def fail(x: Array) -> Array:
            self.called.append("fail")
            raise ZeroDivisionError("on purpose")

        @task(returns=DESC)
        def plus_one(x: Array, *objects: object) -> Array:
            self.called.append("plus one")
            return x + 1

        self.fail, self.plus_one = fail, plus_one


def test_what_is_to_be_updated_by_a_task_that_fails_is_read_before() -> None:
    log = Log()

    @task(updates="x")
    def update(x: Array, y: Array) -> None:
        x += y

    with stitch.open_device("tiny", window=64) as device:
        x = device.tensor(X)
        failed = device.call(log.fail, X)
        read = device.call(log.plus_one, x)
        updated = device.call(update, x, failed)
        with pytest.raises(ZeroDivisionError):
            device.wait()
        assert log.called == ["fail", "plus one"]
        np.testing.assert_array_equal(one(read).numpy(), X + 1)
        with pytest.raises(TaskError):
            one(updated).numpy()


def test_a_failed_object_cancels_its_readers() -> None:
    fails = task(name="opens")(lambda path: Path(path).read_text())
    with stitch.open_device("host", window=64) as device:
        opened = device.call(fails, "/there/is/nothing")
        counted = device.call(named, "count", opened)
        again = device.call(named, "again", counted)
        other = device.call(named, "other")
        with pytest.raises(FileNotFoundError):
            counted.result()
        assert other.result() == ("other",)
        for result in (opened, counted, again):
            with pytest.raises(TaskError, match=r"has no result.*\n.*opens"):
                result.result()
        with pytest.raises(TaskError, match="is a result that failed"):
            device.call(named, "late", opened)


@pytest.mark.parametrize(
    ("wrong", "said"),
    (
        (lambda x: x[:1], r"wrong shape or type.*\n.*\[4, 64\] float32.*\n.*\[1, 64\]"),
        (lambda x: x.astype(np.float64), r"wrong shape or type.*\n.*\n.*float64"),
        (lambda x: (x, x), "wrong shape or type"),
        (lambda x: None, r"returned None.*\n.*\[4, 64\] float32"),
        (lambda x: "four", "wrong shape or type"),
    ),
)
def test_what_is_returned_must_fit(wrong: Callable[[Array], object], said: str) -> None:
    with stitch.open_device("tiny") as device:
        y = one(device.call(task(returns=DESC)(wrong), X))
        with pytest.raises(TaskError, match=said):
            y.numpy()


def test_several_results_fit_all_or_none() -> None:
    both = task(returns=(DESC, DESC), writes="out")

    def two(x: Array, out: Array) -> tuple[Array, Array]:
        return x, x

    def halves(x: Array, out: Array) -> Array:
        out[:] = x
        return x[:2]

    with stitch.open_device("host") as device:
        first, second = several(device.call(both(halves), X))
        with pytest.raises(TaskError, match="wrong shape"):
            device.wait()
        for result in (first, second):
            with pytest.raises(TaskError, match="wrong shape"):
                result.numpy()
        first, second = several(device.call(both(two), X))
        with pytest.raises(TaskError, match="wrong shape"):
            device.wait()
        both_returned = task(returns=(DESC, DESC))
        first, second = several(device.call(both_returned(lambda x: (x,)), X))
        with pytest.raises(TaskError, match="returned 1 result, expected 2"):
            device.wait()


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("says nothing")


def test_an_exception_without_text_cancels_only_dependants() -> None:
    @task(returns=DESC)
    def fails(x: Array) -> Array:
        raise Unsayable

    with stitch.open_device("host") as device:
        failed, other = one(device.call(fails, X)), one(device.call(double, X))
        with pytest.raises(Unsayable):
            device.wait()
        np.testing.assert_array_equal(other.numpy(), X * 2)
        with pytest.raises(TaskError, match="task 'fails' failed: Unsayable"):
            failed.numpy()


def test_results_in_a_list_are_refused() -> None:
    with stitch.open_device("host") as device:
        first = device.call(named, "first")
        with pytest.raises(UsageError, match=r"a list that contains res.*\n.*: \*results$"):
            device.call(named, "second", [first])
        with pytest.raises(UsageError, match=r"a dict that contains res.*\n.*: \*\*results$"):
            device.call(named, "second", {"first": first})


def test_results_of_a_device_closed_after_an_error_say_so() -> None:
    kept: list[Any] = []
    with pytest.raises(KeyError), stitch.open_device("host") as device:
        kept += [device.call(named, "x")]
        raise KeyError("outside")
    with pytest.raises(TaskError, match="closed after an error"):
        kept[0].result()


# -- coming in again -------------------------------------------------------------------------------


def test_a_host_function_queues_what_runs_after_it() -> None:
    with stitch.open_device("tiny", window=4) as device:
        a = device.load(scaled("a", 3.0))
        made: list[stitch.Tensor] = []

        @task()
        def spread(x: Array) -> None:
            for _ in range(10):
                made.append(one(a(x)))
                made.append(one(device.call(double, made[-1])))

        device.call(spread, X)
        device.wait()
        assert not any(tensor.is_pending for tensor in made)
        for first, second in zip(made[::2], made[1::2], strict=True):
            np.testing.assert_array_equal(first.numpy(), 3 * X + 1)
            np.testing.assert_array_equal(second.numpy(), 6 * X + 2)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_pending_result_is_not_read_inside(machine: str) -> None:
    errors: list[Exception] = []
    with stitch.open_device(machine) as device:

        @task(returns=DESC)
        def asks(x: Array) -> Array:
            pending = one(device.call(double, x))
            own = outside["own"]
            for ask in (pending.numpy, own.numpy, device.wait, device.flush, device.close):
                try:
                    ask()
                except StitchError as error:
                    errors.append(error)
            return x

        outside = {"own": device.tensor(X)}
        outside["own"] = one(device.call(asks, X))
        np.testing.assert_array_equal(outside["own"].numpy(), X)
        assert len(errors) == 5
        assert all("inside a host function running on device" in str(error) for error in errors)
        outside.clear()


# -- bad calls -------------------------------------------------------------------------------------


def test_bad_calls_say_what_is_wrong() -> None:
    with stitch.open_device("host") as device, stitch.open_device("host") as other:
        theirs, result = other.tensor(X), other.call(named, "x")
        with pytest.raises(UsageError, match="tensor of another device"):
            device.call(double, theirs)
        for _ in range(2):
            with pytest.raises(UsageError, match="result of another device"):
                device.call(named, result)
            # From now on the device knows what runs it.
            assert device.call(named, "y").result() == ("y",)
        with pytest.raises(UsageError, match="takes a host function"):
            device.call(failing, X)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'double' cannot be called like this"):
            device.call(double)
        with pytest.raises(UsageError, match="updates x"):
            device.call(increment, 3)
        mine = one(device.call(double, X))
        mine.settle()
        view = mine[:2]
        with pytest.raises(TaskError, match="is donated, but views share it"):
            device.call(increment, mine)
        del view
        assert device.statistics().batches == 3
    with pytest.raises(TaskError, match="closed"):
        device.call(double, X)


def test_functions_that_come_and_go_are_forgotten() -> None:
    with stitch.open_device(tiny()) as device:
        functions = list[weakref.ref[Any]]()
        for i in range(20):
            function = lambda x, i=i: x + i  # noqa: E731
            functions.append(weakref.ref(function))
            y = one(device.call(task(returns=DESC)(function), X))
            assert y.numpy()[0, 0] == i
            del function
        device.drain()
        gc.collect()
        assert not any(each() for each in functions)
