"""Gradients of functions of one operand: powers, exponentials, circular and hyperbolic ones.

A slope is said by the result where that is as exact: the operand need not be saved then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from stitch.ops.gradient import Gradient, GradientContext

#: The operand's gradient of one operator.
Slope = Callable[[GradientContext], Any]


def _rule(slope: Slope) -> Gradient:
    def gradient(context: GradientContext) -> Sequence[Any]:
        return (slope(context),)

    return gradient


def _tanh(c: GradientContext) -> Any:
    y = c.output()
    return c.gradient * (1.0 - y * y)


def _tan(c: GradientContext) -> Any:
    y = c.output()
    return c.gradient * (1.0 + y * y)


def _square(c: GradientContext) -> Any:
    x = c.input(0)
    return x * x


def _over_root(c: GradientContext, inner: Any) -> Any:
    return c.gradient / c.apply("Sqrt", inner)


ELEMENTARY: dict[str, Gradient] = {
    name: _rule(slope)
    for name, slope in {
        "Neg": lambda c: -c.gradient,
        "Abs": lambda c: c.gradient * c.apply("Sign", c.input(0)),
        "Sqrt": lambda c: c.gradient * 0.5 / c.output(),
        "Exp": lambda c: c.gradient * c.output(),
        "Log": lambda c: c.gradient / c.input(0),
        "Reciprocal": lambda c: -(c.gradient * c.output() * c.output()),
        "Sin": lambda c: c.gradient * c.apply("Cos", c.input(0)),
        "Cos": lambda c: -(c.gradient * c.apply("Sin", c.input(0))),
        "Tan": _tan,
        "Asin": lambda c: _over_root(c, 1.0 - _square(c)),
        "Acos": lambda c: -_over_root(c, 1.0 - _square(c)),
        "Atan": lambda c: c.gradient / (1.0 + _square(c)),
        "Sinh": lambda c: c.gradient * c.apply("Cosh", c.input(0)),
        "Cosh": lambda c: c.gradient * c.apply("Sinh", c.input(0)),
        "Tanh": _tanh,
        "Asinh": lambda c: _over_root(c, 1.0 + _square(c)),
        "Acosh": lambda c: _over_root(c, _square(c) - 1.0),
        "Atanh": lambda c: c.gradient / (1.0 - _square(c)),
        "Erf": lambda c: c.gradient * (2.0 / math.sqrt(math.pi)) * c.apply("Exp", -_square(c)),
    }.items()
}
