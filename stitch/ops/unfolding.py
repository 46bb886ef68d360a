"""Col2Im and MaxUnpool: the inverses of im2col and MaxPool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import in_first_axis
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, INT64, NUMERIC
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape, WithAttributes
from stitch.ops.steps import check_range, copy_steps, fill_step
from stitch.ops.windows import KERNEL_SHAPE, WINDOW_ATTRIBUTES, lines_of, windows_of
from stitch.ops.workspaces import few
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


def _unpooled(context: WithAttributes, size: Shape) -> Shape:
    """Return the smallest spatial shape whose pool has the spatial shape `size`."""
    kernel = context.ints_of("kernel_shape") or ()
    strides = context.ints_of("strides") or (1,) * len(kernel)
    pads = context.ints_of("pads") or (0,) * (2 * len(kernel))
    return tuple(
        (size[i] - 1) * strides[i] - pads[i] - pads[len(kernel) + i] + kernel[i]
        for i in range(len(kernel))
    )


def _infer_max_unpool(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_type(1, INT64)
    rank = context.require_rank(0, 3)
    context.require_shape(1, x.shape)
    ones = (1,) * (rank - 2)
    for name in ("kernel_shape", "strides"):
        context.spatial_ints(name, ones)
    context.spatial_ints("pads", ones + ones, least=0)
    shape = (*x.shape[:2], *_unpooled(context, x.shape[2:]))
    context.require(min(shape) >= 0, "pads of MaxUnpool are larger than the result", got=shape)
    if context.present(2) is not None:
        wanted = context.known_ints(2, "output_shape")
        fits = len(wanted) == rank and all(w >= s for w, s in zip(wanted, shape, strict=True))
        what = "output_shape of MaxUnpool is too small"
        context.require(fits, what, expected=f"at least {list(shape)}", got=wanted)
        return (ValueType(wanted, x.data_type),)
    return (ValueType(shape, x.data_type),)


def _max_unpool(arguments: KernelArguments) -> Sequence[Thunk]:
    x, indices, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    shape = (*x.shape[:2], *_unpooled(arguments, x.shape[2:]))
    # Indices count in the shape of the pool's input, which may be a corner of the result.
    whole = out if shape == out.shape else np.empty(shape, out.dtype)
    flat, checked = whole.reshape(-1), np.empty(indices.size, np.intp)
    values, flat_indices = x.reshape(-1), indices.reshape(-1)

    def scatter() -> None:
        check_range("MaxUnpool", "an index", flat_indices, flat.size - 1)
        np.copyto(checked, flat_indices)
        flat[...] = 0
        flat[checked] = values

    if whole is out:
        return (scatter,)
    corner = out[tuple(slice(0, size) for size in shape)]
    return (scatter, fill_step(out, 0), *copy_steps(whole, corner))


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


def max_unpool_gradient(context: GradientContext) -> Sequence[Any]:
    """Gather the gradient by the indices."""
    if context.has(2):
        raise context.fail("output_shape is not supported", "remove output_shape")
    flat = context.reshape(context.gradient, (-1,))
    return context.apply("Gather", flat, context.input(1), axis=0), None


OPERATORS = (
    OpDef(
        "Col2Im", (3, 3), _infer_col2im, _col2im, attributes=_LISTS, gradient=col2im_gradient,
        batching=in_first_axis(1, 2), workspace=few,
    ),
    OpDef(
        "MaxUnpool", (2, 3), _infer_max_unpool, _max_unpool,
        attributes=declared(**KERNEL_SHAPE, pads=Attribute("ints"), strides=Attribute("ints")),
        gradient=max_unpool_gradient, checks=True,
    ),
)  # fmt: skip
