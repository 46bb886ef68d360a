"""Convolutions: Conv by gathered columns and one product, ConvTranspose by the reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    computed_nbytes,
    declared,
)
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import along, bytes_from_a_line, copy_steps, fill_step, stretches, workspace
from stitch.ops.window import windows
from stitch.ops.window.convolution_tiles import (
    is_cut,
    one_sample_nbytes,
    spread_nbytes,
    spread_steps,
    tile_nbytes,
    tile_steps,
    weight_nbytes,
    weight_steps,
)
from stitch.ops.window.windows import (
    CONVOLUTION_ATTRIBUTES,
    KERNEL_SHAPE,
    Windows,
    check_window_attributes,
    conv_weight_gradient,
    transposed_windows,
    turned_windows,
    window_view,
    windows_of,
)
from stitch.program import Array, ValueType

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
                # What no sample reaches is padding, and stays zero.
                self._padded = np.zeros((at_once, x.shape[1], *windows.padded), x.dtype)
                places = zip(windows.begin, windows.size, strict=True)
                within = (slice(b, b + s) for b, s in places)
                self._inside = self._padded[(slice(None), slice(None), *within)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the columns of one sample."""
        return (self.x.shape[1], *self.windows.kernel, *self.windows.output)

    def steps(self, part: slice, target: Array) -> list[Thunk]:
        """Columns of these samples, into an array or view of (samples, *shape)."""
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
            seen, places = self._along_width(tap)
            to = images[:, :, tap, rows, places]
            steps.append(partial(np.copyto, to, self.x[part, :, :, seen]))
        return [*steps, partial(np.copyto, target, self._stretches(images))]

    def _zeros(self, at_once: int) -> Array:
        """Images per kernel column; what no sample reaches is padding, and stays zero."""
        height, _ = self.windows.padded
        shape = (at_once, self.x.shape[1], self.windows.kernel[1], height, self.windows.output[1])
        memory = bytes_from_a_line(int(np.prod(shape)) * self.x.dtype.itemsize)
        memory.fill(0)
        return memory.view(self.x.dtype).reshape(shape)

    def _along_width(self, tap: int) -> tuple[slice, slice]:
        """Positions that a kernel column meets inside the image, and the outputs they are for."""
        stride, width = self.windows.strides[1], self.windows.size[1]
        offset = tap * self.windows.dilations[1] - self.windows.begin[1]
        first = max(0, -(offset // stride))
        last = min(self.windows.output[1] - 1, (width - 1 - offset) // stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        begin, end = offset + first * stride, offset + last * stride
        return slice(begin, end + 1, stride), slice(first, last + 1)

    def _stretches(self, images: Array) -> Array:
        """The images seen as columns."""
        sample, channel, column, row, place = images.strides
        return as_strided(
            images,
            (images.shape[0], *self.shape),
            (sample, channel, row * self.windows.dilations[0], column, row, place),
            writeable=False,
        )


# Gradients ----------------------------------------------------------------------------------------

#: Columns are gathered for as many samples at a time as fit in this many bytes, or in those of the
#: result (at least one).
GRADIENT_COLUMNS_NBYTES = 1 << 19
#: From this many places on, a product per sample is long enough; below, samples are joined.
LONG_PRODUCT = 256
#: Sums of fewer products than so many for each filter take less than to turn round what they give.
SHORT_PRODUCT = 2


def _laid(context: GradientContext, windows: Windows) -> dict[str, Any]:
    """How the windows lie, without automatic padding."""
    return {
        "dilations": list(windows.dilations),
        "group": context.int_of("group"),
        "pads": [*windows.begin, *windows.end],
        "strides": list(windows.strides),
    }


def _parameters(
    context: GradientContext, kernel: Shape, laid: dict[str, Any], is_transposed: bool = False
) -> tuple[Any, Any]:
    """What weights and bias get; input and gradient change places if it `is_transposed`."""
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


def conv(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is spread by the weights; what strides left over saw no window."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = windows_of(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
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
    return first, *_parameters(context, kernel, laid)


def conv_transpose(context: GradientContext) -> Sequence[Any]:
    """The input's gradient is a convolution; gradient and input change places for the weights."""
    size, kernel = context.type_of(0).shape[2:], context.type_of(1).shape[2:]
    windows = transposed_windows(context.attributes, size, kernel)
    laid, gradient = _laid(context, windows), context.gradient
    first = None
    if context.wants(0):
        first = context.apply("Conv", gradient, context.input(1), **laid)
        if first.shape[2:] != size:
            axes = list(range(2, 2 + len(size)))
            first = context.apply("Slice", first, [0] * len(size), list(size), axes)
    return first, *_parameters(context, kernel, laid, is_transposed=True)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x, gradient = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    kernel, group = context.ints_of("kernel_shape"), context.int_of("group")
    assert kernel is not None
    check_window_attributes(context, x.shape[2:], kernel)
    windows = windows_of(context.attributes, x.shape[2:], kernel)
    # A transposed convolution may have had fewer places than there are windows.
    fits = gradient.shape[0] == x.shape[0] and all(
        places <= room for places, room in zip(gradient.shape[2:], windows.output, strict=True)
    )
    if group < 1 or x.shape[1] % group or gradient.shape[1] % group or not fits:
        raise context.fail(
            "the gradient does not fit the input",
            expected=f"{x.shape[0]} samples, channels divisible by {group}, "
            f"at most {list(windows.output)} places",
            got=gradient.shape,
        )
    shape = (gradient.shape[1], x.shape[1] // group, *kernel)
    return (ValueType(shape, x.data_type),)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    x, gradient, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
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
    parts = list(stretches(samples, at_once))
    place = out.reshape(group, -1, depth)
    # Whether sums lie as the result does: their shape does not tell, both sides may be as long.
    short = SHORT_PRODUCT * gradient.shape[1] // group
    lies = places < LONG_PRODUCT and at_once * places < short
    if places >= LONG_PRODUCT:
        sums, products = _by_sample(columns, gradient, parts, group)
    else:
        sums, products = _joined(columns, gradient, parts, group, place if lies else None)
    if len(products) == 1:
        return products[0] if lies else [*products[0], _turned(sums, place)]
    total = place if lies else np.empty_like(sums)
    steps: list[Thunk] = []
    for index, step in enumerate(products):
        steps += step
        first = partial(np.copyto, total, sums)
        steps.append(partial(np.add, total, sums, total) if index else first)
    return steps if lies else [*steps, _turned(total, place)]


def _turned(sums: Array, place: Array) -> Thunk:
    return partial(np.copyto, place, sums.transpose(0, 2, 1))


def _workspace(context: WorkspaceContext) -> int:
    x, gradient = context.operand(0), context.operand(1)
    result, itemsize = context.outputs[0], x.data_type.compute_dtype.itemsize
    group = context.int_of("group")
    if 0 in (*x.shape, *gradient.shape):
        return 0
    windows = windows_of(context.attributes, x.shape[2:], result.shape[2:])
    seen = replace(windows, output=gradient.shape[2:])
    sums, one = computed_nbytes(result), one_sample_nbytes(seen, x.shape[1], itemsize)
    if is_cut(one):
        filters = result.shape[0] // group
        return 2 * sums + weight_nbytes(seen, x.shape[1] // group, filters, itemsize)
    places = math.prod(gradient.shape[2:])
    columns = group * math.prod(result.shape[1:]) * places * itemsize
    at_once = _at_once(x.shape[0], columns, sums)
    # A product for each sample, or one for all of them.
    products = sums if places >= LONG_PRODUCT else 0
    return at_once * (one + products + gradient.shape[1] * places * itemsize) + 2 * sums


def _at_once(samples: int, columns: int, sums: int) -> int:
    """Samples whose columns, of so many bytes each, are gathered at a time: as sums are added up
    after each time, columns take no fewer bytes than these, if there are as many."""
    return min(samples, max(1, max(GRADIENT_COLUMNS_NBYTES, sums) // columns))


def _by_sample(
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int
) -> tuple[Array, list[list[Thunk]]]:
    """One product per sample and group, then their sum."""
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
    columns: Columns, gradient: Array, parts: Sequence[slice], group: int,
    place: Array | None = None,
) -> tuple[Array, list[list[Thunk]]]:  # fmt: skip
    """One product per part: channels go first, so that samples and places are one long axis.

    Columns by gradients: a product with the longer side first takes two thirds of the time. With
    the `place` of the result gradients by columns, which is how that lies.
    """
    channels, count = gradient.shape[1], parts[0].stop
    places, before = math.prod(gradient.shape[2:]), gradient.ndim - 1
    depth = math.prod(columns.shape) // (places * group)
    work = workspace(group * depth * count * places, gradient.dtype)
    seen = workspace(channels * count * places, gradient.dtype)
    is_only = len(parts) == 1 and place is not None
    if place is None:
        sums = np.empty((group, depth, channels // group), gradient.dtype)
    else:
        sums = place if is_only else np.empty(place.shape, place.dtype)
    turned = gradient.swapaxes(0, 1)
    steps: list[list[Thunk]] = []
    for part in parts:
        count = part.stop - part.start
        long = count * places
        gathered, rows = work[: group * depth * long], seen[: channels * long]
        wide = gathered.reshape(*columns.shape[:before], count, *columns.shape[before:])
        sides = gathered.reshape(group, depth, long), rows.reshape(group, -1, long)
        first, second = sides if place is None else sides[::-1]
        steps.append([
            *columns.steps(part, np.moveaxis(wide, before, 0)),
            partial(np.copyto, rows.reshape(turned[:, part].shape), turned[:, part]),
            partial(np.matmul, first, second.transpose(0, 2, 1), sums),
        ])  # fmt: skip
    return sums, steps


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
    gradient=conv, batching=windows.conv, workspace=WorkspaceRule(_conv_workspace),
)  # fmt: skip


OPERATORS: tuple[OpDef, ...] = (
    CONVOLUTION,
    OpDef(
        "ConvTranspose", (2, 3), _infer_conv_transpose, _conv_transpose,
        attributes=declared(
            **CONVOLUTION_ATTRIBUTES, output_padding=Attribute("ints"),
            output_shape=Attribute("ints"),
        ),
        gradient=conv_transpose,
        batching=windows.conv_transpose, workspace=WorkspaceRule(_conv_transpose_workspace),
    ),
    OpDef(
        "ConvWeightGradient", (2, 2), _infer, _kernel,
        attributes={**CONVOLUTION_ATTRIBUTES, **KERNEL_SHAPE},
        domain="stitch", batching=conv_weight_gradient, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
