"""Attention as torch's CPU kernel gives it, and its backward pass from the logarithms of sums.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Lowering, rounded_once
from stitch.frontend.torch.lowering.attention import attention, repeated
from stitch.graph import SymbolicTensor

aten = torch.ops.aten
Several = tuple[SymbolicTensor | None, ...]


@rounded_once
def _forward(
    call: Call,
    query: SymbolicTensor,
    key: SymbolicTensor,
    value: SymbolicTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: SymbolicTensor | None = None,
    scale: float | None = None,
) -> Several:
    _check_dropout(dropout_p)
    key, value = (repeated(call, x, query.shape[-3]) for x in (key, value))
    if 1 not in call.used:
        made = attention(call, query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return made, None
    b = call.builder
    scores = _scores(call, _scaled(call, query, scale), key, attn_mask, is_causal)
    return b.matmul(b.softmax(scores), value), b.reduce("log_sum_exp", scores, -1, False)


@rounded_once
def _backward(
    call: Call,
    grad: SymbolicTensor,
    query: SymbolicTensor,
    key: SymbolicTensor,
    value: SymbolicTensor,
    result: SymbolicTensor,
    log_sums: SymbolicTensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: SymbolicTensor | None = None,
    scale: float | None = None,
) -> Several:
    """The weights come back from the scores and the logarithms of their sums."""
    _check_dropout(dropout_p)
    b, scaled, few = call.builder, _scaled(call, query, scale), key.shape[-3]
    key, value = (repeated(call, x, query.shape[-3]) for x in (key, value))
    scores = _scores(call, scaled, key, attn_mask, is_causal)
    weights = b.exp(b.sub(scores, b.unsqueeze(log_sums, -1)))
    of_value = b.matmul(b.swapaxes(weights, -1, -2), grad)
    of_weights = b.matmul(grad, b.swapaxes(value, -1, -2))
    kept = b.reduce_sum(b.mul(grad, result), -1, keepdims=True)
    of_scores = b.mul(weights, b.sub(of_weights, kept))
    of_query = b.mul(b.matmul(of_scores, key), _factor(query, scale))
    of_key = b.matmul(b.swapaxes(of_scores, -1, -2), scaled)
    return of_query, _summed(call, of_key, few), _summed(call, of_value, few)


def _summed(call: Call, x: SymbolicTensor, few: int) -> SymbolicTensor:
    """[..., heads, length, width] with the heads that one of `few` was repeated for added up."""
    *lead, heads, length, width = x.shape
    if few == heads:
        return x
    apart = call.builder.reshape(x, (*lead, few, heads // few, length, width))
    return call.builder.reduce_sum(apart, -3)


def _check_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise CompileError("attention with dropout inside its kernel")


def _factor(query: SymbolicTensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scaled(call: Call, query: SymbolicTensor, scale: float | None) -> SymbolicTensor:
    return call.builder.mul(query, _factor(query, scale))


def _scores(
    call: Call,
    scaled: SymbolicTensor,
    key: SymbolicTensor,
    mask: SymbolicTensor | None,
    is_causal: bool,
) -> SymbolicTensor:
    """What each query makes of each key; minus infinity where it may not see it."""
    b = call.builder
    scores = b.matmul(scaled, b.swapaxes(key, -1, -2))
    if is_causal:
        later = np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), 1)
        scores = b.add(scores, later.astype(scores.dtype))
    return scores if mask is None else b.add(scores, b.cast(mask, scores.data_type))


LOWERINGS: dict[Any, Lowering] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
