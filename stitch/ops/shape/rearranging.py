"""Operators that move elements and compute nothing: Transpose, Concat, Slice, Split, Tile ..."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import along_axis, in_first_axis, of_last_axes
from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
    few,
)
from stitch.ops.element_types import EVERY, INDICES, INT64, MOVED
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import Attributes, InferenceContext, Shape, ints_of
from stitch.ops.shape.reshaping import (
    batch_expand,
    batch_slice,
    batch_split,
    batch_tile,
    batch_transpose,
)
from stitch.ops.steps import copy_steps, fill_step
from stitch.program import ValueType

# Gradients ----------------------------------------------------------------------------------------


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


def _infer_transpose(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    order = _permutation(context.attributes, len(data.shape))
    if sorted(order) != list(range(len(data.shape))):
        raise context.fail(
            "perm must name every axis once",
            expected=f"a permutation of {list(range(len(data.shape)))}",
            got=order,
        )
    return (ValueType(tuple(data.shape[i] for i in order), data.data_type),)


def _permutation(attributes: Attributes, rank: int) -> Shape:
    order = ints_of(attributes, "perm")
    return tuple(range(rank))[::-1] if order is None else order


def _transpose(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.given(0)
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
                f"the operands of a Concat may differ in axis {axis} only",
                expected=first.shape,
                got=shape,
            )
        total += shape[axis]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    return (ValueType(shape, first.data_type),)


def _concat(arguments: KernelArguments) -> Sequence[Thunk]:
    axis = arguments.int_of("axis")
    parts = tuple(arguments.given(i) for i in range(len(arguments.inputs)))
    return (partial(np.concatenate, parts, axis, arguments.outputs[0]),)


def _infer_split(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    count, size = context.attributes.get("num_outputs"), data.shape[axis]
    if context.present(1) is not None:
        context.require_type(1, INT64)
        if count is not None:
            raise context.fail("Split takes the operand split or num_outputs, not both")
        sizes = list(context.known_ints(1, "split"))
    else:
        if count is not None and count != context.outputs:
            raise context.fail(
                "num_outputs of a Split differs from its outputs",
                expected=context.outputs, got=count,
            )  # fmt: skip
        part = -(-size // context.outputs)
        sizes = [max(0, min(part, size - i * part)) for i in range(context.outputs)]
    if len(sizes) != context.outputs or sum(sizes) != size or min(sizes, default=0) < 0:
        raise context.fail(
            "the parts of a Split do not fit",
            expected=f"{context.outputs} parts that sum to {size}",
            got=sizes,
        )
    return tuple(
        ValueType((*data.shape[:axis], part, *data.shape[axis + 1 :]), data.data_type)
        for part in sizes
    )


def _split(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.given(0)
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
    """Slice's operands, clamped as ONNX says, as one Python slice per dimension."""
    slices = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis]
        start, end = (value + size if value < 0 else value for value in (start, end))
        if step > 0:
            slices[axis] = slice(min(max(start, 0), size), min(max(end, 0), size), step)
        else:
            first, last = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
            # A negative stop would count from the end; None runs past the first element.
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
            "the operands of a Slice have one entry per axis, and no step is 0",
            got=f"starts {starts}, ends {ends}, axes {axes}, steps {steps}",
        )
    axes = context.axes_of(axes, len(data.shape))
    slices = slices_of(data.shape, starts, ends, axes, steps)
    sizes = (len(range(*s.indices(size))) for s, size in zip(slices, data.shape, strict=True))
    return (ValueType(tuple(sizes), data.data_type),)


def _slice(arguments: KernelArguments) -> Sequence[Thunk]:
    source = arguments.given(0)
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
    data = context.require_type(0, EVERY)
    context.require_type(1, INT64)
    wanted = context.known_ints(1, "shape")
    if any(size < 0 for size in wanted):
        raise context.fail("Expand needs sizes of at least 0", got=wanted)
    return (ValueType(context.broadcast(data.shape, wanted), data.data_type),)


def _expand(arguments: KernelArguments) -> Sequence[Thunk]:
    return copy_steps(arguments.given(0), arguments.outputs[0])


def _infer_tile(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_type(1, INT64)
    repeats = context.known_ints(1, "repeats")
    if len(repeats) != len(data.shape) or any(count < 0 for count in repeats):
        raise context.fail(
            "Tile repeats each axis",
            expected=f"{len(data.shape)} counts of at least 0",
            got=repeats,
        )
    shape = tuple(size * count for size, count in zip(data.shape, repeats, strict=True))
    return (ValueType(shape, data.data_type),)


def _tile(arguments: KernelArguments) -> Sequence[Thunk]:
    source, repeats, out = arguments.given(0), arguments.ints_at(1), arguments.outputs[0]
    pairs = zip(repeats, source.shape, strict=True)
    target = out.reshape(tuple(itertools.chain.from_iterable(pairs)))
    view = source.reshape(tuple(itertools.chain.from_iterable((1, s) for s in source.shape)))
    return copy_steps(view, target)


def _infer_blocks(to_depth: bool, context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_rank(0, 4, 4)
    block = context.int_of("blocksize")
    n, c, h, w = data.shape
    fits = block >= 1 and (
        h % block == 0 and w % block == 0 if to_depth else c % (block * block) == 0
    )
    if not fits:
        raise context.fail(f"blocksize {block} does not divide the operand of {context.op}")
    if to_depth:
        shape = (n, c * block * block, h // block, w // block)
    else:
        context.require_word("mode", ("DCR", "CRD"), "DepthToSpace has no such mode")
        shape = (n, c // (block * block), h * block, w * block)
    return (ValueType(shape, data.data_type),)


def _depth_to_space(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    b = arguments.int_of("blocksize")
    n, c, h, w = source.shape
    if arguments.string_of("mode") == "DCR":
        view = source.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        view = source.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return copy_steps(view, out.reshape(view.shape))


def _space_to_depth(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    b = arguments.int_of("blocksize")
    n, c, h, w = source.shape
    view = source.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return copy_steps(view, out.reshape(view.shape))


def _infer_trilu(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_rank(0, 2)
    if context.present(1) is not None:
        context.require_type(1, INT64)
        if context.constant(1) is None or context.operand(1).shape not in ((), (1,)):
            raise context.fail("operand 1 (k) of Trilu is one number known at compile time")
    return (data,)


def _trilu(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    k = arguments.ints_at(1)[0] if arguments.optional(1) is not None else 0
    rows, columns = source.shape[-2:]
    # A k beyond all columns is as good as one at the last.
    diagonal = np.arange(rows)[:, None] + min(max(k, -rows - 1), columns + 1)
    column = np.arange(columns)[None, :]
    keep = column >= diagonal if arguments.int_of("upper") else column <= diagonal
    return (fill_step(out, 0), partial(np.copyto, out, source, where=keep))


def _trilu_workspace(context: WorkspaceContext) -> int:
    """Whether each place of one matrix is kept."""
    rows, columns = context.outputs[0].shape[-2:]
    return rows * columns + 32 * (rows + columns)


OPERATORS = (
    OpDef(
        "Transpose", (1, 1), _infer_transpose, _transpose,
        attributes=declared(perm=Attribute("ints")), gradient=transpose,
        batching=batch_transpose, workspace=few,
    ),
    OpDef(
        "Concat", (1, -1), _infer_concat, _concat,
        attributes=declared(axis=Attribute("int", required=True)), gradient=concat,
        batching=along_axis, workspace=few,
    ),
    OpDef(
        "Split", (1, 2), _infer_split, _split, outputs=(1, -1),
        attributes=declared(axis=0, num_outputs=Attribute("int")), gradient=split,
        batching=batch_split, workspace=few,
    ),
    OpDef(
        "Slice", (3, 5), _infer_slice, _slice, gradient=slice_,
        batching=batch_slice, workspace=few,
    ),
    OpDef(
        "Expand", (2, 2), _infer_expand, _expand, gradient=expand,
        batching=batch_expand, workspace=few,
    ),
    OpDef(
        "Tile", (2, 2), _infer_tile, _tile, gradient=tile,
        batching=batch_tile, workspace=few,
    ),
    OpDef(
        "DepthToSpace", (1, 1), partial(_infer_blocks, False), _depth_to_space,
        attributes=declared(blocksize=Attribute("int", required=True), mode="DCR"),
        gradient=depth_to_space, batching=in_first_axis(), workspace=few,
    ),
    OpDef(
        "SpaceToDepth", (1, 1), partial(_infer_blocks, True), _space_to_depth,
        attributes=declared(blocksize=Attribute("int", required=True)),
        gradient=space_to_depth, batching=in_first_axis(), workspace=few,
    ),
    OpDef(
        "Trilu", (1, 2), _infer_trilu, _trilu, attributes=declared(upper=1),
        gradient=trilu,
        batching=of_last_axes, workspace=WorkspaceRule(_trilu_workspace),
    ),
)  # fmt: skip
