"""Which rows a window has whose first row, and strides along its axes, are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stitch.ops.steps import along
from stitch.program import Array


def reached_rows(base: int, strides: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest row that a window reads; (0, -1) where it reads none.

    >>> reached_rows(3, [2, -1], [4, 3])
    (1, 9)
    """
    if 0 in lengths:
        return 0, -1
    spans = [(n - 1) * stride for n, stride in zip(lengths, strides, strict=True)]
    return base + sum(min(s, 0) for s in spans), base + sum(max(s, 0) for s in spans)


def are_in_range(base: int, strides: Sequence[int], lengths: Sequence[int], count: int) -> bool:
    """Whether all rows that a window reads are among so many."""
    least, most = reached_rows(base, strides, lengths)
    return least > most or 0 <= least <= most < count


def moving(strides: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths and strides; where there is one row, or none, nothing moves, whatever its stride."""
    reads = 0 not in lengths
    for length, stride in zip(lengths, strides, strict=True):
        yield length, stride if reads and length > 1 else 0


def row_numbers(base: int, strides: Sequence[int], lengths: Sequence[int]) -> Any:
    """The rows of a window that reads some, int64: as many as its lengths say.

    >>> row_numbers(1, [2, 1], [2, 3]).tolist()
    [[1, 2, 3], [3, 4, 5]]
    """
    rows = np.full(tuple(lengths), base, np.int64)
    for axis, (length, stride) in enumerate(moving(strides, lengths)):
        rows += along(np.arange(length, dtype=np.int64) * stride, axis, len(lengths))
    return rows


def windowed(data: Array, base: int, strides: Sequence[int], lengths: Sequence[int]) -> Array:
    """The rows of a window, all of them in range, as a view of the data."""
    moved = [stride * data.strides[0] for _, stride in moving(strides, lengths)]
    shape = (*lengths, *data.shape[1:])
    first = data if 0 in lengths else data[base:]
    return np.lib.stride_tricks.as_strided(first, shape, (*moved, *data.strides[1:]))
