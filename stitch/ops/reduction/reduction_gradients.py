"""Gradients of reductions, running sums and softmaxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.ops.arithmetic.arithmetic_gradients import kept, zero_like
from stitch.ops.attributes import int_of
from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import Gradient, GradientContext


def _axes(context: GradientContext) -> tuple[int, ...]:
    """The reduced axes of a reduction with the operand `axes`."""
    rank = len(context.type_of(0).shape)
    listed = context.constants[1] if context.has(1) else None
    axes = () if listed is None else tuple(int(a) % rank for a in listed.ravel())
    if axes or int_of(context.attributes, "noop_with_empty_axes"):
        return axes
    return tuple(range(rank))


def _count(context: GradientContext) -> int:
    shape = context.type_of(0).shape
    return math.prod(shape[axis] for axis in _axes(context))


def _with_axes(context: GradientContext, value: Any) -> Any:
    """A reduced value with its reduced axes back, of length 1."""
    axes, shape = _axes(context), context.type_of(0).shape
    kept_shape = tuple(1 if i in axes else size for i, size in enumerate(shape))
    if value.shape == kept_shape:
        return value
    return context.apply("Reshape", value, list(kept_shape))


def _spread(context: GradientContext, value: Any) -> Any:
    """A reduced value, repeated over what was reduced."""
    shape, value = context.type_of(0).shape, _with_axes(context, value)
    return value if value.shape == shape else context.apply("Expand", value, list(shape))


def _sum(c: GradientContext) -> Any:
    return _spread(c, c.gradient)


def _mean(c: GradientContext) -> Any:
    return _spread(c, c.gradient * (1.0 / max(_count(c), 1)))


def _extreme(c: GradientContext) -> Any:
    """All places that reach the extreme share the gradient equally, as torch's amax has it."""
    hit = c.apply("Equal", c.input(0), _with_axes(c, c.output()))
    ones = c.apply("Cast", hit, to=onnx_code(c.gradient.data_type))
    axes = list(_axes(c))
    count = c.apply("ReduceSum", ones, axes, keepdims=1) if axes else ones
    return kept(c, hit, _with_axes(c, c.gradient) / count)


def _product(c: GradientContext) -> Any:
    """The product of the others: among them, one zero leaves a slope only at itself."""
    x, axes = c.input(0), list(_axes(c))
    if not axes:
        return c.gradient
    zero = c.apply("Equal", x, 0.0)
    one = c.constant(np.ones((), x.data_type.dtype))
    others = c.apply("Where", zero, one, x)
    product = c.apply("ReduceProd", others, axes, keepdims=1) * _with_axes(c, c.gradient)
    ones = c.apply("Cast", zero, to=onnx_code(x.data_type))
    zeros = c.apply("ReduceSum", ones, axes, keepdims=1)
    alone = kept(c, c.apply("Equal", zeros, 1.0), product)
    whole = kept(c, c.apply("Equal", zeros, 0.0), product)
    return c.apply("Where", zero, alone, whole / others)


def _absolute_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient) * c.apply("Sign", c.input(0))


def _norm(c: GradientContext) -> Any:
    """x / |x|, and nothing where the norm is zero."""
    y = c.output()
    share = c.apply("Where", c.apply("Equal", y, 0.0), zero_like(c, y), c.gradient / y)
    return _with_axes(c, share) * c.input(0)


def _log_sum(c: GradientContext) -> Any:
    return _spread(c, c.gradient * c.apply("Exp", -c.output()))


def _log_sum_exp(c: GradientContext) -> Any:
    share = c.apply("Exp", c.input(0) - _with_axes(c, c.output()))
    return _with_axes(c, c.gradient) * share


def _square_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient * 2.0) * c.input(0)


def _rule(slope: Callable[[GradientContext], Any]) -> Gradient:
    def gradient(context: GradientContext) -> Sequence[Any]:
        return slope(context), None

    return gradient


REDUCTIONS: dict[str, Gradient] = {
    name: _rule(slope)
    for name, slope in {
        "ReduceSum": _sum,
        "ReduceMean": _mean,
        "ReduceMax": _extreme,
        "ReduceMin": _extreme,
        "ReduceProd": _product,
        "ReduceL1": _absolute_sum,
        "ReduceL2": _norm,
        "ReduceLogSum": _log_sum,
        "ReduceLogSumExp": _log_sum_exp,
        "ReduceSumSquare": _square_sum,
    }.items()
}


def cumulative_sum_gradient(context: GradientContext) -> Sequence[Any]:
    """The sum that runs the other way."""
    attributes = context.attributes
    made = context.apply(
        "CumSum",
        context.gradient,
        context.input(1),
        exclusive=int_of(attributes, "exclusive"),
        reverse=1 - int_of(attributes, "reverse"),
    )
    return made, None


def cumulative_product_gradient(context: GradientContext) -> Sequence[Any]:
    """Sums of dy y that run the other way, over x; the first zero gets the product without it."""
    x, axis, gradient = context.input(0), context.input(1), context.gradient
    exclusive, reverse = (int_of(context.attributes, name) for name in ("exclusive", "reverse"))
    zero = context.apply("Equal", x, 0.0)
    count = context.apply("Cast", zero, to=onnx_code(x.data_type))
    before = context.apply("CumSum", count, axis, exclusive=1, reverse=reverse)
    first = context.apply("And", zero, context.apply("Equal", before, 0.0))
    one = context.constant(np.ones((), x.data_type.dtype))
    without = context.apply("Where", first, one, x)
    product = context.apply("CumProd", without, axis, exclusive=exclusive, reverse=reverse)

    def back(value: Any) -> Any:
        return context.apply("CumSum", value, axis, exclusive=exclusive, reverse=1 - reverse)

    share = back(gradient * context.output()) / context.apply("Where", zero, one, x)
    rest = context.apply("Where", zero, zero_like(context, share), share)
    return context.apply("Where", first, back(gradient * product), rest), None


def softmax_gradient(context: GradientContext) -> Sequence[Any]:
    """By the result alone."""
    axis = int_of(context.attributes, "axis")
    operands = context.gradient, context.output()
    return (context.apply("SoftmaxGradient", *operands, domain="stitch", axis=axis),)


def log_softmax_gradient(context: GradientContext) -> Sequence[Any]:
    """dx = dy - exp(y) sum(dy)."""
    total = context.apply(
        "ReduceSum", context.gradient, [int_of(context.attributes, "axis")], keepdims=1
    )
    return (context.gradient - context.apply("Exp", context.output()) * total,)
