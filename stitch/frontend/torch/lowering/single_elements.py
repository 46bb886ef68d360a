"""ATen's elementwise operators: arithmetic, comparisons, rounding, casts, special functions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    Call,
    KeptWhole,
    Lowering,
    Number,
    Row,
    Value,
    built,
    computing_type,
    data_type_of,
    rounded_once,
)
from stitch.graph import ComputationGraphBuilder as Builder
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten


def _unary(op: str, call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """An operator with an operand of the result's type."""
    return call.builder.op(op, call.cast(x))


def _negative(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """-x; of unsigned integers modulo their range."""
    if call.data_type.dtype.kind == "u":
        return call.builder.sub(call.cast(0), call.cast(x))
    return _unary("Neg", call, x)


def _rounding(op: str, call: Call, x: SymbolicTensor) -> SymbolicTensor:
    return _unary(op, call, x) if x.data_type.is_floating else x


def _sign(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """The sign; 0 for NaN."""
    b, sign = call.builder, _unary("Sign", call, x)
    return b.where(b.op("IsNaN", x), 0.0, sign) if x.data_type.is_floating else sign


def _is_floating_kind(op: str, call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """IsNaN or IsInf; false for integers."""
    return call.builder.op(op, x) if x.data_type.is_floating else call.filled(False)


def _binary(op: str, call: Call, a: Value, b: Value, **attributes: int) -> SymbolicTensor:
    return call.builder.apply(op, [call.cast(a), call.cast(b)], 1, attributes)[0]


def _compare(op: str, call: Call, a: Value, b: Value) -> SymbolicTensor:
    x, y = call.promoted(a, b)
    if x.data_type is DataType.BOOL and op != "Equal":
        x, y = call.cast(x, DataType.INT32), call.cast(y, DataType.INT32)
    return call.builder.op(op, x, y)


def _logical(op: str, call: Call, a: Value, b: Value) -> SymbolicTensor:
    return call.builder.op(op, truth(call, a), truth(call, b))


def truth(call: Call, value: Value) -> SymbolicTensor:
    """Whether each element differs from zero."""
    if isinstance(value, SymbolicTensor) and value.data_type is not DataType.BOOL:
        return call.builder.not_equal(value, 0)
    return call.cast(value, DataType.BOOL)


def _by_type(of_flags: str, of_numbers: str, call: Call, a: Value, b: Value) -> SymbolicTensor:
    return _binary(of_flags if call.data_type is DataType.BOOL else of_numbers, call, a, b)


def _add(call: Call, a: Value, b: Value, alpha: Number = 1) -> SymbolicTensor:
    if call.data_type is DataType.BOOL:
        return _binary("Or", call, a, b if alpha else call.builder.op("And", call.cast(b), False))
    return _scaled_sum("Add", call, a, b, alpha)


def _subtract(call: Call, a: Value, b: Value, alpha: Number = 1) -> SymbolicTensor:
    return _scaled_sum("Sub", call, a, b, alpha)


def _scaled_sum(op: str, call: Call, a: Value, b: Value, alpha: Number) -> SymbolicTensor:
    """a + alpha * b, or a - alpha * b; narrow floats are computed in float32 if alpha is not 1."""
    if alpha == 1:
        return _binary(op, call, a, b)
    wide = computing_type(call.data_type)
    scaled = call.builder.op("Mul", *(call.cast(call.cast(v), wide) for v in (b, alpha)))
    return call.cast(call.builder.op(op, call.cast(call.cast(a), wide), scaled))


def _add_product(
    call: Call, a: SymbolicTensor, b: SymbolicTensor, c: SymbolicTensor, value: Number = 1
) -> SymbolicTensor:
    """a + value * b * c; torch truncates the value for integers."""
    product = call.builder.op("Mul", call.cast(b), call.cast(c))
    return _add(call, a, product, value if call.data_type.is_floating else int(value))


def _by_number(op: str, call: Call, a: Value, b: Value) -> SymbolicTensor:
    """a * b or a / b. torch's kernels for narrow floats use a number or scalar tensor b in float32,
    without rounding it to the narrow type."""
    if not _is_inexact(call, b):
        return _binary(op, call, a, b)
    wide = computing_type(call.data_type)
    return call.cast(call.builder.op(op, call.cast(call.cast(a), wide), call.cast(b, wide)))


def _is_inexact(call: Call, value: Value) -> bool:
    """Whether the result's narrow type may not represent a number or scalar tensor exactly."""
    if computing_type(call.data_type) is call.data_type:
        return False
    if isinstance(value, SymbolicTensor):
        return value.shape == () and value.data_type not in (call.data_type, DataType.BOOL)
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(value).astype(call.data_type.dtype))
    return rounded != value and value == value


def _multiply(call: Call, a: Value, b: Value) -> SymbolicTensor:
    if call.data_type is DataType.BOOL:
        return _binary("And", call, a, b)
    return _by_number("Mul", call, a, b)


def _multiply_add(call: Call, a: Value, b: Value, c: Value) -> SymbolicTensor:
    return _binary("Add", call, _binary("Mul", call, a, b), c)


def _divide(call: Call, a: Value, b: Value, rounding_mode: str | None = None) -> SymbolicTensor:
    if rounding_mode is None:
        return _by_number("Div", call, a, b)
    if not call.data_type.is_floating:
        if rounding_mode == "floor":
            return call.builder.floordiv(call.cast(a), call.cast(b))
        return _binary("Div", call, a, b)
    wide = computing_type(call.data_type)
    x = call.cast(call.cast(a), wide)
    y = call.cast(b if _is_inexact(call, b) else call.cast(b), wide)
    if rounding_mode == "floor":
        return call.cast(_floor_of_quotient(call, x, y))
    return call.cast(_truncate(call, call.builder.div(x, y)))


def _floor_of_quotient(call: Call, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """The floor of the exact quotient, as in Python and torch: x / y may round up to the next
    integer. Division by zero gives x / y."""
    b = call.builder
    quotient, rest = b.div(x, y), b.op("Mod", x, y, fmod=1)
    signs_differ = b.logical_and(b.not_equal(rest, 0), b.logical_xor(b.less(rest, 0), b.less(y, 0)))
    below = b.sub(b.div(b.sub(x, rest), y), b.cast(signs_differ, x.data_type))
    whole = b.floor(below)
    whole = b.add(whole, b.cast(b.greater(b.sub(below, whole), 0.5), x.data_type))
    # A zero has the quotient's sign.
    whole = b.where(b.equal(below, 0), b.mul(quotient, 0.0), whole)
    return b.where(b.equal(y, 0), quotient, whole)


def _truncate(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    if not x.data_type.is_floating:
        return x
    b = call.builder
    return b.where(b.less(x, 0), b.ceil(x), b.floor(x))


def _power(call: Call, base: Value, exponent: Value) -> SymbolicTensor:
    b = call.builder
    if not call.data_type.is_floating:
        return _whole_power(call, base, exponent)
    # torch has no special cases for exponents in float16.
    if isinstance(exponent, SymbolicTensor) or call.data_type is DataType.FLOAT16:
        return _binary("Pow", call, base, exponent)
    x = call.cast(base)
    if exponent == 2:
        return b.mul(x, x)
    if exponent == 3:
        return b.mul(b.mul(x, x), x)
    if exponent == 0.5:
        return b.sqrt(x)
    if exponent == -0.5:
        return b.rsqrt(x)
    return b.reciprocal(x) if exponent == -1 else b.pow(x, call.cast(exponent))


def _whole_power(call: Call, base: Value, exponent: Value) -> SymbolicTensor:
    """A power of integers, modulo the range of their type."""
    b = call.builder
    if type(exponent) is int and exponent in (2, 3):
        x = call.cast(base)
        return b.mul(x, x) if exponent == 2 else b.mul(b.mul(x, x), x)
    is_narrow = call.data_type.dtype.itemsize < 4
    wide = DataType.INT32 if is_narrow or call.data_type is DataType.INT32 else DataType.INT64
    return call.cast(b.op("Pow", *(call.cast(call.cast(v), wide) for v in (base, exponent))))


def _shift(op: str, call: Call, a: Value, by: Value) -> SymbolicTensor:
    """Shift left ("mul") or right ("floordiv") by two powers of two that the type can represent; a
    count outside the type's bits shifts all of them out."""
    b, x, dtype = call.builder, call.cast(a), call.data_type.dtype
    last = dtype.itemsize * 8 - int(op == "floordiv" and dtype.kind == "i")
    powers = [[1 << n for n in (count // 2, count - count // 2)] for count in range(last + 1)]
    if isinstance(by, int):
        halves = [b.constant(np.asarray(n, dtype)) for n in powers[by if 0 <= by <= last else last]]
    else:
        count = call.cast(by, DataType.INT64)
        is_outside = b.logical_or(b.less(count, 0), b.greater(count, last))
        index, table = b.where(is_outside, last, count), np.asarray(powers, dtype)
        halves = [b.gather(b.constant(column), index, 0) for column in table.T.copy()]
    for half in halves:
        x = b.mul(x, half) if op == "mul" else b.floordiv(x, half)
    return x


def _clamp(
    call: Call, x: SymbolicTensor, min: Value | None = None, max: Value | None = None
) -> SymbolicTensor:
    low, high = (None if bound is None else call.cast(bound) for bound in (min, max))
    return call.builder.clip(call.cast(x), low, high)


def _where(call: Call, condition: SymbolicTensor, a: Value, b: Value) -> SymbolicTensor:
    return call.builder.op("Where", truth(call, condition), call.cast(a), call.cast(b))


def _interpolate(call: Call, a: Value, b: Value, weight: Value) -> SymbolicTensor:
    """Linear interpolation, computed from the nearer end, in float32 for narrow floats."""
    builder, wide = call.builder, computing_type(call.data_type)
    x, y = (call.cast(call.cast(value), wide) for value in (a, b))
    if isinstance(weight, SymbolicTensor):
        weight = call.cast(weight)
    share = call.cast(weight, wide)
    difference = builder.sub(y, x)
    is_near = builder.less(builder.abs(share), 0.5)
    from_start = builder.add(x, builder.mul(share, difference))
    from_end = builder.sub(y, builder.mul(difference, builder.sub(1.0, share)))
    return call.cast(builder.where(is_near, from_start, from_end))


def _times_logarithm(call: Call, x: Value, y: Value) -> SymbolicTensor:
    """x * log(y); 0 where x is 0, NaN where y is NaN."""
    b, factor, number = call.builder, call.cast(x), call.cast(y)
    product = b.where(b.equal(factor, 0), 0.0, b.mul(factor, b.log(number)))
    return b.where(b.op("IsNaN", number), math.nan, product)


def _cast(call: Call, x: SymbolicTensor, *_: Any, **__: Any) -> SymbolicTensor:
    return call.cast(x)


def _same(call: Call, x: SymbolicTensor, *_: Any, **__: Any) -> SymbolicTensor:
    return x


def _dropout(call: Call, x: SymbolicTensor, p: float, train: bool) -> SymbolicTensor:
    if train and p > 0:
        raise CompileError(
            "dropout in training mode draws random numbers",
            remedy="call .eval() on the module before compiling it",
        )
    return x


def _to_data_type(call: Call, x: SymbolicTensor, dtype: Any, *_: Any) -> SymbolicTensor:
    return call.cast(x, data_type_of(dtype))


_UNARY = {
    "Relu": aten.relu, "Sigmoid": aten.sigmoid, "Tanh": aten.tanh, "Exp": aten.exp,
    "Log": aten.log, "Sqrt": aten.sqrt, "Abs": aten.abs, "Sin": aten.sin,
    "Cos": aten.cos, "Tan": aten.tan, "Asin": aten.asin, "Acos": aten.acos, "Atan": aten.atan,
    "Sinh": aten.sinh, "Cosh": aten.cosh, "Asinh": aten.asinh, "Acosh": aten.acosh,
    "Atanh": aten.atanh, "Erf": aten.erf, "Reciprocal": aten.reciprocal,
}  # fmt: skip
_ROUNDINGS = {"Floor": aten.floor, "Ceil": aten.ceil, "Round": aten.round}
#: Operators whose second operand is a tensor or a number.
_OF_TWO: dict[Any, Lowering] = {
    aten.add: _add, aten.sub: _subtract, aten.mul: _multiply,
    aten.remainder: built(Builder.mod, cast=True), aten.fmod: partial(_binary, "Mod", fmod=1),
    aten.ne: lambda call, a, b: call.builder.logical_not(_compare("Equal", call, a, b)),
    aten.eq: partial(_compare, "Equal"), aten.lt: partial(_compare, "Less"),
    aten.le: partial(_compare, "LessOrEqual"), aten.gt: partial(_compare, "Greater"),
    aten.ge: partial(_compare, "GreaterOrEqual"),
    aten.bitwise_and: partial(_by_type, "And", "BitwiseAnd"),
    aten.bitwise_or: partial(_by_type, "Or", "BitwiseOr"),
    aten.bitwise_xor: partial(_by_type, "Xor", "BitwiseXor"),
}  # fmt: skip

#: Operators that inductor registers, which may be loaded later.
LOWERINGS_BY_NAME: dict[str, Lowering] = {"prims.fma.default": _multiply_add}


# --------------------------------------------------------------------------------------------------
# Special functions


def negative(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """Whether the sign bit is set, also for -0; false for NaN."""
    b = call.builder
    if not x.data_type.is_floating:
        return b.less(x, 0) if x.data_type is not DataType.BOOL else b.logical_and(x, False)
    # 1 / -0 is -inf.
    return b.logical_or(b.less(x, 0), b.logical_and(b.equal(x, 0), b.less(b.reciprocal(x), 0)))


def _atan2(call: Call, y: SymbolicTensor, x: SymbolicTensor) -> SymbolicTensor:
    # Scalar tensors are cast to the other operand's type first.
    return _angle_of(call, call.cast(y), call.cast(x))


@rounded_once
def _angle_of(call: Call, rise: SymbolicTensor, run: SymbolicTensor) -> SymbolicTensor:
    """The angle of (run, rise) in (-pi, pi], from the arc tangent of a quotient of at most one."""
    b = call.builder
    high, wide = b.abs(rise), b.abs(run)
    least, most = b.op("Min", high, wide), b.op("Max", high, wide)
    # The quotient is undefined if both are zero or infinite.
    is_zero, is_infinite = b.equal(most, 0), b.equal(least, math.inf)
    share = b.div(
        b.where(is_infinite, 1.0, least), b.where(b.logical_or(is_zero, is_infinite), 1.0, most)
    )
    arc = b.op("Atan", share)
    arc = b.where(b.greater(high, wide), b.sub(math.pi / 2, arc), arc)
    arc = b.where(negative(call, run), b.sub(math.pi, arc), arc)
    return b.where(negative(call, rise), b.neg(arc), arc)


def _angle(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """The angle of real numbers: 0 or pi; NaN for NaN."""
    b, number = call.builder, call.cast(x)
    angle = b.where(b.less(number, 0), math.pi, 0.0)
    return b.where(b.op("IsNaN", number), number, call.cast(angle))


@rounded_once
def _hypot(call: Call, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """sqrt(x^2 + y^2) without overflow of the squares."""
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
        """The extreme of two elements; NaN are ignored."""
        b, first, second = call.builder, call.cast(x), call.cast(y)
        extreme = b.op(op, first, second)
        if not call.data_type.is_floating:
            return extreme
        is_nan = b.op("IsNaN", first), b.op("IsNaN", second)
        return b.where(is_nan[0], second, b.where(is_nan[1], first, extreme))

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


def detached(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """A tensor that no gradient flows through: its bits, as those of integers."""
    b, data_type = call.builder, x.data_type
    if not data_type.is_floating:
        return x
    # A training in another precision replaces float32.
    bits = b.op("BitCast", b.cast(x, DataType.FLOAT64), to=DataType.INT64)
    return b.cast(b.op("BitCast", bits, to=DataType.FLOAT64), data_type)


LOWERINGS: dict[Any, Row] = {
    detached: detached,
    **{packet.default: partial(_unary, op) for op, packet in _UNARY.items()},
    **{packet.default: partial(_rounding, op) for op, packet in _ROUNDINGS.items()},
    aten.addcmul.default: _add_product,
    **{packet.Tensor: lowering for packet, lowering in _OF_TWO.items()},
    **{packet.Scalar: lowering for packet, lowering in _OF_TWO.items()},
    **{
        packet.Scalar_Tensor: lowering for packet, lowering in _OF_TWO.items()
        if "Scalar_Tensor" in packet.overloads()
    },
    aten.sign.default: _sign,
    aten.neg.default: _negative,
    **{
        getattr(packet, overload): partial(_shift, op)
        for op, packets in (
            ("mul", (aten.bitwise_left_shift, aten.__lshift__)),
            ("floordiv", (aten.bitwise_right_shift, aten.__rshift__)),
        )
        for packet in packets
        for overload in packet.overloads()
        if overload in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor")
    },
    aten.hardswish.default: KeptWhole(partial(_unary, "HardSwish")),
    aten.mish.default: KeptWhole(partial(_unary, "Mish")),
    aten.div.Tensor: _divide, aten.div.Scalar: _divide, aten.div.Tensor_mode: _divide,
    aten.div.Scalar_mode: _divide,
    aten.xlogy.Tensor: KeptWhole(_times_logarithm),
    aten.xlogy.Scalar_Self: KeptWhole(_times_logarithm),
    aten.xlogy.Scalar_Other: KeptWhole(_times_logarithm),
    aten.lerp.Tensor: KeptWhole(_interpolate), aten.lerp.Scalar: KeptWhole(_interpolate),
    aten.pow.Tensor_Tensor: _power, aten.pow.Tensor_Scalar: _power, aten.pow.Scalar: _power,
    aten.maximum.default: partial(_binary, "Max"), aten.minimum.default: partial(_binary, "Min"),
    aten.isnan.default: partial(_is_floating_kind, "IsNaN"),
    aten.isinf.default: partial(_is_floating_kind, "IsInf"),
    aten.logical_and.default: partial(_logical, "And"),
    aten.logical_or.default: partial(_logical, "Or"),
    aten.logical_xor.default: partial(_logical, "Xor"),
    aten.logical_not.default: lambda call, x: call.builder.logical_not(truth(call, x)),
    aten.bitwise_not.default: built(Builder.logical_not),
    aten.trunc.default: _truncate,
    aten.clamp.default: _clamp, aten.clamp.Tensor: _clamp,
    aten.where.self: _where, aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _to_data_type,
    aten._neg_view.default: _negative,
    aten.clone.default: _same, aten.alias.default: _same, aten.detach_.default: _same,
    aten.lift_fresh_copy.default: _same, aten.lift_fresh.default: _same,
    aten.native_dropout.default: lambda call, x, p, train: (_dropout(call, x, p, train), None),
    aten.atan2.default: _atan2, aten.angle.default: _angle, aten.hypot.default: _hypot,
    aten.copysign.Tensor: _copy_sign, aten.copysign.Scalar: _copy_sign,
    aten.signbit.default: negative,
    aten.fmax.default: _extreme_number("Max"), aten.fmin.default: _extreme_number("Min"),
    aten.round.decimals: _rounded_at,
}  # fmt: skip
