"""ATen's activations, and elementwise functions that take several operators of ONNX."""

from __future__ import annotations

import math
from typing import Any

import torch

from stitch.frontend.torch.aten_call import (
    Call,
    KeptWhole,
    Lowering,
    Number,
    Row,
    built,
    rounded_once,
)  # fmt: skip
from stitch.graph import ComputationGraphBuilder as Builder
from stitch.graph import SymbolicTensor

aten = torch.ops.aten


@rounded_once
def _expm1(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """exp(x) - 1 as 2 exp(x/2) sinh(x/2), which is accurate near zero."""
    b = call.builder
    # Below -80 the result is -1 in every type, but exp(x/2) underflows.
    half = b.mul(b.maximum(call.cast(x), -80.0), 0.5)
    return b.mul(b.mul(b.exp(half), b.op("Sinh", half)), 2.0)


@rounded_once
def log1p(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """log(u) x / (u - 1) of the rounded u = 1 + x (Kahan), which is accurate near zero."""
    b, plain = call.builder, call.cast(x)
    above = b.add(plain, 1.0)
    rest = b.sub(above, 1.0)
    is_same = b.logical_or(b.equal(rest, 0.0), b.equal(plain, math.inf))
    # Divide by one where the result is x: otherwise gradients would divide by zero.
    share = b.div(plain, b.where(is_same, 1.0, rest))
    scaled = b.mul(b.log(b.where(is_same, 1.0, above)), share)
    return b.where(is_same, plain, scaled)


def _log_of_base(base: float) -> Lowering:
    @rounded_once
    def lowered(call: Call, x: SymbolicTensor) -> SymbolicTensor:
        return call.builder.mul(call.builder.log(call.cast(x)), 1.0 / math.log(base))

    return lowered


@rounded_once
def _erfc(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    return call.builder.sub(call.cast(1.0), call.builder.erf(call.cast(x)))


@rounded_once
def _elu(
    call: Call, x: SymbolicTensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> SymbolicTensor:
    b = call.builder
    if input_scale == 1:
        bent = b.elu(x, float(alpha))
        return bent if scale == 1 else b.mul(bent, scale)
    negative = b.mul(b.sub(b.exp(b.mul(x, input_scale)), 1.0), alpha * scale)
    return b.where(b.greater(x, 0), b.mul(x, scale), negative)


def _leaky_relu(call: Call, x: SymbolicTensor, negative_slope: float = 0.01) -> SymbolicTensor:
    return call.builder.leaky_relu(x, float(negative_slope))


def _logit(call: Call, x: SymbolicTensor, eps: float | None = None) -> SymbolicTensor:
    """log(x / (1 - x)) of x clipped to [eps, 1 - eps], bounds of the result's type."""
    b, bounded = call.builder, call.cast(x)
    if eps is not None:
        low = call.cast(eps)
        bounded = b.clip(bounded, low, b.sub(1.0, low))
    return b.log(b.div(bounded, b.sub(1.0, bounded)))


def _hardtanh(
    call: Call, x: SymbolicTensor, min_val: Number = -1, max_val: Number = 1
) -> SymbolicTensor:
    return call.builder.clip(call.cast(x), call.cast(min_val), call.cast(max_val))


@rounded_once
def _softplus(
    call: Call, x: SymbolicTensor, beta: float = 1, threshold: float = 20
) -> SymbolicTensor:
    b = call.builder
    scaled = x if beta == 1 else b.mul(x, beta)
    smooth = b.softplus(scaled)
    bent = smooth if beta == 1 else b.div(smooth, beta)
    return b.where(b.greater(scaled, threshold), x, bent)


LOWERINGS: dict[Any, Row] = {
    aten.rsqrt.default: rounded_once(built(Builder.rsqrt, cast=True)),
    aten.expm1.default: _expm1,
    aten.log1p.default: log1p, aten.log2.default: _log_of_base(2.0),
    aten.log10.default: _log_of_base(10.0),
    aten.exp2.default: lambda call, x: call.builder.pow(call.cast(2.0), call.cast(x)),
    aten.erfc.default: _erfc, aten.gelu.default: KeptWhole(built(Builder.gelu)),
    aten.silu.default: KeptWhole(rounded_once(built(Builder.silu))),
    aten.elu.default: KeptWhole(_elu),
    aten.leaky_relu.default: KeptWhole(_leaky_relu), aten.hardtanh.default: KeptWhole(_hardtanh),
    aten.hardsigmoid.default: KeptWhole(
        lambda call, x: call.builder.op("HardSigmoid", x, alpha=1.0 / 6.0, beta=0.5)
    ),
    aten.logit.default: KeptWhole(_logit), aten.softplus.default: KeptWhole(_softplus),
}  # fmt: skip
