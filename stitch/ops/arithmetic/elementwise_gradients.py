"""Gradients of elementwise arithmetic: Add to Pow, extremes, Clip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import GradientContext
from stitch.program import Array


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
