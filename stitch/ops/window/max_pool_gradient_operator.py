"""`stitch.MaxPoolGradient`: each gradient goes to the first place that holds its window's maximum.

Operands are the gradient of the pool's result, its input and its result, so that no indices are
saved; attributes are those of the pool. As ONNX has it: MaxPool with its indices, and
ScatterElements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, copy_steps, fill_step, stretches, strides_of, workspace
from stitch.ops.window.sliding_positions import maxima, pieces, places_nbytes
from stitch.ops.window.window_batching import by_sample
from stitch.ops.window.windows import (
    POOL_ATTRIBUTES,
    Windows,
    check_pads,
    check_window_attributes,
    pool_windows,
)
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import Array, ValueType

#: As many samples are handled at a time as have inputs of this many bytes (at least one).
SAMPLES_NBYTES = 1 << 18
#: What is known of a window's maximum: whether it is met, its place, in steps and whole, and where
#: the window begins; and a gradient without what goes to no number.
_PLACE_NBYTES = 2 + 2 * 4 + 3 * 8 + 9
#: From more kernel elements on, places are looked for first.
MANY = 64


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(3))
    context.require_rank(1, 3)
    kernel = context.ints_of("kernel_shape") or ()
    check_window_attributes(context, x.shape[2:], kernel)
    windows = pool_windows(context.attributes, x.shape[2:])
    check_pads(context, kernel)
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
