"""ATen's functions of one and two numbers that ONNX lacks: angles, lengths, signs, extremes,
rounding to decimals."""

from __future__ import annotations

import math
from typing import Any

import torch

from stitch.frontend.torch.aten_call import Call, Row, Value, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten


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


LOWERINGS: dict[Any, Row] = {
    aten.atan2.default: _atan2, aten.angle.default: _angle, aten.hypot.default: _hypot,
    aten.copysign.Tensor: _copy_sign, aten.copysign.Scalar: _copy_sign,
    aten.signbit.default: negative,
    aten.fmax.default: _extreme_number("Max"), aten.fmin.default: _extreme_number("Min"),
    aten.round.decimals: _rounded_at,
}  # fmt: skip
