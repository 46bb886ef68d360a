"""ATen operators with weights or statistics: products, convolution, norms.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Lowering, Number, in_one_type, rounded_once
from stitch.frontend.torch.lowering.attention import attention
from stitch.frontend.torch.lowering.pooled_windows import spread
from stitch.graph import SymbolicTensor
from stitch.ops import onnx_code
from stitch.program import DataType

aten = torch.ops.aten
Several = tuple[SymbolicTensor | None, ...]


def _matmul(call: Call, a: SymbolicTensor, b: SymbolicTensor, *_: Any) -> SymbolicTensor:
    return call.builder.matmul(call.cast(a), call.cast(b))


def _linear(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None = None
) -> SymbolicTensor:
    b = call.builder
    if len(weight.shape) == 2 and x.shape:
        return b.linear(x, weight, bias)
    product = b.matmul(x, weight)
    return product if bias is None else b.add(product, bias)


def _add_product(
    call: Call,
    added: SymbolicTensor,
    first: SymbolicTensor,
    second: SymbolicTensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> SymbolicTensor:
    """beta added + alpha (first second): a Gemm for matrices."""
    b, tensors = call.builder, [call.cast(t) for t in (first, second, added)]
    if len(first.shape) == 2 and call.data_type.is_floating:
        attributes = {
            name: float(value) for name, value in (("alpha", alpha), ("beta", beta)) if value != 1
        }
        kept = tensors if beta != 0 else tensors[:2]
        return b.apply("Gemm", kept, 1, attributes)[0]
    product = b.matmul(tensors[0], tensors[1])
    scaled = product if alpha == 1 else b.mul(product, call.cast(alpha))
    if beta == 0:
        return scaled
    return b.add(tensors[2] if beta == 1 else b.mul(tensors[2], call.cast(beta)), scaled)


def _convolution(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor,
    bias: SymbolicTensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> SymbolicTensor:
    b, spatial = call.builder, len(weight.shape) - 2
    single = len(x.shape) == spatial + 1
    batch = b.unsqueeze(x, 0) if single else x
    attributes: dict[str, Any] = {
        "strides": spread(stride, spatial), "pads": spread(padding, spatial) * 2,
        "dilations": spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    if transposed:
        attributes["output_padding"] = spread(output_padding, spatial)
    made = b.apply("ConvTranspose" if transposed else "Conv", [batch, weight, bias], 1, attributes)
    return b.squeeze(made[0], 0) if single else made[0]


# Normalisation -------------------------------------------------------------------------------


@in_one_type
def _batch_norm(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    mean: SymbolicTensor,
    variance: SymbolicTensor,
    momentum: float,
    epsilon: float,
) -> Several:
    width = (x.shape[1],)
    scale, shift = call.optional(weight, 1, width), call.optional(bias, 0, width)
    result = call.builder.batch_norm(x, scale, shift, mean, variance, epsilon=float(epsilon))
    return result, None, None


@rounded_once
def _batch_statistics(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Several:
    """Normalised by the batch's own mean and variance, which torch uses for instances too."""
    b, axes = call.builder, (0, *range(2, len(x.shape)))
    mean = b.reduce_mean(x, axes, keepdims=True)
    centred = b.sub(x, mean)
    rstd = b.rsqrt(b.add(b.reduce_mean(b.square(centred), axes, keepdims=True), float(epsilon)))
    result = b.mul(centred, rstd)
    wide = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    if weight is not None:
        result = b.mul(result, b.reshape(weight, wide))
    if bias is not None:
        result = b.add(result, b.reshape(bias, wide))
    return result, b.reshape(mean, (x.shape[1],)), b.reshape(rstd, (x.shape[1],))


@in_one_type
def _layer_norm(
    call: Call,
    x: SymbolicTensor,
    normalized_shape: Sequence[int],
    weight: SymbolicTensor | None = None,
    bias: SymbolicTensor | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> Several:
    operands = [x, call.optional(weight, 1, normalized_shape), bias]
    attributes = {"axis": -len(normalized_shape), "epsilon": float(epsilon)}
    if x.data_type is DataType.FLOAT64:
        # The statistics of ONNX are else of float32: too few digits.
        attributes["stash_type"] = onnx_code(x.data_type)
    if not call.used - {0}:
        made = call.builder.apply("LayerNormalization", operands, 1, attributes)
        return (*made, None, None)[: len(call.results)]
    return call.as_promised(call.builder.apply("LayerNormalization", operands, 3, attributes))


@rounded_once
def _group_norm(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    epsilon: float,
) -> Several:
    if call.used - {0}:
        return _group_statistics(call, x, weight, bias, groups, epsilon)
    operands = [x, call.optional(weight, 1, (channels,)), call.optional(bias, 0, (channels,))]
    attributes = {"num_groups": groups, "epsilon": float(epsilon)}
    return call.builder.apply("GroupNormalization", operands, 1, attributes)[0], None, None


def _group_statistics(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    groups: int,
    epsilon: float,
) -> Several:
    """The same, with the means and deviations that its backward pass reads."""
    b, flat = call.builder, call.builder.reshape(x, (x.shape[0], groups, -1))
    mean = b.reduce_mean(flat, -1, keepdims=True)
    centred = b.sub(flat, mean)
    rstd = b.rsqrt(b.add(b.reduce_mean(b.square(centred), -1, keepdims=True), float(epsilon)))
    result = b.reshape(b.mul(centred, rstd), x.shape)
    wide = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    if weight is not None:
        result = b.mul(result, b.reshape(weight, wide))
    if bias is not None:
        result = b.add(result, b.reshape(bias, wide))
    return result, b.squeeze(mean, -1), b.squeeze(rstd, -1)


@rounded_once
def _rms_norm(
    call: Call,
    x: SymbolicTensor,
    normalized_shape: Sequence[int],
    weight: SymbolicTensor | None = None,
    epsilon: float | None = None,
) -> SymbolicTensor:
    wide = x.data_type is DataType.FLOAT64
    small = float(np.finfo(np.float64 if wide else np.float32).eps) if epsilon is None else epsilon
    axis = -len(normalized_shape)
    return call.builder.rms_norm(x, weight, axis=axis, epsilon=float(small))


LOWERINGS: dict[Any, Lowering] = {
    aten.mm.default: _matmul, aten.bmm.default: _matmul, aten.matmul.default: _matmul,
    aten.mv.default: _matmul, aten.dot.default: _matmul, aten.linear.default: _linear,
    aten.addmm.default: _add_product, aten.baddbmm.default: _add_product,
    aten.addmv.default: _add_product, aten.convolution.default: _convolution,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_statistics,
    aten.native_layer_norm.default: _layer_norm,
    aten.layer_norm.default: lambda call, *operands: _layer_norm(call, *operands)[0],
    aten.native_group_norm.default: _group_norm, aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: attention,
}  # fmt: skip
