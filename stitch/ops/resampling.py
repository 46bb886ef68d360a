"""Resize: per axis, each output element is a weighted sum of a few input elements of its row.

Sizes, scales and the region of interest are known at compile time, so places and weights are found
once. An element of no weight is not read, so what is no number stays where it is. Source: ONNX's
Resize. Lengths, and what is nearest, are decided in float32, the type of scales, as ONNX Runtime
does (5 elements by 1.4 are 7); other coordinates are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
)
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
from stitch.ops.steps import along, copy_steps, workspace
from stitch.program import Array, ValueType

# Batching -----------------------------------------------------------------------------------------


def batch_resize(c: BatchingContext) -> Sequence[Any]:
    """Sizes and regions are those of listed axes. A region that differs is one that does not count:
    where it does, it is known at compile time."""
    axes = [c.axis_behind(axis) for axis in c.ints_of("axes") or range(c.rank())]
    region = None if c.varies(1) or not c.has(1) else c.operands[1]
    return c.again(c.broadcast(0), region, *c.operands[2:], axes=axes)


def batch_deform_conv(c: BatchingContext) -> Sequence[Any] | None:
    if not c.varies(1, 3):
        return in_first_axis(1, 3)(c)
    # The filters and offsets of each example are groups of their own.
    words = {name: c.int_of(name) * c.batch_size for name in ("group", "offset_group")}
    operands = (c.folded(0, 1), c.folded(1), c.folded(2, 1), c.folded(3), c.folded(4, 1))
    (result,) = c.again(*operands[: len(c.operands)], **words)
    return (c.split(result, 1),)


def batch_roi_align(c: BatchingContext) -> Sequence[Any]:
    if not c.varies(1, 2):
        return (c.split(c.again(c.folded(0, 1), *c.operands[1:])[0], 1),)
    if not c.varies(0):
        return (c.split(c.again(c.operands[0], c.folded(1), c.folded(2))[0]),)
    # A region must not read another example's image: an index out of range for one example stays
    # out of range in the folded axis.
    count = c.shape()[0]
    index = c.broadcast(2)
    inside = c.apply("And", c.apply("Less", index, count), c.apply("GreaterOrEqual", index, -count))
    whole = c.apply("Where", c.apply("Less", index, 0), c.apply("Add", index, count), index)
    own = c.apply("Add", whole, c.example_indices(1, count))
    nowhere = c.constant(np.array(-1 - count * c.batch_size))
    beyond = c.apply("Where", inside, own, nowhere)
    return (c.split(c.again(c.folded(0), c.folded(1), c.merged(beyond))[0]),)


#: The gradient of an axis is a product with a constant matrix of at most so many numbers.
MOST_WEIGHTS = 1 << 26
_MODES = ("nearest", "linear", "cubic")
_COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize",
)  # fmt: skip
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICIES = ("stretch", "not_larger", "not_smaller")


@dataclass(frozen=True, slots=True)
class AxisResize:
    """How one axis changes: sizes before and after, the scale between, the region taken."""

    axis: int
    before: int
    after: int
    scale: float
    region: tuple[float, float]


def _length(before: int, scale: float) -> float:
    """The length of a resized axis, before it is rounded."""
    return float(np.float32(before) * np.float32(scale))


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
        after = [math.floor(_length(shape[a], f)) for a, f in zip(axes, factors, strict=True)]
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
    attributes: Attributes, shape: Shape, known: Sequence[Array | None]
) -> list[AxisResize]:
    """The axes that change, given regions, scales and sizes.

    What shrinks goes first: nothing in between is larger than operand and result.
    """
    axes = tuple(a % len(shape) for a in ints_of(attributes, "axes") or range(len(shape)))
    roi, scales, sizes = (None if a is None else a.reshape(-1) for a in known)
    crops = string_of(attributes, "coordinate_transformation_mode") == _COORDINATES[-1]
    plan = _plan(attributes, shape, axes, roi if crops else None, scales, sizes)
    is_plain = string_of(attributes, "mode") != "cubic" and not int_of(attributes, "antialias")
    if is_plain and not crops and all(one.before == one.after for one in plan):
        return []  # copied whatever the scale, as ONNX Runtime and PyTorch do
    return sorted(
        (one for one in plan if one.before != one.after or one.scale != 1.0 or crops),
        key=lambda one: one.after / max(one.before, 1),
    )


def _check_words(context: InferenceContext) -> None:
    words = (
        ("mode", _MODES),
        ("coordinate_transformation_mode", _COORDINATES),
        ("nearest_mode", _NEAREST),
        ("keep_aspect_ratio_policy", _POLICIES),
    )
    for name, known in words:
        context.require_word(name, known, f"{name} of Resize has no such value")


def _known(context: InferenceContext, index: int, name: str) -> Array | None:
    kind = context.present(index)
    if kind is None or math.prod(kind.shape) == 0:
        return None
    data = context.constant(index)
    if data is None:
        raise context.fail(
            f"operand {index} ({name}) of Resize must be known at compile time: it decides a shape"
        )
    return data.reshape(-1)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    nearest = context.string_of("mode") == "nearest"
    x = context.require_type(0, EVERY if nearest else FLOATS)
    _check_words(context)
    rank = len(x.shape)
    axes = context.axes_of(context.ints_of("axes") or range(rank), rank)
    crops = context.string_of("coordinate_transformation_mode") == _COORDINATES[-1]
    roi = _known(context, 1, "roi") if crops else None
    scales = _known(context, 2, "scales")
    sizes = None
    if context.present(3) is not None:
        sizes = np.array(context.known_ints(3, "sizes"), np.int64)
    if crops and roi is None:
        raise context.fail("tf_crop_and_resize needs the region of interest (operand 1)")
    if (scales is None) == (sizes is None or not sizes.size):
        raise context.fail("Resize takes either scales or sizes")
    lists = ((scales, len(axes)), (sizes if scales is None else None, len(axes)))
    for listed, count in (*lists, (roi, 2 * len(axes))):
        if listed is not None and len(listed) != count:
            raise context.fail(
                "an operand of Resize has not one number per axis", expected=count, got=len(listed)
            )
    if scales is not None and not (np.isfinite(scales).all() and (scales > 0).all()):
        raise context.fail("scales of Resize are positive", got=str(scales.tolist()))
    if scales is None and sizes is not None and (sizes < 0).any():
        raise context.fail("sizes of Resize are at least 0", got=str(sizes.tolist()))
    shape = list(x.shape)
    for one in _plan(context.attributes, x.shape, axes, roi, scales, sizes):
        shape[one.axis] = one.after
        if one.after and not one.before:
            raise context.fail("an empty axis cannot be resized", got=x.shape)
    return (ValueType(tuple(shape), x.data_type),)


def _places(mode: str, one: AxisResize, kind: type[np.floating[Any]]) -> Array:
    """Where each output element lies on the input axis, computed in a type."""
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
    """Keys' cubic kernel at distances."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.asarray(np.where(x <= 1, near, np.where(x < 2, far, 0.0)))


def _first_tap(attributes: Attributes, scale: float) -> tuple[int, float]:
    """How far before a place the first tap of `linear` and `cubic` lies, and how much wider than
    without shrinking."""
    support = 1 if string_of(attributes, "mode") == "linear" else 2
    shrink = min(scale, 1.0) if int_of(attributes, "antialias") else 1.0
    return math.floor(-support / shrink) + 1, shrink


def _taps(attributes: Attributes, place: Array, scale: float) -> tuple[Array, Array]:
    """Per output element, the input places it reads and their weights: (after, taps) each."""
    base = np.ceil(place) - 1
    ratio = (place - base)[:, None]  # in (0, 1]: a whole number reads its left neighbour's right
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
    """The input places and weights (after, taps) of an axis, and which outputs lie outside."""
    mode = string_of(attributes, "coordinate_transformation_mode")
    is_nearest = string_of(attributes, "mode") == "nearest"
    place = _places(mode, one, np.float32 if is_nearest else np.float64)
    outside = np.zeros(one.after, np.bool_)
    if mode == "tf_crop_and_resize":
        outside = (place < 0) | (place > one.before - 1)
    taps, weights = _taps(attributes, place, one.scale)
    if int_of(attributes, "exclude_outside"):
        weights = np.where((taps < 0) | (taps >= one.before), 0, weights)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return np.clip(taps, 0, one.before - 1).astype(np.intp), weights, outside


def _matrix(attributes: Attributes, one: AxisResize) -> tuple[Array, Array]:
    """The weights (after, before) of an axis, and which output elements lie outside."""
    columns, weights, outside = _weights(attributes, one)
    matrix = np.zeros((one.after, one.before))
    np.add.at(matrix, (np.arange(one.after)[:, None], columns), weights)
    return matrix, outside


def _read(columns: Array, weights: Array) -> tuple[Array, Array]:
    """The same places and weights, but that nothing is read that weighs nothing.

    0 times infinity is no number. So in the place of what weighs nothing the heaviest is read once
    more, and what it weighs is divided: in halves, which keep every digit.
    """
    order = np.argsort(-np.abs(weights), 1, "stable")
    columns, weights = (np.take_along_axis(a, order, 1) for a in (columns, weights))
    used = max(1, int((weights != 0).any(0).sum()))
    columns, weights = columns[:, :used], weights[:, :used]
    nothing = weights == 0
    left = nothing.sum(1, keepdims=True)
    halved = weights[:, :1] * 0.5 ** (left + 1 - np.cumsum(nothing, 1).clip(1))
    weights = np.where(nothing, halved, weights)
    weights[:, :1] *= 0.5**left
    return np.where(nothing, columns[:, :1], columns), weights


def _sum_steps(
    columns: Array, weights: Array, source: Array, axis: int, target: Array
) -> list[Thunk]:
    """Steps that add up what each place of `target` reads, tap after tap."""
    columns, weights = _read(columns, weights)
    part = workspace(target.shape, target.dtype)
    steps: list[Thunk] = []
    for tap in range(columns.shape[1]):
        weight = along(weights[:, tap].astype(target.dtype), axis, target.ndim)
        into = part if tap else target
        # Contiguous: so much faster to read than every so many-th index.
        places = np.ascontiguousarray(columns[:, tap])
        steps.append(partial(np.take, source, places, axis, into, "clip"))
        steps.append(partial(np.multiply, into, weight, into))
        if tap:
            steps.append(partial(np.add, target, part, target))
    return steps


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.given(0), arguments.outputs[0], arguments.attributes
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


def _workspace(context: WorkspaceContext) -> int:
    """Places and weights of every axis, as many at once as making them takes; what lies between
    two axes, and one tap of each result."""
    x, result = context.operand(0), context.outputs[0]
    if 0 in result.shape:
        return 0
    known = (*context.constants, None, None, None)[1:4]
    nearest = context.string_of("mode") == "nearest"
    itemsize, shape, kept, passing = result.data_type.compute_dtype.itemsize, list(x.shape), 0, 0
    changes = _changes(context.attributes, x.shape, known)
    for number, one in enumerate(changes, 1):
        taps = 1 if nearest else 2 - 2 * _first_tap(context.attributes, one.scale)[0]
        shape[one.axis] = one.after
        arrays = (number < len(changes)) + (taps > 1)
        kept += arrays * math.prod(shape) * itemsize + one.after * taps * (8 + itemsize)
        # Steps of a tap are objects.
        kept += 1024 * taps
        passing = max(passing, 80 * one.after * (taps + 1))
    crops = context.string_of("coordinate_transformation_mode") == _COORDINATES[-1]
    return kept + passing + (2 * math.prod(result.shape) if crops else 0)


def _gradient(context: GradientContext) -> Sequence[Any]:
    """Per axis the transposed matrix; where windows of equal length tile the result, sums."""
    shape, gradient, attributes = context.type_of(0).shape, context.gradient, context.attributes
    axes = tuple(a % len(shape) for a in ints_of(attributes, "axes") or range(len(shape)))
    known = (*context.constants, None, None, None)[:4]
    scales, sizes = (None if a is None else a.reshape(-1) for a in known[2:])
    crops = string_of(attributes, "coordinate_transformation_mode") == _COORDINATES[-1]
    for one in _plan(attributes, shape, axes, known[1] if crops else None, scales, sizes):
        if one.before == one.after and one.scale == 1.0 and not crops:
            continue
        if one.before * one.after > MOST_WEIGHTS:
            raise context.fail(
                f"axis {one.axis} would have {one.after} times {one.before} weights",
                f"resize in steps, or axes with at most {MOST_WEIGHTS} numbers",
            )
        matrix, outside = _matrix(attributes, one)
        matrix[outside] = 0.0
        times = one.after // one.before
        if np.array_equal(matrix, np.repeat(np.eye(one.before), times, 0)):
            split = (
                *gradient.shape[: one.axis],
                one.before,
                times,
                *gradient.shape[one.axis + 1 :],
            )
            gradient = context.apply("ReduceSum", context.shaped(gradient, split), [one.axis + 1],
                                 keepdims=0)  # fmt: skip
        else:
            gradient = context.weighted(gradient, one.axis, matrix)
    return gradient, None, None, None


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Resize", (1, 4), _infer, _kernel,
        attributes=declared(
            antialias=0, axes=Attribute("ints"), coordinate_transformation_mode="half_pixel",
            cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0,
            keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
        ),
        gradient=_gradient, batching=batch_resize, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
