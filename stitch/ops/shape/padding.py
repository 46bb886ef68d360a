"""Pad, in all its modes; negative padding crops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import string_of
from stitch.ops.definition import (
    Attribute,
    InferenceContext,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
)
from stitch.ops.element_types import INT64, MOVED
from stitch.ops.inference import (
    Shape,
    axes_of,
    known_ints,
    operand,
    present,
    require_same_type,
    require_shape,
    require_type,
)
from stitch.ops.shape.padded_positions import source_positions
from stitch.ops.shape.padding_gradients import pad_gradient
from stitch.ops.steps import copy_steps, given, ints_at, optional, strides_of
from stitch.program import Array, ValueType

PAD_MODES = ("constant", "edge", "reflect", "wrap")


def _infer_pad(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, MOVED)
    require_type(context, 1, INT64)
    mode = string_of(context.attributes, "mode")
    if mode not in PAD_MODES:
        raise context.fail("Pad has no such mode", expected=", ".join(PAD_MODES), got=mode)
    if present(context, 2) is not None:
        require_same_type(context, (0, 2))
        if operand(context, 2).shape not in ((), (1,)):
            require_shape(context, 2, ())
    pads, rank = known_ints(context, 1, "pads"), len(data.shape)
    axes = tuple(range(rank))
    if present(context, 3) is not None:
        axes = axes_of(context, known_ints(context, 3, "axes"), rank)
    if len(pads) != 2 * len(axes):
        raise context.fail(
            "pads holds a begin and an end per axis",
            expected=f"{2 * len(axes)} numbers",
            got=str(list(pads)),
        )
    shape = list(data.shape)
    for i, axis in enumerate(axes):
        begin, end = pads[i], pads[i + len(axes)]
        shape[axis] += begin + end
        reach = data.shape[axis] - 1 if mode == "reflect" else data.shape[axis]
        empty = mode != "constant" and max(begin, end) > 0 and reach < (mode != "reflect")
        if shape[axis] < 0 or empty or (mode == "reflect" and max(begin, end) > max(reach, 0)):
            raise context.fail(
                f"axis {axis} cannot be padded by {begin} and {end} in mode {mode}",
                got=f"size {data.shape[axis]}",
            )
    return (ValueType(tuple(shape), data.data_type),)


def _pad(arguments: KernelArguments) -> Sequence[Thunk]:
    source, pads, out = given(arguments, 0), ints_at(arguments, 1), arguments.outputs[0]
    axes: Shape = tuple(range(source.ndim))
    if optional(arguments, 3) is not None:
        axes = tuple(axis % source.ndim for axis in ints_at(arguments, 3))
    begins = [0] * source.ndim
    for i, axis in enumerate(axes):
        begins[axis] = pads[i]
    if out.size == 0:
        return ()
    mode = string_of(arguments.attributes, "mode")
    if mode == "constant":
        return _pad_constant(source, begins, out, optional(arguments, 2))
    flat = np.zeros(out.shape, np.intp)
    for axis, stride in enumerate(strides_of(source.shape)):
        along = [1] * out.ndim
        along[axis] = out.shape[axis]
        positions = source_positions(mode, source.shape[axis], begins[axis], out.shape[axis])
        flat += (positions * stride).reshape(along)
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
    return [*steps, *copy_steps(source[taken], out[tuple(inner)])]


def _workspace(context: WorkspaceContext) -> int:
    """Where each element comes from, unless what is added is one number."""
    if string_of(context.attributes, "mode") == "constant":
        return 0
    shape = context.outputs[0].shape
    return 8 * math.prod(shape) + 64 * max(shape, default=0)


OPERATORS = (
    OpDef(
        "Pad",
        (2, 4),
        _infer_pad,
        _pad,
        attributes={"mode": Attribute("string", "constant")},
        gradient=pad_gradient,
        workspace=WorkspaceRule(_workspace),
    ),
)
