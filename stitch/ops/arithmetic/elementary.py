"""Functions of one operand, element by element, that NumPy has ready: Neg, Exp, Sin, Round ...

A gradient is said by the result where that is as exact: the operand need not be saved then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import broadcasting
from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import BOOLEAN, FLOATS, INTEGERS, NUMERIC, SIGNED_NUMERIC
from stitch.ops.gradient import GradientContext, Slope, of_first
from stitch.ops.inference import same_as_first
from stitch.ops.steps import reciprocal_step
from stitch.ops.workspaces import few
from stitch.program import Array, DataType


def _square(x: Any) -> Any:
    return x * x


def _over_root(c: GradientContext, inner: Any) -> Any:
    return c.gradient / c.apply("Sqrt", inner)


def _flat(_: GradientContext) -> Any:
    """Steps and signs are flat where they have a slope."""
    return None


def _unary(
    name: str,
    function: Callable[..., object],
    slope: Slope | None = None,
    allowed: frozenset[DataType] = FLOATS,
    step: Callable[[Array, Array], Thunk] | None = None,
) -> OpDef:
    """An operator of one operand that is one NumPy function of one result type; `step`: what
    gives the same bits in less time, bound to operand and result."""

    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        x, out = arguments.given(0), arguments.outputs[0]
        return (partial(function, x, out) if step is None else step(x, out),)

    gradient = None if slope is None else of_first(slope)
    return OpDef(
        name, (1, 1), same_as_first(allowed), kernel, elementwise=True,
        batching=broadcasting, gradient=gradient, workspace=few,
    )  # fmt: skip


OPERATORS = (
    _unary("Neg", np.negative, lambda c: -c.gradient, SIGNED_NUMERIC),
    _unary("Abs", np.absolute, lambda c: c.gradient * c.apply("Sign", c.input(0)), NUMERIC),
    _unary("Sign", np.sign, _flat, NUMERIC),
    _unary("Sqrt", np.sqrt, lambda c: c.gradient * 0.5 / c.output()),
    _unary("Exp", np.exp, lambda c: c.gradient * c.output()),
    _unary("Log", np.log, lambda c: c.gradient / c.input(0)),
    _unary(
        "Reciprocal",
        np.reciprocal,
        lambda c: -(c.gradient * c.output() * c.output()),
        step=reciprocal_step,
    ),
    _unary("Floor", np.floor, _flat),
    _unary("Ceil", np.ceil, _flat),
    _unary("Round", np.rint, _flat),
    _unary("Sin", np.sin, lambda c: c.gradient * c.apply("Cos", c.input(0))),
    _unary("Cos", np.cos, lambda c: -(c.gradient * c.apply("Sin", c.input(0)))),
    _unary("Tan", np.tan, lambda c: c.gradient * (1.0 + _square(c.output()))),
    _unary("Asin", np.arcsin, lambda c: _over_root(c, 1.0 - _square(c.input(0)))),
    _unary("Acos", np.arccos, lambda c: -_over_root(c, 1.0 - _square(c.input(0)))),
    _unary("Atan", np.arctan, lambda c: c.gradient / (1.0 + _square(c.input(0)))),
    _unary("Sinh", np.sinh, lambda c: c.gradient * c.apply("Cosh", c.input(0))),
    _unary("Cosh", np.cosh, lambda c: c.gradient * c.apply("Sinh", c.input(0))),
    _unary("Asinh", np.arcsinh, lambda c: _over_root(c, 1.0 + _square(c.input(0)))),
    _unary("Acosh", np.arccosh, lambda c: _over_root(c, _square(c.input(0)) - 1.0)),
    _unary("Atanh", np.arctanh, lambda c: c.gradient / (1.0 - _square(c.input(0)))),
    _unary("Tanh", np.tanh, lambda c: c.gradient * (1.0 - _square(c.output()))),
    _unary("Not", np.logical_not, allowed=BOOLEAN),
    _unary("BitwiseNot", np.invert, allowed=INTEGERS),
)
