"""Col2Im, the inverse of im2col."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import in_first_axis
from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import NUMERIC
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.windows import WINDOW_ATTRIBUTES, lines_of, windows_of
from stitch.program import Array, ValueType

_LISTS = {name: WINDOW_ATTRIBUTES[name] for name in ("dilations", "pads", "strides")}
#: Up to this many kernel elements, views are made at binding.
_KEPT = 1024


def _infer_col2im(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, NUMERIC)
    context.require_rank(0, 3, 3)
    image = context.known_ints(1, "image_shape")
    block = context.known_ints(2, "block_shape")
    if len(image) != len(block) or not image or min(*image, *block) < 1:
        raise context.fail(
            "image_shape and block_shape of Col2Im differ in length or have a size below 1",
            got=f"{list(image)} and {list(block)}",
        )
    ones = (1,) * len(image)
    for name in ("strides", "dilations"):
        context.spatial_ints(name, ones)
    context.spatial_ints("pads", ones + ones, least=0)
    windows = windows_of(context.attributes, image, block)
    taps, places = math.prod(block), math.prod(windows.output)
    context.require(
        min(windows.output) >= 1 and x.shape[1] % taps == 0 and x.shape[2] == places,
        "shape of the columns of Col2Im does not match image_shape",
        expected=f"a multiple of {taps} rows, {places} columns", got=x.shape[1:],
    )  # fmt: skip
    return (ValueType((x.shape[0], x.shape[1] // taps, *image), x.data_type),)


def _col2im(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]
    windows = windows_of(arguments.attributes, out.shape[2:], arguments.ints_at(2))
    taps = x.reshape(*out.shape[:2], *windows.kernel, *windows.output)
    lines = lines_of(windows)

    def pairs() -> Iterator[tuple[Array, Array]]:
        """Yield for each kernel element the target and the source of an addition."""
        for element in np.ndindex(*windows.kernel):
            met = [line.met(at) for line, at in zip(lines, element, strict=True)]
            columns = (slice(None), slice(None), *element, *(which for which, _ in met))
            yield out[(slice(None), slice(None), *(seen for _, seen in met))], taps[columns]

    # Views of large kernels would take too much memory.
    kept = list(pairs()) if math.prod(windows.kernel) <= _KEPT else None

    def run() -> None:
        out.fill(0)
        for into, columns in kept if kept is not None else pairs():
            np.add(into, columns, into)

    return [run]


def col2im_gradient(context: GradientContext) -> Sequence[Any]:
    """Concatenate a strided slice of the image per kernel element."""
    columns, gradient = context.type_of(0).shape, context.gradient
    image, block = gradient.shape[2:], context.ints_at(2) or ()
    windows = windows_of(context.attributes, image, block)
    ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
    whole = context.pad(gradient, [0, 0, *windows.begin], [0, 0, *ends])
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
        parts.append(context.reshape(part, (*gradient.shape[:2], 1, places)))
    joined = parts[0] if len(parts) == 1 else context.apply("Concat", *parts, axis=2)
    return context.reshape(joined, columns), None, None


OPERATORS = (
    OpDef(
        "Col2Im", (3, 3), _infer_col2im, _col2im, attributes=_LISTS, gradient=col2im_gradient,
        batching=in_first_axis(1, 2),
    ),
)  # fmt: skip
