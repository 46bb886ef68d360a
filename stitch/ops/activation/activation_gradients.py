"""Gradients of activations: by their results where these tell the slope, else by their operands.

Each is called as its operator is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.gradient import GradientContext


def relu(c: GradientContext) -> Any:
    return c.kept(c.apply("Greater", c.output(), 0.0), c.gradient)


def _sign_teller(c: GradientContext, slope_below: float) -> Any:
    """A value that is positive where the operand is: the result, if its slope keeps signs."""
    return c.output() if slope_below >= 0.0 else c.input(0)


def leaky_relu(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    up = c.apply("Greater", _sign_teller(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * alpha)


def thresholded(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    return c.kept(c.apply("Greater", _sign_teller(c, alpha), alpha), c.gradient)


def elu(c: GradientContext) -> Any:
    """Below zero y = alpha (exp(x) - 1), so its slope is y + alpha."""
    alpha, y = c.float_of("alpha"), c.output()
    if alpha == 1.0:
        return c.gradient * (c.apply("Min", y, 0.0) + 1.0)
    up = c.apply("Greater", _sign_teller(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * (y + alpha))


def celu(c: GradientContext) -> Any:
    below = c.apply("Min", c.output(), 0.0)
    return c.gradient * (below * (1.0 / c.float_of("alpha")) + 1.0)


def selu(c: GradientContext) -> Any:
    alpha, gamma, y = c.float_of("alpha"), c.float_of("gamma"), c.output()
    up = c.apply("Greater", _sign_teller(c, alpha * gamma), 0.0)
    slope = c.constant(np.array(gamma, c.type_of(0).data_type.dtype))
    return c.gradient * c.apply("Where", up, slope, y + alpha * gamma)


def sigmoid(c: GradientContext) -> Any:
    y = c.output()
    return c.gradient * (y - y * y)


def softplus(c: GradientContext) -> Any:
    return c.gradient * c.apply("Sigmoid", c.input(0))


def softsign(c: GradientContext) -> Any:
    size = c.apply("Abs", c.input(0)) + 1.0
    return c.gradient / (size * size)


def hard_sigmoid(c: GradientContext) -> Any:
    y = c.output()
    inside = c.apply("And", c.apply("Greater", y, 0.0), c.apply("Less", y, 1.0))
    return c.kept(inside, c.gradient * c.float_of("alpha"))


def hard_swish(c: GradientContext) -> Any:
    x = c.input(0)
    inner = c.gradient * (x * (1.0 / 3.0) + 0.5)
    inner = c.apply("Where", c.apply("Greater", x, 3.0), c.gradient, inner)
    return c.kept(c.apply("Greater", x, -3.0), inner)


def mish(c: GradientContext) -> Any:
    """y = x t with t = tanh(softplus(x))."""
    x = c.input(0)
    t = c.apply("Tanh", c.apply("Softplus", x))
    return c.gradient * (t + x * c.apply("Sigmoid", x) * (1.0 - t * t))


def swish(c: GradientContext) -> Any:
    """y = x s with s = sigmoid(rate x): the slope is s + rate (y - y s)."""
    x, rate = c.input(0), c.float_of("alpha")
    s = c.apply("Sigmoid", x if rate == 1.0 else x * rate)
    y = x * s
    rest = y - y * s
    return c.gradient * (s + (rest if rate == 1.0 else rest * rate))


def prelu(context: GradientContext) -> Sequence[Any]:
    """Below zero y = slope x."""
    x, gradient = context.input(0), context.gradient
    first = second = None
    if context.wants(0):
        below = context.apply("Less", x, 0.0)
        first = context.apply("Where", below, gradient * context.input(1), gradient)
    if context.wants(1):
        second = context.reduced(gradient * context.apply("Min", x, 0.0), 1)
    return first, second
