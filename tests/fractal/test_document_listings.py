"""The listings of FractalTensor's page on parallel functions run as they stand, in every mode.

What the page leaves open with dots is filled in; names of arguments, their order and how results
are taken apart are the page's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3), np.float32)


@pytest.fixture(autouse=True, params=MODES)
def within(request: pytest.FixtureRequest) -> Iterator[None]:
    """A mode, on a device that computes with NumPy."""
    with (
        stitch.open_device("host", executor="numpy") as device,
        ops.mode(request.param, device=device),
    ):
        yield


def test_map_applies_to_the_outermost_depth() -> None:
    itr = FractalTensor([[X, X, X, X], [X, X]])

    def f(xs: Any) -> Any:
        return ops.fold(lambda s, x: s + x, xs)

    found = ops.map(f, itr=itr)
    assert np.allclose(found.numpy(), [f(FractalTensor([X, X, X, X])), f(FractalTensor([X, X]))])


def test_forall_applies_to_elements_at_all_depths() -> None:
    def f(x: Any) -> Any:
        return x * 2

    found = ops.forall(f, itr=FractalTensor([[X, X, X, X], [X, X]]))
    assert found.width_by_depth(1) == [4, 2]
    assert all(np.array_equal(leaf, 2 * X) for row in found for leaf in row)


def test_the_signatures_of_the_page() -> None:
    xs, xss = FractalTensor([1, 2, 3, 4]), FractalTensor([[1, 2], [3]])

    def of_two(a: Any, b: Any, scale: Any = 1) -> Any:
        return a - b * scale

    def even(x: Any, by: Any = 2) -> Any:
        return x % by == 0

    assert ops.filter(predicate=even, itr=xs).tolist() == [2, 4]
    assert ops.filter(even, xs, by=3).tolist() == ops.filter(even, xs, 3).tolist() == [3]
    assert ops.filterall(predicate=even, itr=xss).tolist() == [[2], []]
    # f, itr, initializer, *args, **kwargs
    assert int(ops.reduce(f=lambda a, b: a + b, itr=xs, initializer=10)) == 20
    assert ops.scanl(f=of_two, itr=xs, initializer=10).tolist() == [9, 7, 4, 0]
    assert ops.scanr(f=of_two, itr=xs, initializer=10).tolist() == [0, 1, 3, 6]
    assert ops.scanl(of_two, xs, 10, 2).tolist() == [8, 4, -2, -10]
    assert int(ops.foldl(f=of_two, itr=xs, initializer=10, scale=2)) == -10
    assert int(ops.foldr(f=of_two, itr=xs, initializer=10)) == 0


def test_a_user_function_that_is_not_unary() -> None:
    xs, ys, zs = (FractalTensor(RANDOM.standard_normal((4, 3), np.float32)) for _ in range(3))

    def f(*inputs: Any) -> Any:
        x, y, z = inputs
        rv = x * y + z
        return rv  # noqa: RET504  # as the page has it

    rvs = ops.map(f, ops.zip(xs, ys, zs))
    assert np.allclose(rvs.numpy(), xs.numpy() * ys.numpy() + zs.numpy())


def test_a_user_function_with_multiple_returned_values() -> None:
    length, hidden = 4, 3
    wx, wy = RANDOM.standard_normal((2, hidden, hidden), np.float32)
    ux, uy = RANDOM.standard_normal((2, hidden, 2 * hidden), np.float32)
    rnn_param_x, rnn_param_y = (wx, ux), (wy, uy)
    x, y, above = RANDOM.standard_normal((3, length, hidden), np.float32)

    def vanilla_cell(cur: Any, state: Any, rnn_param: Any) -> Any:
        i2h, h2h = rnn_param
        return ops.tanh(i2h @ cur + h2h @ state)

    def grid_cell(state: Any, state_x: Any, x_t: Any, y_t: Any) -> Any:
        _, state_y = state
        s = ops.cat(state_x, state_y, axis=0)
        h_x = vanilla_cell(x_t, s, rnn_param_x)
        h_y = vanilla_cell(y_t, s, rnn_param_y)
        return h_x, h_y

    zero = np.zeros(hidden, np.float32)
    row = ops.zip(FractalTensor(above), FractalTensor(x), FractalTensor(y))
    h_xs, h_ys = ops.scan(grid_cell, row, (zero, zero))

    assert isinstance(h_xs, FractalTensor) and isinstance(h_ys, FractalTensor)
    before = zero
    for t in range(length):
        s = np.concatenate([above[t], before])
        before = np.tanh(wy @ y[t] + uy @ s)
        np.testing.assert_allclose(h_xs[t], np.tanh(wx @ x[t] + ux @ s), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(h_ys[t], before, rtol=1e-5, atol=1e-6)
