"""Batching of windows that slide: lanes are samples; where weights differ, they are groups.

Places in a flat image count from the start of their lane, those of all lanes together from that of
the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis

#: Of operands that all have samples in front, or of one.
by_sample = in_first_axis()
_with_weights = in_first_axis(1, 2)


def _conv_of_lanes(c: BatchingContext, bias: Any, weights_axis: int) -> Any:
    """Weights of each lane: a lane's channels are a group of their own, or several.

    `weights_axis` is where filters are; an image that is shared needs no groups for that.
    """
    group = c.int_of("group")
    if not c.varies(0) and group == 1:
        (result,) = c.again(c.operands[0], c.folded(1, weights_axis), bias)
    else:
        (result,) = c.again(c.folded(0, 1), c.folded(1), bias, group=group * c.lanes)
    return c.split(result, 1)


def _conv(c: BatchingContext, weights_axis: int) -> Sequence[Any] | None:
    if c.varies(1):
        return (_conv_of_lanes(c, c.folded(2), weights_axis),)
    if not c.varies(2):
        return _with_weights(c)
    data_type = c.type_of(0).data_type
    image = c.folded(0) if c.varies(0) else c.operands[0]
    (result,) = c.again(c.wide(image), c.wide(c.operands[1]))
    if c.varies(0):
        result = c.split(result)
    bias = c.shaped(c.operands[2], (c.lanes, 1, *c.shape(2), *(1,) * (c.rank() - 2)))
    return (c.in_type(c.apply("Add", result, c.wide(bias)), data_type),)


def conv(c: BatchingContext) -> Sequence[Any] | None:
    return _conv(c, 0)


def conv_transpose(c: BatchingContext) -> Sequence[Any] | None:
    """Its weights have input channels first, filters second."""
    return _conv(c, 1)


def conv_weight_gradient(c: BatchingContext) -> Sequence[Any]:
    """No sum goes over lanes: each is groups of its own."""
    group = c.int_of("group") * c.lanes
    (result,) = c.again(c.folded(0, 1), c.folded(1, 1), group=group)
    return (c.split(result),)


def max_pool(c: BatchingContext) -> Sequence[Any]:
    """Places are those in the flat operand, or -1 where there is none."""
    results = [c.split(result) for result in c.again(c.folded(0))]
    if len(results) == 1:
        return results
    before = c.lane_numbers(c.rank(), math.prod(c.shape()))
    none = c.apply("Less", results[1], 0)
    own = c.apply("Sub", results[1], before)
    return results[0], c.apply("Where", none, results[1], own)


def col2im(c: BatchingContext) -> Sequence[Any]:
    return (c.split(c.with_first(c.folded(0))[0]),)


def max_unpool(c: BatchingContext) -> Sequence[Any]:
    """Places that are operands count in the shape that the pool was given."""
    kernel = c.ints_of("kernel_shape") or ()
    strides = c.ints_of("strides") or (1,) * len(kernel)
    pads = c.ints_of("pads") or (0,) * (2 * len(kernel))
    size = [
        (s - 1) * strides[i] - pads[i] - pads[len(kernel) + i] + kernel[i]
        for i, s in enumerate(c.shape()[2:])
    ]
    count = math.prod((*c.shape()[:2], *size))
    # A place beyond a lane must not fall into the next.
    places, nowhere = c.broadcast(1), c.constant(np.array(-1))
    inside = c.apply("And", c.apply("Less", places, count), c.apply("GreaterOrEqual", places, 0))
    own = c.apply("Add", places, c.lane_numbers(c.rank(), count))
    places = c.apply("Where", inside, own, nowhere)
    shape = c.ints_at(2)
    wanted = [] if shape is None else [[shape[0] * c.lanes, *shape[1:]]]
    return (c.split(c.again(c.folded(0), c.merged(places), *wanted)[0]),)
