"""The decompositions of aot_autograd for Stitch: torch's core set without the operators that Stitch
lowers whole, and with operators that torch fuses for its own kernels (an encoder layer)."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from stitch.frontend.torch.lowering import KEPT_BY_AUTOGRAD, POOL_DECOMPOSITIONS
from stitch.frontend.torch.torch_internals import core_decompositions, get_decompositions

aten = torch.ops.aten
#: Operators outside torch's core set that torch has decompositions for.
_FURTHER = (
    aten.exponential, aten.cauchy, aten.geometric, aten.log_normal, aten.dist, aten.as_strided_copy,
    aten.view_copy, aten.permute_copy, aten.unbind_copy, aten.narrow_copy, aten.expand_copy,
    aten.select_copy, aten.slice_copy, aten.squeeze_copy, aten.unsqueeze_copy, aten.t_copy,
    aten.transpose_copy, aten.diagonal_copy, aten.unfold_copy, aten.alias_copy, aten.detach_copy,
    aten._native_batch_norm_legit, aten.native_batch_norm, aten._batch_norm_with_update_functional,
    aten.batch_norm_backward,
)  # fmt: skip
#: With weights or statistics of another type than their elements, these compute in float32.
_NORMALIZATIONS = (
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)  # fmt: skip


def _attend(x: Any, qkv_weight: Any, qkv_bias: Any, heads: int, mask: Any, kind: Any) -> Any:
    """Self-attention of [N, L, E], as in torch's fused encoder layer."""
    batch, length, width = x.shape
    parts = torch.nn.functional.linear(x, qkv_weight, qkv_bias)
    parts = parts.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    query, key, value = parts[0], parts[1], parts[2]
    scores = torch.matmul(query * (1.0 / math.sqrt(width // heads)), key.transpose(-1, -2))
    if mask is not None:
        # kind 0: [L, L]; 1: masked keys, [N, L]; 2: broadcastable to [N, heads, L, L].
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
    """The layers of torch's fused encoder layer (inference only)."""
    functional = torch.nn.functional
    norms = ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))

    def normalize(x: Any, which: int) -> Any:
        return functional.layer_norm(x, (embed_dim,), *norms[which], eps)

    def attend(x: Any) -> Any:
        heads = _attend(x, qkv_weight, qkv_bias, num_heads, mask, mask_type)
        return functional.linear(heads, proj_weight, proj_bias)

    def feed_forward(x: Any) -> Any:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attend(normalize(src, 0))
        return x + feed_forward(normalize(x, 1))
    x = normalize(src + attend(src), 0)
    return normalize(x + feed_forward(x), 1)


def _attention_with_dropout(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Attention that draws random numbers, by torch's composition; others stay whole."""
    if not dropout_p:
        return NotImplemented
    hidden = None
    if mask is not None:
        if mask.dtype is torch.bool:  # The composition adds it.
            mask = query.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
        # The composition has NaN for gradients of rows that hide all keys.
        hidden = (mask == -math.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(hidden, 0.0)
    attend = aten._scaled_dot_product_attention_math.default
    result = attend(query, key, value, mask, dropout_p, is_causal, **options)[0]
    return result if hidden is None else result.masked_fill(hidden, 0.0)


#: torch's number of the reduction of an embedding bag by its maximum, which stays whole.
_MAXIMUM, _MEAN = 2, 1


def _embedding_bag(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Sum the rows of each bag. Results: the sums or means, the bag of each index, the number of
    rows of each bag, and zeros."""
    if mode == _MAXIMUM:
        return NotImplemented
    count = len(offsets) - int(include_last_offset)
    sizes = torch.zeros(count, dtype=torch.int64)
    if not len(indices) or not count:
        return weight.new_zeros(count, weight.shape[1]), torch.zeros_like(indices), sizes, sizes
    bags = torch.searchsorted(offsets[:count].long(), torch.arange(len(indices)), right=True) - 1
    rows, is_counted = _counted_rows(weight.index_select(0, indices), indices, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.to(rows.dtype).unsqueeze(1)
    sizes = sizes.scatter_add(0, bags, is_counted.long())
    total = _summed_rows(rows, bags, count)
    if mode == _MEAN:
        total = total / sizes.clamp(min=1).unsqueeze(1)
    bags, sizes = bags.to(indices.dtype), sizes.to(indices.dtype)
    return total.to(weight.dtype), bags, sizes, torch.zeros_like(sizes)


def _embedding_bag_backward(
    grad: Any, indices: Any, offsets: Any, bags: Any, sizes: Any, maxima: Any, num_weights: int,
    scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    if mode == _MAXIMUM or scale_grad_by_freq:
        return NotImplemented
    if not len(indices) or not len(grad):
        return grad.new_zeros(num_weights, grad.shape[1])
    wide = grad / sizes.clamp(min=1).unsqueeze(1) if mode == _MEAN else grad
    rows, _ = _counted_rows(wide.index_select(0, bags), indices, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.to(rows.dtype).unsqueeze(1)
    return _summed_rows(rows, indices, num_weights).to(grad.dtype)


def _counted_rows(rows: Any, indices: Any, padding: int) -> tuple[Any, Any]:
    """Rows in at least float32, with zeros for padding, and which rows are not padding."""
    is_counted = indices != padding
    wide = rows if rows.dtype is torch.float64 else rows.float()
    return torch.where(is_counted.unsqueeze(1), wide, 0.0) if padding >= 0 else wide, is_counted


def _summed_rows(rows: Any, places: Any, count: int) -> Any:
    index = places.long().unsqueeze(1).expand_as(rows)
    return rows.new_zeros(count, rows.shape[1]).scatter_add(0, index, rows)


#: Of operators outside torch's core set, also for torch.export. Torch's rule for adaptive maxima
#: does not apply to windows of different lengths.
EXPORTED_DECOMPOSITIONS = {
    **get_decompositions((aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.scaled_dot_product_attention.default: _attention_with_dropout,
}


def _in_one_type(operator: Any, rule: Any) -> Any:
    """Compute a normalization of narrow elements by float32 weights (autocast) in float32.

    Its statistics are then float32, as in torch's kernels. The traced graph would make them narrow,
    and some gradients would consist of their rounding errors.
    `rule`: the operator's decomposition; None if it stays whole.
    """

    def decomposed(x: Any, *operands: Any) -> Any:
        tensors = [t for t in (x, *operands) if isinstance(t, torch.Tensor)]
        if len({t.dtype for t in tensors}) == 1:
            return NotImplemented if rule is None else rule(x, *operands)
        result, *others = (rule or operator)(x.float(), *operands)
        return result.to(x.dtype), *others

    return decomposed


def or_whole(table: dict[Any, Any]) -> dict[Any, Any]:
    """Make an operator stay whole if its decomposition fails: torch's fail for some arguments that
    its kernels accept, such as addcmul of integers with value=2.5, or groups without elements."""

    def guarded(rule: Any) -> Any:
        @functools.wraps(rule)
        def decomposed(*operands: Any, **named: Any) -> Any:
            try:
                return rule(*operands, **named)
            except (ValueError, ZeroDivisionError):
                return NotImplemented

        return decomposed

    return {operator: guarded(rule) for operator, rule in table.items()}


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Return the decompositions for aot_autograd."""
    # Not `core_aten_decompositions`: it searches for composite operators, which takes 0.06 s, and
    # aot_autograd decomposes those anyway.
    table = dict(core_decompositions())
    table.update(get_decompositions(_FURTHER))
    for kept in KEPT_BY_AUTOGRAD:
        table.pop(kept, None)
    for operator in _NORMALIZATIONS:
        table[operator] = _in_one_type(operator, table.get(operator))
    table[aten._transformer_encoder_layer_fwd.default] = _encoder_layer
    table.update(POOL_DECOMPOSITIONS)
    table.update(EXPORTED_DECOMPOSITIONS)
    table[aten._embedding_bag_backward.default] = _embedding_bag_backward
    return or_whole(table)
