"""Running totals along one axis: CumSum, CumProd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.attributes import int_of
from stitch.ops.definition import Kernel, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import INDICES, PRODUCTS, onnx_code
from stitch.ops.gradient import Gradient, GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction.reduction_batching import running
from stitch.ops.steps import fill_step
from stitch.ops.workspaces import few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, PRODUCTS)
    context.require_type(1, INDICES)
    context.axis_of(context.known_scalar(1, "axis"), context.require_rank(0, 1))
    return (data,)


def _running(function: np.ufunc, neutral: int) -> Kernel:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.given(0), arguments.outputs[0]
        axis = arguments.ints_at(1)[0] % source.ndim
        if arguments.int_of("reverse"):
            source, out = np.flip(source, axis), np.flip(out, axis)
        if not arguments.int_of("exclusive"):
            return (partial(function.accumulate, source, axis, out.dtype, out),)
        before = (slice(None),) * axis
        size = source.shape[axis]
        first = fill_step(out[(*before, slice(0, 1))], neutral)
        if size == 1:
            return (first,)
        shifted, rest = out[(*before, slice(1, None))], source[(*before, slice(0, size - 1))]
        return (first, partial(function.accumulate, rest, axis, out.dtype, shifted))

    return kernel


def cumulative_sum_gradient(context: GradientContext) -> Sequence[Any]:
    """The sum that runs the other way."""
    attributes = context.attributes
    total = context.apply(
        "CumSum", context.gradient, context.input(1), exclusive=int_of(attributes, "exclusive"),
        reverse=1 - int_of(attributes, "reverse"),
    )  # fmt: skip
    return total, None


def cumulative_product_gradient(context: GradientContext) -> Sequence[Any]:
    """Sums of dy y that run the other way, over x; the first zero gets the product without it."""
    x, axis, gradient = context.input(0), context.input(1), context.gradient
    exclusive, reverse = (context.int_of(name) for name in ("exclusive", "reverse"))
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
    rest = context.apply("Where", zero, context.zero_like(share), share)
    return context.apply("Where", first, back(gradient * product), rest), None


def _operator(
    name: str, function: np.ufunc, neutral: int, gradient: Gradient | None = None
) -> OpDef:
    return OpDef(
        name, (2, 2), _infer, _running(function, neutral),
        attributes=declared(exclusive=0, reverse=0), gradient=gradient,
        batching=running, workspace=few,
    )  # fmt: skip


OPERATORS = (
    _operator("CumSum", np.add, 0, cumulative_sum_gradient),
    _operator("CumProd", np.multiply, 1, cumulative_product_gradient),
)
