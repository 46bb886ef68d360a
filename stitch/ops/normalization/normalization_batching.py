"""Batching of normalizations: lanes are rows, samples, or channels where these have numbers.

Means that are taken as products round with the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.batching import BatchingContext
from stitch.program import DataType


def mean_variance(c: BatchingContext) -> Sequence[Any]:
    axes = [c.axis_behind(axis) for axis in c.ints_of("axes") or ()]
    return c.again(c.operands[0], axes=axes)


def layer(c: BatchingContext) -> Sequence[Any]:
    """Layer- and RMSNormalization. Where scale or shift differ, they follow by themselves."""
    axis = c.axis_behind(c.int_of("axis")) if c.varies(0) else c.int_of("axis")
    if not c.varies(1, 2):
        return c.again(*c.operands, axis=axis)
    x, data_type = c.wide(c.operands[0]), c.type_of(0).data_type
    one = c.filled(1, (), DataType.from_dtype(x.dtype))
    value, *statistics = c.again(x, one, axis=axis)
    for index, op in ((1, "Mul"), (2, "Add")):
        if c.has(index):
            value = c.apply(op, value, c.wide(c.aligned(index, c.rank())))
    if not c.varies(0):
        shapes = (c.result_shape(1 + i) for i in range(len(statistics)))
        statistics = [c.repeated(s, shape) for s, shape in zip(statistics, shapes, strict=True)]
    return c.in_type(value, data_type), *statistics


def layer_gradient(c: BatchingContext) -> Sequence[Any]:
    """The operand's gradient by rows; those of scale and shift sum the rows of one lane."""
    axis, data_type = c.axis_behind(c.int_of("axis"), 1), c.type_of(1).data_type
    gradient, x, mean, inverse = (c.wide(c.broadcast(i)) for i in range(4))
    scale, scaled = c.wide(c.operands[4]), gradient
    if c.varies(4):
        scaled = c.apply("Mul", gradient, c.wide(c.aligned(4, c.rank(1))))
        scale = c.filled(1, c.shape(4), DataType.from_dtype(x.dtype))
    results = [c.apply(c.op, scaled, x, mean, inverse, scale, domain=c.domain, axis=axis)]
    if len(c.output_types) > 1:
        deviation = c.apply("Mul", c.apply("Sub", x, mean), inverse)
        results.append(_over_rows(c, c.apply("Mul", gradient, deviation), axis))
    if len(c.output_types) > 2:
        results.append(_over_rows(c, gradient, axis))
    return tuple(c.in_type(result, data_type) for result in results)


def _over_rows(c: BatchingContext, value: Any, axis: int) -> Any:
    if axis == 1:
        return value
    return c.apply("ReduceSum", value, list(range(1, axis)), keepdims=0)


def by_channel(c: BatchingContext) -> Sequence[Any]:
    """Instance- and GroupNormalization: lanes are samples, or channels if their numbers differ."""
    if not c.varies(1, 2):
        return (c.split(c.with_first(c.folded(0))[0]),)
    groups = c.attributes.get("num_groups")
    more = {"num_groups": groups * c.lanes} if isinstance(groups, int) else {}
    return (c.split(c.again(c.folded(0, 1), c.folded(1), c.folded(2), **more)[0], 1),)


def batch(c: BatchingContext) -> Sequence[Any]:
    """Statistics are those of a channel in one lane: lanes are channels, or samples where all is
    shared that is known of channels."""
    samples = not c.varies(1, 2, 3, 4) and not c.int_of("training_mode")
    if samples:
        return (c.split(c.with_first(c.folded(0))[0]),)
    if c.rank() > 1:
        result, *statistics = c.again(c.folded(0, 1), *(c.folded(i) for i in range(1, 5)))
        return c.split(result, 1), *(c.split(s) for s in statistics)
    # A vector is samples of one channel.
    x = c.apply("Transpose", c.broadcast(0), perm=[1, 0])
    result, *statistics = c.again(x, *(c.folded(i) for i in range(1, 5)))
    return c.in_front(result, 1), *(c.split(s) for s in statistics)


def batch_gradient(c: BatchingContext) -> Sequence[Any]:
    """Lanes are channels: statistics and sums are those of a channel in one lane."""
    figures = [c.folded(i) for i in range(2, 5) if c.has(i)]
    if c.rank(1) > 1:
        result, *sums = c.again(c.folded(0, 1), c.folded(1, 1), *figures)
        return c.split(result, 1), *(c.split(s) for s in sums)
    gradient, x = (c.apply("Transpose", c.broadcast(i), perm=[1, 0]) for i in range(2))
    result, *sums = c.again(gradient, x, *figures)
    return c.in_front(result, 1), *(c.split(s) for s in sums)
