"""Pools: one step per kernel element over strided views, so nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import int_of, ints_of
from stitch.ops.convolution import check_output
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import require_rank, require_type
from stitch.ops.pooling_gradients import (
    average_pool_gradient,
    global_average_gradient,
    global_max_gradient,
    lp_pool_gradient,
    max_pool_gradient,
)
from stitch.ops.steps import fill_step, given, scalar, strides_of, workspace
from stitch.ops.windows import (
    WINDOW_ATTRIBUTES,
    Windows,
    check_window_attributes,
    pad_steps,
    windows_of,
)
from stitch.ops.workspaces import few, operands
from stitch.program import Array, DataType, ValueType

_POOL_ATTRIBUTES = {
    **WINDOW_ATTRIBUTES,
    "ceil_mode": Attribute("int", 0),
    "kernel_shape": Attribute("ints", required=True),
}


def _windows(arguments: KernelArguments) -> Windows:
    kernel = ints_of(arguments.attributes, "kernel_shape") or ()
    ceil = bool(int_of(arguments.attributes, "ceil_mode"))
    return windows_of(arguments.attributes, given(arguments, 0).shape[2:], kernel, ceil)


def _infer_pool(allowed: frozenset[DataType], context: InferenceContext) -> ValueType:
    x = require_type(context, 0, allowed)
    require_rank(context, 0, 3)
    kernel = ints_of(context.attributes, "kernel_shape") or ()
    check_window_attributes(context, x.shape[2:], kernel)
    ceil = bool(int_of(context.attributes, "ceil_mode"))
    windows = windows_of(context.attributes, x.shape[2:], kernel, ceil)
    check_output(context, windows.output)
    return ValueType((*x.shape[:2], *windows.output), x.data_type)


def _infer_average(context: InferenceContext) -> tuple[ValueType, ...]:
    return (_infer_pool(FLOATS, context),)


def _infer_max(context: InferenceContext) -> tuple[ValueType, ...]:
    values = _infer_pool(FLOATS | {DataType.INT8, DataType.UINT8}, context)
    return (values, ValueType(values.shape, DataType.INT64))[: context.outputs]


def _average(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = given(arguments, 0), arguments.outputs[0], _windows(arguments)
    if out.size == 0:
        return ()
    padded, refresh = pad_steps(source, windows, 0)
    include = bool(int_of(arguments.attributes, "count_include_pad"))
    counts = np.zeros(windows.output, out.dtype)
    ones = np.zeros(windows.padded, out.dtype)
    # Padding that ceil_mode adds beyond what was declared never counts.
    inner = tuple(
        slice(0, b + s + e) if include else slice(b, b + s)
        for b, s, e in zip(windows.begin, windows.size, windows.end, strict=True)
    )
    ones[inner] = 1
    steps: list[Thunk] = list(refresh)
    for index, tap in enumerate(windows.taps()):
        counts += ones[tap]
        view = padded[(slice(None), slice(None), *tap)]
        steps.append(partial(np.add, out, view, out) if index else partial(np.copyto, out, view))
    if (counts == counts.flat[0]).all():
        counts = counts.reshape(-1)[0].reshape(())
    return [*steps, partial(np.divide, out, counts, out)]


def _lp(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = given(arguments, 0), arguments.outputs[0], _windows(arguments)
    if out.size == 0:
        return ()
    p = int_of(arguments.attributes, "p")
    powers = np.empty_like(source)
    padded, refresh = pad_steps(powers, windows, 0)
    steps: list[Thunk] = [
        partial(np.absolute, source, powers),
        partial(np.power, powers, scalar(p, powers), powers),
        *refresh,
        fill_step(out, 0),
    ]
    for tap in windows.taps():
        view = padded[(slice(None), slice(None), *tap)]
        steps.append(partial(np.add, out, view, out))
    return [*steps, partial(np.power, out, scalar(1 / p, out), out)]


def _infer_lp(context: InferenceContext) -> tuple[ValueType, ...]:
    if int_of(context.attributes, "p") < 1:
        raise context.fail("p of LpPool is at least 1", got=str(context.attributes["p"]))
    return (_infer_pool(FLOATS, context),)


def _lowest(like: Array) -> float:
    return -np.inf if like.dtype.kind == "f" else int(np.iinfo(like.dtype).min)


def _max(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, windows = given(arguments, 0), arguments.outputs[0], _windows(arguments)
    if out.size == 0:
        return ()
    padded, refresh = pad_steps(source, windows, _lowest(source))
    if len(arguments.outputs) == 1:
        return [*refresh, *_separable_max(padded, windows, out)]
    views = [padded[(slice(None), slice(None), *tap)] for tap in windows.taps()]
    steps: list[Thunk] = [*refresh, partial(np.copyto, out, views[0])]
    indices = arguments.outputs[1]
    column_major = bool(int_of(arguments.attributes, "storage_order"))
    places = [
        padded_index[(slice(None), slice(None), *tap)]
        for padded_index in (_flat_positions(source, windows, column_major),)
        for tap in windows.taps()
    ]
    mask, first = np.empty(out.shape, np.bool_), np.empty(out.shape, np.bool_)
    # A padded element loses even to a value as low as its own.
    steps += [partial(np.copyto, indices, places[0])]
    for view, place in zip(views[1:], places[1:], strict=True):
        steps += [
            partial(np.greater, view, out, mask),
            partial(np.less, indices, scalar(0, indices), first),
            partial(np.logical_or, mask, first, mask),
            partial(np.copyto, out, view, where=mask),
            partial(np.copyto, indices, place, where=mask),
        ]
    return steps


def _separable_max(padded: Array, windows: Windows, out: Array) -> list[Thunk]:
    """The maximum over a box, one axis after the other."""
    steps: list[Thunk] = []
    current = padded
    for axis, kernel in enumerate(windows.kernel, 2):
        shape = (*current.shape[:axis], windows.output[axis - 2], *current.shape[axis + 1 :])
        target = out if axis == out.ndim - 1 else workspace(shape, out.dtype)
        for tap in range(kernel):
            view = current[(slice(None),) * axis + (windows.tap(axis - 2, tap),)]
            first = partial(np.copyto, target, view)
            steps.append(partial(np.maximum, target, view, out=target) if tap else first)
        current = target
    return steps


def _flat_positions(source: Array, windows: Windows, column_major: bool) -> Array:
    """The index of every padded element in the flat source; -1 in the padding."""
    spatial = source.shape[2:]
    strides = strides_of(spatial[::-1])[::-1] if column_major else strides_of(spatial)
    size = math.prod(spatial)
    planes = np.arange(math.prod(source.shape[:2])).reshape(source.shape[:2]) * size
    total = planes.reshape(*planes.shape, *(1,) * len(spatial))
    for axis, (length, stride) in enumerate(zip(spatial, strides, strict=True)):
        along = [1] * source.ndim
        along[axis + 2] = length
        total = total + (np.arange(length) * stride).reshape(along)
    ends = map(sum, zip(windows.end, windows.overhang, strict=True))
    pads = [(0, 0), (0, 0), *zip(windows.begin, ends, strict=True)]
    return np.pad(total, pads, constant_values=-1)


def _infer_global(context: InferenceContext) -> tuple[ValueType, ...]:
    x = require_type(context, 0, FLOATS)
    rank = require_rank(context, 0, 3)
    return (ValueType((*x.shape[:2], *(1,) * (rank - 2)), x.data_type),)


def _global_average(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = given(arguments, 0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (
        partial(np.add.reduce, flat, 2, None, result),
        partial(np.divide, result, scalar(count, out), result),
    )


def _global_max(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = given(arguments, 0), arguments.outputs[0]
    count = math.prod(x.shape[2:])
    if count == 0:
        return (fill_step(out, -np.inf),)
    flat, result = x.reshape(*x.shape[:2], count), out.reshape(x.shape[:2])
    return (partial(np.maximum.reduce, flat, 2, None, result),)


OPERATORS = (
    OpDef(
        "AveragePool",
        (1, 1),
        _infer_average,
        _average,
        attributes={**_POOL_ATTRIBUTES, "count_include_pad": Attribute("int", 0)},
        gradient=average_pool_gradient,
        workspace=operands(4),
    ),
    OpDef(
        "MaxPool",
        (1, 1),
        _infer_max,
        _max,
        outputs=(1, 2),
        attributes={**_POOL_ATTRIBUTES, "storage_order": Attribute("int", 0)},
        gradient=max_pool_gradient,
        workspace=operands(4),
    ),
    OpDef(
        "LpPool",
        (1, 1),
        _infer_lp,
        _lp,
        attributes={**_POOL_ATTRIBUTES, "p": Attribute("int", 2)},
        gradient=lp_pool_gradient,
        workspace=operands(4),
    ),
    OpDef(
        "GlobalAveragePool",
        (1, 1),
        _infer_global,
        _global_average,
        gradient=global_average_gradient,
        workspace=few,
        keeps_workspace=False,
    ),
    OpDef(
        "GlobalMaxPool",
        (1, 1),
        _infer_global,
        _global_max,
        gradient=global_max_gradient,
        workspace=few,
        keeps_workspace=False,
    ),
)
