"""Gradients of Col2Im and MaxUnpool: what was put together is taken apart again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.gradient import GradientContext
from stitch.ops.shape.shape_gradients import ints_at, padded, shaped
from stitch.ops.window.windows import windows_of


def col2im_gradient(context: GradientContext) -> Sequence[Any]:
    """Per kernel element, a strided slice of the image."""
    columns, gradient = context.type_of(0).shape, context.gradient
    image, block = gradient.shape[2:], ints_at(context, 2) or ()
    windows = windows_of({**context.attributes, "auto_pad": "NOTSET"}, image, block)
    ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
    whole = padded(context, gradient, [0, 0, *windows.begin], [0, 0, *ends])
    axes = list(range(2, 2 + len(image)))
    places = math.prod(windows.output)
    parts = []
    for tap in np.ndindex(*block):
        starts = [int(t) * d for t, d in zip(tap, windows.dilations, strict=True)]
        stops = [
            start + (count - 1) * stride + 1
            for start, count, stride in zip(starts, windows.output, windows.strides, strict=True)
        ]
        part = context.apply("Slice", whole, starts, stops, axes, list(windows.strides))
        parts.append(shaped(context, part, (*gradient.shape[:2], 1, places)))
    joined = parts[0] if len(parts) == 1 else context.apply("Concat", *parts, axis=2)
    return shaped(context, joined, columns), None, None


def max_unpool_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradients of the places that were written."""
    if context.has(2):
        raise context.fail("indices count in another shape than output_shape", "leave it out")
    flat = shaped(context, context.gradient, (-1,))
    return context.apply("Gather", flat, context.input(1), axis=0), None
