"""Which rows a program reads of a nest: runs as they are, equal distances as windows, else a list;
and parts that are alike are one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.fractal.modes import Parallel, current_mode

DATA = np.arange(48, dtype=np.float32).reshape(24, 2)
ACCESSES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "whole": (lambda xs: xs, None),
    "run": (lambda xs: xs[3:9], "Slice"),
    "listed run": (lambda xs: xs[[5, 6, 7]], "Slice"),
    "one": (lambda xs: xs[7:8], "Slice"),
    "every third": (lambda xs: xs[1::3], "Window"),
    "backwards": (lambda xs: xs[::-1], "Window"),
    "listed steps": (lambda xs: xs[[9, 7, 5]], "Window"),
    "slide": (lambda xs: ops.slide(xs, 3), "Window"),
    "apart": (lambda xs: ops.slide(xs, 4, stride=4), None),
    "dilated slide": (lambda xs: ops.slide(xs, 3, dilation=2, stride=2), "Window"),
    "dilate": (lambda xs: ops.dilate(xs, 4), "Window"),
    "slides of slides": (lambda xs: ops.slide(ops.slide(xs, 3), 2), "Window"),
    "repeat": (lambda xs: ops.repeat(xs, 3), "Window"),
    "any": (lambda xs: xs[[5, 2, 2, 11]], "Gather"),
    "padded": (lambda xs: ops.slide(xs, 3, padding=1, padding_value=np.ones(2, np.float32)),
               "Gather"),
    "none": (lambda xs: xs[4:4], "Slice"),
}  # fmt: skip


def twice(x: Any) -> Any:
    return x + x if not isinstance(x, FractalTensor) else ops.map(twice, x)


@pytest.mark.parametrize("name", ACCESSES)
def test_rows_are_read_as_they_lie(name: str) -> None:
    access, wanted = ACCESSES[name]
    if name == "none":  # A loop over nothing there is none: the nest itself is asked for.
        made = ops.compile(lambda xs: access(xs), FractalTensor(DATA))
    else:
        made = ops.compile(lambda xs: ops.map(twice, access(xs)), FractalTensor(DATA))
    operators = {o.op for o in made.graph.operations} & {"Slice", "Window", "Gather"}
    assert operators == ({wanted} if wanted else set())
    found, rows = made(FractalTensor(DATA)), access(FractalTensor(DATA))
    assert found.numel == rows.numel
    factor = 1 if name == "none" else 2
    np.testing.assert_array_equal(
        np.asarray(found.leaves()).reshape(-1, 2), factor * np.asarray(rows.leaves())
    )


def test_a_compiled_function_takes_nests_and_tensors_in_any_order() -> None:
    xs, w = FractalTensor(DATA), np.array([[1, 2], [3, 4]], np.float32)
    for function, given in (
        (lambda xs, w: ops.map(lambda x: x @ w, xs), (xs, w)),
        (lambda w, xs: ops.map(lambda x: x @ w, xs), (w, xs)),
    ):
        np.testing.assert_array_equal(ops.compile(function, *given)(*given).numpy(), DATA @ w)


@pytest.fixture
def programs() -> Any:
    """How many programs a device has for what ran in parallel."""
    with stitch.open_device("host", executor="numpy") as device, ops.mode("parallel", device):
        way = current_mode()
        assert isinstance(way, Parallel)
        yield lambda: len(way._programs)


def test_parts_of_equal_length_are_one_program(programs: Callable[[], int]) -> None:
    xs, weight = FractalTensor(DATA), np.float32(2)
    for begin in range(20):
        found = ops.map(lambda x, w: x * w, xs[begin : begin + 4], w=weight)
        np.testing.assert_array_equal(found.numpy(), 2 * DATA[begin : begin + 4])
    assert programs() == 1
    for begin in range(10):
        found = ops.map(lambda x: x + x, xs[begin + 8 : begin : -2])
        np.testing.assert_array_equal(found.numpy(), 2 * DATA[begin + 8 : begin : -2])
    assert programs() == 2
    for begin in range(18):
        part = ops.slide(xs[begin : begin + 6], 3)
        found = ops.map(lambda window: ops.map(lambda x: x + x, window), part)
        rows = begin + np.arange(4)[:, None] + np.arange(3)
        np.testing.assert_array_equal(found.numpy(), 2 * DATA[rows])
    assert programs() == 3


def test_two_parts_of_one_nest_keep_apart(programs: Callable[[], int]) -> None:
    xs = FractalTensor(DATA)
    for a, b in ((0, 5), (5, 0), (2, 9), (7, 7)):
        found = ops.map(lambda x, y: x - 2 * y, ops.zip(xs[a : a + 4], xs[b : b + 4]))
        np.testing.assert_array_equal(found.numpy(), DATA[a : a + 4] - 2 * DATA[b : b + 4])
    assert programs() == 2  # where both begin at one row there is but one part
