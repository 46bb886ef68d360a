"""Batching of what moves elements or lists shapes: axes lie one further behind, counts get a lane.

What decides shapes is known at compile time, so it is written anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.program import DataType


def same_order(c: BatchingContext) -> Sequence[Any]:
    """Reshape, Flatten, Squeeze, Unsqueeze: the result's shape in a lane says all."""
    return (c.shaped(c.operands[0], (c.lanes, *c.result_shape())),)


def dropout(c: BatchingContext) -> Sequence[Any]:
    """Nothing is dropped, whatever the ratio; where the mode is asked for, the ratio is known."""
    ratio = None if c.varies(1) else c.operands[1] if c.has(1) else None
    return c.again(c.broadcast(0), ratio, c.operands[2] if c.has(2) else None)


def shape_of(c: BatchingContext) -> Sequence[Any]:
    """Shape: the same in all lanes."""
    shape = c.shape()
    end = c.attributes.get("end")
    assert end is None or isinstance(end, int)
    listed = np.array(shape[c.int_of("start") : end], np.int64)
    return (c.repeated(c.constant(listed), listed.shape),)


def size(c: BatchingContext) -> Sequence[Any]:
    return (c.repeated(c.constant(np.array(math.prod(c.shape()), np.int64)), ()),)


def expect(c: BatchingContext) -> Sequence[Any]:
    """All lanes are checked at once."""
    checked = c.varies(1, 2)
    return c.again(c.broadcast(0), *(c.broadcast(i) if checked else c.operands[i] for i in (1, 2)))


def transpose(c: BatchingContext) -> Sequence[Any]:
    rank = c.rank()
    order = c.ints_of("perm") or tuple(range(rank))[::-1]
    return c.again(c.operands[0], perm=[0, *(axis + 1 for axis in order)])


def split(c: BatchingContext) -> Sequence[Any]:
    return c.with_first(c.operands[0], axis=c.axis_behind(c.int_of("axis")))


def slice_(c: BatchingContext) -> Sequence[Any]:
    listed = c.ints_at(3)
    if listed is None:
        listed = tuple(range(len(c.ints_at(1) or ())))
    axes = [c.axis_behind(axis) for axis in listed]
    steps = c.operands[4] if c.has(4) else None
    return c.again(c.operands[0], c.operands[1], c.operands[2], axes, steps)


def expand(c: BatchingContext) -> Sequence[Any]:
    shape = c.result_shape()
    return c.again(c.aligned(0, len(shape)), [c.lanes, *shape])


def tile(c: BatchingContext) -> Sequence[Any]:
    return c.again(c.operands[0], [1, *(c.ints_at(1) or ())])


def pad(c: BatchingContext) -> Sequence[Any]:
    listed = c.ints_at(3)
    axes = list(range(c.rank())) if listed is None else listed
    behind = [c.axis_behind(axis) for axis in axes]
    value = c.operands[2] if c.has(2) else None
    if not c.varies(2) or c.string_of("mode") != "constant":
        return c.again(c.broadcast(0), c.operands[1], None if c.varies(2) else value, behind)
    # A number for each lane: what is padded is told apart by padding truth values.
    inside = c.filled(True, c.shape(), DataType.BOOL)
    mask = c.apply("Pad", inside, c.operands[1], np.array(False), list(axes))
    # One after the other: what is batched has an axis more in front.
    padded = c.again(c.operands[0], c.operands[1], None, behind if c.varies(0) else list(axes))[0]
    number = c.shaped(value, (c.lanes, *(1,) * c.rank()))
    return (c.apply("Where", mask, padded, number),)


def eye_like(c: BatchingContext) -> Sequence[Any]:
    """Of its operand only the shape and the type are asked for."""
    like = c.filled(0, c.shape(), c.type_of(0).data_type)
    return (c.repeated(c.again(like)[0], c.result_shape()),)
