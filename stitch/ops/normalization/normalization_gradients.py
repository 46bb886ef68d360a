"""Gradients of normalizations: statistics' own slopes folded into two means per row.

With x' = (x - mean) / deviation and h = dy scale: dx = (h - mean(h) - x' mean(h x')) / deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.gradient import GradientContext


def mean_over(context: GradientContext, value: Any, axes: Sequence[int]) -> Any:
    """The mean over axes, which stay with length 1."""
    return context.apply("ReduceMean", value, list(axes), keepdims=1)


def inverse_deviation(context: GradientContext, variance: Any, epsilon: float) -> Any:
    """1 / sqrt(variance + epsilon)."""
    return context.apply("Reciprocal", context.apply("Sqrt", variance + epsilon))


def standardized(
    context: GradientContext, x: Any, axes: Sequence[int], epsilon: float
) -> tuple[Any, Any]:
    """x to mean 0 and variance 1 over axes, and the inverse deviation."""
    centred = x - mean_over(context, x, axes)
    inverse = inverse_deviation(context, mean_over(context, centred * centred, axes), epsilon)
    return centred * inverse, inverse


def through_statistics(
    context: GradientContext, scaled: Any, normal: Any, inverse: Any, axes: Sequence[int]
) -> Any:
    """The operand's gradient from that of its standardized form."""
    slant = normal * mean_over(context, scaled * normal, axes)
    return (scaled - mean_over(context, scaled, axes) - slant) * inverse


def layer(context: GradientContext) -> Sequence[Any]:
    """By the mean and the inverse deviation that the operator gives as further results."""
    if any(gradient is not None for gradient in context.gradients[1:]):
        raise context.fail("its statistics have none", "do not use them on the way to an output")
    gradient = context.gradient
    first = second = third = None
    if context.wants(0) or context.wants(1):
        kind, shape = context.type_of(0).data_type, _normalized(context)
        statistics = (context.in_type(context.output(i), kind) for i in (1, 2))
        operands = gradient, context.input(0), *statistics, _whole_scale(context)
        first, *sums = context.apply_many(
            "LayerNormalizationGradient", 3, *operands, domain="stitch",
            axis=len(context.type_of(0).shape) - len(shape),
        )  # fmt: skip
        second = context.reduced(sums[0], 1)
        third = context.reduced(sums[1], 2) if context.wants(2) else None
    elif context.wants(2):
        third = context.reduced(gradient, 2)
    return first, second, third


def rms(context: GradientContext) -> Sequence[Any]:
    """As a layer's, without a mean: dx = (h - x mean(h x) / deviation^2) / deviation.

    Sums over rows and over columns are products with a vector, and x is never standardized.
    """
    shape, normalized = context.type_of(0).shape, _normalized(context)
    width = math.prod(normalized)
    rows = math.prod(shape[: len(shape) - len(normalized)])
    x, gradient = (context.shaped(v, (rows, width)) for v in (context.input(0), context.gradient))
    squares = mean_over(context, x * x, [1])
    inverse = inverse_deviation(context, squares, context.float_of("epsilon"))
    product = gradient * x
    first = second = None
    if context.wants(1):
        along = context.apply("MatMul", context.shaped(inverse, (1, rows)), product)
        second = context.reduced(context.shaped(along, normalized), 1)
    if context.wants(0):
        scale = context.shaped(_whole_scale(context), (width,))
        mean = context.shaped(scale * (1.0 / max(width, 1)), (width, 1))
        slant = context.apply("Gemm", product, mean) * (inverse * inverse)
        first = context.shaped((gradient * scale - x * slant) * inverse, shape)
    return first, second


def _normalized(context: GradientContext) -> tuple[int, ...]:
    """The shape of what is normalized."""
    shape = context.type_of(0).shape
    return shape[context.int_of("axis") % len(shape) :]


def _whole_scale(context: GradientContext) -> Any:
    """The scale in the shape of what is normalized."""
    normalized = _normalized(context)
    scale = context.input(1)
    if scale.shape == normalized:
        return scale
    if math.prod(scale.shape) == math.prod(normalized):
        return context.shaped(scale, normalized)
    return context.apply("Expand", scale, list(normalized))


def group(context: GradientContext) -> Sequence[Any]:
    """GroupNormalization, and InstanceNormalization with a group per channel."""
    shape = context.type_of(0).shape
    groups = shape[1]
    if "num_groups" in context.attributes:
        groups = context.int_of("num_groups")
    rows = (shape[0], groups, -1)
    epsilon = context.float_of("epsilon")
    gradient = context.gradient
    others = [0, *range(2, len(shape))]
    first = second = third = None
    if context.wants(2):
        third = context.apply("ReduceSum", gradient, others, keepdims=0)
    if not context.wants(0) and not context.wants(1):
        return None, None, third
    flat = context.apply("Reshape", context.input(0), list(rows))
    normal, inverse = standardized(context, flat, [2], epsilon)
    if context.wants(1):
        spread = context.shaped(normal, shape)
        second = context.apply("ReduceSum", gradient * spread, others, keepdims=0)
    if context.wants(0):
        scale = context.shaped(context.input(1), (shape[1], *(1,) * (len(shape) - 2)))
        scaled = context.apply("Reshape", gradient * scale, list(rows))
        first = context.shaped(
            through_statistics(context, scaled, normal, inverse, [2]), shape
        )  # back from rows
    return first, second, third


def mean_variance(context: GradientContext) -> Sequence[Any]:
    """The function body of ONNX adds its epsilon to the deviation, not to the variance."""
    rank = len(context.type_of(0).shape)
    axes = [axis % rank for axis in context.ints_of("axes") or ()]
    x = context.input(0)
    centred = x - mean_over(context, x, axes)
    deviation = context.apply("Sqrt", mean_over(context, centred * centred, axes))
    inverse = context.apply("Reciprocal", deviation + 1e-9)
    gradient = context.gradient
    slant = context.output() * mean_over(context, gradient * centred, axes) / deviation
    return ((gradient - mean_over(context, gradient, axes) - slant) * inverse,)


def norm(context: GradientContext) -> Sequence[Any]:
    """LpNormalization: dx = (dy - slope of the norm sum(dy y)) / norm; zero rows give nothing."""
    x, y, gradient = context.input(0), context.output(), context.gradient
    axis = [context.int_of("axis")]
    absolute = context.int_of("p") == 1
    norm = context.apply("ReduceL1" if absolute else "ReduceL2", x, axis, keepdims=1)
    slope = context.apply("Sign", x) if absolute else y
    dot = context.apply("ReduceSum", gradient * y, axis, keepdims=1)
    quotient = (gradient - slope * dot) / norm
    return (context.kept(context.apply("Greater", norm, 0.0), quotient),)


def response(context: GradientContext) -> Sequence[Any]:
    """LRN: y = x s^-beta, where s sums squares over a window of channels."""
    x, y, gradient = context.input(0), context.output(), context.gradient
    size, channels = context.int_of("size"), x.shape[1]
    factor = context.float_of("alpha") / size
    beta = context.float_of("beta")
    distance = np.arange(channels)[:, None] - np.arange(channels)
    # [read, reader]: a channel reads (size - 1) // 2 before itself and size // 2 after.
    reads = (distance >= -((size - 1) // 2)) & (distance <= size // 2)
    total = context.weighted(x * x, 1, reads) * factor + context.float_of("bias")
    own = gradient * context.apply("Pow", total, -beta)
    others = context.weighted(gradient * y / total, 1, reads.T)
    return (own - x * others * (2.0 * factor * beta),)


def batch(context: GradientContext) -> Sequence[Any]:
    """By stored statistics an affine map per channel; in training mode through the batch's own."""
    if context.gradient is None or any(g is not None for g in context.gradients[1:]):
        raise context.fail(
            "running statistics have none", "name the outputs whose gradients come in"
        )
    if context.int_of("training_mode"):
        return _trained(context)
    return _stored(context)


def _channels(context: GradientContext, vector: Any) -> Any:
    """A vector per channel, in the operand's type, ready to broadcast."""
    x = context.type_of(0)
    vector = context.in_type(vector, x.data_type)
    return context.shaped(vector, (-1, *(1,) * (len(x.shape) - 2))) if len(x.shape) > 2 else vector


def _summed(context: GradientContext, value: Any, index: int) -> Any:
    """Sums per channel, in the type of operand `index`."""
    axes = [axis for axis in range(len(value.shape)) if axis != 1]
    return _as_vector(context, context.apply("ReduceSum", value, axes, keepdims=0), index)


def _trained(context: GradientContext) -> Sequence[Any]:
    """By an operator; of the shift alone it is a sum."""
    gradient = context.gradient
    if not (context.wants(0) or context.wants(1)):
        third = _summed(context, gradient, 2) if context.wants(2) else None
        return None, None, third, None, None
    kind = context.type_of(0).data_type
    operands = [gradient, context.input(0), context.in_type(context.input(1), kind)]
    is_exact = kind.dtype == kind.compute_dtype and context.type_of(3).data_type is kind
    if is_exact and context.float_of("momentum") == 0:
        # What runs is then this batch's own mean and variance; rounded, they are taken again.
        operands += [context.output(1), context.output(2)]
    first, *sums = context.apply_many(
        "BatchNormalizationGradient", 3, *operands, domain="stitch",
        epsilon=context.float_of("epsilon"),
    )  # fmt: skip
    second, third = (_as_vector(context, total, 1 + i) for i, total in enumerate(sums))
    return first, second, third, None, None


def _as_vector(context: GradientContext, value: Any, index: int) -> Any:
    """A number per channel in the shape and type of operand `index`."""
    kind = context.type_of(index)
    return context.in_type(context.shaped(value, kind.shape), kind.data_type)


def _stored(context: GradientContext) -> Sequence[Any]:
    gradient, epsilon = context.gradient, context.float_of("epsilon")
    gradients: list[Any] = [None] * 5
    if any(context.wants(i) for i in (0, 1, 3, 4)):
        inverse = inverse_deviation(context, _channels(context, context.input(4)), epsilon)
    if context.wants(0) or context.wants(3) or context.wants(4):
        factor = inverse * _channels(context, context.input(1))
    if context.wants(0):
        gradients[0] = gradient * factor
    if context.wants(2):
        gradients[2] = _summed(context, gradient, 2)
    if context.wants(3):
        gradients[3] = -_summed(context, gradient * factor, 3)
    if context.wants(1) or context.wants(4):
        centred = gradient * (context.input(0) - _channels(context, context.input(3)))
        if context.wants(1):
            gradients[1] = _summed(context, centred * inverse, 1)
        if context.wants(4):
            gradients[4] = _summed(context, centred * (factor * inverse * inverse * -0.5), 4)
    return gradients
