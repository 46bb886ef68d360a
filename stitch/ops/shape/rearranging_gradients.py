"""Gradients of operators that only move, repeat or drop elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.gradient import GradientContext


def transpose(context: GradientContext) -> Sequence[Any]:
    """The inverse permutation."""
    order = context.ints_of("perm")
    if order is None:
        return (context.apply("Transpose", context.gradient),)
    inverse = [int(i) for i in np.argsort(order)]
    return (context.apply("Transpose", context.gradient, perm=inverse),)


def concat(context: GradientContext) -> Sequence[Any]:
    """Every operand gets its part."""
    count, gradient = len(context.input_types), context.gradient
    axis = context.int_of("axis") % len(gradient.shape)
    sizes = [context.type_of(i).shape[axis] for i in range(count)]
    wanted = [i for i in range(count) if context.wants(i)]
    if len(wanted) == count and count > 1:
        return context.apply_many("Split", count, gradient, sizes, axis=axis)
    own: list[Any] = [None] * count
    for index in wanted:
        start = sum(sizes[:index])
        own[index] = gradient
        if count > 1:
            end = start + sizes[index]
            own[index] = context.apply("Slice", gradient, [start], [end], [axis])
    return own


def split(context: GradientContext) -> Sequence[Any]:
    """The parts' gradients, one after the other; zeros where none flows back."""
    axis = context.int_of("axis")
    parts = []
    for gradient, kind in zip(context.gradients, context.output_types, strict=True):
        assert kind is not None
        missing = gradient is None
        parts.append(context.zeros(kind.shape, kind.data_type) if missing else gradient)
    joined = parts[0] if len(parts) == 1 else context.apply("Concat", *parts, axis=axis)
    return joined, None


def slice_(context: GradientContext) -> Sequence[Any]:
    """The gradient among zeros; what was skipped by steps gets zeros between."""
    shape, gradient = context.type_of(0).shape, context.gradient
    starts = context.constant_ints(1) or ()
    axes = context.constant_ints(3) or tuple(range(len(starts)))
    steps = context.constant_ints(4) or (1,) * len(starts)
    begins, ends = [0] * len(shape), [0] * len(shape)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        axis, size = axis % len(shape), shape[axis % len(shape)]
        count = gradient.shape[axis]
        if count == 0:
            return (context.zeros(shape, gradient.data_type),) + (None,) * 4
        least = 0 if step > 0 else size - 1
        first = start + size if start < 0 else start
        first = max(first, 0) if step > 0 else min(first, least)
        if step < 0:
            gradient = context.apply("Slice", gradient, [count - 1], [-count - 1], [axis], [-1])
            first, step = first + step * (count - 1), -step
        if step > 1 and count > 1:
            gradient = _apart(context, gradient, axis, step)
        begins[axis] = first
        ends[axis] = size - first - gradient.shape[axis]
    whole = context.padded(gradient, begins, ends)
    return (whole, *(None,) * (len(context.input_types) - 1))


def _apart(context: GradientContext, value: Any, axis: int, step: int) -> Any:
    """The elements along an axis with `step - 1` zeros between them."""
    shape, count = value.shape, value.shape[axis]
    split = context.apply("Unsqueeze", value, [axis + 1])
    ends = [0] * len(shape)
    ends.insert(axis + 1, step - 1)
    wide = context.padded(split, [0] * len(ends), ends)
    wide = context.shaped(wide, (*shape[:axis], count * step, *shape[axis + 1 :]))
    return context.apply("Slice", wide, [0], [(count - 1) * step + 1], [axis])


def expand(context: GradientContext) -> Sequence[Any]:
    """Sums over what was repeated."""
    return context.reduced(context.gradient, 0), None


def tile(context: GradientContext) -> Sequence[Any]:
    """Sums over the repeats."""
    shape = context.type_of(0).shape
    if 0 in context.gradient.shape:
        return context.zeros(shape, context.gradient.data_type), None
    repeats = context.constant_ints(1) or ()
    if all(count == 1 for count in repeats):
        return context.gradient, None
    pairs = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    split = context.shaped(context.gradient, pairs)
    axes = [2 * i for i, count in enumerate(repeats)]
    return context.apply("ReduceSum", split, axes, keepdims=0), None


def depth_to_space(context: GradientContext) -> Sequence[Any]:
    """The inverse rearrangement."""
    block, gradient = context.int_of("blocksize"), context.gradient
    if context.string_of("mode") == "DCR":
        return (context.apply("SpaceToDepth", gradient, blocksize=block),)
    n, c, h, w = context.type_of(0).shape
    fine = context.shaped(gradient, (n, c // block**2, h, block, w, block))
    moved = context.apply("Transpose", fine, perm=[0, 1, 3, 5, 2, 4])
    return (context.shaped(moved, (n, c, h, w)),)


def space_to_depth(context: GradientContext) -> Sequence[Any]:
    """The inverse rearrangement."""
    block = context.int_of("blocksize")
    return (context.apply("DepthToSpace", context.gradient, blocksize=block),)


def trilu(context: GradientContext) -> Sequence[Any]:
    """The same triangle."""
    upper = context.int_of("upper")
    k = context.input(1) if context.has(1) else None
    return context.apply("Trilu", context.gradient, k, upper=upper), None
