"""Convolutions: Conv gathers columns (im2col) for one product, ConvTranspose is the reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.convolution_tiles import (
    is_cut,
    one_sample_nbytes,
    spread_steps,
    tile_steps,
    weight_steps,
)
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import along, copy_steps, fill_step, slice_range
from stitch.ops.windows import (
    CONVOLUTION_ATTRIBUTES,
    KERNEL_SHAPE,
    Windows,
    check_window_attributes,
    transposed_windows,
    turned_windows,
    window_view,
    windows_of,
)
from stitch.ops.workspaces import bytes_from_a_line, workspace
from stitch.program import Array, ValueType


def batch_conv_weight_gradient(c: BatchingContext) -> Sequence[Any]:
    """Fold the batch into groups: no sum crosses examples."""
    group = c.int_of("group") * c.batch_size
    (result,) = c.emit(c.fold(0, 1), c.fold(1, 1), group=group)
    return (c.split(result),)


# Columns (im2col) ---------------------------------------------------------------------------------


class Columns:
    """Gathers columns of at most `at_once` samples of `x`."""

    def __init__(self, x: Array, windows: Windows, at_once: int) -> None:
        self.x, self.windows = x, windows
        self._staged = (
            len(windows.size) == 2
            and windows.strides[0] == 1
            and min(windows.kernel) > 1
            and min(*windows.size, *windows.output) > 0
        )
        if self._staged:
            self._images = self._zeros(at_once)
        else:
            self._padded, self._inside = x, x
            if windows.needs_padding:
                # Padding is never written and stays zero.
                self._padded = np.zeros((at_once, x.shape[1], *windows.padded), x.dtype)
                sides = zip(windows.begin, windows.size, strict=True)
                within = (slice(b, b + s) for b, s in sides)
                self._inside = self._padded[(slice(None), slice(None), *within)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the columns of one sample."""
        return (self.x.shape[1], *self.windows.kernel, *self.windows.output)

    def steps(self, part: slice, target: Array) -> list[Thunk]:
        """Return steps that write the columns of these samples to [samples, *shape]."""
        count = part.stop - part.start
        if not self._staged:
            if self._padded is self.x:
                return [partial(np.copyto, target, window_view(self.x[part], self.windows))]
            padded = window_view(self._padded[:count], self.windows)
            return [
                partial(np.copyto, self._inside[:count], self.x[part]),
                partial(np.copyto, target, padded),
            ]
        images = self._images[:count]
        rows = slice(self.windows.begin[0], self.windows.begin[0] + self.windows.size[0])
        steps: list[Thunk] = []
        for tap in range(self.windows.kernel[1]):
            seen, outputs = self._along_width(tap)
            to = images[:, :, tap, rows, outputs]
            steps.append(partial(np.copyto, to, self.x[part, :, :, seen]))
        return [*steps, partial(np.copyto, target, self._as_columns(images))]

    def _zeros(self, at_once: int) -> Array:
        """Return images per kernel column; padding is never written and stays zero."""
        height, _ = self.windows.padded
        shape = (at_once, self.x.shape[1], self.windows.kernel[1], height, self.windows.output[1])
        memory = bytes_from_a_line(int(np.prod(shape)) * self.x.dtype.itemsize)
        memory.fill(0)
        return memory.view(self.x.dtype).reshape(shape)

    def _along_width(self, tap: int) -> tuple[slice, slice]:
        """Return the positions that a kernel column reads inside the image, and their outputs."""
        stride, width = self.windows.strides[1], self.windows.size[1]
        offset = tap * self.windows.dilations[1] - self.windows.begin[1]
        first = max(0, -(offset // stride))
        last = min(self.windows.output[1] - 1, (width - 1 - offset) // stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        begin, end = offset + first * stride, offset + last * stride
        return slice(begin, end + 1, stride), slice(first, last + 1)

    def _as_columns(self, images: Array) -> Array:
        """Return a view of the images as columns."""
        sample, channel, column, row, place = images.strides
        return as_strided(
            images,
            (images.shape[0], *self.shape),
            (sample, channel, row * self.windows.dilations[0], column, row, place),
            writeable=False,
        )


# Gradients ----------------------------------------------------------------------------------------

#: Bytes of columns gathered at a time (at least one sample, or the bytes of the result).
GRADIENT_COLUMNS_NBYTES = 1 << 19
#: From this many output positions on, there is a product per sample; below, samples are joined.
LONG_PRODUCT = 256
#: Up to this many products per filter, a product in the result's layout is faster than transposing.
SHORT_PRODUCT = 2


def _explicit_attributes(context: GradientContext, windows: Windows) -> dict[str, Any]:
    """Return window attributes with explicit pads."""
    return {
        "dilations": list(windows.dilations),
        "group": context.int_of("group"),
        "pads": [*windows.begin, *windows.end],
        "strides": list(windows.strides),
    }


def _parameter_gradients(
    context: GradientContext, kernel: Shape, laid: dict[str, Any], is_transposed: bool = False
) -> tuple[Any, Any]:
    """Return the gradients of weights and bias; input and gradient swap for ConvTranspose."""
    weights = bias = None
    if context.wants(1):
        operands = context.input(0), context.gradient
        weights = context.apply(
            "ConvWeightGradient", *(operands[::-1] if is_transposed else operands),
            domain="stitch", kernel_shape=list(kernel), **laid,
        )  # fmt: skip
    if context.wants(2):
        axes = [0, *range(2, len(context.gradient.shape))]
        bias = context.apply("ReduceSum", context.gradient, axes, keepdims=0)
    return weights, bias


def conv_gradient(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is a ConvTranspose, padded where strides left elements over."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = windows_of(context.attributes, size, kernel)
    laid, gradient = _explicit_attributes(context, windows), context.gradient
    first = None
    if context.wants(0):
        left = [
            length + b + e - d * (k - 1) - 1 - (places - 1) * s
            for length, b, e, d, k, places, s in zip(
                size, windows.begin, windows.end, windows.dilations, kernel,
                windows.output, windows.strides, strict=True,
            )
        ]  # fmt: skip
        first = context.apply(
            "ConvTranspose", gradient, context.input(1), output_padding=left, **laid
        )
    return first, *_parameter_gradients(context, kernel, laid)


def conv_transpose_gradient(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is a Conv."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = transposed_windows(context.attributes, size, kernel)
    laid, gradient = _explicit_attributes(context, windows), context.gradient
    first = None
    if context.wants(0):
        first = context.apply("Conv", gradient, context.input(1), **laid)
        if first.shape[2:] != size:
            axes = list(range(2, 2 + len(size)))
            first = context.apply("Slice", first, [0] * len(size), list(size), axes)
    return first, *_parameter_gradients(context, kernel, laid, is_transposed=True)


def _infer_weight_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    x, gradient = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    kernel, group = context.ints_of("kernel_shape"), context.int_of("group")
    assert kernel is not None
    check_window_attributes(context, x.shape[2:], kernel)
    windows = windows_of(context.attributes, x.shape[2:], kernel)
    # The gradient of a ConvTranspose may have fewer positions than there are windows.
    fits = gradient.shape[0] == x.shape[0] and all(
        size <= most for size, most in zip(gradient.shape[2:], windows.output, strict=True)
    )
    context.require(
        group >= 1 and x.shape[1] % group == 0 and gradient.shape[1] % group == 0 and fits,
        "shape of the gradient does not match the input",
        expected=f"{x.shape[0]} samples, channels divisible by {group}, spatial shape of at most "
        f"{list(windows.output)}",
        got=gradient.shape,
    )  # fmt: skip
    shape = (gradient.shape[1], x.shape[1] // group, *kernel)
    return (ValueType(shape, x.data_type),)


def _weight_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    x, gradient, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    group = arguments.int_of("group")
    samples, places = gradient.shape[0], math.prod(gradient.shape[2:])
    depth = math.prod(out.shape[1:])
    if samples * places == 0:
        return (fill_step(out, 0),)
    windows = windows_of(arguments.attributes, x.shape[2:], out.shape[2:])
    seen = replace(windows, output=gradient.shape[2:])
    if is_cut(one_sample_nbytes(seen, x.shape[1], x.itemsize)):
        totals = np.empty((group, depth, gradient.shape[1] // group), out.dtype)
        last = partial(np.copyto, out.reshape(group, -1, depth), totals.transpose(0, 2, 1))
        return [*weight_steps(x, seen, gradient, totals), last]
    at_once = _at_once(samples, group * depth * places * x.itemsize, out.size * x.itemsize)
    columns = Columns(x, seen, at_once)
    parts = list(slice_range(samples, at_once))
    target = out.reshape(group, -1, depth)
    short = SHORT_PRODUCT * gradient.shape[1] // group
    in_place = places < LONG_PRODUCT and at_once * places < short
    if places >= LONG_PRODUCT:
        sums, products = _by_sample(columns, gradient, parts, group)
    else:
        sums, products = _joined(columns, gradient, parts, group, target if in_place else None)
    total, steps = sums, products[0]
    if len(products) > 1:
        total = target if in_place else np.empty_like(sums)
        steps = [*steps, partial(np.copyto, total, sums)]
        for product in products[1:]:
            steps += [*product, partial(np.add, total, sums, total)]
    return steps if in_place else [*steps, partial(np.copyto, target, total.transpose(0, 2, 1))]


def _at_once(samples: int, columns: int, sums: int) -> int:
    """Return how many samples are gathered at a time. Sums are added after each time, so columns
    take at least as many bytes as the sums."""
    return min(samples, max(1, max(GRADIENT_COLUMNS_NBYTES, sums) // columns))


def _by_sample(
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int
) -> tuple[Array, list[list[Thunk]]]:
    """Return the sums and the steps of each part: one product per sample and group, summed."""
    samples, channels, places = *gradient.shape[:2], math.prod(gradient.shape[2:])
    depth = math.prod(columns.shape) // (places * group)
    count = parts[0].stop
    work = workspace((count, *columns.shape), gradient.dtype)
    products = np.empty((count, group, depth, channels // group), gradient.dtype)
    sums = np.empty(products.shape[1:], gradient.dtype)
    rows = gradient.reshape(samples, group, channels // group, places).transpose(0, 1, 3, 2)
    steps: list[list[Thunk]] = []
    for part in parts:
        size = part.stop - part.start
        flat = work[:size].reshape(size, group, depth, places)
        steps.append([
            *columns.steps(part, work[:size]),
            partial(np.matmul, flat, rows[part], products[:size]),
            partial(np.add.reduce, products[:size], 0, None, sums),
        ])  # fmt: skip
    return sums, steps


def _joined(
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int, target: Array | None
) -> tuple[Array, list[list[Thunk]]]:
    """Return the sums and the steps of each part: one product over all samples and positions.

    Columns by gradients: the longer side first takes two thirds of the time. With `target`, the
    result, gradients by columns, which is its layout.
    """
    channels, count = gradient.shape[1], parts[0].stop
    places, before = math.prod(gradient.shape[2:]), gradient.ndim - 1
    depth = math.prod(columns.shape) // (places * group)
    work = workspace(group * depth * count * places, gradient.dtype)
    seen = workspace(channels * count * places, gradient.dtype)
    if target is None:
        sums = np.empty((group, depth, channels // group), gradient.dtype)
    else:
        sums = target if len(parts) == 1 else np.empty(target.shape, target.dtype)
    by_channel = gradient.swapaxes(0, 1)
    steps: list[list[Thunk]] = []
    for part in parts:
        count = part.stop - part.start
        long = count * places
        gathered, rows = work[: group * depth * long], seen[: channels * long]
        wide = gathered.reshape(*columns.shape[:before], count, *columns.shape[before:])
        sides = gathered.reshape(group, depth, long), rows.reshape(group, -1, long)
        first, second = sides if target is None else sides[::-1]
        steps.append([
            *columns.steps(part, np.moveaxis(wide, before, 0)),
            partial(np.copyto, rows.reshape(by_channel[:, part].shape), by_channel[:, part]),
            partial(np.matmul, first, second.transpose(0, 2, 1), sums),
        ])  # fmt: skip
    return sums, steps


#: Bytes of columns gathered at a time (at least one sample).
COLUMNS_NBYTES = 1 << 20
#: Up to this many input channels per output channel, a ConvTranspose without strides gathers
#: columns; beyond, scattering the few output channels is faster.
WIDENING = 4
#: Limit of scatter steps, one per kernel element, and their bytes; beyond, a slower loop is used.
MOST_STEPS = 1 << 14


def _check_operands(context: InferenceContext, transposed: bool) -> tuple[Shape, Shape]:
    """Check the operands, and return the spatial shapes of the input and the kernel."""
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type(range(len(context.inputs)))
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    group = context.int_of("group")
    channels, wanted = x.shape[1], w.shape[0] if transposed else w.shape[1] * group
    if group < 1 or channels != wanted or w.shape[0] % group:
        raise context.fail(
            f"channels of {context.op} do not match its weights and group={group}",
            expected=f"{wanted} input channels, filters divisible by {group}",
            got=f"{channels} input channels, weights {list(w.shape)}",
        )
    check_kernel_shape(context, w.shape[2:])
    what = f"kernel of {context.op} has no elements"
    context.require(all(size >= 1 for size in w.shape[2:]), what, got=w.shape[2:])
    check_window_attributes(context, x.shape[2:], w.shape[2:])
    context.require_shape(2, (w.shape[1] * group if transposed else w.shape[0],))
    return x.shape[2:], w.shape[2:]


def check_kernel_shape(context: InferenceContext, kernel: Shape) -> None:
    """Check that the attribute `kernel_shape`, if present, is that of the weights."""
    listed = context.ints_of("kernel_shape") or kernel
    what = f"kernel_shape of {context.op} does not match the weights"
    context.require(listed == kernel, what, expected=kernel, got=listed)


def check_output(context: InferenceContext, output: Shape) -> None:
    """Check that no window is larger than the padded input."""
    what = f"kernel of {context.op} is larger than the padded input"
    # The least of symbolic sizes would be a guard: they would be compared with each other.
    fits = all(size >= 0 for size in output)
    context.require(fits, what, expected="output sizes >= 0", got=output)


def _infer_conv(context: InferenceContext) -> tuple[ValueType, ...]:
    size, kernel = _check_operands(context, transposed=False)
    windows = windows_of(context.attributes, size, kernel)
    check_output(context, windows.output)
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    return (ValueType((x.shape[0], w.shape[0], *windows.output), x.data_type),)


def bias_steps(bias: Array | None, out: Array) -> tuple[Thunk, ...]:
    """Return the step that adds one number per channel."""
    if bias is None:
        return ()
    return (partial(np.add, out, along(bias, 1, out.ndim), out),)


def _is_pointwise(windows: Windows) -> bool:
    return (
        math.prod(windows.kernel) == 1 and not windows.needs_padding and max(windows.strides) == 1
    )


def _conv(arguments: KernelArguments) -> Sequence[Thunk]:
    x, w, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
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
    """Return steps for result[n, g] = weights[g] @ columns of sample n and group g, plus bias."""
    samples, group, _, places = result.shape
    depth = weights.shape[2]
    if is_cut(one_sample_nbytes(windows, x.shape[1], x.dtype.itemsize)):
        added = bias_steps(bias, result.reshape(samples, -1, places))
        return [*tile_steps(x, windows, weights, result), *added]
    at_once = min(samples, max(1, COLUMNS_NBYTES // (group * depth * places * x.itemsize)))
    columns = Columns(x, windows, at_once)
    work = workspace((at_once, *columns.shape), x.dtype)
    steps: list[Thunk] = []
    for part in slice_range(samples, at_once):
        gathered = work[: part.stop - part.start]
        flat = gathered.reshape(-1, group, depth, places)
        steps += columns.steps(part, gathered)
        steps += _products(weights, flat, result[part])
        steps += bias_steps(bias, result[part].reshape(gathered.shape[0], -1, places))
    return steps


def _products(weights: Array, columns: Array, result: Array) -> tuple[Thunk, ...]:
    """Return the step result[n, g] = weights[g] @ columns[n, g]."""
    if columns.shape[:2] == (1, 1):
        return (partial(np.dot, weights[0], columns[0, 0], result[0, 0]),)
    return (partial(np.matmul, weights, columns, result),)


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
    x, w, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    group = arguments.int_of("group")
    windows = transposed_windows(arguments.attributes, x.shape[2:], w.shape[2:])
    samples, places = x.shape[0], math.prod(x.shape[2:])
    bias = bias_steps(arguments.optional(2), out)
    if x.size == 0:
        return (fill_step(out, 0), *bias)
    equivalent = turned_windows(windows)
    if equivalent is not None and x.shape[1] <= WIDENING * out.shape[1]:
        weights, steps = _reversed_weights(arguments, group)
        shape = (samples, group, weights.shape[1], math.prod(out.shape[2:]))
        products = _by_columns(x, equivalent, weights, out.reshape(shape), arguments.optional(2))
        return [*steps, *products]
    depth = math.prod(w.shape[1:])
    weights = w.reshape(group, w.shape[0] // group, depth)
    elements = math.prod(windows.padded) * out.shape[1] + group * depth * places
    at_once = _samples_at_once(samples, group * depth * places * x.itemsize)
    if is_cut(elements * x.dtype.itemsize) or _tap_count(windows, samples, at_once) > MOST_STEPS:
        return [*spread_steps(x, windows, weights, out), *bias]
    weights = weights.transpose(0, 2, 1)
    rows = x.reshape(samples, group, -1, places)
    columns = np.empty((at_once, group, depth, places), x.dtype)
    inner = tuple(slice(b, b + s) for b, s in zip(windows.begin, windows.size, strict=True))
    direct = windows.padded == windows.size
    spread = out if direct else np.empty((at_once, out.shape[1], *windows.padded), x.dtype)
    steps = []
    for part in slice_range(samples, at_once):
        piece = columns[: part.stop - part.start]
        target = spread[part] if direct else spread[: part.stop - part.start]
        steps += [partial(np.matmul, weights, rows[part], piece), fill_step(target, 0)]
        # Add every column at the positions of its kernel element.
        taps = piece.reshape(*target.shape[:2], math.prod(windows.kernel), *windows.output)
        for index, tap in enumerate(windows.taps()):
            into = target[(slice(None), slice(None), *tap)]
            steps.append(partial(np.add, into, taps[:, :, index], into))
        if not direct:
            steps += copy_steps(target[(slice(None), slice(None), *inner)], out[part])
    return [*steps, *bias]


def _samples_at_once(samples: int, columns_nbytes: int) -> int:
    return max(1, min(samples, COLUMNS_NBYTES // max(1, columns_nbytes)))


def _tap_count(windows: Windows, samples: int, at_once: int) -> int:
    """Return how many steps scatter the kernel's elements of all samples."""
    return math.prod(windows.kernel) * -(-samples // at_once)


def _reversed_weights(arguments: KernelArguments, group: int) -> tuple[Array, list[Thunk]]:
    """Return weights with channels swapped and kernels reversed, and their refresh steps."""
    w = arguments.operand(1)
    swapped = w.reshape(group, -1, *w.shape[1:]).swapaxes(1, 2)
    source = np.flip(swapped, tuple(range(3, swapped.ndim)))
    if arguments.is_constant(1):
        flat = arguments.memoize("reversed", lambda: np.ascontiguousarray(source))
        return flat.reshape(group, source.shape[1], -1), []
    weights = np.empty(source.shape, w.dtype)
    return weights.reshape(group, source.shape[1], -1), [partial(np.copyto, weights, source)]


CONVOLUTION = OpDef(
    "Conv", (2, 3), _infer_conv, _conv, attributes=CONVOLUTION_ATTRIBUTES,
    gradient=conv_gradient, batching=in_first_axis(1, 2),
)  # fmt: skip


OPERATORS: tuple[OpDef, ...] = (
    CONVOLUTION,
    OpDef(
        "ConvTranspose", (2, 3), _infer_conv_transpose, _conv_transpose,
        attributes=declared(
            **CONVOLUTION_ATTRIBUTES, output_padding=Attribute("ints"),
            output_shape=Attribute("ints"),
        ),
        gradient=conv_transpose_gradient, batching=in_first_axis(1, 2),
    ),
    OpDef(
        "ConvWeightGradient", (2, 2), _infer_weight_gradient, _weight_gradient,
        attributes={**CONVOLUTION_ATTRIBUTES, **KERNEL_SHAPE}, domain="stitch",
        batching=batch_conv_weight_gradient,
    ),
)  # fmt: skip
