"""Gradients of pools: averages are separable, so they go back one axis at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.arithmetic_gradients import kept
from stitch.ops.attributes import int_of, ints_of, string_of
from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import GradientContext
from stitch.ops.shape_gradients import shaped, weighted
from stitch.ops.windows import Windows, windows_of
from stitch.program import Array


def _windows(context: GradientContext) -> Windows:
    kernel = ints_of(context.attributes, "kernel_shape") or ()
    ceil = bool(int_of(context.attributes, "ceil_mode"))
    return windows_of(context.attributes, context.type_of(0).shape[2:], kernel, ceil)


def max_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """By the input and the result: indices would be one more thing to save."""
    if context.gradient is None:
        return (None,)
    windows = _windows(context)
    made = context.apply(
        "MaxPoolGradient",
        context.gradient,
        context.input(0),
        context.output(),
        domain="stitch",
        auto_pad=string_of(context.attributes, "auto_pad"),
        ceil_mode=int_of(context.attributes, "ceil_mode"),
        dilations=list(windows.dilations),
        kernel_shape=list(windows.kernel),
        strides=list(windows.strides),
        **_pads(context, windows),
    )
    return (made,)


def _pads(context: GradientContext, windows: Windows) -> dict[str, Any]:
    declared = ints_of(context.attributes, "pads")
    return {} if declared is None else {"pads": list(declared)}


def average_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """Each place gets its share of every window that reads it."""
    windows = _windows(context)
    include = bool(int_of(context.attributes, "count_include_pad"))
    tiles = not windows.needs_padding and windows.strides == windows.kernel
    if (
        tiles
        and windows.dilations == (1,) * len(windows.kernel)
        and windows.size
        == tuple(o * k for o, k in zip(windows.output, windows.kernel, strict=True))
    ):
        return (_repeated(context, context.gradient * (1.0 / math.prod(windows.kernel)), windows),)
    made = context.gradient
    for axis, table in enumerate(_tables(windows, include)):
        made = weighted(context, made, axis + 2, table)
    return (made,)


def _repeated(context: GradientContext, value: Any, windows: Windows) -> Any:
    """Every element as often as its window is large, where windows tile the input."""
    lead, shape, wide = value.shape[:2], [], []
    for made, kernel in zip(windows.output, windows.kernel, strict=True):
        shape += [made, 1]
        wide += [made, kernel]
    value = shaped(context, value, (*lead, *shape))
    value = context.apply("Expand", value, [*lead, *wide])
    return shaped(context, value, context.type_of(0).shape)


def _tables(windows: Windows, include: bool | None) -> list[Array]:
    """Per axis, [window, place]: the share with which a window reads a place (None: ones)."""
    tables = []
    for axis, (size, kernel) in enumerate(zip(windows.size, windows.kernel, strict=True)):
        begin, end = windows.begin[axis], windows.end[axis]
        made = windows.output[axis]
        table, counts = np.zeros((made, size)), np.zeros(made)
        for window in range(made):
            first = window * windows.strides[axis] - begin
            places = first + np.arange(kernel) * windows.dilations[axis]
            inside = places[(places >= 0) & (places < size)]
            table[window, inside] = 1.0
            # Padding that ceil_mode adds beyond what was declared never counts.
            counts[window] = (places < size + end).sum() if include else inside.size
        tables.append(table if include is None else table / counts[:, None])
    return tables


def global_average_gradient(context: GradientContext) -> Sequence[Any]:
    """Every place gets the same share."""
    shape = context.type_of(0).shape
    share = context.gradient * (1.0 / max(math.prod(shape[2:]), 1))
    return (context.apply("Expand", share, list(shape)),)


def global_max_gradient(context: GradientContext) -> Sequence[Any]:
    """All places that reach the maximum share the gradient equally."""
    axes = list(range(2, len(context.type_of(0).shape)))
    hit = context.apply("Equal", context.input(0), context.output())
    ones = context.apply("Cast", hit, to=onnx_code(context.gradient.data_type))
    share = context.gradient / context.apply("ReduceSum", ones, axes, keepdims=1)
    return (kept(context, hit, share),)


def lp_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """y^p = sum |x|^p: dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p) over x's windows."""
    p, x, made = int_of(context.attributes, "p"), context.input(0), context.gradient
    if p != 1:
        y = context.output()
        share = made * context.apply("Pow", y, float(1 - p))
        made = kept(context, context.apply("Greater", y, 0.0), share)
    for axis, table in enumerate(_tables(_windows(context), None)):
        made = weighted(context, made, axis + 2, table)
    if p == 1:
        return (made * context.apply("Sign", x),)
    if p == 2:
        return (made * x,)
    power = context.apply("Pow", context.apply("Abs", x), float(p - 1))
    return (made * power * context.apply("Sign", x),)
