"""How aot_autograd takes a graph apart for Stitch: torch's core decompositions, and where not.

What Stitch has whole, or writes better itself, stays; what torch fuses for its own kernels (a whole
encoder layer) comes apart here.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions

from stitch.frontend.torch.lowering import KEPT_BY_AUTOGRAD
from stitch.frontend.torch.pool_gradients import DECOMPOSITIONS

aten = torch.ops.aten
#: Draws of other distributions, which torch makes of uniform and normal ones.
_DRAWS = (aten.exponential, aten.cauchy, aten.geometric, aten.log_normal)
#: Not in torch's core set, and taken apart by it well.
_TAKEN_APART = (
    *_DRAWS, aten.dist, aten.as_strided_copy,
    aten.view_copy, aten.permute_copy, aten.unbind_copy, aten.narrow_copy, aten.expand_copy,
    aten.select_copy, aten.slice_copy, aten.squeeze_copy, aten.unsqueeze_copy, aten.t_copy,
    aten.transpose_copy, aten.diagonal_copy, aten.unfold_copy, aten.alias_copy, aten.detach_copy,
    aten._native_batch_norm_legit, aten.native_batch_norm, aten._batch_norm_with_update_functional,
    aten.batch_norm_backward,
)  # fmt: skip
#: Given weights and statistics of another type than their elements, these compute in float32.
_NORMALIZATIONS = (
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)  # fmt: skip


def _attend(x: Any, qkv_weight: Any, qkv_bias: Any, heads: int, mask: Any, kind: Any) -> Any:
    """Self-attention of [N, L, E], as torch's encoder layer computes it when it does not train."""
    batch, length, width = x.shape
    parts = torch.nn.functional.linear(x, qkv_weight, qkv_bias)
    parts = parts.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    query, key, value = parts[0], parts[1], parts[2]
    scores = torch.matmul(query * (1.0 / math.sqrt(width // heads)), key.transpose(-1, -2))
    if mask is not None:
        # 0: [L, L]; 1: keys to leave out, [N, L]; 2: [N, heads, L, L] or what broadcasts to it.
        wide = mask.view(batch, 1, 1, length) if kind == 1 else mask
        hides = wide.dtype is torch.bool
        scores = scores.masked_fill(wide, -math.inf) if hides else scores + wide
    attended = torch.matmul(torch.softmax(scores, -1), value)
    return attended.permute(0, 2, 1, 3).reshape(batch, length, width)


def _encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any,
    norm_bias_1: Any, norm_weight_2: Any, norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any,
    ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None, mask_type: Any = None,
) -> Any:  # fmt: skip
    """torch's fused encoder layer (inference only), as the layers that it fuses."""
    functional = torch.nn.functional
    norms = ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))

    def normal(x: Any, which: int) -> Any:
        return functional.layer_norm(x, (embed_dim,), *norms[which], eps)

    def attended(x: Any) -> Any:
        heads = _attend(x, qkv_weight, qkv_bias, num_heads, mask, mask_type)
        return functional.linear(heads, proj_weight, proj_bias)

    def fed(x: Any) -> Any:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attended(normal(src, 0))
        return x + fed(normal(x, 1))
    x = normal(src + attended(src), 0)
    return normal(x + fed(x), 1)


def _in_one_type(operator: Any, apart: Any) -> Any:
    """A normalization of narrow elements by weights of float32, as autocast asks for: in float32.

    Its statistics are of float32 then, as those of torch's kernels are; its traced graph would say
    that they are narrow, and their rounding is all that some gradients would consist of.
    `apart`: how the operator is taken apart otherwise; None where it stays whole.
    """

    def decomposed(x: Any, *operands: Any) -> Any:
        given = [t for t in (x, *operands) if isinstance(t, torch.Tensor)]
        if len({t.dtype for t in given}) == 1:
            return NotImplemented if apart is None else apart(x, *operands)
        result, *others = (apart or operator)(x.float(), *operands)
        return result.to(x.dtype), *others

    return decomposed


def or_whole(table: dict[Any, Any]) -> dict[Any, Any]:
    """A table of decompositions by which an operator stays whole where taking it apart fails.

    torch's own raise for arguments that its kernels take: a value of 2.5 of addcmul of integers,
    groups of no elements.
    """

    def guarded(apart: Any) -> Any:
        @functools.wraps(apart)
        def decomposed(*operands: Any, **named: Any) -> Any:
            try:
                return apart(*operands, **named)
            except (ValueError, ZeroDivisionError):
                return NotImplemented

        return decomposed

    return {operator: guarded(apart) for operator, apart in table.items()}


@functools.cache
def decompositions() -> dict[Any, Any]:
    """The table for aot_autograd; built once."""
    # As `core_aten_decompositions`, which looks through all operators for such as are made of
    # others: that takes 0.06 s, and aot_autograd takes those apart anyway.
    table = dict(_core_aten_decompositions_post_autograd())
    table.update(get_decompositions(_TAKEN_APART))
    for kept in KEPT_BY_AUTOGRAD:
        table.pop(kept, None)
    for operator in _NORMALIZATIONS:
        table[operator] = _in_one_type(operator, table.get(operator))
    table[aten._transformer_encoder_layer_fwd.default] = _encoder_layer
    table.update(DECOMPOSITIONS)
    return or_whole(table)
