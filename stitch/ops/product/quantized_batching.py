"""Batching of products of integers that stand for real numbers.

Scales and zero points come as one number, or as one for each row, column or filter; those of one
lane count for what is that lane's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, Shape, in_first_axis
from stitch.ops.product.product_batching import sides_of


def _points(c: BatchingContext, index: int, side: Shape, axis: int, varies: bool) -> Any:
    """Zero points or scales of a side of this shape: one number, or one for each row (axis -2) or
    column (axis -1), of each lane if the side has lanes."""
    if not c.has(index):
        return None
    shape = c.shape(index)
    if not c.varies(index) and len(shape) <= 1:
        return c.operands[index]
    if not varies:
        return c.operands[index]
    # As many leading axes as the side has, then a column or a row.
    last = (1,) if len(shape) == 1 and axis == -2 else ()
    own = (*shape, *last)
    ones = (1,) * (len(side) - 1 - len(own))
    value = c.shaped(c.broadcast(index), (c.lanes, *ones, *own))
    wide = list(side)
    wide[-1 if axis == -2 else -2] = 1
    return c.apply("Expand", value, wide)


def matmul_integer(c: BatchingContext) -> Sequence[Any]:
    left, right = sides_of(c, 1, c.varies(0, 2), c.varies(1, 3))
    points = (
        _points(c, 2, left.shape, -2, c.varies(0, 2)),
        _points(c, 3, right.shape, -1, c.varies(1, 3)),
    )
    return (c.shaped(c.again(left, right, *points)[0], (c.lanes, *c.result_shape())),)


def qlinear_matmul(c: BatchingContext) -> Sequence[Any]:
    """Scales and zero points of the result vary with that of the left side."""
    varies = c.varies(0, 1, 2, 6, 7), c.varies(3, 4, 5)
    left, right = sides_of(c, 3, *varies)
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    result = (*lead, left.shape[-2], right.shape[-1])
    a = [_points(c, i, left.shape, -2, varies[0]) for i in (1, 2)]
    b = [_points(c, i, right.shape, -1, varies[1]) for i in (4, 5)]
    y = [_points(c, i, result, -2, True) for i in (6, 7)]
    (made,) = c.again(left, *a, right, *b, *y)
    return (c.shaped(made, (c.lanes, *c.result_shape())),)


def conv_integer(c: BatchingContext) -> Sequence[Any] | None:
    """Zero points of an image are one number, so they are shared; those of filters need not be."""
    if not c.varies(1, 2, 3):
        return in_first_axis(1, 2, 3)(c)
    if c.varies(2):
        return None
    point = c.operands[2] if c.has(2) else None
    group = c.int_of("group") * c.lanes
    points = _per_filter(c, 3, 1)
    return (c.split(c.again(c.folded(0, 1), c.folded(1), point, points, group=group)[0], 1),)


def _per_filter(c: BatchingContext, index: int, weights: int) -> Any:
    """One number per filter of each lane; as it is where it is one number for all."""
    if not c.has(index):
        return None
    filters = c.shape(weights)[0]
    if not c.varies(index) and math.prod(c.shape(index)) == 1:
        return c.operands[index]
    numbers = c.shaped(c.broadcast(index), (c.lanes, math.prod(c.shape(index))))
    return c.merged(c.apply("Expand", numbers, [c.lanes, filters]))


def qlinear_conv(c: BatchingContext) -> Sequence[Any] | None:
    if not c.varies(*range(1, 9)):
        return in_first_axis(*range(1, 9))(c)
    if c.varies(1, 2, 6, 7):
        return None
    one, two, six, seven = (c.operands[i] for i in (1, 2, 6, 7))
    scale, point = (_per_filter(c, i, 3) for i in (4, 5))
    bias = c.folded(8) if c.has(8) else None
    group = c.int_of("group") * c.lanes
    operands = (c.folded(0, 1), one, two, c.folded(3), scale, point, six, seven, bias)
    return (c.split(c.again(*operands, group=group)[0], 1),)
