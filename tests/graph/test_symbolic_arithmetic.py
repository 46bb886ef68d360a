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
W = np.arange(12, dtype=np.float32).reshape(3, 4) / 7

TWO_FLOATS: dict[str, F] = {
    "unequal": lambda x, y: (x != y) & ~(x == 1.5),
    "scalar_left": lambda x, y: 1 - (2.0 / y) + 3 * x,
    "reflected_power": lambda x, y: 2.0**y,
    "reflected_floor_divide": lambda x, y: 5 // y,
    "reflected_modulo": lambda x, y: 5 % y,
    "negative_positive": lambda x, y: -x + (+y),
    "matmul_with_array": lambda x, y: x @ W,
    "array_on_the_left": lambda x, y: W.T @ x.T,
    "array_minus_tensor": lambda x, y: B - x,
    "reshape": lambda x, y: x.reshape(3, -1) + y.reshape((3, 2)),
    "transpose": lambda x, y: x.transpose(1, 0) + y.transpose(),
    "swapaxes": lambda x, y: x.swapaxes(0, 1),
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


@pytest.mark.parametrize("operands", [("x", -np.inf), (-np.inf, "x"), (np.inf, 0.5)])
def test_a_condition_does_not_decide_the_type_of_numbers_beside_it(
    operands: tuple[Any, Any], run: Run
) -> None:
    def chosen(x: Any, mask: Any) -> Any:
        first, second = (x if operand == "x" else operand for operand in operands)
        return x.builder.op("Where", mask, first, second) + x

    x, mask = A, A > 0
    first, second = (x if operand == "x" else np.float32(operand) for operand in operands)
    (found,) = run(trace(chosen, x, mask), x, mask).values()
    np.testing.assert_array_equal(found, np.where(mask, first, second) + x)
