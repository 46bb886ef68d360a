"""Attention: torch's `scaled_dot_product_attention`, and its CPU kernel with the backward pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, Several, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType, int64_array

aten = torch.ops.aten


@rounded_once
def _attention(
    call: Call, query: SymbolicTensor, key: SymbolicTensor, value: SymbolicTensor,
    attn_mask: SymbolicTensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> SymbolicTensor:  # fmt: skip
    """softmax(Q K' scale + mask) V of [..., length, width]; zero in rows that mask all keys."""
    b = call.builder
    if enable_gqa:
        key, value = (_repeated(call, x, query.shape[-3]) for x in (key, value))
    mask = hidden = None
    if attn_mask is not None:
        mask = _mask(call, attn_mask, query)
        hidden = _hidden(call, mask)
        if mask.data_type is not DataType.BOOL:
            # Weights of a row of -inf are NaN, which the gradient of Add hands to queries and keys.
            mask = b.where(hidden, 0.0, mask)
    scores = _scores(call, b.mul(query, _factor(query, scale)), key, mask, is_causal)
    weights = b.softmax(scores)
    if hidden is not None:
        weights = b.where(hidden, 0.0, weights)
    return b.matmul(weights, value)


def _mask(call: Call, mask: SymbolicTensor, scores: SymbolicTensor) -> SymbolicTensor:
    """A boolean mask as it is, any other one in the type of the scores."""
    is_bool = mask.data_type is DataType.BOOL
    return mask if is_bool else call.builder.cast(mask, scores.data_type)


def _hidden(call: Call, mask: SymbolicTensor) -> SymbolicTensor:
    """Which rows of a mask hide all keys.

    From the mask, not from the scores: it is smaller, and often a constant.
    """
    most = call.builder.reduce_max(mask, -1, keepdims=True)
    is_bool = mask.data_type is DataType.BOOL
    return call.builder.op("Not", most) if is_bool else call.builder.equal(most, -math.inf)


def _repeated(call: Call, x: SymbolicTensor, heads: int) -> SymbolicTensor:
    """Repeat each head of [..., few, length, width] to get `heads` of them."""
    *lead, few, length, width = x.shape
    if few == heads:
        return x
    b, apart = call.builder, call.builder.reshape(x, (*lead, few, 1, length, width))
    wide = b.broadcast(apart, (*lead, few, heads // few, length, width))
    return b.reshape(wide, (*lead, heads, length, width))


def _factor(query: SymbolicTensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(
    call: Call, scaled: SymbolicTensor, key: SymbolicTensor, mask: SymbolicTensor | None,
    is_causal: bool,
) -> SymbolicTensor:  # fmt: skip
    """Scores of queries and keys; -inf where masked."""
    b = call.builder
    scores = b.matmul(scaled, b.swapaxes(key, -1, -2))
    if is_causal:
        rows, columns = (b.op("Range", 0, int64_array([n], ()), 1) for n in scores.shape[-2:])
        is_later = b.op("Greater", columns, b.unsqueeze(rows, -1))
        closed, opened = (np.asarray(x, scores.dtype) for x in (-math.inf, 0.0))
        # Adding is faster than Where on scores.
        scores = b.add(scores, b.where(is_later, closed, opened))
    if mask is not None and mask.data_type is DataType.BOOL:
        return b.where(mask, scores, -math.inf)
    return scores if mask is None else b.add(scores, mask)


# The CPU kernel ------------------------------------------------------------------------------


@rounded_once
def _kernel(
    call: Call, query: SymbolicTensor, key: SymbolicTensor, value: SymbolicTensor,
    dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: SymbolicTensor | None = None,
    scale: float | None = None,
) -> Several:  # fmt: skip
    _check_dropout(dropout_p)
    key, value = (_repeated(call, x, query.shape[-3]) for x in (key, value))
    if 1 not in call.used:
        result = _attention(call, query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return result, None
    b = call.builder
    mask = None if attn_mask is None else _mask(call, attn_mask, query)
    scores = _scores(call, b.mul(query, _factor(query, scale)), key, mask, is_causal)
    weights = b.softmax(scores)
    if mask is not None:
        weights = b.where(_hidden(call, mask), 0.0, weights)
    return b.matmul(weights, value), b.reduce("log_sum_exp", scores, -1, False)


@rounded_once
def _kernel_backward(
    call: Call, grad: SymbolicTensor, query: SymbolicTensor, key: SymbolicTensor,
    value: SymbolicTensor, result: SymbolicTensor, log_sums: SymbolicTensor, dropout_p: float,
    is_causal: bool, *, attn_mask: SymbolicTensor | None = None, scale: float | None = None,
) -> Several:  # fmt: skip
    """Recomputes the weights from the scores and the logarithms of their sums."""
    _check_dropout(dropout_p)
    b, few = call.builder, key.shape[-3]
    scaled = b.mul(query, _factor(query, scale))
    key, value = (_repeated(call, x, query.shape[-3]) for x in (key, value))
    mask = None if attn_mask is None else _mask(call, attn_mask, query)
    scores = _scores(call, scaled, key, mask, is_causal)
    weights = b.exp(b.sub(scores, b.unsqueeze(log_sums, -1)))
    if mask is not None:
        weights = b.where(_hidden(call, mask), 0.0, weights)
    of_value = b.matmul(b.swapaxes(weights, -1, -2), grad)
    of_weights = b.matmul(grad, b.swapaxes(value, -1, -2))
    row_sums = b.reduce_sum(b.mul(grad, result), -1, keepdims=True)
    of_scores = b.mul(weights, b.sub(of_weights, row_sums))
    of_query = b.mul(b.matmul(of_scores, key), _factor(query, scale))
    of_key = b.matmul(b.swapaxes(of_scores, -1, -2), scaled)
    return of_query, _summed(call, of_key, few), _summed(call, of_value, few)


def _summed(call: Call, x: SymbolicTensor, few: int) -> SymbolicTensor:
    """The gradient of `_repeated`: sum the copies of each of `few` heads."""
    *lead, heads, length, width = x.shape
    if few == heads:
        return x
    apart = call.builder.reshape(x, (*lead, few, heads // few, length, width))
    return call.builder.reduce_sum(apart, -3)


def _check_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise CompileError(
            "attention with dropout in its kernel is not supported", expected="dropout_p=0",
            got=f"dropout_p={dropout_p}", remedy="apply dropout outside of the attention",
        )  # fmt: skip


LOWERINGS: dict[Any, Row] = {
    aten.scaled_dot_product_attention.default: KeptWhole(_attention),
    aten._scaled_dot_product_flash_attention_for_cpu.default: KeptWhole(_kernel, exported=False),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _kernel_backward,
}
