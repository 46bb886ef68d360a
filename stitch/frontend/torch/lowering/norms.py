"""ATen's batch, layer, group, RMS and weight normalizations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, Several, in_one_type, rounded_once
from stitch.graph import SymbolicTensor
from stitch.ops import onnx_code
from stitch.program import DataType

aten = torch.ops.aten


@in_one_type
def _batch_norm(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    mean: SymbolicTensor, variance: SymbolicTensor, momentum: float, epsilon: float,
) -> Several:  # fmt: skip
    width = (x.shape[1],)
    scale, shift = call.optional(weight, 1, width), call.optional(bias, 0, width)
    result = call.builder.batch_norm(x, scale, shift, mean, variance, epsilon=float(epsilon))
    # In evaluation mode the other two results are empty in torch.
    return result, *(_empty(call, number) for number in (1, 2))


def _empty(call: Call, number: int) -> SymbolicTensor | None:
    """A result without elements; None if it is not read."""
    kind = call.results[number] if number in call.used else None
    if kind is None:
        return None
    return call.builder.constant(np.zeros(kind.shape, kind.data_type.dtype))


@rounded_once
def _batch_statistics(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    training: bool, momentum: float, epsilon: float,
) -> Several:  # fmt: skip
    """Normalize by the batch's own mean and variance; also torch's instance normalization."""
    return _by_own_statistics(call, x, weight, bias, epsilon)[:3]


@in_one_type
def _layer_norm(
    call: Call, x: SymbolicTensor, normalized_shape: Sequence[int],
    weight: SymbolicTensor | None = None, bias: SymbolicTensor | None = None,
    epsilon: float = 1e-5, *_: Any,
) -> Several:  # fmt: skip
    operands = [x, call.optional(weight, 1, normalized_shape), bias]
    attributes: dict[str, Any] = {"axis": -len(normalized_shape), "epsilon": float(epsilon)}
    if x.data_type is DataType.FLOAT64:
        # By default ONNX computes the statistics in float32.
        attributes["stash_type"] = onnx_code(x.data_type)
    if not call.used - {0}:
        result = call.builder.op("LayerNormalization", *operands, **attributes)
        return (result, None, None)[: len(call.results)]
    return call.cast_results(call.builder.apply("LayerNormalization", operands, 3, attributes))


@rounded_once
def _group_norm(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    batch: int, channels: int, inner: int, groups: int, epsilon: float,
) -> Several:  # fmt: skip
    if call.used - {0}:
        return _group_statistics(call, x, weight, bias, groups, epsilon)
    scale, shift = call.optional(weight, 1, (channels,)), call.optional(bias, 0, (channels,))
    options: dict[str, Any] = {"num_groups": groups, "epsilon": float(epsilon)}
    return call.builder.op("GroupNormalization", x, scale, shift, **options), None, None


def _group_statistics(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    groups: int, epsilon: float,
) -> Several:  # fmt: skip
    """As `_group_norm`, with the means and inverse deviations that the backward pass reads."""
    width = math.prod(x.shape[1:]) // groups
    b, flat = call.builder, call.builder.reshape(x, (x.shape[0], groups, width))
    mean = b.reduce_mean(flat, -1, keepdims=True)
    centred = b.sub(flat, mean)
    variance = b.reduce_mean(b.square(centred), -1, keepdims=True)
    inverse = b.rsqrt(b.add(variance, float(epsilon)))
    result = b.reshape(b.mul(centred, inverse), x.shape)
    wide = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    if weight is not None:
        result = b.mul(result, b.reshape(weight, wide))
    if bias is not None:
        result = b.add(result, b.reshape(bias, wide))
    return result, b.squeeze(mean, -1), b.squeeze(inverse, -1)


@rounded_once
def _rms_norm(
    call: Call, x: SymbolicTensor, normalized_shape: Sequence[int],
    weight: SymbolicTensor | None = None, epsilon: float | None = None,
) -> SymbolicTensor:  # fmt: skip
    wide = x.data_type is DataType.FLOAT64
    small = float(np.finfo(np.float64 if wide else np.float32).eps) if epsilon is None else epsilon
    axis = -len(normalized_shape)
    return call.builder.rms_norm(x, weight, axis=axis, epsilon=float(small))


@rounded_once
def _weight_norm_backward(
    call: Call, grad: SymbolicTensor, direction: SymbolicTensor, length: SymbolicTensor,
    norms: SymbolicTensor, dim: int,
) -> Several:  # fmt: skip
    """The gradients of length * direction / norms, with one norm for each index of `dim`."""
    b = call.builder
    axes = tuple(a for a in range(len(direction.shape)) if a != dim % len(direction.shape))
    product = b.mul(grad, direction)
    along = b.reduce_sum(product, axes, keepdims=True) if axes else product
    inverse = b.reciprocal(norms)
    of_length = b.mul(along, inverse)
    away = b.sub(grad, b.mul(direction, b.mul(of_length, inverse)))
    return b.mul(b.mul(length, inverse), away), of_length


# Batch normalization in training ---------------------------------------------------------------


@rounded_once
def _functional_batch_norm(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    running_mean: SymbolicTensor, running_variance: SymbolicTensor, training: bool,
    momentum: float, epsilon: float,
) -> Several:  # fmt: skip
    running = running_mean, running_variance
    if not training:
        return *_batch_norm(call, x, weight, bias, *running, momentum, epsilon), *running
    # A node whose result is not read is merged with the node whose result is.
    merged = running if 0 in call.used else None
    result, mean, inverse, variance = _by_own_statistics(call, x, weight, bias, epsilon, merged)
    count = math.prod(x.shape) // x.shape[1] if x.shape[1] else 1
    # ONNX gives the population's variance, torch's running variance is that of a sample.
    sample = variance * (count / max(1, count - 1))
    return (
        result, mean, inverse,
        _updated(running_mean, mean, momentum), _updated(running_variance, sample, momentum),
    )  # fmt: skip


def _by_own_statistics(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor | None, bias: SymbolicTensor | None,
    epsilon: float, running: tuple[SymbolicTensor, SymbolicTensor] | None = None,
) -> tuple[SymbolicTensor, SymbolicTensor, SymbolicTensor | None, SymbolicTensor]:  # fmt: skip
    """Normalize by the batch's own statistics in one operator: result, mean, inverse deviation
    (None if not read) and variance."""
    b, width = call.builder, (x.shape[1],)
    scale, shift = call.optional(weight, 1, width), call.optional(bias, 0, width)
    if running is None:
        running = (b.broadcast(b.constant(np.zeros((), x.dtype)), width),) * 2
    # With momentum 0 the operator gives the statistics of this batch alone.
    attributes = {"training_mode": 1, "epsilon": float(epsilon), "momentum": 0.0}
    operands = [x, scale, shift, *running]
    result, mean, variance = b.apply("BatchNormalization", operands, 3, attributes)
    inverse = b.rsqrt(b.add(variance, float(epsilon))) if 2 in call.used else None
    return result, mean, inverse, variance


def _updated(running: SymbolicTensor, now: SymbolicTensor, momentum: float) -> SymbolicTensor:
    """The running statistic after this batch."""
    return running * (1.0 - momentum) + now * float(momentum)


LOWERINGS: dict[Any, Row] = {
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: KeptWhole(_batch_statistics, exported=False),
    aten._native_batch_norm_legit_functional.default: KeptWhole(_functional_batch_norm),
    aten.native_layer_norm.default: _layer_norm,
    aten.layer_norm.default: KeptWhole(lambda call, *operands: _layer_norm(call, *operands)[0]),
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.native_group_norm.default: _group_norm, aten.rms_norm.default: KeptWhole(_rms_norm),
}  # fmt: skip
