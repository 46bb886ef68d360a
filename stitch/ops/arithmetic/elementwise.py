"""Arithmetic, element by element: Add, Sub, Mul, Div, Mod, Pow, Max, Min, Sum, Mean, Clip.

Every kernel here allows its output to be the array of any one of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, broadcasting
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, INTEGERS, NUMERIC, onnx_code
from stitch.ops.gradient import Gradient, GradientContext
from stitch.ops.inference import Inference, InferenceContext
from stitch.ops.steps import copy_steps, overlaps, scalar
from stitch.ops.workspaces import few, operands
from stitch.program import Array, DataType, ValueType

# --------------------------------------------------------------------------------------------------
# Gradients of elementwise arithmetic: Add to Pow, extremes, Clip.


def add(context: GradientContext) -> Sequence[Any]:
    """Every operand gets the gradient itself (also Sum's)."""
    return context.of_operands(*[lambda: context.gradient] * len(context.input_types))


def mean(context: GradientContext) -> Sequence[Any]:
    """Every operand gets its share."""
    share = context.gradient * (1.0 / len(context.input_types))
    return context.of_operands(*[lambda: share] * len(context.input_types))


def sub(context: GradientContext) -> Sequence[Any]:
    """d(a - b) = da - db."""
    first = context.reduced(context.gradient, 0) if context.wants(0) else None
    second = -context.reduced(context.gradient, 1) if context.wants(1) else None
    return first, second


def mul(context: GradientContext) -> Sequence[Any]:
    """d(a·b) = b·da + a·db."""
    gradient = context.gradient
    return context.of_operands(
        lambda: gradient * context.input(1), lambda: gradient * context.input(0)
    )


def div(context: GradientContext) -> Sequence[Any]:
    """d(a / b) = da / b - (a / b) db / b."""
    quotient = context.gradient / context.input(1)
    first = context.reduced(quotient, 0) if context.wants(0) else None
    second = None
    if context.wants(1):
        second = -context.reduced(quotient * context.output(), 1)
    return first, second


def mod(context: GradientContext) -> Sequence[Any]:
    """y = a - b trunc(a / b), and trunc has no slope."""

    def whole() -> Any:
        return context.apply("Round", (context.output() - context.input(0)) / context.input(1))

    return context.of_operands(lambda: context.gradient, lambda: context.gradient * whole())


def _exponent(data: Array | None) -> float | None:
    """The one known exponent."""
    return float(data.reshape(())) if data is not None and data.size == 1 else None


def pow_(context: GradientContext) -> Sequence[Any]:
    """d(a^b) = b a^(b-1) da + a^b log(a) db; no slope in a zero base or exponent becomes NaN."""
    first = second = None
    if context.wants(0):
        exponent = _exponent(context.constants[1])
        sloped = _known_power(context, exponent) if exponent is not None else _power(context)
        first = None if sloped is None else context.reduced(sloped, 0)
    if context.wants(1):
        base = context.input(0)
        log = context.apply("Log", base)
        flat = context.apply("Equal", base, context.zero_like(base))
        log = context.apply("Where", flat, context.zero_like(base), log)
        product = context.gradient * context.output() * log
        second = context.in_type(context.reduced(product, 1), context.type_of(1).data_type)
    return first, second


def _known_power(context: GradientContext, exponent: float) -> Any:
    gradient = context.gradient
    if exponent == 0.0:
        return None
    if exponent == 1.0:
        return gradient
    if exponent == 2.0:
        return gradient * 2.0 * context.input(0)
    if exponent == 0.5:
        return gradient * 0.5 / context.output()
    if exponent == -1.0:
        return -(gradient * context.output() * context.output())
    if exponent == -0.5:
        return gradient * -0.5 * context.output() / context.input(0)
    base = context.input(0)
    if exponent == 3.0:
        return gradient * 3.0 * (base * base)
    return gradient * exponent * context.apply("Pow", base, exponent - 1.0)


def _power(context: GradientContext) -> Any:
    base, exponent = context.input(0), context.input(1)
    slope = context.apply("Pow", base, exponent - 1)
    factor = exponent
    if exponent.data_type != base.data_type:
        factor = context.apply("Cast", exponent, to=onnx_code(base.data_type))
    product = context.gradient * factor * slope
    flat = context.apply("Equal", factor, context.zero_like(factor))
    return context.apply("Where", flat, context.zero_like(product), product)


def extreme(context: GradientContext) -> Sequence[Any]:
    """Max and Min: the first operand that reaches the result gets the gradient, others nothing."""
    rest, count = context.gradient, len(context.input_types)
    last = max(i for i in range(count) if context.wants(i))
    shares: list[Any] = [None] * count
    for index in range(last + 1):
        if index == count - 1:
            shares[index] = context.reduced(rest, index)
            break
        hit = context.apply("Equal", context.input(index), context.output())
        if context.wants(index):
            shares[index] = context.reduced(context.kept(hit, rest), index)
        if index < last:
            rest = context.apply("Where", hit, context.zero_like(rest), rest)
    return shares


def clip(context: GradientContext) -> Sequence[Any]:
    """The operand where it is inside, bounds included; a bound where it replaced the operand."""
    x, gradient = context.input(0), context.gradient
    below = context.apply("Less", x, context.input(1)) if context.has(1) else None
    above = context.apply("Greater", x, context.input(2)) if context.has(2) else None
    outside = below if above is None else above
    if below is not None and above is not None:
        outside = context.apply("Or", below, above)
    inner = low = high = None
    if context.wants(0):
        zero = context.zero_like(gradient)
        inner = gradient
        inner = inner if outside is None else context.apply("Where", outside, zero, inner)
    if context.wants(2):
        assert above is not None
        high = context.reduced(context.kept(above, gradient), 2)
    if context.wants(1):
        assert below is not None
        low = context.reduced(context.kept(below, gradient), 1)
    return inner, low, high


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
    binary("Add", np.add, NUMERIC, gradient=add),
    binary("Sub", np.subtract, NUMERIC, gradient=sub),
    binary("Mul", np.multiply, NUMERIC, gradient=mul),
    OpDef(
        "Div", (2, 2), infer_broadcast(NUMERIC), _divide, elementwise=True,
        batching=broadcasting, gradient=div, workspace=operands(1),
    ),
    OpDef(
        "Mod", (2, 2), _infer_mod, _mod, attributes=declared(fmod=0), elementwise=True,
        batching=broadcasting,
        gradient=mod, workspace=few,
    ),
    OpDef(
        "Pow", (2, 2), _infer_pow, _pow, elementwise=True,
        batching=broadcasting, gradient=pow_, workspace=few,
    ),
    _variadic("Max", _fold(np.maximum), NUMERIC, extreme),
    _variadic("Min", _fold(np.minimum), NUMERIC, extreme),
    _variadic("Sum", _fold(np.add), FLOATS, add),
    _variadic("Mean", _fold(np.add, average=True), FLOATS, mean),
    OpDef(
        "Clip", (1, 3), _infer_clip, _clip, elementwise=True,
        batching=_clip_lanes, gradient=clip, workspace=few,
    ),
    binary("BitwiseAnd", np.bitwise_and, INTEGERS),
    binary("BitwiseOr", np.bitwise_or, INTEGERS),
    binary("BitwiseXor", np.bitwise_xor, INTEGERS),
)  # fmt: skip
