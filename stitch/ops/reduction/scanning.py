"""Running totals along one axis: CumSum, CumProd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import int_of
from stitch.ops.definition import (
    Attribute,
    InferenceContext,
    Kernel,
    KernelArguments,
    OpDef,
    Thunk,
)
from stitch.ops.element_types import INDICES, PRODUCTS
from stitch.ops.gradient import Gradient
from stitch.ops.inference import axis_of, known_scalar, require_rank, require_type
from stitch.ops.reduction.reduction_gradients import (
    cumulative_product_gradient,
    cumulative_sum_gradient,
)
from stitch.ops.steps import fill_step, given, ints_at
from stitch.ops.workspaces import few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, PRODUCTS)
    require_type(context, 1, INDICES)
    axis_of(context, known_scalar(context, 1, "axis"), require_rank(context, 0, 1))
    return (data,)


def _running(function: np.ufunc, neutral: int) -> Kernel:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = given(arguments, 0), arguments.outputs[0]
        axis = ints_at(arguments, 1)[0] % source.ndim
        if out.size == 0:
            return ()
        if int_of(arguments.attributes, "reverse"):
            source, out = np.flip(source, axis), np.flip(out, axis)
        if not int_of(arguments.attributes, "exclusive"):
            return (partial(function.accumulate, source, axis, out.dtype, out),)
        before = (slice(None),) * axis
        size = source.shape[axis]
        first = fill_step(out[(*before, slice(0, 1))], neutral)
        if size == 1:
            return (first,)
        shifted, rest = out[(*before, slice(1, None))], source[(*before, slice(0, size - 1))]
        return (first, partial(function.accumulate, rest, axis, out.dtype, shifted))

    return kernel


def _operator(
    name: str, function: np.ufunc, neutral: int, gradient: Gradient | None = None
) -> OpDef:
    return OpDef(
        name,
        (2, 2),
        _infer,
        _running(function, neutral),
        attributes={"exclusive": Attribute("int", 0), "reverse": Attribute("int", 0)},
        gradient=gradient,
        workspace=few,
    )


OPERATORS = (
    _operator("CumSum", np.add, 0, cumulative_sum_gradient),
    _operator("CumProd", np.multiply, 1, cumulative_product_gradient),
)
