"""Arithmetic, element by element: Add, Sub, Mul, Div, Mod, Pow, Max, Min, Sum, Mean, Clip.

Every kernel here allows its output to be the array of any one of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.arithmetic import elementwise_gradients as gradients
from stitch.ops.batching import BatchingContext, broadcasting
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, INTEGERS, NUMERIC
from stitch.ops.gradient import Gradient
from stitch.ops.inference import Inference, InferenceContext
from stitch.ops.steps import copy_steps, overlaps, scalar
from stitch.ops.workspaces import few, operands
from stitch.program import DataType, ValueType


def infer_broadcast(allowed: frozenset[DataType], result: DataType | None = None) -> Inference:
    """Inference for operands of one type that broadcast; the result has that type or `result`."""

    def infer(context: InferenceContext) -> tuple[ValueType, ...]:
        every = range(len(context.inputs))
        types = [context.require_type(i, allowed) for i in every]
        context.require_same_type(every)
        shape = context.broadcast(*(t.shape for t in types))
        return (ValueType(shape, result or types[0].data_type),)

    return infer


def binary(
    name: str,
    function: Callable[..., object],
    allowed: frozenset[DataType],
    result: DataType | None = None,
    gradient: Gradient | None = None,
) -> OpDef:
    """An operator of two operands that is one NumPy function."""

    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        a, b = arguments.given(0), arguments.given(1)
        return (partial(function, a, b, out=arguments.outputs[0]),)

    infer = infer_broadcast(allowed, result)
    return OpDef(
        name,
        (2, 2),
        infer,
        kernel,
        elementwise=True,
        batching=broadcasting,
        gradient=gradient,
        workspace=few,
    )


def _divide(arguments: KernelArguments) -> Sequence[Thunk]:
    a, b, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    if out.dtype.kind == "f":
        return (partial(np.divide, a, b, out),)
    if out.dtype.kind == "u":
        return (partial(np.floor_divide, a, b, out),)
    # NumPy floors; ONNX truncates. Without its remainder the dividend divides exactly.
    work = np.empty_like(out)
    return (
        partial(np.fmod, a, b, work),
        partial(np.subtract, a, work, work),
        partial(np.floor_divide, work, b, out),
    )


def _infer_mod(context: InferenceContext) -> tuple[ValueType, ...]:
    first = context.operand(0)
    if first.data_type.is_floating and context.int_of("fmod") != 1:
        raise context.fail("Mod of floats needs fmod=1", expected="fmod=1", got="fmod=0")
    return infer_broadcast(NUMERIC)(context)


def _mod(arguments: KernelArguments) -> Sequence[Thunk]:
    function = np.fmod if arguments.int_of("fmod") else np.remainder
    return (partial(function, arguments.given(0), arguments.given(1), arguments.outputs[0]),)


_POWERS = FLOATS | {DataType.INT32, DataType.INT64}


def _infer_pow(context: InferenceContext) -> tuple[ValueType, ...]:
    base, exponent = context.require_type(0, _POWERS), context.require_type(1, NUMERIC)
    return (ValueType(context.broadcast(base.shape, exponent.shape), base.data_type),)


def _integer_power(base: Any, exponent: Any, out: Any) -> None:
    """Integers to integers; a negative exponent gives the truncated quotient (0 for base 0)."""
    negative = exponent < 0
    if not negative.any():
        np.power(base, exponent, out, casting="unsafe")
        return
    unit = np.where(base == 1, 1, np.where(base == -1, 1 - 2 * (exponent & 1), 0))
    result = np.power(base, np.where(negative, 0, exponent))
    np.copyto(out, np.where(negative, unit, result), "unsafe")


def _pow(arguments: KernelArguments) -> Sequence[Thunk]:
    a, b, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    if out.dtype.kind != "f":
        if b.dtype.kind != "f":
            return (partial(_integer_power, a, b, out),)
        wide = np.empty(out.shape, np.float64)
        convert = partial(np.copyto, out, wide, "unsafe")
        return (partial(np.power, a, b, wide, dtype=wide.dtype, casting="unsafe"), convert)
    if arguments.is_constant(1) and b.size == 1 and float(b.reshape(())) == 2.0:
        return (partial(np.multiply, a, a, out),)
    return (partial(np.power, a, b, out, dtype=out.dtype, casting="unsafe"),)


def _fold(function: Callable[..., object], average: bool = False) -> Any:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        first, *others = (arguments.given(i) for i in range(len(arguments.inputs)))
        out = arguments.outputs[0]
        # The second step reads its operand after the first has written the output.
        target = np.empty_like(out) if overlaps(out, *others[1:]) else out
        steps: list[Thunk] = [] if others else [*copy_steps(first, target)]
        for other in others:
            steps.append(partial(function, first, other, out=target))
            first = target
        if average:
            steps.append(partial(np.divide, target, scalar(len(arguments.inputs), out), out))
        elif target is not out:
            steps += copy_steps(target, out)
        return steps

    return kernel


def _infer_clip(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, NUMERIC)
    context.require_same_type(range(len(context.inputs)))
    for index in (1, 2):
        if context.present(index) is not None:
            context.require_shape(index, ())
    return (data,)


def _clip(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    low, high = arguments.optional(1), arguments.optional(2)
    target = np.empty_like(out) if high is not None and overlaps(out, high) else out
    steps: list[Thunk] = []
    if low is not None:
        steps.append(partial(np.maximum, source, low, out=target))
        source = target
    if high is not None:
        steps.append(partial(np.minimum, source, high, out=out))
    else:
        steps += copy_steps(source, out)
    return steps


def _clip_lanes(context: BatchingContext) -> Sequence[Any]:
    """Where a bound is not one number any more, an extreme of two operands."""
    if not context.varies(1, 2):
        return context.again(*context.operands)
    rank, value = context.rank(), context.operands[0]
    for index, op in ((1, "Max"), (2, "Min")):
        if context.has(index):
            value = context.apply(op, value, context.aligned(index, rank))
    return (value,)


def _variadic(name: str, kernel: Any, allowed: frozenset[DataType], gradient: Gradient) -> OpDef:
    infer = infer_broadcast(allowed)
    return OpDef(
        name,
        (1, -1),
        infer,
        kernel,
        elementwise=True,
        batching=broadcasting,
        gradient=gradient,
        workspace=few,
    )


OPERATORS = (
    binary("Add", np.add, NUMERIC, gradient=gradients.add),
    binary("Sub", np.subtract, NUMERIC, gradient=gradients.sub),
    binary("Mul", np.multiply, NUMERIC, gradient=gradients.mul),
    OpDef(
        "Div", (2, 2), infer_broadcast(NUMERIC), _divide, elementwise=True,
        batching=broadcasting, gradient=gradients.div, workspace=operands(1),
    ),
    OpDef(
        "Mod", (2, 2), _infer_mod, _mod, attributes=declared(fmod=0), elementwise=True,
        batching=broadcasting,
        gradient=gradients.mod, workspace=few,
    ),
    OpDef(
        "Pow", (2, 2), _infer_pow, _pow, elementwise=True,
        batching=broadcasting, gradient=gradients.pow_, workspace=few,
    ),
    _variadic("Max", _fold(np.maximum), NUMERIC, gradients.extreme),
    _variadic("Min", _fold(np.minimum), NUMERIC, gradients.extreme),
    _variadic("Sum", _fold(np.add), FLOATS, gradients.add),
    _variadic("Mean", _fold(np.add, average=True), FLOATS, gradients.mean),
    OpDef(
        "Clip", (1, 3), _infer_clip, _clip, elementwise=True,
        batching=_clip_lanes, gradient=gradients.clip, workspace=few,
    ),
    binary("BitwiseAnd", np.bitwise_and, INTEGERS),
    binary("BitwiseOr", np.bitwise_or, INTEGERS),
    binary("BitwiseXor", np.bitwise_xor, INTEGERS),
)  # fmt: skip
