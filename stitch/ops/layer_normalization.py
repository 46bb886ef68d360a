"""Normalizations over a layer, an instance or a group, and by a norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, data_type_of_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction import SPREAD_FROM, inverse_deviation, row_chunks, standardize
from stitch.ops.steps import along, copy_steps, fill_step, scalar
from stitch.ops.workspaces import workspace
from stitch.program import Array, DataType, ValueType

# Batching -------------------------------------------


def batch_layer(c: BatchingContext) -> Sequence[Any] | None:
    """Layer- and RMSNormalization with shared scale and shift."""
    if c.varies(1, 2):
        return None
    return c.emit(*c.operands, axis=c.axis_behind(c.int_of("axis")))


def batch_layer_gradient(c: BatchingContext) -> Sequence[Any]:
    """The operand's gradient by rows; those of scale and shift sum the rows of one example."""
    axis, data_type = c.axis_behind(c.int_of("axis"), 1), c.type_of(1).data_type
    gradient, x, mean, inverse = (c.wide(c.broadcast(i)) for i in range(4))
    scale, scaled = c.wide(c.operands[4]), gradient
    if c.varies(4):
        scaled = c.apply("Mul", gradient, c.wide(c.align(4, c.rank(1))))
        scale = c.fill(1, c.shape(4), DataType.from_dtype(x.dtype))
    results = [c.apply(c.op, scaled, x, mean, inverse, scale, domain=c.domain, axis=axis)]
    if len(c.output_types) > 1:
        deviation = c.apply("Mul", c.apply("Sub", x, mean), inverse)
        results.append(_over_rows(c, c.apply("Mul", gradient, deviation), axis))
    if len(c.output_types) > 2:
        results.append(_over_rows(c, gradient, axis))
    return tuple(c.cast(result, data_type) for result in results)


def _over_rows(c: BatchingContext, value: Any, axis: int) -> Any:
    if axis == 1:
        return value
    return c.apply("ReduceSum", value, list(range(1, axis)), keepdims=0)


# Gradients ----------------------------------------------------------------------------------------


def mean_over(context: GradientContext, value: Any, axes: Sequence[int]) -> Any:
    return context.apply("ReduceMean", value, list(axes), keepdims=1)


def root_reciprocal(context: GradientContext, variance: Any, epsilon: float) -> Any:
    """1 / sqrt(variance + epsilon)."""
    return context.apply("Reciprocal", context.apply("Sqrt", variance + epsilon))


def layer_gradient(context: GradientContext) -> Sequence[Any]:
    """Reads the mean and the inverse deviation, which are further results of the operator."""
    if any(gradient is not None for gradient in context.gradients[1:]):
        raise context.fail(
            "only output 0 is differentiable, its statistics are not",
            "do not use the statistics on the way to the loss",
        )
    gradient = context.gradient
    first = second = third = None
    if context.wants(0) or context.wants(1):
        kind, shape = context.type_of(0).data_type, _normalized(context)
        statistics = (context.cast(context.output(i), kind) for i in (1, 2))
        operands = gradient, context.input(0), *statistics, _whole_scale(context)
        first, *sums = context.apply_many(
            "LayerNormalizationGradient", 3, *operands, domain="stitch",
            axis=len(context.type_of(0).shape) - len(shape),
        )  # fmt: skip
        second = context.sum_to(sums[0], 1)
        third = context.sum_to(sums[1], 2) if context.wants(2) else None
    elif context.wants(2):
        third = context.sum_to(gradient, 2)
    return first, second, third


def rms_gradient(context: GradientContext) -> Sequence[Any]:
    """dx = (h - x mean(h x) / deviation^2) / deviation with h = scale dy.

    Sums over rows and over columns are products with a vector; x is never standardized.
    """
    shape, normalized = context.type_of(0).shape, _normalized(context)
    width = math.prod(normalized)
    rows = math.prod(shape[: len(shape) - len(normalized)])
    x, gradient = (context.reshape(v, (rows, width)) for v in (context.input(0), context.gradient))
    squares = mean_over(context, x * x, [1])
    inverse = root_reciprocal(context, squares, context.float_of("epsilon"))
    product = gradient * x
    first = second = None
    if context.wants(1):
        along = context.apply("MatMul", context.reshape(inverse, (1, rows)), product)
        second = context.sum_to(context.reshape(along, normalized), 1)
    if context.wants(0):
        scale = context.reshape(_whole_scale(context), (width,))
        mean = context.reshape(scale * (1.0 / max(width, 1)), (width, 1))
        slant = context.apply("Gemm", product, mean) * (inverse * inverse)
        first = context.reshape((gradient * scale - x * slant) * inverse, shape)
    return first, second


def _normalized(context: GradientContext) -> tuple[int, ...]:
    """Return the shape of the normalized axes."""
    shape = context.type_of(0).shape
    return shape[context.int_of("axis") % len(shape) :]


def _whole_scale(context: GradientContext) -> Any:
    """Return the scale, expanded to the shape of the normalized axes."""
    normalized = _normalized(context)
    scale = context.input(1)
    if scale.shape == normalized:
        return scale
    if math.prod(scale.shape) == math.prod(normalized):
        return context.reshape(scale, normalized)
    return context.apply("Expand", scale, list(normalized))


def group_gradient(context: GradientContext) -> Sequence[Any]:
    """GroupNormalization, and InstanceNormalization with a group per channel."""
    shape, gradient = context.type_of(0).shape, context.gradient
    groups = shape[1]
    if "num_groups" in context.attributes:
        groups = context.int_of("num_groups")
    rows = (shape[0], groups, -1)
    others = [0, *range(2, len(shape))]
    first = second = third = None
    if context.wants(2):
        third = context.apply("ReduceSum", gradient, others, keepdims=0)
    if not context.wants(0) and not context.wants(1):
        return None, None, third
    flat = context.apply("Reshape", context.input(0), list(rows))
    centred = flat - mean_over(context, flat, [2])
    variance = mean_over(context, centred * centred, [2])
    inverse = root_reciprocal(context, variance, context.float_of("epsilon"))
    normal = centred * inverse
    if context.wants(1):
        product = gradient * context.reshape(normal, shape)
        second = context.apply("ReduceSum", product, others, keepdims=0)
    if context.wants(0):
        scale = context.reshape(context.input(1), (shape[1], *(1,) * (len(shape) - 2)))
        scaled = context.apply("Reshape", gradient * scale, list(rows))
        slant = normal * mean_over(context, scaled * normal, [2])
        first = (scaled - mean_over(context, scaled, [2]) - slant) * inverse
        first = context.reshape(first, shape)
    return first, second, third


EPSILON = 9.999999747378752e-06  # 1e-5 as the float32 that ONNX's schema holds


def _scale_and_shift(out: Array, scale: Array, shift: Array | None) -> list[Thunk]:
    steps: list[Thunk] = [partial(np.multiply, out, scale, out)]
    return steps if shift is None else [*steps, partial(np.add, out, shift, out)]


def _infer_layer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_same_type(range(len(context.inputs)))
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    context.require_broadcast_to(1, x.shape)
    context.require_broadcast_to(2, x.shape)
    stash = data_type_of_code(context.int_of("stash_type"), f"stash_type of {context.op}")
    if stash not in FLOATS:
        what = f"stash_type of {context.op} is not a float type"
        raise context.fail(what, expected=FLOATS, got=stash.value)
    row = ValueType((*x.shape[:axis], *(1,) * (len(x.shape) - axis)), stash)
    return (x, row, row)[: context.outputs]


def _rows(x: Array, axis: int) -> tuple[int, int]:
    return math.prod(x.shape[:axis]), math.prod(x.shape[axis:])


def _layer(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % x.ndim
    shape = _rows(x, axis)
    if x.size == 0:
        return [partial(np.copyto, row, np.nan) for row in arguments.outputs[1:]]
    mean, inverse = np.empty(shape[0], out.dtype), np.empty(shape[0], out.dtype)
    epsilon = arguments.float_of("epsilon")
    rows, results, chunks = x.reshape(shape), out.reshape(shape), row_chunks(shape)
    steps, operands, after = _spread_operands(arguments, shape, chunks)
    for part in chunks:
        steps += standardize(rows[part], results[part], mean[part], inverse[part], epsilon)
        for function, operand in operands:
            chunk = results[part]
            steps.append(partial(function, chunk, operand[: chunk.shape[0]], chunk))
    for row, statistic in zip(arguments.outputs[1:], (mean, inverse), strict=False):
        steps += copy_steps(statistic.reshape(row.shape), row)
    return [*steps, *after]


def _spread_operands(
    arguments: KernelArguments, shape: tuple[int, int], chunks: Sequence[slice]
) -> tuple[list[Thunk], list[tuple[np.ufunc, Array]], list[Thunk]]:
    """Return steps to run first, functions to apply to each chunk, and steps to run last, which
    together apply scale and shift.

    With enough chunks a row is expanded to a chunk's shape once: arrays of equal shape multiply
    twice as fast as arrays that broadcast.
    """
    before: list[Thunk] = []
    operands: list[tuple[np.ufunc, Array]] = []
    after: list[Thunk] = []
    out = arguments.outputs[0]
    for index, function in ((1, np.multiply), (2, np.add)):
        operand = arguments.optional(index)
        if operand is None:
            continue
        if operand.size != shape[1] or after:
            after.append(partial(function, out, operand, out))
            continue
        row, fixed = operand.reshape(1, -1), arguments.is_constant(index)
        if fixed or len(chunks) >= SPREAD_FROM:
            spread = workspace((chunks[0].stop, shape[1]), out.dtype)
            fill = partial(np.copyto, spread, row)
            before.append(fill)
            row = spread
        operands.append((function, row))
    return before, operands, after


def _rms(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    shape = _rows(x, arguments.int_of("axis") % x.ndim)
    row = np.empty(shape[0], out.dtype)
    source, result = x.reshape(shape), out.reshape(shape)
    return [
        partial(np.vecdot, source, source, row),
        partial(np.divide, row, scalar(shape[1], row), row),
        *inverse_deviation(row, arguments.float_of("epsilon")),
        partial(np.multiply, source, row[:, None], result),
        *_scale_and_shift(out, scale, None),
    ]


def _infer_channels(least_rank: int, context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_same_type((0, 1, 2))
    context.require_rank(0, least_rank)
    for index in (1, 2):
        context.require_shape(index, x.shape[1:2])
    return (x,)


def _infer_group(context: InferenceContext) -> tuple[ValueType, ...]:
    (x,) = _infer_channels(2, context)
    groups = context.int_of("num_groups")
    if groups < 1 or x.shape[1] % groups:
        raise context.fail(
            f"num_groups={groups} does not divide {x.shape[1]} channels",
            expected=f"a divisor of {x.shape[1]}", got=groups,
        )  # fmt: skip
    return (x,)


def _by_groups(arguments: KernelArguments) -> Sequence[Thunk]:
    """GroupNormalization, and InstanceNormalization with a group per channel."""
    x, out = arguments.operand(0), arguments.outputs[0]
    grouped = "num_groups" in arguments.attributes
    groups = arguments.int_of("num_groups") if grouped else x.shape[1]
    shape = (x.shape[0] * groups, x.size // (x.shape[0] * groups))
    mean, inverse = np.empty(shape[0], out.dtype), np.empty(shape[0], out.dtype)
    epsilon = arguments.float_of("epsilon")
    scale, shift = (along(arguments.operand(i), 1, x.ndim) for i in (1, 2))
    rows, results = x.reshape(shape), out.reshape(shape)
    steps: list[Thunk] = []
    for part in row_chunks(shape):
        steps += standardize(rows[part], results[part], mean[part], inverse[part], epsilon)
    return [*steps, *_scale_and_shift(out, scale, shift)]


_LAYER = declared(axis=-1, epsilon=EPSILON, stash_type=1)


# stitch.LayerNormalizationGradient ----------------------------------------------------------------


def _infer_layer_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(5))
    axis = context.axis_of(context.int_of("axis"), context.require_rank(1, 1))
    row = (*x.shape[:axis], *(1,) * (len(x.shape) - axis))
    for index, shape in ((0, x.shape), (2, row), (3, row), (4, x.shape[axis:])):
        context.require_shape(index, shape)
    weights = ValueType(x.shape[axis:], x.data_type)
    return (x, weights, weights)[: context.outputs]


def _layer_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x, mean, inverse, scale = (arguments.operand(i) for i in range(5))
    out, *sums = arguments.outputs
    if x.size == 0:
        return [fill_step(total, 0) for total in sums]
    axis = arguments.int_of("axis") % x.ndim
    shape = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    chunks = _Chunks(shape, scale.reshape(1, -1), [s.reshape(1, -1) for s in sums])
    steps = chunks.before()
    rows = mean.reshape(-1, 1), inverse.reshape(-1, 1)
    for part in chunks.parts:
        operands = gradient.reshape(shape)[part], x.reshape(shape)[part]
        steps += chunks.steps(*operands, rows[0][part], rows[1][part], out.reshape(shape)[part])
    return steps


class _Chunks:
    """Workspaces that the chunks of rows of one layer share."""

    def __init__(self, shape: tuple[int, int], scale: Array, sums: Sequence[Array]) -> None:
        self.parts = row_chunks(shape)
        self.scale, self.sums, self.first = scale, sums, True
        wide, dtype = (self.parts[0].stop, shape[1]), scale.dtype
        self.centred, self.product = (workspace(wide, dtype) for _ in range(2))
        #: The scale divided by the row length: a product with it is a mean.
        self.share = workspace((shape[1], 1), dtype)
        self.slant, self.mean = (workspace((wide[0], 1), dtype) for _ in range(2))
        self.more, self.ones = workspace((1, shape[1]), dtype), np.ones((1, wide[0]), dtype)
        # A row that broadcasts multiplies half as fast as a chunk.
        self.spread = workspace(wide, dtype) if len(self.parts) >= SPREAD_FROM else None

    def before(self) -> list[Thunk]:
        """Return steps to run before all chunks."""
        width = scalar(self.share.size, self.share)
        steps: list[Thunk] = [partial(np.divide, self.scale.T, width, self.share)]
        if self.spread is not None:
            steps.append(partial(np.copyto, self.spread, self.scale))
        return steps

    def steps(
        self, gradient: Array, x: Array, mean: Array, inverse: Array, out: Array
    ) -> list[Thunk]:
        """Return the steps of one chunk of rows; `mean` and `inverse` are columns."""
        count = len(x)
        c, p = self.centred[:count], self.product[:count]
        slant, average = self.slant[:count], self.mean[:count]
        scale = self.scale if self.spread is None else self.spread[:count]
        steps: list[Thunk] = [
            partial(np.subtract, x, mean, c),
            partial(np.multiply, gradient, c, p),
            *self._summed(inverse.T, p, 0),
            *self._summed(self.ones[:, :count], gradient, 1),
            partial(np.dot, p, self.share, slant),
            partial(np.multiply, slant, inverse, slant),
            partial(np.multiply, slant, inverse, slant),
            partial(np.multiply, c, slant, c),
            partial(np.multiply, gradient, scale, out),
            partial(np.subtract, out, c, out),
            partial(np.dot, gradient, self.share, average),
            partial(np.subtract, out, average, out),
            partial(np.multiply, out, inverse, out),
        ]
        self.first = False
        return steps

    def _summed(self, weights: Array, rows: Array, index: int) -> list[Thunk]:
        """Return steps that add a weighted sum of rows to the total `index`."""
        if index >= len(self.sums):
            return []
        total = self.sums[index]
        if self.first:
            return [partial(np.dot, weights, rows, total)]
        return [partial(np.dot, weights, rows, self.more), partial(np.add, total, self.more, total)]


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "LayerNormalization", (2, 3), _infer_layer, _layer, (1, 3), _LAYER,
        gradient=layer_gradient, batching=batch_layer,
    ),
    OpDef(
        "RMSNormalization", (2, 2), _infer_layer, _rms, attributes=_LAYER, gradient=rms_gradient,
        batching=batch_layer,
    ),
    OpDef(
        "InstanceNormalization", (3, 3), partial(_infer_channels, 3), _by_groups,
        attributes=declared(epsilon=EPSILON), gradient=group_gradient, batching=in_first_axis(1, 2),
    ),
    OpDef(
        "GroupNormalization", (3, 3), _infer_group, _by_groups,
        attributes=declared(
            epsilon=EPSILON, num_groups=Attribute("int", required=True), stash_type=1
        ),
        gradient=group_gradient, batching=in_first_axis(1, 2),
    ),
    OpDef(
        "LayerNormalizationGradient", (5, 5), _infer_layer_gradient, _layer_gradient, (1, 3),
        attributes=declared(axis=-1), domain="stitch", batching=batch_layer_gradient,
    ),
)  # fmt: skip
