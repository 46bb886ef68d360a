"""Gradients of reductions: what became one is spread over what it was made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import GradientContext


def _axes(context: GradientContext) -> tuple[int, ...]:
    """The reduced axes of a reduction with the operand `axes`."""
    rank = len(context.type_of(0).shape)
    listed = context.constants[1] if context.has(1) else None
    axes = () if listed is None else tuple(int(a) % rank for a in listed.ravel())
    if axes or context.int_of("noop_with_empty_axes"):
        return axes
    return tuple(range(rank))


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


def total(c: GradientContext) -> Any:
    return _spread(c, c.gradient)


def mean(c: GradientContext) -> Any:
    count = math.prod(c.type_of(0).shape[axis] for axis in _axes(c))
    return _spread(c, c.gradient * (1.0 / max(count, 1)))


def extreme(c: GradientContext) -> Any:
    """All places that reach the extreme share the gradient equally, as torch's amax has it."""
    hit = c.apply("Equal", c.input(0), _with_axes(c, c.output()))
    ones = c.apply("Cast", hit, to=onnx_code(c.gradient.data_type))
    axes = list(_axes(c))
    count = c.apply("ReduceSum", ones, axes, keepdims=1) if axes else ones
    return c.kept(hit, _with_axes(c, c.gradient) / count)


def product(c: GradientContext) -> Any:
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
    alone = c.kept(c.apply("Equal", zeros, 1.0), product)
    whole = c.kept(c.apply("Equal", zeros, 0.0), product)
    return c.apply("Where", zero, alone, whole / others)


def absolute_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient) * c.apply("Sign", c.input(0))


def norm(c: GradientContext) -> Any:
    """x / |x|, and nothing where the norm is zero."""
    y = c.output()
    share = c.apply("Where", c.apply("Equal", y, 0.0), c.zero_like(y), c.gradient / y)
    return _with_axes(c, share) * c.input(0)


def log_sum(c: GradientContext) -> Any:
    return _spread(c, c.gradient * c.apply("Exp", -c.output()))


def log_sum_exp(c: GradientContext) -> Any:
    share = c.apply("Exp", c.input(0) - _with_axes(c, c.output()))
    return _with_axes(c, c.gradient) * share


def square_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient * 2.0) * c.input(0)
