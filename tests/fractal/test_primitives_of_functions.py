"""Primitives of functions over nests: on tensors, on elements of rows, on nests, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.errors import UsageError
from stitch.fractal import FractalTensor

X = np.array([[-1.0, 0.5], [2.0, -0.25]], np.float32)
POWERS = np.exp(X)
ELEMENTWISE = {
    "exp": POWERS,
    "relu": np.maximum(X, 0),
    "sigmoid": 1 / (1 + np.exp(-X)),
    "softmax": POWERS / POWERS.sum(axis=1, keepdims=True),
    "tanh": np.tanh(X),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_primitives_of_one_tensor(name: str) -> None:
    primitive = getattr(ops, name)
    found = [primitive(X), *ops.map(primitive, FractalTensor([X, X]))]
    assert found[0].dtype == np.float32
    for each in found:
        np.testing.assert_allclose(np.asarray(each), ELEMENTWISE[name], rtol=1e-6)
    along = ops.softmax(X, axis=0)
    np.testing.assert_allclose(np.asarray(along), POWERS / POWERS.sum(axis=0), rtol=1e-6)
    assert ops.tanh(0.0).dtype == np.float32


def test_cat_puts_tensors_and_elements_of_rows_side_by_side() -> None:
    pairs = ops.zip(FractalTensor([[X, X + 1], [X]]), FractalTensor([X * 2, X * 3]))
    expected = np.array([np.hstack([X, X * 2]), np.hstack([X, X * 3])])
    for f in (
        lambda row, x: ops.cat(row[0], x, axis=1),
        lambda row, x: ops.cat((row[0], x), axis=1),
        lambda row, x: ops.cat([row[0], x], axis=1),
    ):
        assert np.array_equal(ops.map(f, pairs).numpy(), expected)
    assert ops.cat(X, X).shape == (4, 2)


def test_cat_of_nests_joins_them() -> None:
    xs, ys = FractalTensor([1, 2]), FractalTensor([3])
    assert ops.cat(xs, ys).tolist() == ops.cat([xs, ys]).tolist() == [1, 2, 3]
    assert [n.tolist() for n in ops.cat((xs, xs), (ys, ys))] == [[1, 2, 3]] * 2
    assert [n.tolist() for n in ops.cat(ops.zip(xs, xs), ops.zip(ys, ys))] == [[1, 2, 3]] * 2


def test_leaves_of_a_nest_become_one_tensor() -> None:
    rows = FractalTensor([[X, X + 1], [X + 2]])
    everything = np.concatenate([X, X + 1, X + 2])
    assert np.array_equal(ops.flatten(rows).numpy(), everything)
    assert np.array_equal(ops.stack(rows[0]).numpy(), np.stack([X, X + 1]))
    assert np.array_equal(ops.stack(rows[0], axis=2).numpy(), np.stack([X, X + 1], axis=2))
    sums = ops.map(lambda row: ops.stack(row).sum(axis=0) + ops.flatten(row[:1]), rows)
    assert np.array_equal(sums.numpy(), np.array([X * 3 + 1, X * 2 + 4]))
    assert ops.flatten(FractalTensor([[1, 2], [3]])).tolist() == [1, 2, 3]


def test_tensors_of_a_device_are_taken() -> None:
    with stitch.open_device("host") as device, ops.mode("sequential", device=device):
        xs = FractalTensor(device.tensor(X))
        assert np.array_equal(ops.stack(xs).numpy(), X)
        assert np.array_equal(ops.flatten(xs).numpy(), X.ravel())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda xs: ops.tanh(xs), r"tanh needs tensors[\s\S]*ops.map\(ops.tanh, xs\)"),
        (lambda xs: ops.softmax("text"), "softmax needs tensors"),
        (lambda xs: ops.cat(), "cat needs at least one tensor"),
        (lambda xs: ops.cat([]), "cat needs at least one tensor"),
        (lambda xs: ops.cat(xs, X), r"cat needs tensors only[\s\S]*ndarray"),
        (lambda xs: ops.cat(xs, xs, axis=1), r"with axis 0[\s\S]*axis 1"),
        (lambda xs: ops.stack(xs), r"nest of depth 1[\s\S]*depth 2"),
        (lambda xs: ops.stack(xs[0][:0]), "stack needs at least one tensor"),
        (lambda xs: ops.stack(xs[0], axis=2), r"axis 2 of stack[\s\S]*-1 to 0"),
        (lambda xs: ops.flatten(xs[:0]), "flatten needs at least one leaf"),
        (lambda xs: ops.flatten(X), "flatten needs a FractalTensor"),  # type: ignore[arg-type]
    ],
)
def test_what_primitives_do_not_take_is_one_clear_error(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(FractalTensor([[1.0, 2.0], [3.0]]))


def test_primitives_are_traced() -> None:
    def function(x: Any, y: Any) -> Any:
        return (
            ops.softmax(ops.cat(ops.tanh(x), y, X, axis=1))
            + ops.sigmoid(ops.stack([x, y]))[0, 0, 0]
        )

    with stitch.open_device("host") as device:
        model = device.load(stitch.compile(function, [X, X + 1], target="host"))
        found = np.asarray(model(X, X + 1))
    np.testing.assert_allclose(found, np.asarray(function(X, X + 1)), rtol=1e-6)
