"""Calls are traced once for a function object and the lengths, shapes and types of what it is
given; what a function reads from around it is as it was when it was traced, as with JAX."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from tests.support.garbage import only_of_here

FACTOR = 2.0
XS = FractalTensor([1.0, 2.0])


@pytest.fixture
def within() -> Iterator[stitch.Device]:
    with stitch.open_device("host") as device, ops.mode("parallel", device=device):
        yield device


class Runs:
    """How often functions ran: what they print is no data."""

    def __init__(self, read: pytest.CaptureFixture[str]) -> None:
        self._read = read

    def of(self, run: Callable[[], Any]) -> list[str]:
        self._read.readouterr()
        run()
        return self._read.readouterr().out.split()


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(capsys)


def printing(name: str) -> Callable[[Any], Any]:
    """A function that says that it runs."""

    def function(x: Any) -> Any:
        print(name)
        return x + 1

    return function


# When a function is traced ------------------------------------------------------------------------


def test_a_function_object_is_traced_once_and_a_new_closure_anew(
    within: stitch.Device, runs: Runs
) -> None:
    one, other = printing("one"), printing("other")
    assert runs.of(lambda: ops.map(one, XS)) == ["one"]
    assert runs.of(lambda: ops.map(one, FractalTensor([5.0, 6.0]))) == []
    assert ops.map(one, FractalTensor([5.0, 6.0])).tolist() == [6.0, 7.0]
    assert runs.of(lambda: ops.map(other, XS)) == ["other"]
    assert runs.of(lambda: ops.map(lambda x: one(x), XS)) == ["one"]
    assert runs.of(lambda: ops.map(printing("one"), XS)) == ["one"]


def test_other_lengths_types_and_shapes_are_other_traces(within: stitch.Device, runs: Runs) -> None:
    def double(x: Any) -> Any:
        print(x.dtype, x.ndim)
        return x * 2

    assert runs.of(lambda: ops.map(double, XS)) == ["float32", "0"]
    assert runs.of(lambda: ops.map(double, FractalTensor([1.0, 2.0, 3.0]))) == ["float32", "0"]
    assert runs.of(lambda: ops.map(double, FractalTensor([1, 2]))) == ["int64", "0"]
    assert runs.of(lambda: ops.map(double, FractalTensor(np.ones((2, 3))))) == ["float64", "1"]
    assert runs.of(lambda: ops.map(double, XS)) == []


def test_which_rows_a_nest_takes_is_a_part_of_its_form(within: stitch.Device) -> None:
    rows = FractalTensor(np.arange(8, dtype=np.float32).reshape(8, 1))

    def same(x: Any) -> Any:
        return x * 1

    for numbers in ([0, 3, 1], [7, 0, 2], [0, 3, 1]):
        assert ops.map(same, rows[numbers]).numpy()[:, 0].tolist() == numbers
    nest = FractalTensor([[1.0], [2.0, 3.0]])
    turned = FractalTensor([[1.0, 2.0], [3.0]])
    for each in (nest, turned, nest):
        assert ops.map(lambda row: ops.map(same, row), each).tolist() == each.tolist()


def test_arguments_count_by_value_if_numbers_or_texts_and_by_type_if_arrays(
    within: stitch.Device, runs: Runs
) -> None:
    def scaled(x: Any, by: Any) -> Any:
        print("run")
        return x * (len(by) if isinstance(by, str) else by)

    weights = np.float32(2) * np.ones(1, np.float32)
    for by, expected in ((2.0, [2.0, 4.0]), (3.0, [3.0, 6.0]), ("abcd", [4.0, 8.0])):
        call = functools.partial(ops.map, scaled, XS, by)
        assert runs.of(call) == ["run"] and runs.of(call) == []
        assert ops.map(scaled, XS, by).tolist() == expected
    runs.of(lambda: ops.map(scaled, XS, weights))
    weights[0] = 5  # It is data, and seen.
    assert runs.of(lambda: ops.map(scaled, XS, weights)) == []
    assert ops.map(scaled, XS, weights).numpy().tolist() == [[5.0], [10.0]]
    assert ops.map(scaled, XS, 0.0).tolist() == [0.0, 0.0]
    assert np.signbit(ops.map(scaled, XS, -0.0).numpy()).all()


def test_methods_of_one_object_are_one_function(within: stitch.Device, runs: Runs) -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def times(self, x: Any) -> Any:
            print("run")
            return x * self.by

    two, three = Scale(2.0), Scale(3.0)
    assert runs.of(lambda: ops.map(two.times, XS)) == ["run"]
    assert runs.of(lambda: ops.map(two.times, XS)) == []
    assert ops.map(three.times, XS).tolist() == [3.0, 6.0]
    assert ops.map(two.times, XS).tolist() == [2.0, 4.0]


def test_arguments_that_cannot_be_hashed_are_looked_at_in_each_call() -> None:
    table = {"by": 2.0}

    def scaled(x: Any, by: dict[str, float]) -> Any:
        return x * by["by"]

    with ops.mode("parallel") as report:
        for factor in (2.0, 3.0):
            table["by"] = factor
            assert ops.map(scaled, XS, table).tolist() == [factor, 2 * factor]
    assert "traced at each call, as dict cannot be hashed and may have changed" in report.explain()


def test_arguments_that_are_tensors_of_torch_are_read_in_each_call() -> None:
    weights, nested = torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def scaled(x: Any, by: Any, pair: tuple[Any, str]) -> Any:
        return x * by[1] * pair[0][0]

    with ops.mode("parallel") as report:
        for factor in (1.0, 2.0, 3.0):
            weights.fill_(factor)
            nested.fill_(10 * factor)
            wanted = [10 * factor**2, 20 * factor**2]
            assert ops.map(scaled, XS, weights, (nested, "pair")).tolist() == wanted
    assert "as elements of Tensor may have changed" in report.explain()


# What a function reads from around it -------------------------------------------------------------


def test_what_a_function_closes_over_is_as_it_was_when_it_was_traced(
    within: stitch.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, listed, array = 2.0, [2.0], np.full(1, 2.0, np.float32)

    def of_cell(x: Any) -> Any:
        return x * cell

    def of_list(x: Any) -> Any:
        return x * listed[0]

    def of_array(x: Any) -> Any:
        return (x * array)[0]

    def of_global(x: Any) -> Any:
        return x * FACTOR

    def of_default(x: Any, by: float = 2.0) -> Any:
        return x * by

    functions = (of_cell, of_list, of_array, of_global, of_default)
    for function in functions:
        assert ops.map(function, XS).tolist() == [2.0, 4.0]
    cell, listed[0] = 3.0, 3.0
    array[0] = 3.0
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    of_default.__defaults__ = (3.0,)
    for function in functions:
        assert ops.map(function, XS).tolist() == [2.0, 4.0], function.__name__
        # A new closure, another length or another type are traced, and see what is there now.
        assert ops.map(lambda x, f=function: f(x), XS).tolist() == [3.0, 6.0], function.__name__
        longer = FractalTensor([1.0, 2.0, 3.0])
        assert ops.map(function, longer).tolist() == [3.0, 6.0, 9.0], function.__name__
    with ops.mode("sequential"):
        assert ops.map(of_cell, XS).tolist() == [3.0, 6.0]


def test_a_function_that_failed_is_traced_again(within: stitch.Device) -> None:
    is_wrong = True

    def function(x: Any) -> Any:
        if is_wrong:
            raise KeyError("wrong")
        return x + 1

    with pytest.raises(KeyError, match="wrong"):
        ops.map(function, XS)
    is_wrong = False
    assert ops.map(function, XS).tolist() == [2.0, 3.0]


# What is kept -------------------------------------------------------------------------------------


def test_functions_and_what_they_close_over_are_let_go(within: stitch.Device) -> None:
    def of(number: int) -> weakref.ref[Any]:
        weights = np.full(100_000, number, np.float32)
        found = ops.map(lambda x: np.max(x * weights), XS)
        assert found.tolist() == [number, 2.0 * number]
        return weakref.ref(weights)

    with only_of_here():
        gone = [of(number) for number in range(3)]
        gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_functions_at_the_address_of_one_that_went_are_others(within: stitch.Device) -> None:
    for number in range(60):
        made = eval(f"lambda x: x * {number}")
        assert ops.map(made, XS).tolist() == [number, 2.0 * number]
        del made
