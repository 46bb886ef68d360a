"""ATen operators with weights, windows or statistics: products, convolution, pooling, norms.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch_attention import attention
from stitch.frontend.torch_call import Call, Lowering, Number
from stitch.graph import SymbolicTensor
from stitch.program import Array, DataType

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


def _spread(values: Sequence[int] | int, count: int) -> list[int]:
    """One number per spatial axis: torch gives one for all, or each."""
    listed = [values] if isinstance(values, int) else list(values)
    return listed * count if len(listed) == 1 else listed


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
        "strides": _spread(stride, spatial), "pads": _spread(padding, spatial) * 2,
        "dilations": _spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    if transposed:
        attributes["output_padding"] = _spread(output_padding, spatial)
    made = b.apply("ConvTranspose" if transposed else "Conv", [batch, weight, bias], 1, attributes)
    return b.squeeze(made[0], 0) if single else made[0]


# Pooling -------------------------------------------------------------------------------------


def _pooled(
    call: Call, op: str, x: SymbolicTensor, spatial: int, outputs: int, **attributes: Any
) -> tuple[SymbolicTensor, ...]:
    """A pooling of [N, C, ...]; a tensor without N gets one on the way."""
    b = call.builder
    if len(x.shape) == spatial + 2:
        return b.apply(op, [x], outputs, attributes)
    made = b.apply(op, [b.unsqueeze(x, 0)], outputs, attributes)
    return tuple(b.squeeze(tensor, 0) for tensor in made)


def _max_pool(
    spatial: int,
    call: Call,
    x: SymbolicTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> Several:
    kernel = _spread(kernel_size, spatial)
    made = _pooled(
        call, "MaxPool", x, spatial, 2 if 1 in call.used else 1,
        kernel_shape=kernel, strides=_spread(stride, spatial) if stride else kernel,
        pads=_spread(padding, spatial) * 2, dilations=_spread(dilation, spatial),
        ceil_mode=int(ceil_mode),
    )  # fmt: skip
    if len(made) == 1:
        return (made[0], None)
    # ONNX counts places over the whole tensor, torch within one plane.
    return made[0], call.builder.mod(made[1], math.prod(x.shape[-spatial:]))


def _one_max_pool(spatial: int, call: Call, *operands: Any) -> SymbolicTensor | None:
    return _max_pool(spatial, call, *operands)[0]


def _average_pool(
    spatial: int,
    call: Call,
    x: SymbolicTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> SymbolicTensor:
    kernel = _spread(kernel_size, spatial)
    if divisor_override is not None and ceil_mode:
        raise CompileError("average pooling with ceil_mode and a divisor of its own")
    made = _pooled(
        call, "AveragePool", x, spatial, 1,
        kernel_shape=kernel, strides=_spread(stride, spatial) if stride else kernel,
        pads=_spread(padding, spatial) * 2, ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad or divisor_override is not None),
    )[0]  # fmt: skip
    if divisor_override is None:
        return made
    return call.builder.mul(made, math.prod(kernel) / divisor_override)


def _adaptive_average(
    spatial: int, call: Call, x: SymbolicTensor, output_size: Sequence[int]
) -> SymbolicTensor:
    """Means over windows that cover each axis; a product with weights where they are uneven."""
    b, sizes = call.builder, call.shape[-spatial:]
    lengths = x.shape[-spatial:]
    if all(s == 1 for s in sizes):
        return b.reduce_mean(x, tuple(range(-spatial, 0)), keepdims=True)
    if all(s and n % s == 0 for n, s in zip(lengths, sizes, strict=True)):
        return _average_pool(
            spatial, call, x, [n // s for n, s in zip(lengths, sizes, strict=True)]
        )
    for axis, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        place = axis - spatial
        weights = b.constant(_window_weights(length, size).astype(x.dtype))
        moved = x if place == -1 else b.swapaxes(x, place, -1)
        mean = b.matmul(moved, weights)
        x = mean if place == -1 else b.swapaxes(mean, place, -1)
    return x


def _window_weights(length: int, size: int) -> Array:
    """[length, size]: column j averages elements floor(j n/s) to ceil((j + 1) n/s)."""
    weights = np.zeros((length, size))
    for j in range(size):
        start, end = j * length // size, -(-(j + 1) * length // size)
        weights[start:end, j] = 1.0 / (end - start)
    return weights


# Normalisation -------------------------------------------------------------------------------


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


def _layer_norm(
    call: Call,
    x: SymbolicTensor,
    normalized_shape: Sequence[int],
    weight: SymbolicTensor | None = None,
    bias: SymbolicTensor | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> Several:
    scale = call.optional(weight, 1, normalized_shape)
    made = call.builder.apply(
        "LayerNormalization",
        [x, scale, bias],
        3 if call.used - {0} else 1,
        {"axis": -len(normalized_shape), "epsilon": float(epsilon)},
    )
    return made if len(made) == 3 else (made[0], None, None)


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
        raise CompileError("a group normalisation's mean and deviation are read")
    operands = [x, call.optional(weight, 1, (channels,)), call.optional(bias, 0, (channels,))]
    attributes = {"num_groups": groups, "epsilon": float(epsilon)}
    return call.builder.apply("GroupNormalization", operands, 1, attributes)[0], None, None


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
    aten.max_pool2d_with_indices.default: partial(_max_pool, 2),
    aten.max_pool3d_with_indices.default: partial(_max_pool, 3),
    aten.max_pool2d.default: partial(_one_max_pool, 2),
    aten.avg_pool1d.default: partial(_average_pool, 1),
    aten.avg_pool2d.default: partial(_average_pool, 2),
    aten.avg_pool3d.default: partial(_average_pool, 3),
    aten.adaptive_avg_pool1d.default: partial(_adaptive_average, 1),
    aten._adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    aten.adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    aten._adaptive_avg_pool3d.default: partial(_adaptive_average, 3),
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_statistics,
    aten.native_layer_norm.default: _layer_norm,
    aten.layer_norm.default: lambda call, *operands: _layer_norm(call, *operands)[0],
    aten.native_group_norm.default: _group_norm, aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: attention,
}  # fmt: skip
