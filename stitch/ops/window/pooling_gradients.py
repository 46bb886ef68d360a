"""Gradients of pools: averages are separable, so they go back one axis at a time; those of maxima
are an operator (`max_pool_gradient_operator`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import GradientContext
from stitch.ops.window.sliding import WindowLine, lines_of, taps_of
from stitch.ops.window.windows import Windows, pool_windows
from stitch.program import Array

#: Up to so many windows times places of an axis, the shares are a constant matrix.
MOST_SHARES = 1 << 22


def _windows(context: GradientContext) -> Windows:
    return pool_windows(context.attributes, context.type_of(0).shape[2:])


def max_pool(context: GradientContext) -> Sequence[Any]:
    """By the input and the result: indices would be one more thing to save."""
    if context.gradient is None:
        return (None,)
    windows = _windows(context)
    gradient = context.apply(
        "MaxPoolGradient", context.gradient, context.input(0), context.output(), domain="stitch",
        auto_pad=context.string_of("auto_pad"), ceil_mode=context.int_of("ceil_mode"),
        dilations=list(windows.dilations), kernel_shape=list(windows.kernel),
        strides=list(windows.strides), pads=context.ints_of("pads"),
    )  # fmt: skip
    return (gradient,)


def average_pool(context: GradientContext) -> Sequence[Any]:
    """Each place gets its share of every window that reads it."""
    windows = _windows(context)
    include = bool(context.int_of("count_include_pad"))
    tiles = not windows.needs_padding and windows.strides == windows.kernel
    if (
        tiles
        and windows.dilations == (1,) * len(windows.kernel)
        and windows.size
        == tuple(o * k for o, k in zip(windows.output, windows.kernel, strict=True))
    ):
        return (_repeated(context, context.gradient * (1.0 / math.prod(windows.kernel)), windows),)
    gradient = context.gradient
    for axis, line in enumerate(lines_of(windows)):
        counts = line.count_padded(windows.end[axis]) if include else line.count_inside()
        # A window that reads nothing gives nothing back.
        gradient = _spread(context, gradient, axis + 2, line, np.maximum(counts, 1))
    return (gradient,)


def _repeated(context: GradientContext, value: Any, windows: Windows) -> Any:
    """Every element as often as its window is large, where windows tile the input."""
    lead, shape, wide = value.shape[:2], [], []
    for count, kernel in zip(windows.output, windows.kernel, strict=True):
        shape += [count, 1]
        wide += [count, kernel]
    value = context.shaped(value, (*lead, *shape))
    value = context.apply("Expand", value, [*lead, *wide])
    return context.shaped(value, context.type_of(0).shape)


def _spread(
    context: GradientContext, value: Any, axis: int, line: WindowLine, counts: Array | None
) -> Any:
    """Every place of an axis gets the sum over the windows that read it, each divided by its count
    (None: as it is)."""
    if line.output * line.size <= MOST_SHARES:
        table = np.zeros((line.output, line.size))
        for which, places in taps_of(line):
            table[range(which.start, which.stop), range(*places.indices(line.size))] = 1.0
        return context.weighted(value, axis, table if counts is None else table / counts[:, None])
    if line.kernel > MOST_SHARES:
        raise context.fail(
            "its windows are too long", f"use windows of at most {MOST_SHARES} elements"
        )
    shape, dtype = value.shape, value.data_type.dtype
    if counts is not None:
        along = (-1, *(1,) * (len(shape) - 1 - axis))
        value = value * context.constant((1 / counts).reshape(along).astype(dtype))
    rest = math.prod(shape[axis + 1 :])
    value = context.shaped(value, (math.prod(shape[:axis]), 1, line.output, rest))
    reach = (line.output - 1) * line.stride + (line.kernel - 1) * line.dilation + 1 - line.begin
    value = context.apply(
        "ConvTranspose", value, context.constant(np.ones((1, 1, line.kernel, 1), dtype)),
        dilations=[line.dilation, 1], output_padding=[max(line.size - reach, 0), 0],
        pads=[line.begin, 0, max(reach - line.size, 0), 0], strides=[line.stride, 1],
    )  # fmt: skip
    return context.shaped(value, (*shape[:axis], line.size, *shape[axis + 1 :]))


def global_average(context: GradientContext) -> Sequence[Any]:
    """Every place gets the same share."""
    shape = context.type_of(0).shape
    share = context.gradient * (1.0 / max(math.prod(shape[2:]), 1))
    return (context.apply("Expand", share, list(shape)),)


def global_max(context: GradientContext) -> Sequence[Any]:
    """All places that reach the maximum share the gradient equally."""
    axes = list(range(2, len(context.type_of(0).shape)))
    hit = context.apply("Equal", context.input(0), context.output())
    ones = context.apply("Cast", hit, to=onnx_code(context.gradient.data_type))
    share = context.gradient / context.apply("ReduceSum", ones, axes, keepdims=1)
    return (context.kept(hit, share),)


def lp_pool(context: GradientContext) -> Sequence[Any]:
    """y^p = sum |x|^p: dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p) over x's windows."""
    p, x, gradient = context.int_of("p"), context.input(0), context.gradient
    if p != 1:
        y = context.output()
        share = gradient * context.apply("Pow", y, float(1 - p))
        gradient = context.kept(context.apply("Greater", y, 0.0), share)
    for axis, line in enumerate(lines_of(_windows(context))):
        gradient = _spread(context, gradient, axis + 2, line, None)
    if p == 1:
        return (gradient * context.apply("Sign", x),)
    if p == 2:
        return (gradient * x,)
    power = context.apply("Pow", context.apply("Abs", x), float(p - 1))
    return (gradient * power * context.apply("Sign", x),)
