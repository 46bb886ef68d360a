"""Functions of one operand, element by element, that NumPy has ready: Neg, Exp, Sin, Round ...

A gradient is said by the result where that is as exact: the operand need not be saved then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import BOOLEAN, FLOATS, INTEGERS, NUMERIC, SIGNED_NUMERIC
from stitch.ops.gradient import Gradient, GradientContext, no_gradient
from stitch.ops.inference import same_as_first
from stitch.ops.steps import given
from stitch.ops.workspaces import few
from stitch.program import DataType

_STEPS = frozenset({"Ceil", "Floor", "Round", "Sign"})


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
    }.items()
}


def unary(
    name: str, function: Callable[..., object], allowed: frozenset[DataType] = FLOATS
) -> OpDef:
    """An operator of one operand that is one NumPy function of one result type."""

    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        return (partial(function, given(arguments, 0), arguments.outputs[0]),)

    # Steps and signs are flat where they have a slope.
    gradient = no_gradient if name in _STEPS else ELEMENTARY.get(name)
    infer = same_as_first(allowed)
    return OpDef(
        name,
        (1, 1),
        infer,
        kernel,
        elementwise=True,
        gradient=gradient,
        workspace=few,
    )


OPERATORS = (
    unary("Neg", np.negative, SIGNED_NUMERIC),
    unary("Abs", np.absolute, NUMERIC),
    unary("Sign", np.sign, NUMERIC),
    unary("Sqrt", np.sqrt),
    unary("Exp", np.exp),
    unary("Log", np.log),
    unary("Reciprocal", np.reciprocal),
    unary("Floor", np.floor),
    unary("Ceil", np.ceil),
    unary("Round", np.rint),
    unary("Sin", np.sin),
    unary("Cos", np.cos),
    unary("Tan", np.tan),
    unary("Asin", np.arcsin),
    unary("Acos", np.arccos),
    unary("Atan", np.arctan),
    unary("Sinh", np.sinh),
    unary("Cosh", np.cosh),
    unary("Asinh", np.arcsinh),
    unary("Acosh", np.arccosh),
    unary("Atanh", np.arctanh),
    unary("Tanh", np.tanh),
    unary("Not", np.logical_not, BOOLEAN),
    unary("BitwiseNot", np.invert, INTEGERS),
)
