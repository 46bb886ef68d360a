"""Pools: one step per kernel element over strided views, so nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BYTES, FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, fill_step, scalar, stretches, strides_of, workspace
from stitch.ops.window import pooling_gradients as gradients
from stitch.ops.window import window_batching as batching
from stitch.ops.window.convolution import check_output
from stitch.ops.window.sliding import PLANES_NBYTES, Sliding, lines_of, sliding_nbytes
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


def _windows(arguments: KernelArguments) -> Windows:
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
    source, out, windows = arguments.given(0), arguments.outputs[0], _windows(arguments)
    include = bool(arguments.int_of("count_include_pad"))
    planes, sums = _planes(source), _planes(out)
    steps = Sliding(np.add, 0, windows, len(planes), out.dtype).steps(planes, sums)
    return [*steps, partial(np.divide, out, _counts(windows, include, out.dtype), out)]


def _lp(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = arguments.given(0), arguments.outputs[0], _windows(arguments)
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
    source, out, windows = arguments.given(0), arguments.outputs[0], _windows(arguments)
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
        gradient=gradients.average_pool,
        batching=batching.by_sample, workspace=WorkspaceRule(_average_workspace),
    ),
    OpDef(
        "MaxPool", (1, 1), partial(_infer_pool, FLOATS | BYTES), _max, outputs=(1, 2),
        attributes=declared(**POOL_ATTRIBUTES, storage_order=0), gradient=gradients.max_pool,
        batching=batching.max_pool, workspace=WorkspaceRule(_max_workspace),
    ),
    OpDef(
        "LpPool", (1, 1), _infer_lp, _lp, attributes=declared(**POOL_ATTRIBUTES, p=2),
        gradient=gradients.lp_pool,
        batching=batching.by_sample, workspace=WorkspaceRule(_lp_workspace, is_kept=False),
    ),
    OpDef(
        "GlobalAveragePool", (1, 1), _infer_global, _global_average,
        gradient=gradients.global_average, batching=batching.by_sample, workspace=few,
    ),
    OpDef(
        "GlobalMaxPool", (1, 1), _infer_global, _global_max, gradient=gradients.global_max,
        batching=batching.by_sample, workspace=few,
    ),
)  # fmt: skip
