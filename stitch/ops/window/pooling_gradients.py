"""Gradients of pools: averages are separable, so they go back one axis at a time; those of maxima
are an operator, `stitch.MaxPoolGradient`: each goes to the first place that holds its window's
maximum.

Its operands are the pool's result gradient, its input and its result, so that no indices are saved;
attributes are those of the pool. As ONNX has it: MaxPool with its indices, and ScatterElements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS, onnx_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, copy_steps, fill_step, stretches, strides_of, workspace
from stitch.ops.window.sliding import WindowLine, lines_of, taps_of
from stitch.ops.window.sliding_positions import maxima, pieces, places_nbytes
from stitch.ops.window.window_batching import by_sample
from stitch.ops.window.windows import (
    POOL_ATTRIBUTES,
    Windows,
    check_window_attributes,
    pool_windows,
)
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import Array, ValueType

#: Up to so many windows times places of an axis, the shares are a constant matrix.
MOST_SHARES = 1 << 22
#: As many samples are handled at a time as have inputs of this many bytes (at least one).
SAMPLES_NBYTES = 1 << 18
#: What is known of a window's maximum: whether it is met, its place, in steps and whole, and where
#: the window begins; and a gradient without what goes to no number.
_PLACE_NBYTES = 2 + 2 * 4 + 3 * 8 + 9
#: From more kernel elements on, places are looked for first.
MANY = 64


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


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(3))
    context.require_rank(1, 3)
    kernel = context.ints_of("kernel_shape") or ()
    check_window_attributes(context, x.shape[2:], kernel)
    windows = pool_windows(context.attributes, x.shape[2:])
    for index in (0, 2):
        context.require_shape(index, (*x.shape[:2], *windows.output))
    return (x,)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x, y = (arguments.given(i) for i in range(3))
    out = arguments.outputs[0]
    if gradient.size == 0:
        return (fill_step(out, 0),)
    windows = pool_windows(arguments.attributes, x.shape[2:])
    if _is_wide(windows):
        seen, sums = (a.reshape(-1, *windows.size) for a in (x, out))
        return [partial(_by_places, gradient.reshape(-1, *windows.output), seen, sums, windows)]
    at_once = _samples_at_once(x.shape[0], x.nbytes)
    direct = not windows.needs_padding
    wide = (at_once, x.shape[1], *windows.padded)
    source = x if direct else np.full(wide, -np.inf, x.dtype)
    target = out if direct else np.empty(wide, out.dtype)
    work = _Workspace(gradient, at_once, windows)
    inner = tuple(slice(b, b + s) for b, s in zip(windows.begin, windows.size, strict=True))
    inside = (slice(None), slice(None), *inner)
    steps: list[Thunk] = []
    for part in stretches(x.shape[0], at_once):
        here = part if direct else slice(0, part.stop - part.start)
        if not direct:
            steps += copy_steps(x[part], source[here][inside])
        steps += work.steps(source[here], target[here], gradient[part], y[part])
        if not direct:
            steps += copy_steps(target[here][inside], out[part])
    return steps


def _is_wide(windows: Windows) -> bool:
    padded, size = math.prod(windows.padded), math.prod(windows.size)
    return math.prod(windows.kernel) > MANY or padded > 4 * size


def _samples_at_once(samples: int, nbytes: int) -> int:
    return min(samples, max(1, SAMPLES_NBYTES * samples // nbytes))


def _taken(context: WorkspaceContext) -> int:
    x = context.operand(1)
    windows, dtype = pool_windows(context.attributes, x.shape[2:]), x.data_type.compute_dtype
    planes = math.prod(x.shape[:2])
    if _is_wide(windows):
        return 2 * places_nbytes(windows, planes, dtype)
    nbytes = math.prod(x.shape) * dtype.itemsize
    planes = 0 if not nbytes else _samples_at_once(x.shape[0], nbytes) * x.shape[1]
    padded = 2 * math.prod(windows.padded) * dtype.itemsize if windows.needs_padding else 0
    return few.nbytes(context) + planes * (padded + _PLACE_NBYTES * math.prod(windows.output))


def _by_places(gradient: Array, x: Array, out: Array, windows: Windows) -> None:
    """The places of all maxima first: however long the kernel, an element is looked at a few
    times. A NaN equals no maximum, so nothing goes to it."""
    size = math.prod(windows.size)
    for part in pieces(windows, len(x)):
        values, places = maxima(x[part], windows, strides_of(windows.size), -np.inf)
        numbers = np.arange(len(places)).reshape(-1, *(1,) * len(windows.size)) * size
        hit = (places >= 0) & (values == values)
        flat = out[part].reshape(-1)
        flat[...] = 0
        np.add.at(flat, (places + numbers)[hit], gradient[part][hit])


class _Workspace:
    """What one stretch of samples needs: which windows have not met their maximum yet, by how much
    its place is behind the window's first, and its place.

    A window whose maximum is at none of its places has it at the last; only a NaN equals nothing.
    """

    def __init__(self, gradient: Array, samples: int, windows: Windows) -> None:
        shape, size = (samples, *gradient.shape[1:]), windows.padded
        self.taps = list(windows.taps())
        strides = strides_of(size)
        first = (sum(t.start * s for t, s in zip(tap, strides, strict=True)) for tap in self.taps)
        offsets = list(first)
        self.steps_between = [b - a for a, b in pairwise(offsets)]
        kind = np.min_scalar_type(offsets[-1] - offsets[0])
        self.missed, self.other = (workspace(shape, np.dtype(np.bool_)) for _ in "ab")
        self.behind, self.more = (workspace(shape, kind) for _ in "ab")
        self.places = workspace(shape, np.dtype(np.intp))
        #: The first place of each window.
        begins = np.full((1,) * len(size), offsets[0])
        for axis, stride in enumerate(strides):
            begin = np.arange(windows.output[axis]) * windows.strides[axis] * stride
            begins = begins + along(begin, axis, len(size))
        planes = np.arange(math.prod(shape[:2])) * math.prod(size)
        self.begins = (planes.reshape(-1, *(1,) * len(size)) + begins).reshape(shape)
        #: Whether no place lies in two windows: what it gets is written, not added.
        self.apart = all(
            stride > dilation * (kernel - 1)
            for stride, dilation, kernel in zip(
                windows.strides, windows.dilations, windows.kernel, strict=True
            )
        )

    def steps(self, x: Array, out: Array, gradient: Array, y: Array) -> list[Thunk]:
        """A step for each element of the kernel but the last, and one that brings each gradient to
        its place."""
        count = gradient.shape[0]
        arrays = self.missed, self.other, self.behind, self.more, self.places
        missed, other, behind, more, places = (a[:count] for a in arrays)
        steps: list[Thunk] = [] if self.steps_between else [fill_step(behind, 0)]
        for index, (tap, step) in enumerate(zip(self.taps, self.steps_between, strict=False)):
            seen, wide = x[:, :, *tap], np.array(step, behind.dtype)
            if index:
                steps += [
                    partial(np.not_equal, seen, y, other),
                    partial(np.logical_and, missed, other, missed),
                    partial(np.multiply, missed.view(np.uint8), wide, more),
                    partial(np.add, behind, more, behind),
                ]
            else:
                steps += [
                    partial(np.not_equal, seen, y, missed),
                    partial(np.multiply, missed.view(np.uint8), wide, behind),
                ]
        return [
            *steps,
            partial(np.copyto, places, behind),
            partial(np.add, places, self.begins[:count], places),
            fill_step(out, 0),
            partial(
                _bring, out.reshape(-1), places.reshape(-1), gradient.reshape(-1), y.reshape(-1),
                self.apart,
            ),
        ]  # fmt: skip


def _bring(out: Array, places: Array, gradient: Array, y: Array, apart: bool) -> None:
    """Gradients to their places; nothing for a maximum that is no number. A sum of squares is no
    number if, and only if, one of them is none."""
    if np.isnan(np.dot(y, y)):
        gradient = np.where(y == y, gradient, gradient.dtype.type(0))
    if apart:
        out[places] = gradient
    else:
        np.add.at(out, places, gradient)


OPERATORS = (
    OpDef(
        "MaxPoolGradient", (3, 3), _infer, _kernel,
        attributes=POOL_ATTRIBUTES,
        domain="stitch", batching=by_sample, workspace=WorkspaceRule(_taken),
    ),
)  # fmt: skip
