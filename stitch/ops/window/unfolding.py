"""From windows back to what they slid over: Col2Im, MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared, few
from stitch.ops.element_types import FLOATS, INT64, NUMERIC
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import check_range, copy_steps, fill_step
from stitch.ops.window import windows
from stitch.ops.window.windows import KERNEL_SHAPE, WINDOW_ATTRIBUTES, lines_of, windows_of
from stitch.program import Array, ValueType

_LISTS = {name: WINDOW_ATTRIBUTES[name] for name in ("dilations", "pads", "strides")}


#: The views of so many kernel elements are kept from binding on.
_KEPT = 1024


def _infer_col2im(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, NUMERIC)
    context.require_rank(0, 3, 3)
    image = context.known_ints(1, "image_shape")
    block = context.known_ints(2, "block_shape")
    if len(image) != len(block) or not image or min(*image, *block) < 1:
        raise context.fail(
            "image_shape and block_shape of a Col2Im are sizes of at least 1, one per axis",
            got=f"{list(image)} and {list(block)}",
        )
    ones = (1,) * len(image)
    for name in ("strides", "dilations"):
        context.spatial_ints(name, ones)
    context.spatial_ints("pads", ones + ones, least=0)
    windows = windows_of(context.attributes, image, block)
    taps, places = math.prod(block), math.prod(windows.output)
    if min(windows.output) < 1 or x.shape[1] % taps or x.shape[2] != places:
        raise context.fail(
            "the columns of a Col2Im do not fit its image",
            expected=f"a multiple of {taps} rows, {places} columns",
            got=x.shape[1:],
        )
    return (ValueType((x.shape[0], x.shape[1] // taps, *image), x.data_type),)


def _col2im(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    windows = windows_of(arguments.attributes, out.shape[2:], arguments.ints_at(2))
    taps = x.reshape(*out.shape[:2], *windows.kernel, *windows.output)
    lines = lines_of(windows)

    def added() -> Iterator[tuple[Array, Array]]:
        """For each kernel element, where it is added, and what."""
        for place in np.ndindex(*windows.kernel):
            met = [line.met(at) for line, at in zip(lines, place, strict=True)]
            columns = (slice(None), slice(None), *place, *(which for which, _ in met))
            yield out[(slice(None), slice(None), *(places for _, places in met))], taps[columns]

    # Views are made once, but for kernels so large that views would be what takes room.
    kept = list(added()) if math.prod(windows.kernel) <= _KEPT else None

    def run() -> None:
        out.fill(0)
        for into, columns in kept if kept is not None else added():
            np.add(into, columns, into)

    return [run]


def _unpooled(context: InferenceContext | KernelArguments, size: Shape) -> Shape:
    """The spatial shape that a pool with these windows was given, as far as it can be told."""
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
    if min(shape) < 0:
        raise context.fail("the padding of MaxUnpool leaves nothing", got=shape)
    if context.present(2) is not None:
        wanted = context.known_ints(2, "output_shape")
        fits = len(wanted) == rank and all(w >= s for w, s in zip(wanted, shape, strict=True))
        if not fits:
            raise context.fail(
                "output_shape of MaxUnpool is smaller than what is unpooled",
                expected=f"at least {list(shape)}",
                got=wanted,
            )
        return (ValueType(wanted, x.data_type),)
    return (ValueType(shape, x.data_type),)


def _max_unpool(arguments: KernelArguments) -> Sequence[Thunk]:
    x, indices, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    shape = (*x.shape[:2], *_unpooled(arguments, x.shape[2:]))
    # Indices count in the shape that the pool was given, which may be a corner of the result.
    whole = out if shape == out.shape else np.empty(shape, out.dtype)
    flat, places = whole.reshape(-1), np.empty(indices.size, np.intp)
    values, chosen = x.reshape(-1), indices.reshape(-1)

    def scatter() -> None:
        check_range("MaxUnpool", "an index", chosen, flat.size - 1)
        np.copyto(places, chosen)
        flat[...] = 0
        flat[places] = values

    if whole is out:
        return (scatter,)
    corner = out[tuple(slice(0, size) for size in shape)]
    return (scatter, fill_step(out, 0), *copy_steps(whole, corner))


def col2im_gradient(context: GradientContext) -> Sequence[Any]:
    """Per kernel element, a strided slice of the image."""
    columns, gradient = context.type_of(0).shape, context.gradient
    image, block = gradient.shape[2:], context.constant_ints(2) or ()
    windows = windows_of(context.attributes, image, block)
    ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
    whole = context.padded(gradient, [0, 0, *windows.begin], [0, 0, *ends])
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
        parts.append(context.shaped(part, (*gradient.shape[:2], 1, places)))
    joined = parts[0] if len(parts) == 1 else context.apply("Concat", *parts, axis=2)
    return context.shaped(joined, columns), None, None


def max_unpool_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradients of the places that were written."""
    if context.has(2):
        raise context.fail("indices count in another shape than output_shape", "leave it out")
    flat = context.shaped(context.gradient, (-1,))
    return context.apply("Gather", flat, context.input(1), axis=0), None


OPERATORS = (
    OpDef(
        "Col2Im", (3, 3), _infer_col2im, _col2im, attributes=_LISTS, gradient=col2im_gradient,
        batching=windows.col2im, workspace=few,
    ),
    OpDef(
        "MaxUnpool", (2, 3), _infer_max_unpool, _max_unpool,
        attributes=declared(**KERNEL_SHAPE, pads=Attribute("ints"), strides=Attribute("ints")),
        gradient=max_unpool_gradient, checks=True, batching=windows.max_unpool,
    ),
)  # fmt: skip
