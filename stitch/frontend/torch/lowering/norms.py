"""Batch normalization in training mode: the batch's own statistics, and running ones that follow.

Comes in: what aten gives `_native_batch_norm_legit_functional`. Goes out: the result, the batch's
mean and inverse deviation, and the next running statistics as torch counts them (ONNX's variance is
that of the population, torch's running one that of a sample). Importing this module needs the
package torch (an optional extra).
"""

from __future__ import annotations

import math

import torch

from stitch.frontend.torch.aten_call import Call, Lowering, rounded_once
from stitch.graph import SymbolicTensor

aten = torch.ops.aten


@rounded_once
def _batch_norm(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    running_mean: SymbolicTensor,
    running_variance: SymbolicTensor,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[SymbolicTensor | None, ...]:
    b, axes = call.builder, (0, *range(2, len(x.shape)))
    if not training:
        width = (x.shape[1],)
        scale, shift = call.optional(weight, 1, width), call.optional(bias, 0, width)
        made = b.batch_norm(x, scale, shift, running_mean, running_variance, epsilon=float(epsilon))
        return made, None, None, running_mean, running_variance
    if {1, 2}.isdisjoint(call.used):
        return _whole(call, x, weight, bias, (running_mean, running_variance), momentum, epsilon)
    mean = b.reduce_mean(x, axes, keepdims=True)
    centred = b.sub(x, mean)
    variance = b.reduce_mean(b.square(centred), axes, keepdims=True)
    rstd = b.rsqrt(b.add(variance, float(epsilon)))
    wide = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    factor = rstd if weight is None else b.mul(rstd, b.reshape(weight, wide))
    result = b.mul(centred, factor)
    if bias is not None:
        result = b.add(result, b.reshape(bias, wide))
    count = math.prod(x.shape[axis] for axis in axes)
    flat = [b.reshape(part, (x.shape[1],)) for part in (mean, rstd, variance)]
    sample = b.mul(flat[2], count / max(1, count - 1))
    return (
        result, flat[0], flat[1],
        _moved(running_mean, flat[0], momentum), _moved(running_variance, sample, momentum),
    )  # fmt: skip


def _whole(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    running: tuple[SymbolicTensor, SymbolicTensor],
    momentum: float,
    epsilon: float,
) -> tuple[SymbolicTensor | None, ...]:
    """As one operator, where nobody asks for the batch's statistics themselves."""
    b, width = call.builder, (x.shape[1],)
    scale, shift = call.optional(weight, 1, width), call.optional(bias, 0, width)
    attributes = {
        "training_mode": 1, "epsilon": float(epsilon), "momentum": 1.0 - float(momentum),
    }  # fmt: skip
    result, mean, variance = b.apply(
        "BatchNormalization", [x, scale, shift, *running], 3, attributes
    )
    count = math.prod(x.shape) // x.shape[1]
    kept = running[1] * (1.0 - momentum)
    # ONNX adds the variance of the population, torch that of a sample.
    return result, None, None, mean, kept + (variance - kept) * (count / max(1, count - 1))


def _moved(running: SymbolicTensor, now: SymbolicTensor, momentum: float) -> SymbolicTensor:
    """The running statistic after this batch."""
    return running * (1.0 - momentum) + now * float(momentum)


LOWERINGS: dict[object, Lowering] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
}
