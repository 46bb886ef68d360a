"""Attention as torch defines it: masks, causality, grouped heads, rows that see nothing.

Comes in: a `Call`, queries, keys, values, a mask. Goes out: operations in the builder.
"""

from __future__ import annotations

import math

import numpy as np

from stitch.frontend.torch.aten_call import Call, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType


@rounded_once
def attention(
    call: Call,
    query: SymbolicTensor,
    key: SymbolicTensor,
    value: SymbolicTensor,
    attn_mask: SymbolicTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SymbolicTensor:
    """softmax(Q K' scale + mask) V over [..., length, width]; rows without a key give zeros."""
    b = call.builder
    if enable_gqa:
        key, value = (repeated(call, x, query.shape[-3]) for x in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = b.matmul(b.mul(query, factor), b.swapaxes(key, -1, -2))
    if is_causal:
        later = np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), 1)
        scores = b.add(scores, later.astype(scores.dtype))
    if attn_mask is None:
        return b.matmul(b.softmax(scores), value)
    if attn_mask.data_type is DataType.BOOL:
        scores = b.where(attn_mask, scores, -math.inf)
    else:
        scores = b.add(scores, call.cast(attn_mask))
    weights = b.softmax(scores)
    if _may_hide_a_row(call, attn_mask, scores.shape):
        hidden = b.equal(b.reduce_max(scores, -1, keepdims=True), -math.inf)
        weights = b.where(hidden, 0.0, weights)
    return b.matmul(weights, value)


def _may_hide_a_row(call: Call, mask: SymbolicTensor, shape: tuple[int, ...]) -> bool:
    """Whether a row of the mask may hide every key, as far as is known before the run."""
    known = call.builder.known_data(mask)
    if known is None:
        return True
    open_keys = known if known.dtype == np.bool_ else known > -np.inf
    return not bool(np.broadcast_to(open_keys, shape).any(-1).all())


def repeated(call: Call, x: SymbolicTensor, heads: int) -> SymbolicTensor:
    """[..., few, length, width] with each head repeated until there are `heads`."""
    *lead, few, length, width = x.shape
    if few == heads:
        return x
    b = call.builder
    wide = b.broadcast(
        b.reshape(x, (*lead, few, 1, length, width)), (*lead, few, heads // few, length, width)
    )
    return b.reshape(wide, (*lead, heads, length, width))
