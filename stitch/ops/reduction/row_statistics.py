"""Means and variances of the rows of two-dimensional arrays, for normalizations."""

from __future__ import annotations

from functools import partial

import numpy as np

from stitch.ops.definition import Thunk
from stitch.ops.steps import CHUNK_SIZE, reciprocal_step, scalar, stretches
from stitch.program import Array

#: From this many chunks of rows on, a row of weights is spread over a chunk.
SPREAD_FROM = 4
#: Longer rows are summed in pairs.
LONG_ROW = 4096


def inverse_deviation(row: Array, epsilon: float) -> list[Thunk]:
    """1 / sqrt(variance + epsilon), in place."""
    return [
        partial(np.add, row, scalar(epsilon, row), row),
        partial(np.sqrt, row, row),
        reciprocal_step(row, row),
    ]


def row_chunks(shape: tuple[int, int]) -> list[slice]:
    """Stretches of the rows of (rows, columns) arrays that stay in the caches."""
    return list(stretches(shape[0], max(1, CHUNK_SIZE // shape[1])))


def row_means(source: Array, mean: Array) -> list[Thunk]:
    """The means of the rows of a (rows, columns) array.

    A product with a column is three times as fast as a sum over short rows; long ones need the
    care for rounding that sums take.
    """
    columns = source.shape[1]
    if columns > LONG_ROW:
        count = scalar(columns, mean)
        return [
            partial(np.add.reduce, source, 1, None, mean),
            partial(np.divide, mean, count, mean),
        ]
    parts = np.full((columns, 1), 1.0 / columns, mean.dtype)
    return [partial(np.dot, source, parts, mean[:, None])]


def standardize(
    source: Array, out: Array, mean: Array, inverse: Array, epsilon: float
) -> list[Thunk]:
    """Rows of (rows, columns) arrays to mean 0 and variance 1; statistics go to (rows,) arrays."""
    count = scalar(source.shape[1], out)
    return [
        *row_means(source, mean),
        partial(np.subtract, source, mean[:, None], out),
        partial(np.vecdot, out, out, inverse),
        partial(np.divide, inverse, count, inverse),
        *inverse_deviation(inverse, epsilon),
        partial(np.multiply, out, inverse[:, None], out),
    ]
