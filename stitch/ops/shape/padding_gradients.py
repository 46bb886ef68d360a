"""Gradient of Pad, in all its modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.attributes import string_of
from stitch.ops.gradient import GradientContext
from stitch.ops.shape.padded_positions import source_positions
from stitch.ops.shape.shape_gradients import ints_at, padded, shaped, weighted


def pad_gradient(context: GradientContext) -> Sequence[Any]:
    """What is inside; a padded value gets all the rest, a repeated element all its copies."""
    shape, gradient = context.type_of(0).shape, context.gradient
    pads = ints_at(context, 1) or ()
    axes = ints_at(context, 3) or tuple(range(len(shape)))
    begins = [0] * len(shape)
    for index, axis in enumerate(axes):
        begins[axis % len(shape)] = pads[index]
    if string_of(context.attributes, "mode") != "constant":
        return _unrepeated(context, begins), None, None, None
    first = [max(begin, 0) for begin in begins]
    last = [
        min(begin + size, length)
        for begin, size, length in zip(begins, shape, gradient.shape, strict=True)
    ]
    if any(end <= start for start, end in zip(first, last, strict=True)):
        raise context.fail("nothing of the operand is left", "take this operator out of the graph")
    inner = gradient
    if any(first) or tuple(last) != gradient.shape:
        inner = context.apply("Slice", gradient, first, last, list(range(len(shape))))
    value = None
    if context.wants(2):
        value = context.apply("ReduceSum", gradient, keepdims=0)
        value = value - context.apply("ReduceSum", inner, keepdims=0)
        value = shaped(context, value, context.type_of(2).shape)
    low = [start - begin for start, begin in zip(first, begins, strict=True)]
    high = [
        size + begin - end for size, begin, end in zip(shape, begins, last, strict=True)
    ]  # cropped at the end
    return padded(context, inner, low, high), None, value, None


def _unrepeated(context: GradientContext, begins: Sequence[int]) -> Any:
    """Per padded axis a product with the matrix that says which element each place repeats."""
    shape, made = context.type_of(0).shape, context.gradient
    mode = string_of(context.attributes, "mode")
    for axis, (size, begin) in enumerate(zip(shape, begins, strict=True)):
        length = context.gradient.shape[axis]
        if length == size and begin == 0:
            continue
        table = np.zeros((length, size), np.bool_)
        table[np.arange(length), source_positions(mode, size, begin, length)] = True
        made = weighted(context, made, axis, table)
    return made
