"""Gradients of convolutions: a convolution and a transposed one are each other's; that of the
weights is an operator, `stitch.ConvWeightGradient`, a product of unfolded columns.

Its operands are the convolution's input [N, C, *size] and its output's gradient [N, O, *places];
the result is [O, C / group, *kernel_shape]. As ONNX has it: Pad, one Slice per kernel element,
Concat, and one MatMul. A convolution with the gradient as its kernel would be slow everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import fill_step, stretches, workspace
from stitch.ops.window.columns import Columns
from stitch.ops.window.convolution_tiles import (
    is_cut,
    one_sample_nbytes,
    weight_nbytes,
    weight_steps,
)
from stitch.ops.window.window_batching import conv_weight_gradient
from stitch.ops.window.windows import (
    CONVOLUTION_ATTRIBUTES,
    KERNEL_SHAPE,
    Windows,
    check_window_attributes,
    transposed_windows,
    windows_of,
)
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, computed_nbytes
from stitch.program import Array, ValueType

#: Columns are gathered for as many samples at a time as fit in this many bytes, or in those of the
#: result (at least one).
COLUMNS_NBYTES = 1 << 19
#: From this many places on, a product per sample is long enough; below, samples are joined.
LONG_PRODUCT = 256
#: Sums of fewer products than so many for each filter take less than to turn round what they give.
SHORT_PRODUCT = 2


def _laid(context: GradientContext, windows: Windows) -> dict[str, Any]:
    """How the windows lie, without automatic padding."""
    return {
        "dilations": list(windows.dilations),
        "group": context.int_of("group"),
        "pads": [*windows.begin, *windows.end],
        "strides": list(windows.strides),
    }


def _parameters(
    context: GradientContext, kernel: Shape, laid: dict[str, Any], is_transposed: bool = False
) -> tuple[Any, Any]:
    """What weights and bias get; input and gradient change places if it `is_transposed`."""
    weights = bias = None
    if context.wants(1):
        operands = context.input(0), context.gradient
        weights = context.apply(
            "ConvWeightGradient", *(operands[::-1] if is_transposed else operands),
            domain="stitch", kernel_shape=list(kernel), **laid,
        )  # fmt: skip
    if context.wants(2):
        axes = [0, *range(2, len(context.gradient.shape))]
        bias = context.apply("ReduceSum", context.gradient, axes, keepdims=0)
    return weights, bias


def conv(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is spread by the weights; what strides left over saw no window."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = windows_of(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
    first = None
    if context.wants(0):
        left = [
            length + b + e - d * (k - 1) - 1 - (places - 1) * s
            for length, b, e, d, k, places, s in zip(
                size, windows.begin, windows.end, windows.dilations, kernel,
                windows.output, windows.strides, strict=True,
            )
        ]  # fmt: skip
        first = context.apply(
            "ConvTranspose", gradient, context.input(1), output_padding=left, **laid
        )
    return first, *_parameters(context, kernel, laid)


def conv_transpose(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is a convolution; gradient and input change places for the weights."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = transposed_windows(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
    first = None
    if context.wants(0):
        first = context.apply("Conv", gradient, context.input(1), **laid)
        if first.shape[2:] != size:
            axes = list(range(2, 2 + len(size)))
            first = context.apply("Slice", first, [0] * len(size), list(size), axes)
    return first, *_parameters(context, kernel, laid, is_transposed=True)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x, gradient = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    kernel, group = context.ints_of("kernel_shape"), context.int_of("group")
    assert kernel is not None
    check_window_attributes(context, x.shape[2:], kernel)
    windows = windows_of(context.attributes, x.shape[2:], kernel)
    # A transposed convolution may have had fewer places than there are windows.
    fits = gradient.shape[0] == x.shape[0] and all(
        places <= room for places, room in zip(gradient.shape[2:], windows.output, strict=True)
    )
    if group < 1 or x.shape[1] % group or gradient.shape[1] % group or not fits:
        raise context.fail(
            "the gradient does not fit the input",
            expected=f"{x.shape[0]} samples, channels divisible by {group}, "
            f"at most {list(windows.output)} places",
            got=gradient.shape,
        )
    shape = (gradient.shape[1], x.shape[1] // group, *kernel)
    return (ValueType(shape, x.data_type),)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    x, gradient, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    group = arguments.int_of("group")
    samples, places = gradient.shape[0], math.prod(gradient.shape[2:])
    depth = math.prod(out.shape[1:])
    if samples * places == 0:
        return (fill_step(out, 0),)
    windows = windows_of(arguments.attributes, x.shape[2:], out.shape[2:])
    seen = replace(windows, output=gradient.shape[2:])
    if is_cut(one_sample_nbytes(seen, x.shape[1], x.itemsize)):
        totals = np.empty((group, depth, gradient.shape[1] // group), out.dtype)
        last = partial(np.copyto, out.reshape(group, -1, depth), totals.transpose(0, 2, 1))
        return [*weight_steps(x, seen, gradient, totals), last]
    at_once = _at_once(samples, group * depth * places * x.itemsize, out.size * x.itemsize)
    columns = Columns(x, seen, at_once)
    parts = list(stretches(samples, at_once))
    place = out.reshape(group, -1, depth)
    # Whether sums lie as the result does: their shape does not tell, both sides may be as long.
    short = SHORT_PRODUCT * gradient.shape[1] // group
    lies = places < LONG_PRODUCT and at_once * places < short
    if places >= LONG_PRODUCT:
        sums, products = _by_sample(columns, gradient, parts, group)
    else:
        sums, products = _joined(columns, gradient, parts, group, place if lies else None)
    if len(products) == 1:
        return products[0] if lies else [*products[0], _turned(sums, place)]
    total = place if lies else np.empty_like(sums)
    steps: list[Thunk] = []
    for index, step in enumerate(products):
        steps += step
        first = partial(np.copyto, total, sums)
        steps.append(partial(np.add, total, sums, total) if index else first)
    return steps if lies else [*steps, _turned(total, place)]


def _turned(sums: Array, place: Array) -> Thunk:
    return partial(np.copyto, place, sums.transpose(0, 2, 1))


def _workspace(context: WorkspaceContext) -> int:
    x, gradient = context.operand(0), context.operand(1)
    result, itemsize = context.outputs[0], x.data_type.compute_dtype.itemsize
    group = context.int_of("group")
    if 0 in (*x.shape, *gradient.shape):
        return 0
    windows = windows_of(context.attributes, x.shape[2:], result.shape[2:])
    seen = replace(windows, output=gradient.shape[2:])
    sums, one = computed_nbytes(result), one_sample_nbytes(seen, x.shape[1], itemsize)
    if is_cut(one):
        filters = result.shape[0] // group
        return 2 * sums + weight_nbytes(seen, x.shape[1] // group, filters, itemsize)
    places = math.prod(gradient.shape[2:])
    columns = group * math.prod(result.shape[1:]) * places * itemsize
    at_once = _at_once(x.shape[0], columns, sums)
    # A product for each sample, or one for all of them.
    products = sums if places >= LONG_PRODUCT else 0
    return at_once * (one + products + gradient.shape[1] * places * itemsize) + 2 * sums


def _at_once(samples: int, columns: int, sums: int) -> int:
    """Samples whose columns, of so many bytes each, are gathered at a time: as sums are added up
    after each time, columns take no fewer bytes than these, if there are as many."""
    return min(samples, max(1, max(COLUMNS_NBYTES, sums) // columns))


def _by_sample(
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int
) -> tuple[Array, list[list[Thunk]]]:
    """One product per sample and group, then their sum."""
    samples, channels, places = *gradient.shape[:2], math.prod(gradient.shape[2:])
    depth = math.prod(columns.shape) // (places * group)
    count = parts[0].stop
    work = workspace((count, *columns.shape), gradient.dtype)
    products = np.empty((count, group, depth, channels // group), gradient.dtype)
    sums = np.empty(products.shape[1:], gradient.dtype)
    rows = gradient.reshape(samples, group, channels // group, places).transpose(0, 1, 3, 2)
    steps: list[list[Thunk]] = []
    for part in parts:
        size = part.stop - part.start
        flat = work[:size].reshape(size, group, depth, places)
        steps.append([
            *columns.steps(part, work[:size]),
            partial(np.matmul, flat, rows[part], products[:size]),
            partial(np.add.reduce, products[:size], 0, None, sums),
        ])  # fmt: skip
    return sums, steps


def _joined(
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int,
    place: Array | None = None,
) -> tuple[Array, list[list[Thunk]]]:  # fmt: skip
    """One product per part: channels go first, so that samples and places are one long axis.

    Columns by gradients: a product with the longer side first takes two thirds of the time. With
    the `place` of the result gradients by columns, which is how that lies.
    """
    channels, count = gradient.shape[1], parts[0].stop
    places, before = math.prod(gradient.shape[2:]), gradient.ndim - 1
    depth = math.prod(columns.shape) // (places * group)
    work = workspace(group * depth * count * places, gradient.dtype)
    seen = workspace(channels * count * places, gradient.dtype)
    is_only = len(parts) == 1 and place is not None
    if place is None:
        sums = np.empty((group, depth, channels // group), gradient.dtype)
    else:
        sums = place if is_only else np.empty(place.shape, place.dtype)
    turned = gradient.swapaxes(0, 1)
    steps: list[list[Thunk]] = []
    for part in parts:
        count = part.stop - part.start
        long = count * places
        gathered, rows = work[: group * depth * long], seen[: channels * long]
        wide = gathered.reshape(*columns.shape[:before], count, *columns.shape[before:])
        sides = gathered.reshape(group, depth, long), rows.reshape(group, -1, long)
        first, second = sides if place is None else sides[::-1]
        steps.append([
            *columns.steps(part, np.moveaxis(wide, before, 0)),
            partial(np.copyto, rows.reshape(turned[:, part].shape), turned[:, part]),
            partial(np.matmul, first, second.transpose(0, 2, 1), sums),
        ])  # fmt: skip
    return sums, steps


OPERATORS = (
    OpDef(
        "ConvWeightGradient", (2, 2), _infer, _kernel,
        attributes={**CONVOLUTION_ATTRIBUTES, **KERNEL_SHAPE},
        domain="stitch", batching=conv_weight_gradient, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
