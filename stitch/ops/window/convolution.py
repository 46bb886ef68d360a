"""Convolutions: Conv by gathered columns and one product, ConvTranspose by the reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import along, copy_steps, fill_step, stretches, workspace
from stitch.ops.window import convolution_gradients as gradients
from stitch.ops.window import window_batching as batching
from stitch.ops.window.columns import Columns
from stitch.ops.window.convolution_tiles import (
    is_cut,
    one_sample_nbytes,
    spread_nbytes,
    spread_steps,
    tile_nbytes,
    tile_steps,
)
from stitch.ops.window.windows import (
    CONVOLUTION_ATTRIBUTES,
    Windows,
    check_window_attributes,
    transposed_windows,
    turned_windows,
    windows_of,
)
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule
from stitch.program import Array, ValueType

#: Columns are gathered for as many samples at a time as fit in this many bytes (at least one).
COLUMNS_NBYTES = 1 << 20
#: Up to so many input channels for each output channel, a ConvTranspose without strides gathers
#: columns; beyond, spreading the few output channels takes less time.
WIDENING = 4
#: Kernel elements are spread by a step each up to so many steps of about so many bytes; beyond, by
#: a loop, which takes longer.
MOST_STEPS = 1 << 14
STEP_NBYTES = 640


def _check_operands(context: InferenceContext, transposed: bool) -> tuple[Shape, Shape]:
    """Spatial and kernel shapes of checked operands."""
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type(range(len(context.inputs)))
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    group = context.int_of("group")
    channels, wanted = x.shape[1], w.shape[0] if transposed else w.shape[1] * group
    if group < 1 or channels != wanted or w.shape[0] % group:
        raise context.fail(
            f"channels and groups of a {context.op} do not fit",
            expected=f"{wanted} input channels, filters divisible by {group}",
            got=f"{channels} input channels, weights {list(w.shape)}",
        )
    declared = context.ints_of("kernel_shape")
    if declared is not None and declared != w.shape[2:]:
        raise context.fail(
            "kernel_shape differs from the weights", expected=w.shape[2:], got=declared
        )
    if min(w.shape[2:]) < 1:
        raise context.fail("a kernel needs at least one element", got=w.shape[2:])
    check_window_attributes(context, x.shape[2:], w.shape[2:])
    if context.present(2) is not None:
        context.require_shape(2, (w.shape[1] * group if transposed else w.shape[0],))
    return x.shape[2:], w.shape[2:]


def check_output(context: InferenceContext, output: Shape) -> None:
    """No window may be larger than what it slides over."""
    if any(size < 0 for size in output):
        raise context.fail(
            f"the kernel of {context.op} is larger than its padded input", got=output
        )


def _infer_conv(context: InferenceContext) -> tuple[ValueType, ...]:
    size, kernel = _check_operands(context, transposed=False)
    windows = windows_of(context.attributes, size, kernel)
    check_output(context, windows.output)
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    return (ValueType((x.shape[0], w.shape[0], *windows.output), x.data_type),)


def bias_steps(bias: Array | None, out: Array) -> tuple[Thunk, ...]:
    """Add one number per channel."""
    if bias is None:
        return ()
    return (partial(np.add, out, along(bias, 1, out.ndim), out),)


def _is_pointwise(windows: Windows) -> bool:
    return (
        math.prod(windows.kernel) == 1 and not windows.needs_padding and max(windows.strides) == 1
    )


def _conv(arguments: KernelArguments) -> Sequence[Thunk]:
    x, w, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    group = arguments.int_of("group")
    windows = windows_of(arguments.attributes, x.shape[2:], w.shape[2:])
    samples, places = x.shape[0], math.prod(windows.output)
    depth = math.prod(w.shape[1:])
    bias = bias_steps(arguments.optional(2), out)
    if depth == 0:
        return (fill_step(out, 0), *bias)
    weights = w.reshape(group, w.shape[0] // group, depth)
    result = out.reshape(samples, group, weights.shape[1], places)
    if _is_pointwise(windows):
        return (*_products(weights, x.reshape(samples, group, depth, places), result), *bias)
    return _by_columns(x, windows, weights, result, arguments.optional(2))


def _by_columns(
    x: Array, windows: Windows, weights: Array, result: Array, bias: Array | None
) -> list[Thunk]:
    """result[n, g] = weights[g] @ columns of sample n and group g, and a number per channel."""
    samples, group, _, places = result.shape
    depth = weights.shape[2]
    if is_cut(one_sample_nbytes(windows, x.shape[1], x.dtype.itemsize)):
        added = bias_steps(bias, result.reshape(samples, -1, places))
        return [*tile_steps(x, windows, weights, result), *added]
    at_once = min(samples, max(1, COLUMNS_NBYTES // (group * depth * places * x.itemsize)))
    columns = Columns(x, windows, at_once)
    work = workspace((at_once, *columns.shape), x.dtype)
    steps: list[Thunk] = []
    for part in stretches(samples, at_once):
        gathered = work[: part.stop - part.start]
        flat = gathered.reshape(-1, group, depth, places)
        steps += columns.steps(part, gathered)
        steps += _products(weights, flat, result[part])
        steps += bias_steps(bias, result[part].reshape(gathered.shape[0], -1, places))
    return steps


def _products(weights: Array, columns: Array, result: Array) -> tuple[Thunk, ...]:
    """result[n, g] = weights[g] @ columns[n, g]; a lone sample and group is one `np.dot`."""
    if columns.shape[:2] == (1, 1):
        return (partial(np.dot, weights[0], columns[0, 0], result[0, 0]),)
    return (partial(np.matmul, weights, columns, result),)


def _conv_workspace(context: WorkspaceContext) -> int:
    x, w = context.operand(0), context.operand(1)
    windows = windows_of(context.attributes, x.shape[2:], w.shape[2:])
    if _is_pointwise(windows) or 0 in context.outputs[0].shape:
        return 0
    return _columns_nbytes(context, windows, x, w.shape[0])


def _columns_nbytes(context: WorkspaceContext, windows: Windows, x: ValueType, filters: int) -> int:
    """What `_by_columns` takes."""
    group, itemsize = context.int_of("group"), x.data_type.compute_dtype.itemsize
    one = one_sample_nbytes(windows, x.shape[1], itemsize)
    if is_cut(one):
        return tile_nbytes(windows, x.shape[1] // group, filters // group, itemsize)
    columns = x.shape[1] * math.prod(windows.kernel) * math.prod(windows.output) * itemsize
    return max(1, min(x.shape[0], COLUMNS_NBYTES // max(1, columns))) * one


def _infer_conv_transpose(context: InferenceContext) -> tuple[ValueType, ...]:
    size, kernel = _check_operands(context, transposed=True)
    context.spatial_ints("output_padding", (0,) * len(size), least=0)
    context.spatial_ints("output_shape", (0,) * len(size), least=0)
    windows = transposed_windows(context.attributes, size, kernel)
    check_output(context, windows.size)
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    channels = w.shape[1] * context.int_of("group")
    return (ValueType((x.shape[0], channels, *windows.size), x.data_type),)


def _conv_transpose(arguments: KernelArguments) -> Sequence[Thunk]:
    x, w, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    group = arguments.int_of("group")
    windows = transposed_windows(arguments.attributes, x.shape[2:], w.shape[2:])
    samples, places = x.shape[0], math.prod(x.shape[2:])
    bias = bias_steps(arguments.optional(2), out)
    if x.size == 0:
        return (fill_step(out, 0), *bias)
    turned = turned_windows(windows)
    if turned is not None and x.shape[1] <= WIDENING * out.shape[1]:
        weights, steps = _turned_weights(arguments, group)
        shape = (samples, group, weights.shape[1], math.prod(out.shape[2:]))
        products = _by_columns(x, turned, weights, out.reshape(shape), arguments.optional(2))
        return [*steps, *products]
    depth = math.prod(w.shape[1:])
    weights = w.reshape(group, w.shape[0] // group, depth)
    taken = math.prod(windows.padded) * out.shape[1] + group * depth * places
    # As many samples at a time as keep their columns in the cache.
    at_once = _samples_at_once(samples, group * depth * places * x.itemsize)
    if is_cut(taken * x.dtype.itemsize) or _tap_count(windows, samples, at_once) > MOST_STEPS:
        return [*spread_steps(x, windows, weights, out), *bias]
    weights = weights.transpose(0, 2, 1)
    rows = x.reshape(samples, group, -1, places)
    columns = np.empty((at_once, group, depth, places), x.dtype)
    inner = tuple(slice(b, b + s) for b, s in zip(windows.begin, windows.size, strict=True))
    direct = windows.padded == windows.size
    spread = out if direct else np.empty((at_once, out.shape[1], *windows.padded), x.dtype)
    steps = []
    for part in stretches(samples, at_once):
        taken = columns[: part.stop - part.start]
        target = spread[part] if direct else spread[: part.stop - part.start]
        steps += [partial(np.matmul, weights, rows[part], taken), fill_step(target, 0)]
        steps += _tap_steps(taken, target, windows)
        if not direct:
            steps += copy_steps(target[(slice(None), slice(None), *inner)], out[part])
    return [*steps, *bias]


def _conv_transpose_workspace(context: WorkspaceContext) -> int:
    x, w = context.operand(0), context.operand(1)
    result, itemsize = context.outputs[0], x.data_type.compute_dtype.itemsize
    if 0 in result.shape or 0 in x.shape:
        return 0
    windows = transposed_windows(context.attributes, x.shape[2:], w.shape[2:])
    turned = turned_windows(windows)
    if turned is not None and x.shape[1] <= WIDENING * result.shape[1]:
        weights = math.prod(w.shape) * itemsize
        return weights + _columns_nbytes(context, turned, x, result.shape[1])
    columns = result.shape[1] * math.prod(w.shape[2:]) * math.prod(x.shape[2:]) * itemsize
    one = columns + math.prod(windows.padded) * result.shape[1] * itemsize
    at_once = _samples_at_once(x.shape[0], columns)
    taps = _tap_count(windows, x.shape[0], at_once)
    if is_cut(one) or taps > MOST_STEPS:
        return spread_nbytes(windows, w.shape[1], itemsize)
    return at_once * one + STEP_NBYTES * taps


def _samples_at_once(samples: int, columns_nbytes: int) -> int:
    return max(1, min(samples, COLUMNS_NBYTES // max(1, columns_nbytes)))


def _tap_count(windows: Windows, samples: int, at_once: int) -> int:
    """How many steps would spread the kernel's elements of all samples."""
    return math.prod(windows.kernel) * -(-samples // at_once)


def _turned_weights(arguments: KernelArguments, group: int) -> tuple[Array, list[Thunk]]:
    """Weights with channels swapped and every kernel reversed, and the step that refreshes them."""
    w = arguments.given(1)
    swapped = w.reshape(group, -1, *w.shape[1:]).swapaxes(1, 2)
    source = np.flip(swapped, tuple(range(3, swapped.ndim)))
    if arguments.is_constant(1):
        flat = arguments.remembered("turned", lambda: np.ascontiguousarray(source))
        return flat.reshape(group, source.shape[1], -1), []
    weights = np.empty(source.shape, w.dtype)
    return weights.reshape(group, source.shape[1], -1), [partial(np.copyto, weights, source)]


def _tap_steps(columns: Array, target: Array, windows: Windows) -> list[Thunk]:
    """Add every column where its kernel element put it."""
    count = math.prod(windows.kernel)
    taps = columns.reshape(*target.shape[:2], count, *windows.output)
    places = (target[(slice(None), slice(None), *tap)] for tap in windows.taps())
    return [partial(np.add, p, taps[:, :, index], p) for index, p in enumerate(places)]


CONVOLUTION = OpDef(
    "Conv", (2, 3), _infer_conv, _conv, attributes=CONVOLUTION_ATTRIBUTES,
    gradient=gradients.conv, batching=batching.conv, workspace=WorkspaceRule(_conv_workspace),
)  # fmt: skip
OPERATORS = (
    CONVOLUTION,
    OpDef(
        "ConvTranspose", (2, 3), _infer_conv_transpose, _conv_transpose,
        attributes=declared(
            **CONVOLUTION_ATTRIBUTES, output_padding=Attribute("ints"),
            output_shape=Attribute("ints"),
        ),
        gradient=gradients.conv_transpose,
        batching=batching.conv_transpose, workspace=WorkspaceRule(_conv_transpose_workspace),
    ),
    *gradients.OPERATORS,
)  # fmt: skip
