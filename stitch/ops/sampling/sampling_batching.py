"""Batching of sampling: lanes are images; shared regions look at all lanes' channels at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis


def resize(c: BatchingContext) -> Sequence[Any]:
    """Sizes and regions are those of listed axes. A region that differs is one that does not count:
    where it does, it is known at compile time."""
    axes = [c.axis_behind(axis) for axis in c.ints_of("axes") or range(c.rank())]
    region = None if c.varies(1) or not c.has(1) else c.operands[1]
    return c.again(c.broadcast(0), region, *c.operands[2:], axes=axes)


def deform_conv(c: BatchingContext) -> Sequence[Any] | None:
    if not c.varies(1, 3):
        return in_first_axis(1, 3)(c)
    # Filters of a lane are groups of their own, and so are its offsets.
    words = {name: c.int_of(name) * c.lanes for name in ("group", "offset_group")}
    operands = (c.folded(0, 1), c.folded(1), c.folded(2, 1), c.folded(3), c.folded(4, 1))
    (result,) = c.again(*operands[: len(c.operands)], **words)
    return (c.split(result, 1),)


def roi_align(c: BatchingContext) -> Sequence[Any]:
    if not c.varies(1, 2):
        return (c.split(c.again(c.folded(0, 1), *c.operands[1:])[0], 1),)
    if not c.varies(0):
        return (c.split(c.again(c.operands[0], c.folded(1), c.folded(2))[0]),)
    # Regions of a lane must not look at the image of another: an index that is out of range for
    # one lane stays so for all.
    count = c.shape()[0]
    index = c.broadcast(2)
    inside = c.apply("And", c.apply("Less", index, count), c.apply("GreaterOrEqual", index, -count))
    whole = c.apply("Where", c.apply("Less", index, 0), c.apply("Add", index, count), index)
    own = c.apply("Add", whole, c.lane_numbers(1, count))
    nowhere = c.constant(np.array(-1 - count * c.lanes))
    beyond = c.apply("Where", inside, own, nowhere)
    return (c.split(c.again(c.folded(0), c.folded(1), c.merged(beyond))[0]),)
