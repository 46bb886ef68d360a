"""Operators that only move elements: Transpose, Concat, Slice, Split, Expand, Tile, Pad, Trilu."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import (
    BatchingContext,
    along_axis,
    first_along_axis,
    of_last_axes,
)
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, INDICES, INT64, MOVED
from stitch.ops.gradient import GradientContext, no_gradient
from stitch.ops.inference import Attributes, InferenceContext, Shape, ints_of
from stitch.ops.steps import along, copy_steps, fill_step, strides_of
from stitch.program import Array, ValueType, slice_bounds


def batch_transpose(c: BatchingContext) -> Sequence[Any]:
    rank = c.rank()
    order = c.ints_of("perm") or tuple(range(rank))[::-1]
    return c.emit(c.operands[0], perm=[0, *(axis + 1 for axis in order)])


def batch_slice(c: BatchingContext) -> Sequence[Any]:
    listed = c.ints_at(3)
    if listed is None:
        listed = tuple(range(len(c.ints_at(1) or ())))
    axes = [c.axis_behind(axis) for axis in listed]
    steps = c.operands[4] if c.has(4) else None
    return c.emit(c.operands[0], c.operands[1], c.operands[2], axes, steps)


def batch_expand(c: BatchingContext) -> Sequence[Any]:
    shape = c.result_shape()
    return c.emit(c.align(0, len(shape)), [c.batch_size, *shape])


def batch_tile(c: BatchingContext) -> Sequence[Any]:
    return c.emit(c.operands[0], [1, *(c.ints_at(1) or ())])


def batch_pad(c: BatchingContext) -> Sequence[Any] | None:
    if c.varies(2):
        return None
    axes = range(c.rank()) if c.ints_at(3) is None else c.ints_at(3) or ()
    value = c.operands[2] if c.has(2) else None
    return c.emit(c.operands[0], c.operands[1], value, [c.axis_behind(axis) for axis in axes])


# Gradients ----------------------------------------------------------------------------------------


def transpose_gradient(context: GradientContext) -> Sequence[Any]:
    order = context.ints_of("perm")
    if order is None:
        return (context.apply("Transpose", context.gradient),)
    inverse = [int(i) for i in np.argsort(order)]
    return (context.apply("Transpose", context.gradient, perm=inverse),)


def concat_gradient(context: GradientContext) -> Sequence[Any]:
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


def split_gradient(context: GradientContext) -> Sequence[Any]:
    axis = context.int_of("axis")
    parts = []
    for gradient, kind in zip(context.gradients, context.output_types, strict=True):
        assert kind is not None
        is_zero = gradient is None
        parts.append(context.fill(0, kind.shape, kind.data_type) if is_zero else gradient)
    joined = parts[0] if len(parts) == 1 else context.apply("Concat", *parts, axis=axis)
    return joined, None


def slice_gradient(context: GradientContext) -> Sequence[Any]:
    """Pad the gradient with zeros; with steps, insert zeros between its elements."""
    shape, gradient = context.type_of(0).shape, context.gradient
    starts = context.ints_at(1) or ()
    axes = context.ints_at(3) or tuple(range(len(starts)))
    steps = context.ints_at(4) or (1,) * len(starts)
    begins, ends = [0] * len(shape), [0] * len(shape)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        axis, size = axis % len(shape), shape[axis % len(shape)]
        count = gradient.shape[axis]
        if count == 0:
            return (context.fill(0, shape, gradient.data_type),) + (None,) * 4
        least = 0 if step > 0 else size - 1
        first = start + size if start < 0 else start
        first = max(first, 0) if step > 0 else min(first, least)
        if step < 0:
            gradient = context.apply("Slice", gradient, [count - 1], [-count - 1], [axis], [-1])
            first, step = first + step * (count - 1), -step
        if step > 1 and count > 1:
            gradient = _dilated(context, gradient, axis, step)
        begins[axis] = first
        ends[axis] = size - first - gradient.shape[axis]
    return (context.pad(gradient, begins, ends), *no_gradient(context)[1:])


def _dilated(context: GradientContext, value: Any, axis: int, step: int) -> Any:
    """Return the elements along an axis with `step - 1` zeros between them."""
    shape, count = value.shape, value.shape[axis]
    split = context.apply("Unsqueeze", value, [axis + 1])
    ends = [0] * len(shape)
    ends.insert(axis + 1, step - 1)
    wide = context.pad(split, [0] * len(ends), ends)
    wide = context.reshape(wide, (*shape[:axis], count * step, *shape[axis + 1 :]))
    return context.apply("Slice", wide, [0], [(count - 1) * step + 1], [axis])


def expand_gradient(context: GradientContext) -> Sequence[Any]:
    return context.sum_to(context.gradient, 0), None


def tile_gradient(context: GradientContext) -> Sequence[Any]:
    shape = context.type_of(0).shape
    if 0 in context.gradient.shape:
        return context.fill(0, shape, context.gradient.data_type), None
    repeats = context.ints_at(1) or ()
    if all(count == 1 for count in repeats):
        return context.gradient, None
    pairs = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    split = context.reshape(context.gradient, pairs)
    axes = [2 * i for i, count in enumerate(repeats)]
    return context.apply("ReduceSum", split, axes, keepdims=0), None


def trilu_gradient(context: GradientContext) -> Sequence[Any]:
    upper = context.int_of("upper")
    k = context.input(1) if context.has(1) else None
    return context.apply("Trilu", context.gradient, k, upper=upper), None


def _infer_transpose(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    order = _permutation(context.attributes, len(data.shape))
    if sorted(order) != list(range(len(data.shape))):
        raise context.fail(
            "perm of Transpose is not a permutation of the axes",
            expected=f"a permutation of {list(range(len(data.shape)))}", got=order,
        )  # fmt: skip
    return (ValueType(tuple(data.shape[i] for i in order), data.data_type),)


def _permutation(attributes: Attributes, rank: int) -> Shape:
    order = ints_of(attributes, "perm")
    return tuple(range(rank))[::-1] if order is None else order


def _transpose(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.operand(0)
    order = _permutation(arguments.attributes, source.ndim)
    return copy_steps(source.transpose(order), arguments.outputs[0])


def _infer_concat(context: InferenceContext) -> tuple[ValueType, ...]:
    every = range(len(context.inputs))
    first = context.require_type(0, EVERY)
    context.require_same_type(every)
    rank = context.require_rank(0, 1)
    axis = context.axis_of(context.int_of("axis"), rank)
    others = (*first.shape[:axis], *first.shape[axis + 1 :])
    total = 0
    for index in every:
        shape = context.operand(index).shape
        if len(shape) != rank or (*shape[:axis], *shape[axis + 1 :]) != others:
            raise context.fail(
                f"operand {index} of Concat differs from operand 0 in other axes than {axis}",
                expected=first.shape, got=shape,
            )  # fmt: skip
        total += shape[axis]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    return (ValueType(shape, first.data_type),)


def _concat(arguments: KernelArguments) -> Sequence[Thunk]:
    axis = arguments.int_of("axis")
    parts = tuple(arguments.operand(i) for i in range(len(arguments.inputs)))
    return (partial(np.concatenate, parts, axis, arguments.outputs[0]),)


def _infer_split(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    count, size = context.attributes.get("num_outputs"), data.shape[axis]
    if context.present(1) is not None:
        context.require_type(1, INT64)
        if count is not None:
            raise context.fail("Split has both the operand split and num_outputs: remove one")
        sizes = list(context.known_ints(1, "split"))
    else:
        if count is not None and count != context.outputs:
            raise context.fail(
                f"num_outputs={count} of Split does not match its {context.outputs} outputs",
                expected=context.outputs, got=count,
            )  # fmt: skip
        part = -(-size // context.outputs)
        sizes = [max(0, min(part, size - i * part)) for i in range(context.outputs)]
    if len(sizes) != context.outputs or sum(sizes) != size or min(sizes, default=0) < 0:
        raise context.fail(
            f"sizes of Split do not match axis {axis}",
            expected=f"{context.outputs} sizes that sum to {size}", got=sizes,
        )  # fmt: skip
    return tuple(
        ValueType((*data.shape[:axis], part, *data.shape[axis + 1 :]), data.data_type)
        for part in sizes
    )


def _split(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.operand(0)
    axis = arguments.int_of("axis") % source.ndim
    steps: list[Thunk] = []
    start = 0
    for out in arguments.outputs:
        stop = start + out.shape[axis]
        steps += copy_steps(source[(slice(None),) * axis + (slice(start, stop),)], out)
        start = stop
    return steps


def slices_of(
    shape: Shape, starts: Shape, ends: Shape, axes: Shape, steps: Shape
) -> tuple[slice, ...]:
    """Return Slice's operands, clamped as in ONNX, as one Python slice per dimension."""
    slices = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis]
        start, end = (value + size if value < 0 else value for value in (start, end))
        if step > 0:
            slices[axis] = slice(min(max(start, 0), size), min(max(end, 0), size), step)
        else:
            first, last = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
            # A negative stop would count from the end; None includes the first element.
            slices[axis] = slice(first, None if last < 0 else last, step)
            if size == 0:
                slices[axis] = slice(0, 0)
    return tuple(slices)


def _infer_slice(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    for index in range(1, len(context.inputs)):
        if context.present(index) is not None:
            context.require_type(index, INDICES)
    starts, ends = context.known_ints(1, "starts"), context.known_ints(2, "ends")
    axes: Shape = tuple(range(len(starts)))
    if context.present(3) is not None:
        axes = context.known_ints(3, "axes")
    steps: Shape = (1,) * len(starts)
    if context.present(4) is not None:
        steps = context.known_ints(4, "steps")
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise context.fail(
            "starts, ends, axes and steps of Slice differ in length, or a step is 0",
            got=f"starts {starts}, ends {ends}, axes {axes}, steps {steps}",
        )
    axes = context.axes_of(axes, len(data.shape))
    slices = slices_of(data.shape, starts, ends, axes, steps)
    sizes = (slice_bounds(s, size)[3] for s, size in zip(slices, data.shape, strict=True))
    return (ValueType(tuple(sizes), data.data_type),)


def _slice(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.operand(0)
    starts, ends = arguments.ints_at(1), arguments.ints_at(2)
    axes: Shape = tuple(range(len(starts)))
    if arguments.optional(3) is not None:
        axes = tuple(axis % source.ndim for axis in arguments.ints_at(3))
    steps: Shape = (1,) * len(starts)
    if arguments.optional(4) is not None:
        steps = arguments.ints_at(4)
    return copy_steps(
        source[slices_of(source.shape, starts, ends, axes, steps)], arguments.outputs[0]
    )


def _infer_expand(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, INT64)
    wanted = context.known_ints(1, "shape")
    if any(size < 0 for size in wanted):
        raise context.fail("shape of Expand has a negative size", got=wanted)
    return (ValueType(context.broadcast(data.shape, wanted), data.data_type),)


def _expand(arguments: KernelArguments) -> Sequence[Thunk]:
    return copy_steps(arguments.operand(0), arguments.outputs[0])


def _infer_tile(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_type(1, INT64)
    repeats = context.known_ints(1, "repeats")
    if len(repeats) != len(data.shape) or any(count < 0 for count in repeats):
        raise context.fail(
            f"repeats of Tile do not match the operand's rank {len(data.shape)}",
            expected=f"{len(data.shape)} counts >= 0", got=repeats,
        )  # fmt: skip
    shape = tuple(size * count for size, count in zip(data.shape, repeats, strict=True))
    return (ValueType(shape, data.data_type),)


def _tile(arguments: KernelArguments) -> Sequence[Thunk]:
    source, repeats, out = arguments.operand(0), arguments.ints_at(1), arguments.outputs[0]
    pairs = zip(repeats, source.shape, strict=True)
    target = out.reshape(tuple(itertools.chain.from_iterable(pairs)))
    view = source.reshape(tuple(itertools.chain.from_iterable((1, s) for s in source.shape)))
    return copy_steps(view, target)


def _infer_trilu(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_rank(0, 2)
    if context.present(1) is not None:
        context.require_type(1, INT64)
        context.require_scalar(1)
        context.known_data(1, "k")
    return (data,)


def _trilu(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.operand(0), arguments.outputs[0]
    k = arguments.ints_at(1)[0] if arguments.optional(1) is not None else 0
    rows, columns = source.shape[-2:]
    # Clip k: the sum could overflow.
    diagonal = np.arange(rows)[:, None] + min(max(k, -rows - 1), columns + 1)
    column = np.arange(columns)[None, :]
    keep = column >= diagonal if arguments.int_of("upper") else column <= diagonal
    return (fill_step(out, 0), partial(np.copyto, out, source, where=keep))


def source_positions(mode: str, size: int, begin: int, length: int) -> Array:
    """Return the source index that each padded element along an axis repeats."""
    # Reduce Python integers first: pads may be as large as int64.
    if mode == "edge":
        begin = min(max(begin, -size), length)
        return np.arange(-begin, length - begin).clip(0, size - 1)
    if mode == "wrap":
        # Negative pads crop before the rest is repeated.
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
    mode = context.require_word("mode", ("constant", "edge", "reflect", "wrap"))
    context.require_same_type((0, 2))
    context.require_scalar(2)
    pads, rank = context.known_ints(1, "pads"), len(data.shape)
    axes = tuple(range(rank))
    if context.present(3) is not None:
        axes = context.axes_of(context.known_ints(3, "axes"), rank)
    context.require(
        len(pads) == 2 * len(axes), f"pads of Pad has {len(pads)} elements for {len(axes)} axes",
        expected=f"{2 * len(axes)} elements", got=pads,
    )  # fmt: skip
    shape = list(data.shape)
    for i, axis in enumerate(axes):
        begin, end = pads[i], pads[i + len(axes)]
        shape[axis] += begin + end
        reach = max(data.shape[axis] + min(begin, 0) + min(end, 0), 0) - (mode == "reflect")
        is_empty = mode != "constant" and max(begin, end) > 0 and reach < (mode != "reflect")
        fits = not is_empty and (mode != "reflect" or max(begin, end) <= max(reach, 0))
        if shape[axis] < 0 or not fits:
            what = f"axis {axis} of size {data.shape[axis]} cannot be padded by {begin} and {end}"
            raise context.fail(f"{what} in mode {mode!r}")
    return (ValueType(tuple(shape), data.data_type),)


def _pad(arguments: KernelArguments) -> Sequence[Thunk]:
    source, pads, out = arguments.operand(0), arguments.ints_at(1), arguments.outputs[0]
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
    """Fill the borders, two slabs per axis, then copy the inside."""
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
    cropped = tuple(
        slice(place.start - begin, place.stop - begin)
        for place, begin in zip(inner, begins, strict=True)
    )
    if not cropped:
        return copy_steps(source, out)  # Indexing a 0-d array by () would return a number.
    return [*steps, *copy_steps(source[cropped], out[tuple(inner)])]


def pad_gradient(context: GradientContext) -> Sequence[Any]:
    """Slice the inside; the pad value gets the sum of the rest."""
    shape, gradient = context.type_of(0).shape, context.gradient
    pads = context.ints_at(1) or ()
    axes = context.ints_at(3) or tuple(range(len(shape)))
    begins = [0] * len(shape)
    for index, axis in enumerate(axes):
        begins[axis % len(shape)] = pads[index]
    if context.string_of("mode") != "constant":
        return _sum_copies(context, begins), None, None, None
    first = [max(begin, 0) for begin in begins]
    last = [
        min(begin + size, length)
        for begin, size, length in zip(begins, shape, gradient.shape, strict=True)
    ]
    if any(end <= start for start, end in zip(first, last, strict=True)):
        raise context.fail("its pads crop the whole operand", "remove this operator")
    inner = gradient
    if any(first) or tuple(last) != gradient.shape:
        inner = context.apply("Slice", gradient, first, last, list(range(len(shape))))
    value = None
    if context.wants(2):
        value = context.apply("ReduceSum", gradient, keepdims=0)
        value = value - context.apply("ReduceSum", inner, keepdims=0)
        value = context.reshape(value, context.type_of(2).shape)
    low = [start - begin for start, begin in zip(first, begins, strict=True)]
    high = [size + begin - end for size, begin, end in zip(shape, begins, last, strict=True)]
    return context.pad(inner, low, high), None, value, None


def _sum_copies(context: GradientContext, begins: Sequence[int]) -> Any:
    """Multiply each padded axis by the matrix [padded, source] of repeated elements."""
    shape, sums = context.type_of(0).shape, context.gradient
    mode = context.string_of("mode")
    for axis, (size, begin) in enumerate(zip(shape, begins, strict=True)):
        length = context.gradient.shape[axis]
        if length == size and begin == 0:
            continue
        table = np.zeros((length, size), np.bool_)
        table[np.arange(length), source_positions(mode, size, begin, length)] = True
        sums = context.multiply_axis(sums, axis, table)
    return sums


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Transpose", (1, 1), _infer_transpose, _transpose,
        attributes=declared(perm=Attribute("ints")), gradient=transpose_gradient,
        batching=batch_transpose,
    ),
    OpDef(
        "Concat", (1, -1), _infer_concat, _concat,
        attributes=declared(axis=Attribute("int", required=True)), gradient=concat_gradient,
        batching=along_axis,
    ),
    OpDef(
        "Split", (1, 2), _infer_split, _split, outputs=(1, -1),
        attributes=declared(axis=0, num_outputs=Attribute("int")), gradient=split_gradient,
        batching=first_along_axis,
    ),
    OpDef(
        "Slice", (3, 5), _infer_slice, _slice, gradient=slice_gradient, batching=batch_slice,
    ),
    OpDef(
        "Expand", (2, 2), _infer_expand, _expand, gradient=expand_gradient, batching=batch_expand,
    ),
    OpDef(
        "Tile", (2, 2), _infer_tile, _tile, gradient=tile_gradient, batching=batch_tile,
    ),
    OpDef(
        "Trilu", (1, 2), _infer_trilu, _trilu, attributes=declared(upper=1),
        gradient=trilu_gradient, batching=of_last_axes,
    ),
    OpDef(
        "Pad", (2, 4), _infer_pad, _pad, attributes=declared(mode="constant"),
        gradient=pad_gradient, batching=batch_pad,
    ),
)  # fmt: skip
