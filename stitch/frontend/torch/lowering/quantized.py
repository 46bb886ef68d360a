"""The operators `quantized_decomposed` of PT2E exports, and ATen's fake quantization.

Types that QuantizeLinear supports are quantized by it, with scale 1 after a product with the
inverse scale: PyTorch multiplies by that, while ONNX divides by the scale, which rounds
differently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, KeptWhole, Lowering, Row, Several, data_type_of
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
#: The types to which QuantizeLinear of opset 21 quantizes float32.
_LINEAR = frozenset({DataType.INT8, DataType.UINT8, DataType.INT16, DataType.UINT16})
#: A number, or a tensor of one element.
One = float | int | SymbolicTensor
FLOAT = DataType.FLOAT32


def _number(call: Call, value: One, data_type: DataType) -> SymbolicTensor:
    """A number or a tensor of one element as a scalar tensor."""
    if isinstance(value, SymbolicTensor):
        return call.cast(call.builder.reshape(value, []), data_type)
    return call.builder.constant(np.array(value, data_type.dtype))


def _inverse(call: Call, scale: One) -> SymbolicTensor:
    """1 / scale, divided in float64, in float32."""
    if not isinstance(scale, SymbolicTensor):
        return call.builder.constant(np.array(1.0 / scale, np.float32))
    wide = _number(call, scale, DataType.FLOAT64)
    one = call.builder.constant(np.array(1.0, np.float64))
    return call.cast(call.builder.op("Div", one, wide), FLOAT)


def _rounded(
    call: Call, scaled: SymbolicTensor, zero: SymbolicTensor, least: One, most: One
) -> SymbolicTensor:
    """`clamp(round(scaled) + zero)`."""
    kind = scaled.data_type
    whole = call.builder.op("Add", call.builder.op("Round", scaled), call.cast(zero, kind))
    return call.builder.op("Clip", whole, _number(call, least, kind), _number(call, most, kind))


def _linear(
    call: Call, scaled: SymbolicTensor, zero: SymbolicTensor, least: One, most: One,
    data_type: DataType, axis: int | None = None,
) -> SymbolicTensor:  # fmt: skip
    """Quantize scaled elements: by QuantizeLinear if it supports the types."""
    builder = call.builder
    if data_type not in _LINEAR or scaled.data_type is not FLOAT:
        if axis is not None:
            zero = _along(call, zero, axis, scaled)
        whole = _rounded(call, scaled, zero, least, most)
        # Through int32, because ONNX Runtime converts floats to few types.
        return call.cast(call.cast(whole, DataType.INT32), data_type)
    limits = np.iinfo(data_type.dtype)
    if (least, most) != (limits.min, limits.max):
        # Clamp before rounding: the bounds are integers.
        shift = call.cast(zero if axis is None else _along(call, zero, axis, scaled), FLOAT)
        bounds = [builder.op("Sub", _number(call, each, FLOAT), shift) for each in (least, most)]
        scaled = builder.op("Min", builder.op("Max", scaled, bounds[0]), bounds[1])
    ones = builder.constant(np.ones(zero.shape, np.float32))
    operands = [scaled, ones, call.cast(zero, data_type)]
    return builder.apply("QuantizeLinear", operands, 1, {"axis": axis})[0]


def _along(call: Call, values: SymbolicTensor, axis: int, like: SymbolicTensor) -> SymbolicTensor:
    """A vector reshaped to lie along an axis of another tensor."""
    shape = [1] * like.ndim
    shape[axis] = values.size
    return call.builder.reshape(values, shape)


def _quantized(
    call: Call, x: SymbolicTensor, scale: One, zero: One, least: One, most: One, dtype: Any
) -> SymbolicTensor:
    data_type = data_type_of(dtype)
    scaled = call.builder.op("Mul", call.cast(x, FLOAT), _inverse(call, scale))
    at = _number(call, zero, DataType.INT64)
    return _linear(call, scaled, at, least, most, data_type)


def _quantized_by_channel(
    call: Call, x: SymbolicTensor, scales: SymbolicTensor, zeros: SymbolicTensor, axis: int,
    least: int, most: int, dtype: Any,
) -> SymbolicTensor:  # fmt: skip
    builder, data_type = call.builder, data_type_of(dtype)
    _check_zeros(zeros)
    one = builder.constant(np.array(1.0, scales.data_type.dtype))
    wide, inverse = call.promoted(call.cast(x, FLOAT), builder.op("Div", one, scales))
    scaled = builder.op("Mul", wide, _along(call, inverse, axis, x))
    return _linear(call, scaled, zeros, least, most, data_type, axis % x.ndim)


def _dequantized(
    call: Call, x: SymbolicTensor, scale: One, zero: One, least: One, most: One, dtype: Any,
    *, out_dtype: Any = None,
) -> SymbolicTensor:  # fmt: skip
    """Compute in float32 and round once to a narrower type, as torch's kernels do."""
    builder, result = call.builder, FLOAT if out_dtype is None else data_type_of(out_dtype)
    kind = DataType.FLOAT64 if result is DataType.FLOAT64 else FLOAT
    at, step = _number(call, zero, DataType.INT64), _number(call, scale, kind)
    if x.data_type in _LINEAR and kind is FLOAT:
        whole = builder.op("DequantizeLinear", x, step, call.cast(at, x.data_type))
    else:
        whole = builder.op("Sub", call.cast(x, kind), call.cast(at, kind))
        whole = builder.op("Mul", whole, step)
    return call.cast(whole, result)


def _dequantized_by_channel(
    call: Call, x: SymbolicTensor, scales: SymbolicTensor, zeros: SymbolicTensor | None, axis: int,
    least: int, most: int, dtype: Any, *, out_dtype: Any = None,
) -> SymbolicTensor:  # fmt: skip
    builder, result = call.builder, FLOAT if out_dtype is None else data_type_of(out_dtype)
    if zeros is not None:
        _check_zeros(zeros)
    if x.data_type in _LINEAR and scales.data_type is FLOAT:
        at = None if zeros is None else call.cast(zeros, x.data_type)
        return call.cast(builder.op("DequantizeLinear", x, scales, at, axis=axis % x.ndim), result)
    whole, kind = call.cast(x, scales.data_type), scales.data_type
    if zeros is not None:
        whole = builder.op("Sub", whole, call.cast(_along(call, zeros, axis, x), kind))
    return call.cast(builder.op("Mul", whole, _along(call, scales, axis, x)), result)


def _check_zeros(zeros: SymbolicTensor) -> None:
    if zeros.data_type.is_floating:
        raise CompileError(
            "quantization with floating-point zero points is not supported",
            expected="integer zero points", got=zeros.data_type.value,
        )  # fmt: skip


def _parameters(is_symmetric: bool) -> Lowering:
    """Lower `choose_qparams`: scale and zero point from the extremes of a tensor."""

    def lowered(
        call: Call, x: SymbolicTensor, least: int, most: int, epsilon: float, dtype: Any
    ) -> Several:
        builder, x = call.builder, call.cast(x, FLOAT)
        nothing = builder.constant(np.zeros((), np.float32))
        low = builder.op("Min", builder.op("ReduceMin", x, keepdims=0), nothing)
        high = builder.op("Max", builder.op("ReduceMax", x, keepdims=0), nothing)
        span = builder.constant(np.array(most - least, np.float32))
        bottom = builder.constant(np.array(epsilon, np.float32))
        if is_symmetric:
            high = builder.op("Max", builder.op("Neg", low), high)
            low, span = nothing, builder.constant(np.array((most - least) / 2, np.float32))
        scale = builder.op("Max", builder.op("Div", builder.op("Sub", high, low), span), bottom)
        if is_symmetric:
            zero = builder.constant(np.array([128 if dtype is torch.uint8 else 0]))
        else:
            steps = builder.op("Round", builder.op("Div", low, scale))
            start = builder.constant(np.array(least, np.float32))
            limits = [_number(call, each, FLOAT) for each in (least, most)]
            whole = builder.op("Clip", builder.op("Sub", start, steps), *limits)
            zero = call.cast(builder.reshape(whole, [1]), DataType.INT64)
        return call.cast(builder.reshape(scale, [1]), DataType.FLOAT64), zero

    return lowered


def _fake_quantized(
    call: Call, x: SymbolicTensor, step: SymbolicTensor, zero: SymbolicTensor, least: int, most: int
) -> SymbolicTensor:
    """Quantize and dequantize."""
    builder = call.builder
    one = builder.constant(np.array(1.0, np.float32))
    scaled = builder.op("Mul", call.cast(x, FLOAT), builder.op("Div", one, step))
    inside = _rounded(call, scaled, zero, least, most)
    return call.cast(builder.op("Mul", builder.op("Sub", inside, zero), step), x.data_type)


def _fake(
    call: Call, x: SymbolicTensor, scale: One, zero: One, least: int, most: int
) -> SymbolicTensor:
    step, at = _number(call, scale, FLOAT), _number(call, zero, FLOAT)
    return _fake_quantized(call, x, step, at, least, most)


def _fake_by_channel(
    call: Call, x: SymbolicTensor, scales: SymbolicTensor, zeros: SymbolicTensor, axis: int,
    least: int, most: int,
) -> SymbolicTensor:  # fmt: skip
    steps, at = (_along(call, call.cast(each, FLOAT), axis, x) for each in (scales, zeros))
    return _fake_quantized(call, x, steps, at, least, most)


LOWERINGS: dict[Any, Row] = {
    aten.fake_quantize_per_tensor_affine.default: KeptWhole(_fake),
    aten.fake_quantize_per_tensor_affine.tensor_qparams: KeptWhole(_fake),
    aten.fake_quantize_per_channel_affine.default: KeptWhole(_fake_by_channel),
}
LOWERINGS_BY_NAME: dict[str, Lowering] = {
    **{
        f"quantized_decomposed.{name}_per_tensor.{overload}": lowering
        for name, lowering in (("quantize", _quantized), ("dequantize", _dequantized))
        for overload in ("default", "tensor", "tensor2")
    },
    "quantized_decomposed.quantize_per_channel.default": _quantized_by_channel,
    "quantized_decomposed.dequantize_per_channel.default": _dequantized_by_channel,
    "quantized_decomposed.choose_qparams.tensor": _parameters(is_symmetric=False),
    "quantized_decomposed.choose_qparams_symmetric.tensor": _parameters(is_symmetric=True),
}  # fmt: skip
