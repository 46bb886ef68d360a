"""Operands of ATen operators on complex numbers, as pairs: real and imaginary parts, last axis."""

from __future__ import annotations

import numpy as np

from stitch.frontend.torch.aten_call import Call, ComplexTensor, Value
from stitch.graph import SymbolicTensor
from stitch.program import DataType

#: What stands where torch's schema says Tensor or Scalar, and either may be complex.
ComplexValue = ComplexTensor | Value | complex


def is_real(value: ComplexValue) -> bool:
    """Whether an operand has no imaginary part by its type."""
    return not isinstance(value, ComplexTensor | complex)


def wide_of(call: Call, value: ComplexValue) -> SymbolicTensor:
    """A real operand in the type of the result's parts, with a last axis of one."""
    assert not isinstance(value, ComplexTensor | complex), "it has two parts"
    number = call.cast(value)
    return call.builder.unsqueeze(number, -1) if number.shape else number


def pair_of(call: Call, value: ComplexValue, data_type: DataType | None = None) -> SymbolicTensor:
    """An operand as pairs, by default in the type of the result's parts."""
    b, kind = call.builder, call.data_type if data_type is None else data_type
    if isinstance(value, ComplexTensor):
        return b.cast(value.pairs, kind)
    if not isinstance(value, SymbolicTensor):
        number = complex(value)
        return b.constant(np.asarray([number.real, number.imag], kind.dtype))
    real = b.unsqueeze(b.cast(value, kind), -1)
    return b.concat([real, b.broadcast(b.constant(np.zeros(1, kind.dtype)), real.shape)], -1)


def parts_of(
    call: Call, value: ComplexValue, data_type: DataType | None = None
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Both parts of an operand, each with a last axis of one."""
    real, imaginary = call.builder.split(pair_of(call, value, data_type), 1, -1)
    return real, imaginary


def joined(call: Call, real: SymbolicTensor, imaginary: SymbolicTensor) -> ComplexTensor:
    """Of two parts, each with a last axis of one, complex numbers of the result's shape."""
    b, shape = call.builder, (*call.shape[:-1], 1)
    return ComplexTensor(b.concat([b.broadcast(real, shape), b.broadcast(imaginary, shape)], -1))


def turned(call: Call, pairs: SymbolicTensor) -> SymbolicTensor:
    """Complex conjugates."""
    return call.builder.mul(pairs, np.asarray([1, -1], pairs.data_type.dtype))
