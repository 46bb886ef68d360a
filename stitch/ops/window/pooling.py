"""Pools: one step per kernel element over strided views, so nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BYTES, FLOATS, onnx_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, fill_step, scalar, stretches, strides_of, workspace
from stitch.ops.window import window_batching as batching
from stitch.ops.window.convolution import check_output
from stitch.ops.window.sliding import (
    PLANES_NBYTES,
    Sliding,
    WindowLine,
    lines_of,
    sliding_nbytes,
    taps_of,
)
from stitch.ops.window.sliding_positions import (
    Views,
    are_viewed,
    maxima,
    pieces,
    places_nbytes,
    views_nbytes,
)
from stitch.ops.window.windows import (
    POOL_ATTRIBUTES,
    Windows,
    check_pads,
    check_window_attributes,
    pool_windows,
)
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import Array, DataType, ValueType

# --------------------------------------------------------------------------------------------------
# Gradients of pools: averages are separable, so they go back one axis at a time; those of maxima
# are an operator (`max_pool_gradient_operator`).

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


def _pooling_windows(arguments: KernelArguments) -> Windows:
    return pool_windows(arguments.attributes, arguments.given(0).shape[2:])


def _sliding(context: WorkspaceContext, ufunc: np.ufunc) -> tuple[Windows, int]:
    """The windows of a pool, and what sliding a ufunc over them takes."""
    x, result = context.operand(0), context.outputs[0]
    windows = pool_windows(context.attributes, x.shape[2:])
    if 0 in result.shape:
        return windows, 0
    planes, dtype = math.prod(x.shape[:2]), result.data_type.compute_dtype
    return windows, sliding_nbytes(ufunc, windows, planes, dtype)


def _average_workspace(context: WorkspaceContext) -> int:
    """Besides, how many elements each window of a plane has."""
    windows, taken = _sliding(context, np.add)
    counts = 2 * math.prod(windows.output) * context.outputs[0].data_type.compute_dtype.itemsize
    return taken + counts + 64 * sum(windows.output)


def _lp_workspace(context: WorkspaceContext) -> int:
    """Besides, the powers of a few planes."""
    windows, taken = _sliding(context, np.add)
    plane = math.prod(windows.size) * context.outputs[0].data_type.compute_dtype.itemsize
    return taken + max(PLANES_NBYTES, plane)


def _max_workspace(context: WorkspaceContext) -> int:
    if len(context.outputs) > 1:
        x = context.operand(0)
        windows = pool_windows(context.attributes, x.shape[2:])
        planes = math.prod(x.shape[:2])
        taken = places_nbytes(windows, planes, x.data_type.compute_dtype)
        return taken + (views_nbytes(windows, planes) if are_viewed(windows) else 0)
    return _sliding(context, np.maximum)[1]


def _infer_pool(allowed: frozenset[DataType], context: InferenceContext) -> tuple[ValueType, ...]:
    """Values, and their places where these are asked for."""
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
    """How many elements each window averages: one number, or an array of the output's size."""
    total = np.ones((1,) * len(windows.size), dtype)
    for axis, line in enumerate(lines_of(windows)):
        # Padding that ceil_mode adds beyond what was declared never counts.
        counts = line.count_padded(windows.end[axis]) if include else line.count_inside()
        if (counts == counts[0]).all():
            counts = counts[:1]
        total = total * along(counts.astype(dtype), axis, len(windows.size))
    return total.reshape(()) if total.size == 1 else total


def _average(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.given(0), arguments.outputs[0], _pooling_windows(arguments)
    include = bool(arguments.int_of("count_include_pad"))
    planes, sums = _planes(source), _planes(out)
    steps = Sliding(np.add, 0, windows, len(planes), out.dtype).steps(planes, sums)
    return [*steps, partial(np.divide, out, _counts(windows, include, out.dtype), out)]


def _lp(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.given(0), arguments.outputs[0], _pooling_windows(arguments)
    p = arguments.int_of("p")
    planes, results = _planes(source), _planes(out)
    sums = Sliding(np.add, 0, windows, len(planes), out.dtype)
    powers = workspace((sums.at_once, *windows.size), out.dtype)
    steps: list[Thunk] = []
    for part in stretches(len(planes), sums.at_once):
        seen, totals = planes[part], results[part]
        raised = powers[: len(seen)]
        steps += [
            partial(np.absolute, seen, raised),
            partial(np.power, raised, scalar(p, raised), raised),
            *sums.steps(raised, totals),
        ]
    return [*steps, partial(np.power, out, scalar(1 / p, out), out)]


def _infer_lp(context: InferenceContext) -> tuple[ValueType, ...]:
    if context.int_of("p") < 1:
        raise context.fail("p of LpPool is at least 1", got=context.attributes["p"])
    return _infer_pool(FLOATS, context)


def _lowest(like: Array) -> float:
    return -np.inf if like.dtype.kind == "f" else int(np.iinfo(like.dtype).min)


def _max(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.given(0), arguments.outputs[0], _pooling_windows(arguments)
    if len(arguments.outputs) == 1:
        planes, results = _planes(source), _planes(out)
        largest = Sliding(np.maximum, _lowest(out), windows, len(planes), out.dtype)
        return largest.steps(planes, results)
    column_major = bool(arguments.int_of("storage_order"))
    counts = strides_of(windows.size[::-1])[::-1] if column_major else strides_of(windows.size)
    arrays = _planes(source), _planes(out), _planes(arguments.outputs[1])
    thorough = partial(_max_and_places, windows, counts, *arrays)
    if not are_viewed(windows):
        return [thorough]
    steps = Views(windows, counts, len(arrays[0])).steps(*arrays)
    if source.dtype.kind != "f":
        return steps
    return [*steps, partial(_where_nan, source.reshape(-1), thorough)]


def _where_nan(flat: Array, thorough: Thunk) -> None:
    """A sum of squares is no number if, and only if, one of them is none."""
    if np.isnan(np.dot(flat, flat)):
        thorough()


def _max_and_places(
    windows: Windows, counts: Sequence[int], planes: Array, values: Array, indices: Array
) -> None:
    """The maxima, and the index of each in the flat source; -1 where there is but padding."""
    for part in pieces(windows, len(planes)):
        values[part], places = maxima(planes[part], windows, counts, _lowest(values))
        before = np.arange(part.start, part.stop) * math.prod(windows.size)
        before = before.reshape(-1, *(1,) * len(windows.size))
        indices[part] = np.where(places < 0, -1, places + before)


def _infer_global(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    rank = context.require_rank(0, 3)
    return (ValueType((*x.shape[:2], *(1,) * (rank - 2)), x.data_type),)


def _global_average(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (
        partial(np.add.reduce, flat, 2, None, result),
        partial(np.divide, result, scalar(count, out), result),
    )


def _global_max(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    if count == 0:
        return (fill_step(out, -np.inf),)
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (partial(np.maximum.reduce, flat, 2, None, result),)


OPERATORS = (
    OpDef(
        "AveragePool", (1, 1), partial(_infer_pool, FLOATS), _average,
        attributes=declared(**POOL_ATTRIBUTES, count_include_pad=0),
        gradient=average_pool,
        batching=batching.by_sample, workspace=WorkspaceRule(_average_workspace),
    ),
    OpDef(
        "MaxPool", (1, 1), partial(_infer_pool, FLOATS | BYTES), _max, outputs=(1, 2),
        attributes=declared(**POOL_ATTRIBUTES, storage_order=0), gradient=max_pool,
        batching=batching.max_pool, workspace=WorkspaceRule(_max_workspace),
    ),
    OpDef(
        "LpPool", (1, 1), _infer_lp, _lp, attributes=declared(**POOL_ATTRIBUTES, p=2),
        gradient=lp_pool,
        batching=batching.by_sample, workspace=WorkspaceRule(_lp_workspace, is_kept=False),
    ),
    OpDef(
        "GlobalAveragePool", (1, 1), _infer_global, _global_average,
        gradient=global_average, batching=batching.by_sample, workspace=few,
    ),
    OpDef(
        "GlobalMaxPool", (1, 1), _infer_global, _global_max, gradient=global_max,
        batching=batching.by_sample, workspace=few,
    ),
)  # fmt: skip
