"""What expressions on symbolic tensors mean, compared with NumPy on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stitch.graph import trace
from stitch.program import Array

Run = Callable[..., dict[str, Array]]
F = Callable[..., Any]

A = np.array([[1.5, -2.0, 3.25], [0.5, 4.0, -1.0]], np.float32)
B = np.array([[2.0, 0.5, -1.5], [1.0, -3.0, 2.0]], np.float32)
I = np.array([[7, -7, 5], [-5, 9, 0]], np.int32)  # noqa: E741
J = np.array([[2, 2, -3], [-3, 4, 5]], np.int32)
W = np.arange(12, dtype=np.float32).reshape(3, 4) / 7

TWO_FLOATS: dict[str, F] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "floor_divide": lambda x, y: x // y,
    "modulo": lambda x, y: x % y,
    "power": lambda x, y: abs(x) ** y,
    "scalar_right": lambda x, y: x * 2 - 1.5,
    "scalar_left": lambda x, y: 1 - (2.0 / y) + 3 * x,
    "reflected_power": lambda x, y: 2.0**y,
    "reflected_floor_divide": lambda x, y: 5 // y,
    "reflected_modulo": lambda x, y: 5 % y,
    "negative_positive": lambda x, y: -x + (+y),
    "matmul": lambda x, y: x @ y.T,
    "matmul_with_array": lambda x, y: x @ W,
    "array_on_the_left": lambda x, y: W.T @ x.T,
    "array_minus_tensor": lambda x, y: B - x,
    "comparisons": lambda x, y: (x < y) | (x >= 3.0) & (y != 0.5) ^ (x == 1.5),
    "more_comparisons": lambda x, y: ~(x > y) & (x <= y),
    "sum": lambda x, y: x.sum() + y.sum(0, keepdims=True),
    "mean_max_min_prod": lambda x, y: x.mean(-1) + y.max(1) - x.min(1) * y.prod((1,)),
    "var": lambda x, y: x.var(1),
    "argmax": lambda x, y: x.argmax(1) + y.argmin(1) + x.argmax(),
    "reshape": lambda x, y: x.reshape(3, -1) + y.reshape((3, 2)),
    "transpose": lambda x, y: x.transpose(1, 0) + y.transpose(),
    "swapaxes": lambda x, y: x.swapaxes(0, 1),
    "ravel": lambda x, y: x.ravel() + y.flatten(),
    "astype": lambda x, y: x.astype(np.float64),
    "iteration": lambda x, y: sum(row for row in x) + len(y),
    "size_and_ndim": lambda x, y: x * x.size + y.ndim,
}


@pytest.mark.parametrize("name", TWO_FLOATS)
def test_an_expression_on_floats_means_what_numpy_means(name: str, run: Run) -> None:
    f = TWO_FLOATS[name]
    expected = np.asarray(f(A, B))
    found = run(trace(f, A, B), A, B)["output"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


INTEGERS: dict[str, F] = {
    "floor_divide": lambda x, y: x // y,
    "modulo": lambda x, y: x % y,
    "bitwise": lambda x, y: (x & y) | (x ^ 3),
    "invert": lambda x, y: ~x,
    "scalar": lambda x, y: 3 * x - y * 2,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_an_expression_on_integers_means_what_numpy_means(name: str, run: Run) -> None:
    f = INTEGERS[name]
    found = run(trace(f, I, J), I, J)["output"]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, f(I, J))


def test_floor_division_of_unsigned_integers_rounds_down(run: Run) -> None:
    x, y = np.array([7, 8, 255], np.uint8), np.array([2, 3, 16], np.uint8)
    np.testing.assert_array_equal(run(trace(lambda a, b: a // b, x, y), x, y)["output"], x // y)


C = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
PICK = np.array([[0, 2], [-1, 1]])
KEYS: dict[str, Any] = {
    "integer": 1,
    "negative_integer": -1,
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "backwards_from": slice(3, None, -2),
    "to_the_left_of_the_start": slice(2, -9, -1),
    "empty": slice(3, 1),
    "ellipsis": (Ellipsis, 2),
    "ellipsis_in_the_middle": (0, Ellipsis, slice(1, 4)),
    "new_axis": None,
    "new_axes_between": (slice(None), None, 1, None, slice(0, 2)),
    "new_axis_at_the_end": (Ellipsis, None),
    "all_integers": (1, 2, 3),
    "list": [2, 0, 0],
    "list_on_a_later_axis": (slice(1, 3), [4, 0]),
    "index_matrix": (slice(None), PICK, slice(0, 2)),
    "index_matrix_and_new_axis": (slice(None), PICK, None),
    "constant_mask": np.array([True, False, True, True]),
    "nothing": (),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_selects_what_it_selects_from_an_array(name: str, run: Run) -> None:
    key = KEYS[name]
    found = run(trace(lambda x: x[key] * 1, C), C)["output"]
    assert found.shape == C[key].shape
    np.testing.assert_array_equal(found, C[key])


def test_a_symbolic_index_gathers(run: Run) -> None:
    index = np.array([3, 0], np.int64)
    found = run(trace(lambda x, i: x[:, i], C, index), C, index)["output"]
    np.testing.assert_array_equal(found, C[:, index])


def test_infinities_and_nan_are_numbers_of_any_floating_type(run: Run) -> None:
    x = A.astype(np.float16)
    graph = trace(lambda t: (t + float("inf"), t * float("nan"), t - np.float64("inf")), x)
    high, none, low = run(graph, x).values()
    assert np.isposinf(high).all()
    assert np.isnan(none).all()
    assert np.isneginf(low).all()
