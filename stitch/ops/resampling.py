"""Resize: along each axis, every output element is a weighted sum of a few input elements.

Sizes, scales and the region of interest are known at compile time, so indices and weights are
computed at binding. Elements of weight 0 are not read, so a NaN there has no effect. Lengths and
nearest elements are computed in float32, the type of scales, as in ONNX Runtime (5 elements by 1.4
are 7); other coordinates are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import (
    Attributes,
    InferenceContext,
    Shape,
    float_of,
    int_of,
    ints_of,
    string_of,
)
from stitch.ops.steps import along, copy_steps
from stitch.ops.workspaces import workspace
from stitch.program import Array, ValueType, is_symbolic

# Batching -----------------------------------------------------------------------------------------


def batch_resize(c: BatchingContext) -> Sequence[Any]:
    """List the axes. A region that varies over the batch is unused, else it would be known."""
    axes = [c.axis_behind(axis) for axis in c.ints_of("axes") or range(c.rank())]
    region = None if c.varies(1) or not c.has(1) else c.operands[1]
    return c.emit(c.broadcast(0), region, *c.operands[2:], axes=axes)


#: Limit of the elements of an axis' gradient matrix.
MOST_WEIGHTS = 1 << 26
_COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize",
)  # fmt: skip
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True, slots=True)
class AxisResize:
    """The resize of one axis: sizes before and after, the scale, and the region of interest."""

    axis: int
    before: int
    after: int
    scale: float
    region: tuple[float, float]


#: Integers up to this one are exact in float32.
_EXACT = 1 << 24


def _length(before: int, scale: float) -> float:
    """Return the length of a resized axis before rounding."""
    return float(np.float32(before) * np.float32(scale))


def _resized_length(before: int, scale: float) -> int:
    if is_symbolic(before) and scale % 1 == 0 and before * int(scale) <= _EXACT:
        return before * int(scale)
    return math.floor(_length(before, scale))


def _plan(
    attributes: Attributes,
    shape: Shape,
    axes: Shape,
    roi: Array | None,
    scales: Array | None,
    sizes: Array | None,
) -> tuple[AxisResize, ...]:
    regions = [(0.0, 1.0)] * len(axes)
    if roi is not None and roi.size:
        regions = [(float(roi[i]), float(roi[len(axes) + i])) for i in range(len(axes))]
    if scales is not None and scales.size:
        factors = [float(value) for value in scales]
        after = [_resized_length(shape[a], f) for a, f in zip(axes, factors, strict=True)]
    else:
        assert sizes is not None
        after = [int(value) for value in sizes]
        factors = [w / shape[a] if shape[a] else 1.0 for a, w in zip(axes, after, strict=True)]
        policy = string_of(attributes, "keep_aspect_ratio_policy")
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * len(axes)
            after = [math.floor(shape[a] * factor + 0.5) for a in axes]
    return tuple(
        AxisResize(a, shape[a], w, f, r)
        for a, w, f, r in zip(axes, after, factors, regions, strict=True)
    )


def _changes(
    attributes: Attributes, shape: Shape, operands: Sequence[Array | None]
) -> list[AxisResize]:
    """Return the axes that change, for the operands roi, scales and sizes.

    Axes that shrink come first, so that no intermediate is larger than operand and result.
    """
    axes = tuple(a % len(shape) for a in ints_of(attributes, "axes") or range(len(shape)))
    roi, scales, sizes = (None if a is None else a.reshape(-1) for a in operands)
    crops = _crops(attributes)
    plan = _plan(attributes, shape, axes, roi if crops else None, scales, sizes)
    is_plain = string_of(attributes, "mode") != "cubic" and not int_of(attributes, "antialias")
    if is_plain and not crops and all(one.before == one.after for one in plan):
        return []  # copied whatever the scale, as ONNX Runtime and PyTorch do
    return sorted(
        (one for one in plan if one.before != one.after or one.scale != 1.0 or crops),
        key=lambda one: one.after / max(one.before, 1),
    )


def _crops(attributes: Attributes) -> bool:
    return string_of(attributes, "coordinate_transformation_mode") == "tf_crop_and_resize"


def _is_stretched(context: InferenceContext) -> bool:
    return context.string_of("keep_aspect_ratio_policy") == "stretch"


def _known(context: InferenceContext, index: int, name: str) -> Array | None:
    kind = context.present(index)
    if kind is None or math.prod(kind.shape) == 0:
        return None
    return context.known_data(index, name).reshape(-1)


def _stretched(
    context: InferenceContext, x: ValueType, axes: Shape, sizes: Shape
) -> tuple[ValueType, ...]:
    """Return the type of axes with sizes of their own, which may be symbolic."""
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        if size < 0:
            raise context.fail("sizes of Resize must be at least 0", got=sizes)
        if size != 0 and shape[axis] == 0:
            raise context.fail(f"axis {axis} of size 0 cannot be resized to {size}", got=x.shape)
        shape[axis] = size
    return (ValueType(tuple(shape), x.data_type),)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    nearest = context.string_of("mode") == "nearest"
    x = context.require_type(0, EVERY if nearest else FLOATS)
    context.require_word("mode", ("nearest", "linear", "cubic"))
    context.require_word("coordinate_transformation_mode", _COORDINATES)
    context.require_word("nearest_mode", _NEAREST)
    context.require_word("keep_aspect_ratio_policy", ("stretch", "not_larger", "not_smaller"))
    rank = len(x.shape)
    axes = context.axes_of(context.ints_of("axes") or range(rank), rank)
    crops = _crops(context.attributes)
    roi = _known(context, 1, "roi") if crops else None
    scales = _known(context, 2, "scales")
    sizes = None
    if context.present(3) is not None:
        given = context.known_ints(3, "sizes")
        is_free = scales is None and not crops and _is_stretched(context)
        if is_free and len(given) == len(axes) and any(map(is_symbolic, (*given, *x.shape))):
            return _stretched(context, x, axes, given)
        sizes = np.array(given, np.int64)
    if crops and roi is None:
        raise context.fail("Resize with tf_crop_and_resize requires operand 1 (roi)")
    if (scales is None) == (sizes is None or not sizes.size):
        raise context.fail("Resize requires either scales or sizes")
    lists = ((scales, len(axes)), (sizes if scales is None else None, len(axes)))
    for listed, count in (*lists, (roi, 2 * len(axes))):
        if listed is not None and len(listed) != count:
            raise context.fail(
                f"an operand of Resize has {len(listed)} elements for {len(axes)} axes",
                expected=count, got=len(listed),
            )  # fmt: skip
    if scales is not None and not (np.isfinite(scales).all() and (scales > 0).all()):
        raise context.fail("scales of Resize must be positive", got=scales.tolist())
    if scales is None and sizes is not None and (sizes < 0).any():
        raise context.fail("sizes of Resize must be at least 0", got=sizes.tolist())
    shape = list(x.shape)
    for one in _plan(context.attributes, x.shape, axes, roi, scales, sizes):
        shape[one.axis] = one.after
        if one.after and not one.before:
            raise context.fail(
                f"axis {one.axis} of size 0 cannot be resized to {one.after}", got=x.shape
            )
    return (ValueType(tuple(shape), x.data_type),)


def _coordinates(mode: str, one: AxisResize, kind: type[np.floating[Any]]) -> Array:
    """Return the input coordinate of each output element, computed in a floating type."""
    y, scale, half = np.arange(one.after, dtype=kind), kind(one.scale), kind(0.5)
    width = kind(_length(one.before, one.scale))
    if mode == "asymmetric":
        return np.asarray(y / scale)
    if mode == "align_corners":
        return y * 0 if width == 1 else y * (one.before - 1) / (width - 1)
    if mode == "tf_crop_and_resize":
        start, end = one.region
        last = one.before - 1
        if width == 1:
            return y * 0 + (end - start) * last / 2 + start * last
        return y * (end - start) * last / (width - 1) + start * last
    if mode == "pytorch_half_pixel" and width == 1:
        return np.asarray(y * 0 - half)
    offset = kind(0)
    if mode == "half_pixel_symmetric":
        offset = kind(one.before / 2) * (1 - one.after / width)
    return np.asarray(offset + (y + half) / scale - half)


def cubic_weight(distance: Array, a: float) -> Array:
    """Return the weights of Keys' cubic convolution kernel."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.asarray(np.where(x <= 1, near, np.where(x < 2, far, 0.0)))


def _first_tap(attributes: Attributes, scale: float) -> tuple[int, float]:
    """Return the offset of the first tap of `linear` and `cubic`, and the factor on distances, less
    than 1 for antialiased shrinking."""
    support = 1 if string_of(attributes, "mode") == "linear" else 2
    shrink = min(scale, 1.0) if int_of(attributes, "antialias") else 1.0
    return math.floor(-support / shrink) + 1, shrink


def _taps(attributes: Attributes, coordinates: Array, scale: float) -> tuple[Array, Array]:
    """Return the input indices that each output element reads, and weights: [after, taps] each."""
    base = np.ceil(coordinates) - 1
    ratio = (coordinates - base)[:, None]  # in (0, 1]
    mode = string_of(attributes, "mode")
    if mode == "nearest":
        rounding = string_of(attributes, "nearest_mode")
        left = {
            "round_prefer_floor": ratio <= 0.5,
            "round_prefer_ceil": ratio < 0.5,
            "floor": ratio < 1,
            "ceil": ratio < 0,
        }[rounding]
        return base[:, None] + ~left, np.ones_like(ratio)
    first, shrink = _first_tap(attributes, scale)
    steps = np.arange(first, 2 - first)
    distance = (steps - ratio) * shrink
    if mode == "linear":
        weights = np.clip(1 - np.abs(distance), 0, 1)
    else:
        weights = cubic_weight(distance, float_of(attributes, "cubic_coeff_a"))
    if shrink < 1:
        weights = weights / weights.sum(1, keepdims=True)
    return base[:, None] + steps, weights


def _weights(attributes: Attributes, one: AxisResize) -> tuple[Array, Array, Array]:
    """Return input indices and weights, [after, taps], and which output elements are outside."""
    mode = string_of(attributes, "coordinate_transformation_mode")
    is_nearest = string_of(attributes, "mode") == "nearest"
    coordinates = _coordinates(mode, one, np.float32 if is_nearest else np.float64)
    outside = np.zeros(one.after, np.bool_)
    if mode == "tf_crop_and_resize":
        outside = (coordinates < 0) | (coordinates > one.before - 1)
    taps, weights = _taps(attributes, coordinates, one.scale)
    if int_of(attributes, "exclude_outside"):
        weights = np.where((taps < 0) | (taps >= one.before), 0, weights)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return np.clip(taps, 0, one.before - 1).astype(np.intp), weights, outside


def _matrix(attributes: Attributes, one: AxisResize) -> tuple[Array, Array]:
    """Return the weights of an axis, [after, before], and which output elements are outside."""
    columns, weights, outside = _weights(attributes, one)
    matrix = np.zeros((one.after, one.before))
    np.add.at(matrix, (np.arange(one.after)[:, None], columns), weights)
    return matrix, outside


def _without_zeros(columns: Array, weights: Array) -> tuple[Array, Array]:
    """Replace taps of weight 0, as 0 times infinity is NaN, by repeating the heaviest tap.

    Its weight is divided by powers of two, which is exact.
    """
    order = np.argsort(-np.abs(weights), 1, "stable")
    columns, weights = (np.take_along_axis(a, order, 1) for a in (columns, weights))
    used = max(1, int((weights != 0).any(0).sum()))
    columns, weights = columns[:, :used], weights[:, :used]
    is_zero = weights == 0
    count = is_zero.sum(1, keepdims=True)
    halved = weights[:, :1] * 0.5 ** (count + 1 - np.cumsum(is_zero, 1).clip(1))
    weights = np.where(is_zero, halved, weights)
    weights[:, :1] *= 0.5**count
    return np.where(is_zero, columns[:, :1], columns), weights


def _sum_steps(
    columns: Array, weights: Array, source: Array, axis: int, target: Array
) -> list[Thunk]:
    """Return steps that sum the weighted taps of each element of `target`."""
    columns, weights = _without_zeros(columns, weights)
    part = workspace(target.shape, target.dtype)
    steps: list[Thunk] = []
    for tap in range(columns.shape[1]):
        weight = along(weights[:, tap].astype(target.dtype), axis, target.ndim)
        into = part if tap else target
        # np.take is much faster with contiguous indices.
        indices = np.ascontiguousarray(columns[:, tap])
        steps.append(partial(np.take, source, indices, axis, into, "clip"))
        steps.append(partial(np.multiply, into, weight, into))
        if tap:
            steps.append(partial(np.add, target, part, target))
    return steps


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.operand(0), arguments.outputs[0], arguments.attributes
    plan = _changes(attributes, x.shape, [arguments.optional(index) for index in (1, 2, 3)])
    steps: list[Thunk] = []
    current, outside = x, np.zeros((1,) * x.ndim, np.bool_)
    nearest = string_of(attributes, "mode") == "nearest"
    for one in plan:
        columns, weights, beyond = _weights(attributes, one)
        outside = outside | along(beyond, one.axis, x.ndim)
        shape = (*current.shape[: one.axis], one.after, *current.shape[one.axis + 1 :])
        target = out if one is plan[-1] else np.empty(shape, x.dtype)
        if nearest:
            rows = columns[:, 0].copy()
            steps.append(partial(np.take, current, rows, one.axis, target, "clip"))
        else:
            steps += _sum_steps(columns, weights, current, one.axis, target)
        current = target
    if not plan:
        steps += copy_steps(x, out)
    if outside.any():
        value = np.array(float_of(attributes, "extrapolation_value")).astype(out.dtype)
        steps.append(partial(np.copyto, out, value, where=np.broadcast_to(outside, out.shape)))
    return steps


def _gradient(context: GradientContext) -> Sequence[Any]:
    """Multiply each axis by its transposed matrix; sum if equal runs tile the result."""
    shape, gradient, attributes = context.type_of(0).shape, context.gradient, context.attributes
    axes = tuple(a % len(shape) for a in ints_of(attributes, "axes") or range(len(shape)))
    known = (*context.constants, None, None, None)[:4]
    scales, sizes = (None if a is None else a.reshape(-1) for a in known[2:])
    crops = _crops(attributes)
    for one in _plan(attributes, shape, axes, known[1] if crops else None, scales, sizes):
        if one.before == one.after and one.scale == 1.0 and not crops:
            continue
        if one.before * one.after > MOST_WEIGHTS:
            raise context.fail(
                f"axis {one.axis} would need a matrix of {one.after} x {one.before} weights",
                f"resize in several steps of at most {MOST_WEIGHTS} weights",
            )
        matrix, outside = _matrix(attributes, one)
        matrix[outside] = 0.0
        times = one.after // one.before
        if np.array_equal(matrix, np.repeat(np.eye(one.before), times, 0)):
            lead, rest = gradient.shape[: one.axis], gradient.shape[one.axis + 1 :]
            split = context.reshape(gradient, (*lead, one.before, times, *rest))
            gradient = context.apply("ReduceSum", split, [one.axis + 1], keepdims=0)
        else:
            gradient = context.multiply_axis(gradient, one.axis, matrix)
    return gradient, None, None, None


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Resize", (1, 4), _infer, _kernel,
        attributes=declared(
            antialias=0, axes=Attribute("ints"), coordinate_transformation_mode="half_pixel",
            cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0,
            keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
        ),
        gradient=_gradient, batching=batch_resize,
    ),
)  # fmt: skip
