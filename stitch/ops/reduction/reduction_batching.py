"""Batching of reductions, extremes' places, running totals and counts: over the axes behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext


def reduce(c: BatchingContext) -> Sequence[Any]:
    """Without axes all are meant but that of the lanes."""
    listed = c.ints_at(1) or ()
    if listed or c.int_of("noop_with_empty_axes"):
        return c.again(c.operands[0], [c.axis_behind(axis) for axis in listed])
    if c.rank():
        return c.again(c.operands[0], list(range(1, c.rank() + 1)))
    # No axes at all would again mean all.
    return c.again(c.shaped(c.operands[0], (c.lanes, 1)), [1], keepdims=0)


def running(c: BatchingContext) -> Sequence[Any]:
    """The axis is an operand."""
    (axis,) = c.ints_at(1) or (0,)
    return c.again(c.operands[0], np.array(c.axis_behind(axis)))


def counted(c: BatchingContext) -> Sequence[Any]:
    """Rows are counted one by one: a lane is one, or some more of them."""
    rows = c.operands[0] if c.rank() == 1 else c.folded(0)
    return (c.shaped(c.again(rows)[0], (c.lanes, *c.result_shape())),)
