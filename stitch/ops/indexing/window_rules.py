"""The gradient of `stitch.Window`, and windows for many lanes.

Comes in: one operation, its operands. Goes out: what flows back to the rows, overlaps added up; and
the windows of all lanes at once. A window stays inside its lane: what was out of range for one lane
is refused for all. Must not know: kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.ops.gradient import GradientContext
from stitch.ops.indexing.row_strides import are_in_range, row_numbers
from stitch.ops.steps import along


def gradient(c: GradientContext) -> Sequence[Any]:
    """Rows are added where they came from; what was one row all along an axis is summed first."""
    data, lengths, flowing = c.type_of(0), c.ints_of("lengths"), c.gradient
    assert lengths is not None
    table = c.zeros(data.shape, data.data_type)
    if 0 in lengths:
        return table, None, None
    base, strides = c.constants[1], c.constants[2]
    if base is not None and strides is not None:
        axes = zip(lengths, strides.tolist(), strict=True)
        still = [axis for axis, (length, step) in enumerate(axes) if length > 1 and not step]
        if still:
            flowing = c.apply("ReduceSum", flowing, still, keepdims=1)
            lengths = tuple(1 if axis in still else n for axis, n in enumerate(lengths))
        rows = c.constant(row_numbers(int(base), strides.tolist(), lengths)[..., None])
    else:
        rows = c.shaped(_computed_rows(c, c.input(1), c.input(2), lengths), (*lengths, 1))
    return c.apply("ScatterND", table, rows, flowing, reduction="add"), None, None


def _computed_rows(
    c: GradientContext | BatchingContext, base: Any, strides: Any, lengths: Sequence[int]
) -> Any:
    """Rows by number of windows whose first row and strides are values, with lanes or without."""
    rank, leading = len(lengths), strides.shape[:-1]
    rows = c.shaped(base, (*base.shape, *(1,) * rank))
    for axis, length in enumerate(lengths):
        step = c.apply("Slice", strides, [axis], [axis + 1], [-1])
        step = c.shaped(step, (*leading, *(1,) * rank))
        places = along(np.arange(length, dtype=np.int64), axis, rank)
        rows = c.apply("Add", rows, c.apply("Mul", step, places))
    return rows


def batching(c: BatchingContext) -> Sequence[Any]:
    lengths = c.ints_of("lengths")
    assert lengths is not None
    data, base, strides = c.operands
    if c.varies(1, 2):
        return (_own_windows(c, lengths),)
    count, leaf = c.shape()[0], c.shape()[1:]
    first, steps = c.constants[1], c.constants[2]
    if (
        first is not None
        and steps is not None
        and are_in_range(int(first), steps.tolist(), lengths, count)
    ):
        # The lanes are one more axis of the window, over the rows of all.
        rows = c.shaped(data, (c.lanes * count, *leaf))
        joined = np.array([count, *steps.tolist()], np.int64)
        return c.again(rows, base, joined, lengths=(c.lanes, *lengths))
    # Each row with what it is in all lanes: no lane's rows follow another's.
    order = [1, 0, *range(2, len(leaf) + 2)]
    (found,) = c.again(c.apply("Transpose", data, perm=order), base, strides)
    return (c.in_front(found, len(lengths)),)


def _own_windows(c: BatchingContext, lengths: Sequence[int]) -> Any:
    """Windows that lie elsewhere in each lane: rows by number."""
    data, base, strides = c.operands
    count, whole = c.shape()[0], (c.lanes, *lengths)
    # Far outside is outside; of numbers that are cut no sum is too large for its type.
    base = c.apply("Clip", base, np.array(-1), np.array(count))
    strides = c.apply("Clip", strides, np.array(-count), np.array(count))
    rows = _computed_rows(c, base, strides, lengths)
    if rows.shape != whole:
        rows = c.apply("Expand", rows, list(whole))
    # A number below 0 would count from the end.
    is_before = c.apply("Less", rows, np.array(0))
    rows = c.apply("Where", is_before, np.array(count), rows)
    if not c.varies(0):
        return c.apply("Gather", data, rows, axis=0)
    return c.apply("GatherND", data, c.shaped(rows, (*whole, 1)), batch_dims=1)
