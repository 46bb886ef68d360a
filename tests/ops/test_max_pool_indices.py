"""Where the maximum of a window is: the first of several, the first NaN."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from stitch.ops import bind
from stitch.ops.windows import Windows, pool_windows
from stitch.program import Array

#: Kernel, strides, dilations: none reaches beyond, and none overlaps much.
SMALL = [
    ((2, 2), (2, 2), (1, 1)), ((3, 2), (2, 3), (1, 1)), ((1, 4), (1, 2), (1, 2)),
    ((3, 3), (3, 2), (2, 1)), ((1, 1), (2, 1), (1, 1)),
]  # fmt: skip


DEFAULTS: dict[str, Any] = {"auto_pad": "NOTSET", "ceil_mode": 0, "storage_order": 0}


def windows_over(x: Array, words: dict[str, Any]) -> Windows:
    return pool_windows({**DEFAULTS, **words}, x.shape[2:])


def found(x: Array, **attributes: Any) -> tuple[Array, Array]:
    output = windows_over(x, attributes).output
    outputs = [np.empty((*x.shape[:2], *output), kind) for kind in (x.dtype, np.int64)]
    with np.errstate(all="ignore"):
        for step in bind("MaxPool", [x], outputs, attributes=attributes):
            step()
    return outputs[0], outputs[1]


def looked_up(x: Array, **attributes: Any) -> tuple[Array, Array]:
    """One window after the other, as Python sees it."""
    windows = windows_over(x, attributes)
    values = np.empty((*x.shape[:2], *windows.output), x.dtype)
    places = np.empty(values.shape, np.int64)
    by_columns = bool(attributes.get("storage_order", 0))
    rows, columns = x.shape[2:]
    for n, c, i, j in np.ndindex(values.shape):
        best: tuple[Any, int] | None = None
        for a, b in itertools.product(*map(range, windows.kernel)):
            row = i * windows.strides[0] + a * windows.dilations[0]
            column = j * windows.strides[1] + b * windows.dilations[1]
            value = x[n, c, row, column]
            inner = column * rows + row if by_columns else row * columns + column
            if best is None or value > best[0] or (value != value and best[0] == best[0]):
                best = value, (n * x.shape[1] + c) * rows * columns + inner
        assert best is not None
        values[n, c, i, j], places[n, c, i, j] = best
    return values, places


@pytest.mark.parametrize("order", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("special", [(), (np.nan,), (np.inf, -np.inf, -0.0, 0.0)], ids=str)
@pytest.mark.parametrize("windows", SMALL, ids=str)
def test_small_windows_find_the_first_of_the_largest(
    windows: tuple[Any, ...], special: tuple[float, ...], order: int
) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-3, 3, (2, 3, 9, 11)).astype(np.float32)
    for value in special:
        x[rng.random(x.shape) < 0.2] = value
    kernel, strides, dilations = windows
    words = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    for mine, wanted in zip(
        found(x, storage_order=order, **words), looked_up(x, storage_order=order, **words),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(mine, wanted)


def test_small_windows_over_many_planes_are_looked_at_in_pieces() -> None:
    x = np.random.default_rng(4).integers(-9, 9, (40, 50, 14, 14)).astype(np.int8)
    values, places = found(x, kernel_shape=(2, 2), strides=(2, 2))
    tiled = x.reshape(40, 50, 7, 2, 7, 2)
    np.testing.assert_array_equal(values, tiled.max((3, 5)))
    np.testing.assert_array_equal(x.reshape(-1)[places], values)
    assert (np.diff(places.reshape(2000, -1)[:, 0]) > 0).all()
