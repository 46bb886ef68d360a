"""Pad, in all its modes; negative padding crops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import (
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
)
from stitch.ops.element_types import INT64, MOVED
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.shape.reshaping import batch_pad
from stitch.ops.steps import along, copy_steps, strides_of
from stitch.program import Array, ValueType

PAD_MODES = ("constant", "edge", "reflect", "wrap")


def source_positions(mode: str, size: int, begin: int, length: int) -> Array:
    """For each padded position along an axis, the source position that it repeats."""
    # Reduced as Python's integers first: what is cut away may be as long as 64 bits can say.
    if mode == "edge":
        begin = min(max(begin, -size), length)
        return np.arange(-begin, length - begin).clip(0, size - 1)
    if mode == "wrap":
        # Of what is left when pads below 0 have cropped it.
        first = max(-begin, 0)
        left = size - first + min(length - size - begin, 0)
        start = (-max(begin, 0)) % left
        return first + np.arange(start, start + length) % left
    if size == 1:
        return np.zeros(length, np.intp)
    period = 2 * (size - 1)
    start = -begin % period
    folded = np.arange(start, start + length) % period
    return np.minimum(folded, period - folded)


def _infer_pad(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, INT64)
    mode = context.require_word("mode", PAD_MODES, "Pad has no such mode")
    if context.present(2) is not None:
        context.require_same_type((0, 2))
        if context.operand(2).shape not in ((), (1,)):
            context.require_shape(2, ())
    pads, rank = context.known_ints(1, "pads"), len(data.shape)
    axes = tuple(range(rank))
    if context.present(3) is not None:
        axes = context.axes_of(context.known_ints(3, "axes"), rank)
    if len(pads) != 2 * len(axes):
        raise context.fail(
            "pads holds a begin and an end per axis", expected=f"{2 * len(axes)} numbers", got=pads
        )
    shape = list(data.shape)
    for i, axis in enumerate(axes):
        begin, end = pads[i], pads[i + len(axes)]
        shape[axis] += begin + end
        reach = max(data.shape[axis] + min(begin, 0) + min(end, 0), 0) - (mode == "reflect")
        empty = mode != "constant" and max(begin, end) > 0 and reach < (mode != "reflect")
        if shape[axis] < 0 or empty or (mode == "reflect" and max(begin, end) > max(reach, 0)):
            raise context.fail(
                f"axis {axis} cannot be padded by {begin} and {end} in mode {mode}",
                got=f"size {data.shape[axis]}",
            )
    return (ValueType(tuple(shape), data.data_type),)


def _pad(arguments: KernelArguments) -> Sequence[Thunk]:
    source, pads, out = arguments.given(0), arguments.ints_at(1), arguments.outputs[0]
    axes: Shape = tuple(range(source.ndim))
    if arguments.optional(3) is not None:
        axes = tuple(axis % source.ndim for axis in arguments.ints_at(3))
    begins = [0] * source.ndim
    for i, axis in enumerate(axes):
        begins[axis] = pads[i]
    mode = arguments.string_of("mode")
    if mode == "constant":
        return _pad_constant(source, begins, out, arguments.optional(2))
    flat = np.zeros(out.shape, np.intp)
    for axis, stride in enumerate(strides_of(source.shape)):
        positions = source_positions(mode, source.shape[axis], begins[axis], out.shape[axis])
        flat += along(positions * stride, axis, out.ndim)
    return (partial(np.take, source.reshape(-1), flat, None, out, "clip"),)


def _pad_constant(
    source: Array, begins: Sequence[int], out: Array, value: Array | None
) -> Sequence[Thunk]:
    """Fill the borders, one pair of slabs per axis, then copy what is inside."""
    fill = np.zeros((), out.dtype) if value is None else value.reshape(())
    inner: list[slice] = []
    steps: list[Thunk] = []
    for axis, begin in enumerate(begins):
        first = max(begin, 0)
        last = max(min(begin + source.shape[axis], out.shape[axis]), first)
        borders = (slice(0, first), slice(last, out.shape[axis]))
        steps += [
            partial(np.copyto, out[(*inner, border)], fill)
            for border in borders
            if border.stop > border.start
        ]
        inner.append(slice(first, last))
    taken = tuple(
        slice(place.start - begin, place.stop - begin)
        for place, begin in zip(inner, begins, strict=True)
    )
    if not taken:
        return copy_steps(source, out)  # Indexed by nothing, a scalar is a number and no array.
    return [*steps, *copy_steps(source[taken], out[tuple(inner)])]


def _workspace(context: WorkspaceContext) -> int:
    """Where each element comes from, unless what is added is one number."""
    if context.string_of("mode") == "constant":
        return 0
    shape = context.outputs[0].shape
    return 8 * math.prod(shape) + 64 * max(shape, default=0)


def pad_gradient(context: GradientContext) -> Sequence[Any]:
    """What is inside; a padded value gets all the rest, a repeated element all its copies."""
    shape, gradient = context.type_of(0).shape, context.gradient
    pads = context.constant_ints(1) or ()
    axes = context.constant_ints(3) or tuple(range(len(shape)))
    begins = [0] * len(shape)
    for index, axis in enumerate(axes):
        begins[axis % len(shape)] = pads[index]
    if context.string_of("mode") != "constant":
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
        value = context.shaped(value, context.type_of(2).shape)
    low = [start - begin for start, begin in zip(first, begins, strict=True)]
    high = [
        size + begin - end for size, begin, end in zip(shape, begins, last, strict=True)
    ]  # cropped at the end
    return context.padded(inner, low, high), None, value, None


def _unrepeated(context: GradientContext, begins: Sequence[int]) -> Any:
    """Per padded axis a product with the matrix that says which element each place repeats."""
    shape, sums = context.type_of(0).shape, context.gradient
    mode = context.string_of("mode")
    for axis, (size, begin) in enumerate(zip(shape, begins, strict=True)):
        length = context.gradient.shape[axis]
        if length == size and begin == 0:
            continue
        table = np.zeros((length, size), np.bool_)
        table[np.arange(length), source_positions(mode, size, begin, length)] = True
        sums = context.weighted(sums, axis, table)
    return sums


OPERATORS = (
    OpDef(
        "Pad", (2, 4), _infer_pad, _pad, attributes=declared(mode="constant"),
        gradient=pad_gradient, batching=batch_pad, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
