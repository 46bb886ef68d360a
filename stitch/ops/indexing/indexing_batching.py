"""Batching of reading and writing by index: lanes that have data of their own are one more index.

An index stays inside its lane: what was out of range for one lane is refused for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.program import DataType


def gather(c: BatchingContext) -> Sequence[Any]:
    data, indices = c.operands
    axis = c.axis_behind(c.int_of("axis")) - 1
    if not c.varies(1):
        return c.again(data, indices, axis=axis + 1)
    if not c.varies(0):
        return (c.in_front(c.again(data, indices, axis=axis)[0], axis),)
    # Each lane's indices into its own data: rows of the axis that is brought behind the lanes.
    rank, picked = c.rank(), c.rank(1)
    if axis:
        order = [0, axis + 1, *(a for a in range(1, rank + 1) if a != axis + 1)]
        data = c.apply("Transpose", data, perm=order)
    rows = c.shaped(c.in_type(indices, DataType.INT64), (c.lanes, *c.shape(1), 1))
    result = c.apply("GatherND", data, rows, batch_dims=1)
    if not axis:
        return (result,)
    before = [1 + picked + a for a in range(axis)]
    order = [0, *before, *range(1, picked + 1), *range(1 + picked + axis, picked + rank)]
    return (c.apply("Transpose", result, perm=order),)


def gather_rows(c: BatchingContext) -> Sequence[Any]:
    """GatherND: lanes are batch axes; data that all share needs none, if it has none yet."""
    batch = c.int_of("batch_dims")
    if not batch and not c.varies(0):
        return c.again(*c.operands)
    return c.again(*c.all_broadcast(), batch_dims=batch + 1)


def reverse_sequence(c: BatchingContext) -> Sequence[Any]:
    axis = c.int_of("batch_axis")
    (result,) = c.again(c.folded(0, axis), c.folded(1))
    return (c.split(result, axis),)


def top(c: BatchingContext) -> Sequence[Any]:
    return c.with_first(c.operands[0], axis=c.axis_behind(c.int_of("axis")))


def cache(c: BatchingContext) -> Sequence[Any]:
    """TensorScatter: lanes are samples. Its axis is none of these, and stays where it is."""
    axis = c.int_of("axis") % c.rank()
    operands = (c.folded(i) for i in range(len(c.operands)))
    return (c.split(c.again(*operands, axis=axis)[0]),)


def scatter_rows(c: BatchingContext) -> Sequence[Any]:
    """ScatterND: the lane is one more part of each index, in front."""
    shape = c.shape(1)
    numbers = c.lane_numbers(len(shape))
    lane = c.apply("Expand", numbers, [c.lanes, *shape[:-1], 1])
    rows = c.apply("Concat", lane, c.broadcast(1), axis=-1)
    return c.again(c.broadcast(0), rows, c.broadcast(2))


def one_hot(c: BatchingContext) -> Sequence[Any]:
    """Where the two values differ from lane to lane, these are chosen by truth values."""
    rank = c.rank() + 1
    axis = c.int_of("axis") % rank
    behind = axis + 1 if c.varies(0) else axis
    if not c.varies(2):
        return c.again(*c.operands, axis=behind)
    hit = c.again(c.operands[0], c.operands[1], np.array([False, True]), axis=behind)[0]
    off, on = (
        c.shaped(c.apply("Slice", c.operands[2], [i], [i + 1], [1]), (c.lanes, *(1,) * rank))
        for i in range(2)
    )
    return (c.apply("Where", hit, on, off),)
