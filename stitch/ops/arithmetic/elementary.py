"""Functions of one operand, element by element, that NumPy has ready: Neg, Exp, Sin, Round ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from stitch.ops.arithmetic.arithmetic_gradients import no_gradient
from stitch.ops.arithmetic.elementary_gradients import ELEMENTARY
from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import BOOLEAN, FLOATS, INTEGERS, NUMERIC, SIGNED_NUMERIC
from stitch.ops.inference import same_as_first
from stitch.ops.steps import given
from stitch.ops.workspaces import few
from stitch.program import DataType

_STEPS = frozenset({"Ceil", "Floor", "Round", "Sign"})


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
