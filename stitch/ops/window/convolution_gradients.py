"""Gradients of convolutions: a convolution and a transposed one are each other's.

The weights' gradient is `ConvWeightGradient`, a product of unfolded columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.gradient import GradientContext
from stitch.ops.window.windows import Windows, transposed_windows, windows_of


def _laid(context: GradientContext, windows: Windows) -> dict[str, Any]:
    """How the windows lie, without automatic padding."""
    return {
        "dilations": list(windows.dilations),
        "group": context.int_of("group"),
        "pads": [*windows.begin, *windows.end],
        "strides": list(windows.strides),
    }


def _bias(context: GradientContext) -> Any:
    """Sums per channel."""
    if not context.wants(2):
        return None
    axes = [0, *range(2, len(context.gradient.shape))]
    return context.apply("ReduceSum", context.gradient, axes, keepdims=0)


def conv(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is spread by the weights; what strides left over saw no window."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = windows_of(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
    first = second = None
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
    if context.wants(1):
        second = context.apply(
            "ConvWeightGradient", context.input(0), gradient, domain="stitch",
            kernel_shape=list(kernel), **laid,
        )  # fmt: skip
    return first, second, _bias(context)


def conv_transpose(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is a convolution; gradient and input change places for the weights."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = transposed_windows(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
    first = second = None
    if context.wants(0):
        first = context.apply("Conv", gradient, context.input(1), **laid)
        if first.shape[2:] != size:
            axes = list(range(2, 2 + len(size)))
            first = context.apply("Slice", first, [0] * len(size), list(size), axes)
    if context.wants(1):
        second = context.apply(
            "ConvWeightGradient", gradient, context.input(0), domain="stitch",
            kernel_shape=list(kernel), **laid,
        )  # fmt: skip
    return first, second, _bias(context)
