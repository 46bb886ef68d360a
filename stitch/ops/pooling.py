"""AveragePool, MaxPool, LpPool and global pools: steps over strided views, nothing is gathered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.convolution import check_output
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BYTES, FLOATS, onnx_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, copy_steps, fill_step, scalar, slice_range, strides_of
from stitch.ops.windows import (
    POOL_ATTRIBUTES,
    Sliding,
    WindowLine,
    Windows,
    check_pads,
    check_window_attributes,
    lines_of,
    planes_at_once,
    pool_windows,
    taps_of,
)
from stitch.ops.workspaces import workspace
from stitch.program import Array, DataType, ValueType

#: Of operands that all have samples in front, or of one.
by_sample = in_first_axis()


def batch_max_pool(c: BatchingContext) -> Sequence[Any]:
    """Indices count in the flat operand of one example; -1: the window is padding only."""
    results = [c.split(result) for result in c.emit(c.fold(0))]
    if len(results) == 1:
        return results
    before = c.example_indices(c.rank(), math.prod(c.shape()))
    is_none = c.apply("Less", results[1], 0)
    own = c.apply("Sub", results[1], before)
    return results[0], c.apply("Where", is_none, results[1], own)


# Positions of maxima ------------------------------------------------------------------------------

#: `places_of_maxima` takes up to this many times the bytes of its planes.
TIMES = 14


def pieces(windows: Windows, planes: int) -> Iterator[slice]:
    """Slice planes into pieces that `places_of_maxima` processes together."""
    return slice_range(planes, planes_at_once(windows, planes, TIMES))


def places_of_maxima(x: Array, y: Array, windows: Windows, counts: Sequence[int]) -> Array:
    """Return the position in its plane of the first maximum of every window, the first NaN if there
    is one; -1 if the window is padding only.

    Args:
        x: Planes [planes, *size].
        y: The maxima of the windows.
        counts: The difference of positions between neighbours along each axis.
    """
    lines, every = lines_of(windows), slice(None)
    axes = [along(np.arange(n) * count, i, len(lines))
            for i, (n, count) in enumerate(zip(windows.size, counts, strict=True))]  # fmt: skip
    positions = sum(axes, start=np.zeros((), np.int64))
    places = np.full(y.shape, -1, np.int64)
    if math.prod(len(line.taps) for line in lines) > math.prod(windows.output):
        for window in np.ndindex(*windows.output):
            seen = tuple(line.inside(i) for line, i in zip(lines, window, strict=True))
            inside = x[every, *seen].reshape(len(x), -1)
            if inside.size:
                places[every, *window] = positions[seen].reshape(-1)[inside.argmax(1)]
        return places
    # The first maximum is written last.
    for tap in itertools.product(*(line.taps[::-1] for line in lines)):
        which, seen = zip(*(line.met(i) for line, i in zip(lines, tap, strict=True)), strict=True)
        values = x[every, *seen]
        hit = values == y[every, *which]
        if x.dtype.kind == "f":
            hit |= np.isnan(values)
        np.copyto(places[every, *which], positions[seen], where=hit)
    return places


# Gradients ----------------------------------------------------------------------------------------

#: Up to this many elements, the matrix [windows, positions] of an axis is a constant.
MOST_SHARES = 1 << 22


def _windows(context: GradientContext) -> Windows:
    return pool_windows(context.attributes, context.type_of(0).shape[2:])


def max_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """Reads the input and the result, so that no indices need to be saved."""
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


def average_pool_gradient(context: GradientContext) -> Sequence[Any]:
    windows = _windows(context)
    include = bool(context.int_of("count_include_pad"))
    covered = tuple(o * k for o, k in zip(windows.output, windows.kernel, strict=True))
    has_plain_kernel = windows.strides == windows.kernel and max(windows.dilations) == 1
    if has_plain_kernel and not windows.needs_padding and windows.size == covered:
        return (_repeated(context, context.gradient * (1.0 / math.prod(windows.kernel)), windows),)
    gradient = context.gradient
    for axis, line in enumerate(lines_of(windows)):
        counts = line.count_padded(windows.end[axis]) if include else line.count_inside()
        # Windows of padding only have count 0 and no gradient.
        gradient = _spread(context, gradient, axis + 2, line, np.maximum(counts, 1))
    return (gradient,)


def _repeated(context: GradientContext, value: Any, windows: Windows) -> Any:
    """Repeat every element over its window, if windows tile the input."""
    lead, shape, wide = value.shape[:2], [], []
    for count, kernel in zip(windows.output, windows.kernel, strict=True):
        shape += [count, 1]
        wide += [count, kernel]
    value = context.reshape(value, (*lead, *shape))
    value = context.apply("Expand", value, [*lead, *wide])
    return context.reshape(value, context.type_of(0).shape)


def _spread(
    context: GradientContext, value: Any, axis: int, line: WindowLine, counts: Array | None
) -> Any:
    """Sum for each position of an axis the windows that read it, divided by their counts if any."""
    if line.output * line.size <= MOST_SHARES:
        table = np.zeros((line.output, line.size))
        for which, places in taps_of(line):
            table[range(which.start, which.stop), range(*places.indices(line.size))] = 1.0
        return context.multiply_axis(
            value, axis, table if counts is None else table / counts[:, None]
        )
    if line.kernel > MOST_SHARES:
        raise context.fail(
            f"its kernel has {line.kernel} elements", f"use at most {MOST_SHARES} elements"
        )
    shape, dtype = value.shape, value.data_type.dtype
    if counts is not None:
        along = (-1, *(1,) * (len(shape) - 1 - axis))
        value = value * context.constant((1 / counts).reshape(along).astype(dtype))
    rest = math.prod(shape[axis + 1 :])
    value = context.reshape(value, (math.prod(shape[:axis]), 1, line.output, rest))
    reach = (line.output - 1) * line.stride + (line.kernel - 1) * line.dilation + 1 - line.begin
    value = context.apply(
        "ConvTranspose", value, context.constant(np.ones((1, 1, line.kernel, 1), dtype)),
        dilations=[line.dilation, 1], output_padding=[max(line.size - reach, 0), 0],
        pads=[line.begin, 0, max(reach - line.size, 0), 0], strides=[line.stride, 1],
    )  # fmt: skip
    return context.reshape(value, (*shape[:axis], line.size, *shape[axis + 1 :]))


def global_average_pool_gradient(context: GradientContext) -> Sequence[Any]:
    shape = context.type_of(0).shape
    share = context.gradient * (1.0 / max(math.prod(shape[2:]), 1))
    return (context.apply("Expand", share, list(shape)),)


def global_max_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """All elements that equal the maximum share the gradient equally."""
    axes = list(range(2, len(context.type_of(0).shape)))
    hit = context.apply("Equal", context.input(0), context.output())
    ones = context.apply("Cast", hit, to=onnx_code(context.gradient.data_type))
    share = context.gradient / context.apply("ReduceSum", ones, axes, keepdims=1)
    return (context.where(hit, share),)


def lp_pool_gradient(context: GradientContext) -> Sequence[Any]:
    """y^p = sum |x|^p: dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p) over x's windows."""
    p, x, gradient = context.int_of("p"), context.input(0), context.gradient
    if p != 1:
        y = context.output()
        share = gradient * context.apply("Pow", y, float(1 - p))
        gradient = context.where(context.apply("Greater", y, 0.0), share)
    for axis, line in enumerate(lines_of(_windows(context))):
        gradient = _spread(context, gradient, axis + 2, line, None)
    if p == 1:
        return (gradient * context.apply("Sign", x),)
    if p == 2:
        return (gradient * x,)
    power = context.apply("Pow", context.apply("Abs", x), float(p - 1))
    return (gradient * power * context.apply("Sign", x),)


def _pooling_windows(arguments: KernelArguments) -> Windows:
    return pool_windows(arguments.attributes, arguments.operand(0).shape[2:])


def _infer_pool(allowed: frozenset[DataType], context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, allowed)
    context.require_rank(0, 3)
    kernel = context.ints_of("kernel_shape") or ()
    check_window_attributes(context, x.shape[2:], kernel)
    windows = pool_windows(context.attributes, x.shape[2:])
    check_pads(context, kernel)
    check_output(context, windows.output)
    shape = (*x.shape[:2], *windows.output)
    return (ValueType(shape, x.data_type), ValueType(shape, DataType.INT64))[: context.outputs]


def _planes(array: Array) -> Array:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _counts(windows: Windows, include: bool, dtype: np.dtype[Any]) -> Array:
    """Return the element counts of windows: one number, or an array of the output's shape."""
    total = np.ones((1,) * len(windows.size), dtype)
    for axis, line in enumerate(lines_of(windows)):
        # Padding that ceil_mode adds beyond `pads` never counts.
        counts = line.count_padded(windows.end[axis]) if include else line.count_inside()
        if (counts == counts[0]).all():
            counts = counts[:1]
        total = total * along(counts.astype(dtype), axis, len(windows.size))
    return total.reshape(()) if total.size == 1 else total


def _average(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.operand(0), arguments.outputs[0], _pooling_windows(arguments)
    include = bool(arguments.int_of("count_include_pad"))
    planes, sums = _planes(source), _planes(out)
    steps = Sliding(np.add, 0, windows, len(planes), out.dtype).steps(planes, sums)
    return [*steps, partial(np.divide, out, _counts(windows, include, out.dtype), out)]


def _lp(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.operand(0), arguments.outputs[0], _pooling_windows(arguments)
    p = arguments.int_of("p")
    planes, results = _planes(source), _planes(out)
    sums = Sliding(np.add, 0, windows, len(planes), out.dtype)
    powers = workspace((sums.at_once, *windows.size), out.dtype)
    steps: list[Thunk] = []
    for part in slice_range(len(planes), sums.at_once):
        seen, totals = planes[part], results[part]
        raised = powers[: len(seen)]
        steps += [
            partial(np.absolute, seen, raised),
            partial(np.power, raised, scalar(p, raised), raised),
            *sums.steps(raised, totals),
        ]
    return [*steps, partial(np.power, out, scalar(1 / p, out), out)]


def _infer_lp(context: InferenceContext) -> tuple[ValueType, ...]:
    p = context.int_of("p")
    context.require(p >= 1, f"p={p} of LpPool is out of range", expected="at least 1", got=p)
    return _infer_pool(FLOATS, context)


def _lowest(like: Array) -> float:
    return -np.inf if like.dtype.kind == "f" else int(np.iinfo(like.dtype).min)


def _max(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.operand(0), arguments.outputs[0], _pooling_windows(arguments)
    planes, results = _planes(source), _planes(out)
    steps = Sliding(np.maximum, _lowest(out), windows, len(planes), out.dtype).steps(
        planes, results
    )
    if len(arguments.outputs) == 1:
        return steps
    column_major = bool(arguments.int_of("storage_order"))
    counts = strides_of(windows.size[::-1])[::-1] if column_major else strides_of(windows.size)
    indices = _planes(arguments.outputs[1])
    return [*steps, partial(_write_places, windows, counts, planes, results, indices)]


def _has_nan(flat: Array) -> bool:
    """Return whether an element is NaN: only then a sum of squares is NaN."""
    return bool(np.isnan(np.dot(flat, flat)))


def _write_places(
    windows: Windows, counts: Sequence[int], x: Array, y: Array, indices: Array
) -> None:
    """Write the indices of the maxima in the flat source."""
    for part in pieces(windows, len(x)):
        places = places_of_maxima(x[part], y[part], windows, counts)
        before = np.arange(part.start, part.stop) * math.prod(windows.size)
        before = before.reshape(-1, *(1,) * len(windows.size))
        indices[part] = np.where(places < 0, -1, places + before)


def _infer_global(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    rank = context.require_rank(0, 3)
    return (ValueType((*x.shape[:2], *(1,) * (rank - 2)), x.data_type),)


def _global_average(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (
        partial(np.add.reduce, flat, 2, None, result),
        partial(np.divide, result, scalar(count, out), result),
    )


def _global_max(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    if count == 0:
        return (fill_step(out, -np.inf),)
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (partial(np.maximum.reduce, flat, 2, None, result),)


# stitch.MaxPoolGradient ---------------------------------------------------------------------------

#: Bytes of the input of samples that are processed at a time (at least one sample).
SAMPLES_NBYTES = 1 << 18
#: Kernels of more elements use `places_of_maxima`.
MANY = 64


def _infer_max_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
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


def _max_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x, y = (arguments.operand(i) for i in range(3))
    out = arguments.outputs[0]
    if gradient.size == 0:
        return (fill_step(out, 0),)
    windows = pool_windows(arguments.attributes, x.shape[2:])
    if _is_wide(windows):
        seen, sums = (a.reshape(-1, *windows.size) for a in (x, out))
        given, largest = (a.reshape(-1, *windows.output) for a in (gradient, y))
        return [partial(_by_maxima, given, seen, largest, sums, windows)]
    at_once = _samples_at_once(x.shape[0], x.nbytes)
    direct = not windows.needs_padding
    wide = (at_once, x.shape[1], *windows.padded)
    source = x if direct else np.full(wide, -np.inf, x.dtype)
    target = out if direct else np.empty(wide, out.dtype)
    work = _FirstHits(gradient, at_once, windows)
    inner = tuple(slice(b, b + s) for b, s in zip(windows.begin, windows.size, strict=True))
    inside = (slice(None), slice(None), *inner)
    steps: list[Thunk] = []
    for part in slice_range(x.shape[0], at_once):
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


def _by_maxima(gradient: Array, x: Array, y: Array, out: Array, windows: Windows) -> None:
    """Scatter the gradient to the positions of the maxima; a maximum of NaN gets nothing."""
    size = math.prod(windows.size)
    for part in pieces(windows, len(x)):
        places = places_of_maxima(x[part], y[part], windows, strides_of(windows.size))
        numbers = np.arange(len(places)).reshape(-1, *(1,) * len(windows.size)) * size
        hit = (places >= 0) & (y[part] == y[part])
        flat = out[part].reshape(-1)
        flat[...] = 0
        np.add.at(flat, (places + numbers)[hit], gradient[part][hit])


class _FirstHits:
    """For a piece of samples, the first position in each window that equals the maximum.

    A window without such a position (the maximum is NaN) counts as its last position.
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
        #: The first position of each window.
        begins = np.full((1,) * len(size), offsets[0])
        for axis, stride in enumerate(strides):
            begin = np.arange(windows.output[axis]) * windows.strides[axis] * stride
            begins = begins + along(begin, axis, len(size))
        planes = np.arange(math.prod(shape[:2])) * math.prod(size)
        self.begins = (planes.reshape(-1, *(1,) * len(size)) + begins).reshape(shape)
        #: Whether windows do not overlap: gradients are written, not added.
        self.apart = all(
            stride > dilation * (kernel - 1)
            for stride, dilation, kernel in zip(
                windows.strides, windows.dilations, windows.kernel, strict=True
            )
        )

    def steps(self, x: Array, out: Array, gradient: Array, y: Array) -> list[Thunk]:
        """Return steps that find the positions and scatter the gradient there."""
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
                _scatter, out.reshape(-1), places.reshape(-1), gradient.reshape(-1), y.reshape(-1),
                self.apart,
            ),
        ]  # fmt: skip


def _scatter(out: Array, places: Array, gradient: Array, y: Array, apart: bool) -> None:
    """Write or add gradients at positions, except those of maxima of NaN."""
    if _has_nan(y):
        gradient = np.where(y == y, gradient, gradient.dtype.type(0))
    if apart:
        out[places] = gradient
    else:
        np.add.at(out, places, gradient)


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "AveragePool", (1, 1), partial(_infer_pool, FLOATS), _average,
        attributes=declared(**POOL_ATTRIBUTES, count_include_pad=0), batching=by_sample,
        gradient=average_pool_gradient,
    ),
    OpDef(
        "MaxPool", (1, 1), partial(_infer_pool, FLOATS | BYTES), _max, outputs=(1, 2),
        attributes=declared(**POOL_ATTRIBUTES, storage_order=0), gradient=max_pool_gradient,
        batching=batch_max_pool,
    ),
    OpDef(
        "LpPool", (1, 1), _infer_lp, _lp, attributes=declared(**POOL_ATTRIBUTES, p=2),
        gradient=lp_pool_gradient, batching=by_sample,
    ),
    OpDef(
        "GlobalAveragePool", (1, 1), _infer_global, _global_average,
        gradient=global_average_pool_gradient, batching=by_sample,
    ),
    OpDef(
        "GlobalMaxPool", (1, 1), _infer_global, _global_max, gradient=global_max_pool_gradient,
        batching=by_sample,
    ),
    OpDef(
        "MaxPoolGradient", (3, 3), _infer_max_gradient, _max_gradient, attributes=POOL_ATTRIBUTES,
        domain="stitch", batching=by_sample,
    ),
)  # fmt: skip
