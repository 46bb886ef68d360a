"""Gradients of reading and writing by index: what one does, the other undoes.

Several places may read one element, so gradients are added where they meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.gradient import GradientContext
from stitch.ops.steps import along


def gather(context: GradientContext) -> Sequence[Any]:
    """Rows are added where they came from: axes [positions, rest] into [size, rest]."""
    data, indices = context.type_of(0), context.type_of(1).shape
    gradient, known = context.gradient, context.constants[1]
    axis = context.int_of("axis") % len(data.shape)
    size = data.shape[axis]
    if known is not None and known.size == 1:
        return _one_place(context, axis, int(known.reshape(())) % size), None
    before, after = math.prod(data.shape[:axis]), math.prod(data.shape[axis + 1 :])
    count = math.prod(indices)
    rows = context.shaped(gradient, (before, count, after))
    if before > 1:
        rows = context.apply("Transpose", rows, perm=[1, 0, 2])
    rows = context.shaped(rows, (count, before * after))
    places = context.shaped(context.input(1), (count, 1))
    if places.data_type.value != "int64":
        places = context.apply("Cast", places, to=7)
    table = context.zeros((size, before * after), data.data_type)
    sums = context.apply("ScatterND", table, places, rows, reduction="add")
    if before > 1:
        sums = context.shaped(sums, (size, before, after))
        sums = context.apply("Transpose", sums, perm=[1, 0, 2])
    return context.shaped(sums, data.shape), None


def _one_place(context: GradientContext, axis: int, place: int) -> Any:
    """The gradient of one known index along an axis: zeros around it."""
    shape = context.type_of(0).shape
    kept_shape = (*shape[:axis], 1, *shape[axis + 1 :])
    begins, ends = [0] * len(shape), [0] * len(shape)
    begins[axis], ends[axis] = place, shape[axis] - 1 - place
    return context.padded(context.shaped(context.gradient, kept_shape), begins, ends)


def gather_elements(context: GradientContext) -> Sequence[Any]:
    """Elements are added where they came from."""
    data = context.type_of(0)
    sums = context.apply(
        "ScatterElements", context.zeros(data.shape, data.data_type), context.input(1),
        context.gradient, axis=context.int_of("axis"), reduction="add",
    )  # fmt: skip
    return sums, None


def gather_nd(context: GradientContext) -> Sequence[Any]:
    """Slices are added where they came from; batch axes become leading indices."""
    data, indices = context.type_of(0), context.input(1)
    for axis in reversed(range(context.int_of("batch_dims"))):
        shape = indices.shape
        count = along(np.arange(shape[axis], dtype=np.int64), axis, len(shape))
        leading = context.constant(np.broadcast_to(count, (*shape[:-1], 1)).copy())
        indices = context.apply("Concat", leading, indices, axis=-1)
    table = context.zeros(data.shape, data.data_type)
    sums = context.apply("ScatterND", table, indices, context.gradient, reduction="add")
    return sums, None


def reverse_sequence(context: GradientContext) -> Sequence[Any]:
    """A reversal undoes itself."""
    reversed_back = context.apply(
        "ReverseSequence", context.gradient, context.input(1),
        batch_axis=context.int_of("batch_axis"), time_axis=context.int_of("time_axis"),
    )  # fmt: skip
    return reversed_back, None


def top(context: GradientContext) -> Sequence[Any]:
    """Values' gradients go to the places that they were taken from."""
    data, axis = context.type_of(0), context.int_of("axis")
    if context.gradient is None:
        return None, None
    places = context.output(1)
    table = context.zeros(data.shape, data.data_type)
    return context.apply("ScatterElements", table, places, context.gradient, axis=axis), None


def scatter_elements(context: GradientContext) -> Sequence[Any]:
    """Written places read the updates' gradient; the data keeps the rest (all, where added)."""
    return _scattered(context, "ScatterElements", "GatherElements", axis=context.int_of("axis"))


def scatter_nd(context: GradientContext) -> Sequence[Any]:
    """As `scatter_elements`, with slices."""
    return _scattered(context, "ScatterND", "GatherND")


def _scattered(context: GradientContext, write: str, read: str, **along: Any) -> Sequence[Any]:
    reduction = context.string_of("reduction")
    if reduction not in ("none", "add"):
        raise context.fail(
            f"its reduction {reduction!r} mixes old and new values",
            "use reduction 'none' or 'add' on the way to parameters",
        )
    first = second = None
    indices = context.input(1)
    if context.wants(0):
        first = context.gradient
        if reduction == "none":
            kind = context.type_of(2)
            nothing = context.zeros(kind.shape, kind.data_type)
            first = context.apply(write, first, indices, nothing, **along)
    if context.wants(2):
        second = context.apply(read, context.gradient, indices, **along)
    return first, None, second


def one_hot(context: GradientContext) -> Sequence[Any]:
    """Of the two values: what flows back to places that are off, and on."""
    gradient = context.gradient
    depth = context.constants[1]
    assert depth is not None
    off_on = context.constant(np.array([0, 1], gradient.data_type.dtype))
    axis = context.int_of("axis")
    hit = context.apply("OneHot", context.input(0), depth, off_on, axis=axis)
    on = context.apply("ReduceSum", gradient * hit, keepdims=0)
    off = context.apply("ReduceSum", gradient, keepdims=0) - on
    parts = [context.apply("Unsqueeze", part, [0]) for part in (off, on)]
    return None, None, context.apply("Concat", *parts, axis=0)
