"""Rows of a value of a graph: the leaves of a nest over it, an element by a number of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.rows.index_map import Affine, Indexed
from stitch.fractal.rows.index_tree import IndexTree
from stitch.graph import SymbolicTensor
from stitch.runtime import Tensor


def leaf_rows(data: SymbolicTensor, index: Indexed) -> SymbolicTensor:
    """The leaves that an index names, one after the other: `[numel, *leaf]`."""
    builder: Any = data.builder
    index = index if isinstance(index.map, Affine) else index.narrowed()
    where, lengths, numel = index.map, index.tree.uniform, index.tree.numel
    if not isinstance(where, Affine) or lengths is None:
        rows = index.rows()
        is_whole = len(rows) == data.shape[0] and np.array_equal(rows, np.arange(len(rows)))
        found: SymbolicTensor = data if is_whole else builder.gather(data, rows)
        return found
    axes = _axes(lengths, where.strides)
    if not numel or not axes or (len(axes) == 1 and axes[0][1] == 1):
        first, last = where.base, where.base + numel
        return data if (first, last) == (0, data.shape[0]) else data[first:last]
    window = builder.window_rows(data, where.base, [s for _, s in axes], [n for n, _ in axes])
    leaves: SymbolicTensor = window.reshape(numel, *data.shape[1:])
    return leaves


def looked_up(
    data: Any, index: Indexed, number: SymbolicTensor
) -> tuple[SymbolicTensor, IndexTree | None]:
    """The element that a number of a graph names: all its leaves, and their lengths where it is a
    nest. Raises `UsageError` for what is no whole number, and lists that differ in length."""
    if number.shape or number.dtype.kind not in "iu":
        raise UsageError(
            "an element of a FractalTensor is chosen by one whole number",
            got=f"{number.dtype}{list(number.shape)}",
            remedy="map over several numbers: ops.map(lambda i: xs[i], numbers)",
        )
    lengths = index.tree.uniform
    if lengths is None:
        raise UsageError(
            "of lists that differ in length none is chosen by a number that is not known yet",
            remedy="choose by a number of Python's, or give the lists one length",
        )
    builder: Any = number.builder
    builder = builder.innermost([number, data])
    if number.dtype.name not in ("int32", "int64"):
        number = number.cast("int64")  # Bytes and the like are no indices of `Gather`.
    rows = leaf_rows(builder.tensor(data.numpy() if isinstance(data, Tensor) else data), index)
    if index.tree.depth == 1:
        return builder.gather(rows, number, 0), None
    inside = IndexTree.of(lengths[1:])
    shaped = rows.reshape(lengths[0], inside.numel, *rows.shape[1:])
    return builder.gather(shaped, number, 0), inside


def _axes(lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Lengths and strides of a nest, as few as say the same.

    >>> _axes((2, 1, 3, 4), (12, 99, 4, 1)), _axes((2, 3), (1, 2))
    ([(24, 1)], [(2, 1), (3, 2)])
    """
    axes: list[tuple[int, int]] = []
    for length, stride in zip(lengths, strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            length *= axes.pop()[0]
        axes.append((length, stride))
    return axes
