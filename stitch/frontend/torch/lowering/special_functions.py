"""ATen's functions of one and two numbers that ONNX lacks: angles, lengths, gamma functions, the
inverse error function, bits of a floating number.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Series that
cancel are summed in float64 and rounded once. Must not know: fx nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Row, Value, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten

# Of two numbers ------------------------------------------------------------------------------


def negative(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """Whether the sign bit is set, that of -0 too."""
    b = call.builder
    if not x.data_type.is_floating:
        return b.less(x, 0) if x.data_type is not DataType.BOOL else b.logical_and(x, False)
    # 1 / -0 is -inf; NaN keep no sign here.
    return b.logical_or(b.less(x, 0), b.logical_and(b.equal(x, 0), b.less(b.reciprocal(x), 0)))


def _atan2(call: Call, y: SymbolicTensor, x: SymbolicTensor) -> SymbolicTensor:
    # A tensor without axes takes the other's type before anything is computed.
    return _angle_of(call, call.cast(y), call.cast(x))


@rounded_once
def _angle_of(call: Call, rise: SymbolicTensor, run: SymbolicTensor) -> SymbolicTensor:
    """The angle of (run, rise) in (-pi, pi], by the arc whose tangent is at most one."""
    b = call.builder
    high, wide = b.abs(rise), b.abs(run)
    least, most = b.op("Min", high, wide), b.op("Max", high, wide)
    # Where both are zero, or both infinite, the quotient is not one.
    is_zero, is_endless = b.equal(most, 0), b.equal(least, math.inf)
    share = b.div(
        b.where(is_endless, 1.0, least), b.where(b.logical_or(is_zero, is_endless), 1.0, most)
    )
    arc = b.op("Atan", share)
    arc = b.where(b.greater(high, wide), b.sub(math.pi / 2, arc), arc)
    arc = b.where(negative(call, run), b.sub(math.pi, arc), arc)
    return b.where(negative(call, rise), b.neg(arc), arc)


def _angle(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """Of a real number: zero, or half a turn; a NaN stays."""
    b, number = call.builder, call.cast(x)
    turned = b.where(b.less(number, 0), math.pi, 0.0)
    return b.where(b.op("IsNaN", number), number, call.cast(turned))


@rounded_once
def _hypot(call: Call, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """sqrt(x^2 + y^2) without squares that leave the range."""
    b = call.builder
    first, second = b.abs(call.cast(x)), b.abs(call.cast(y))
    least, most = b.op("Min", first, second), b.op("Max", first, second)
    plain = b.logical_or(b.equal(most, 0), b.equal(most, math.inf))
    share = b.div(least, b.where(plain, 1.0, most))
    length = b.mul(most, b.sqrt(b.add(b.square(share), 1.0)))
    return b.where(b.logical_or(b.equal(first, math.inf), b.equal(second, math.inf)), math.inf,
                   b.where(plain, most, length))  # fmt: skip


def _copy_sign(call: Call, x: Value, sign: Value) -> SymbolicTensor:
    b, size = call.builder, call.builder.abs(call.cast(x))
    return b.where(negative(call, call.cast(sign)), b.neg(size), size)


def _extreme_number(op: str) -> Any:
    def lowered(call: Call, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
        """The extreme of two, of which a NaN is none."""
        b, first, second = call.builder, call.cast(x), call.cast(y)
        extreme = b.op(op, first, second)
        if not call.data_type.is_floating:
            return extreme
        lost = b.op("IsNaN", first), b.op("IsNaN", second)
        return b.where(lost[0], second, b.where(lost[1], first, extreme))

    return lowered


@rounded_once
def _rounded_at(call: Call, x: SymbolicTensor, *, decimals: int = 0) -> SymbolicTensor:
    b, tensor = call.builder, call.cast(x)
    if not call.data_type.is_floating:
        return tensor
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return b.mul(b.round(b.div(tensor, scale)), scale)
    return b.div(b.round(b.mul(tensor, scale)), scale)


# The gamma function --------------------------------------------------------------------------

#: Places by which arguments are moved to where Stirling's series converges.
_MOVED = 8
#: B(2k) / (2k (2k - 1)) of the logarithm's series, and B(2k) / (2k) of its derivative's.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
_OF_LOG = tuple(n / (2 * k * (2 * k - 1)) for k, n in enumerate(_BERNOULLI, 1))
_OF_FIRST = tuple(n / (2 * k) for k, n in enumerate(_BERNOULLI, 1))


def _series(call: Call, x: SymbolicTensor, factors: Sequence[float]) -> SymbolicTensor:
    """factors[0] + factors[1] x + ..., by Horner."""
    b, total = call.builder, call.cast(factors[-1], x.data_type)
    for factor in reversed(factors[:-1]):
        total = b.add(b.mul(total, x), factor)
    return total


def _in_float64(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    return call.builder.cast(call.cast(x), DataType.FLOAT64)


def _log_gamma_above(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """Stirling's series for x > 0, from eight places further on."""
    b, product = call.builder, x
    for step in range(1, _MOVED):
        product = b.mul(product, b.add(x, float(step)))
    far = b.add(x, float(_MOVED))
    inverse = b.reciprocal(far)
    series = b.mul(_series(call, b.square(inverse), _OF_LOG), inverse)
    main = b.sub(b.mul(b.sub(far, 0.5), b.log(far)), far)
    total = b.add(b.add(main, 0.5 * math.log(2 * math.pi)), series)
    # Where the product leaves the range, x is so large that the two agree without it.
    near = b.less(x, 1e30)
    moved = b.sub(total, b.log(b.where(near, product, 1.0)))
    return b.where(near, moved, b.mul(x, b.sub(b.log(x), 1.0)))


def _log_gamma(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """The logarithm of |gamma|; below one half by its mirror image."""
    b, wide = call.builder, _in_float64(call, x)
    mirrored = b.less(wide, 0.5)
    above = _log_gamma_above(call, b.where(mirrored, b.sub(1.0, wide), wide))
    whole = b.equal(wide, b.floor(wide))
    turn = b.abs(b.sin(b.mul(b.sub(wide, b.round(wide)), math.pi)))
    below = b.sub(b.sub(math.log(math.pi), b.log(turn)), above)
    below = b.where(whole, math.inf, below)
    result = b.where(mirrored, below, above)
    return call.cast(b.where(b.equal(b.abs(wide), math.inf), math.inf, result))


def _digamma(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    b, wide = call.builder, _in_float64(call, x)
    mirrored = b.less(wide, 0.5)
    plain = b.where(mirrored, b.sub(1.0, wide), wide)
    far = b.add(plain, float(_MOVED))
    inverse = b.reciprocal(far)
    square = b.square(inverse)
    series = b.mul(_series(call, square, _OF_FIRST), square)
    above = b.sub(b.sub(b.log(far), b.mul(inverse, 0.5)), series)
    for step in range(_MOVED):
        above = b.sub(above, b.reciprocal(b.add(plain, float(step))))
    share = b.sub(wide, b.round(wide))
    turn = b.mul(share, math.pi)
    mirror = b.mul(b.div(b.cos(turn), b.sin(turn)), math.pi)
    below = b.where(b.equal(share, 0.0), math.nan, b.sub(above, mirror))
    # At zero torch gives an infinity of the other sign.
    at_zero = b.mul(b.where(negative(call, wide), call.cast(1, DataType.FLOAT64), -1.0), math.inf)
    result = b.where(mirrored, b.where(b.equal(wide, 0.0), at_zero, below), above)
    return call.cast(b.where(b.equal(wide, -math.inf), math.nan, result))


def _polygamma(call: Call, order: int, x: SymbolicTensor) -> SymbolicTensor:
    """The first derivative of the digamma function, and that itself."""
    if order == 0:
        return _digamma(call, x)
    if order != 1:
        raise CompileError(
            "this derivative of the gamma function's logarithm is not supported",
            expected="digamma, or the first derivative of it", got=f"the derivative {order} of it",
        )  # fmt: skip
    b, wide = call.builder, _in_float64(call, x)
    mirrored = b.less(wide, 0.5)
    plain = b.where(mirrored, b.sub(1.0, wide), wide)
    far = b.add(plain, float(_MOVED))
    inverse = b.reciprocal(far)
    square = b.square(inverse)
    series = b.mul(_series(call, square, _BERNOULLI), b.mul(square, inverse))
    above = b.add(b.add(inverse, b.mul(square, 0.5)), series)
    for step in range(_MOVED):
        above = b.add(above, b.reciprocal(b.square(b.add(plain, float(step)))))
    turn = b.sin(b.mul(b.sub(wide, b.round(wide)), math.pi))
    mirror = b.div(math.pi**2, b.square(turn))
    return call.cast(b.where(mirrored, b.sub(mirror, above), above))


# The inverse error function ------------------------------------------------------------------

#: Giles, "Approximating the erfinv function" (2010): of w - 2.5, and of sqrt(w) - 3 from w = 5 on.
_NEAR = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06,
    -3.5233877e-06, 3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_FAR = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844,
    0.00134934322, 0.000100950558, -0.000200214257,
)  # fmt: skip


@rounded_once
def _erfinv(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    b, y = call.builder, call.cast(x)
    ends = b.equal(b.abs(y), 1.0)
    inner = b.where(ends, 0.0, y)
    w = b.neg(b.log(b.mul(b.sub(1.0, inner), b.add(inner, 1.0))))
    near = _series(call, b.sub(w, 2.5), _NEAR)
    far = _series(call, b.sub(b.sqrt(b.op("Max", w, 5.0)), 3.0), _FAR)
    root = b.mul(b.where(b.less(w, 5.0), near, far), inner)
    if y.data_type is DataType.FLOAT64:
        for _ in range(2):
            # Newton's steps; the slope of erf is 2 / sqrt(pi) exp(-root^2).
            slope = b.mul(b.exp(b.neg(b.square(root))), 2.0 / math.sqrt(math.pi))
            root = b.sub(root, b.div(b.sub(b.erf(root), inner), slope))
    return b.where(ends, b.mul(y, math.inf), root)


LOWERINGS: dict[Any, Row] = {
    aten.atan2.default: _atan2, aten.angle.default: _angle, aten.hypot.default: _hypot,
    aten.copysign.Tensor: _copy_sign, aten.copysign.Scalar: _copy_sign,
    aten.signbit.default: negative,
    aten.fmax.default: _extreme_number("Max"), aten.fmin.default: _extreme_number("Min"),
    aten.round.decimals: _rounded_at,
    aten.lgamma.default: _log_gamma, aten.digamma.default: _digamma,
    aten.polygamma.default: _polygamma,
    aten.erfinv.default: _erfinv,
}  # fmt: skip
