"""Attention and embeddings as ONNX Runtime's optimizer writes them, in plain operations.

Comes in: a node of `com.microsoft`. Goes out: what plain operations make of its operands. Must not
know: scopes, files.
"""

from __future__ import annotations

import math

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

_Some = list[SymbolicTensor | None]


def attention(builder: ComputationGraphBuilder, call: NodeCall) -> _Some:
    """Heads of one projected tensor; and the keys and values, where there were earlier ones."""
    x, weights = call.required(0), call.required(1)
    if x.ndim != 3 or weights.ndim != 2:
        raise call.malformed("Attention has operands [batch, length, width] and [width, widths]")
    bias = call.operand(2)
    widths = call.wholes("qkv_hidden_sizes") or (weights.shape[1] // 3,) * 3
    if len(widths) != 3 or sum(widths) != weights.shape[1] or widths[0] != widths[1]:
        raise call.unfit("qkv_hidden_sizes", f"three widths of {weights.shape[1]}", widths)
    projected = builder.op("MatMul", x, weights)
    projected = projected if bias is None else projected + bias
    parts = builder.apply("Split", [projected, list(widths)], 3, {"axis": -1})
    query, key, value = (_heads(builder, call, part) for part in parts)
    past = call.operand(4)
    if past is not None:
        earlier = [builder.op("Squeeze", half, [0]) for half in
                   builder.apply("Split", [past, [1, 1]], 2, {"axis": 0})]  # fmt: skip
        key, value = (
            builder.op("Concat", old, new, axis=2)
            for old, new in zip(earlier, (key, value), strict=True)
        )
    attended = _attended(builder, call, query, key, value, call.operand(3), call.operand(5))
    pair = [builder.op("Unsqueeze", half, [0]) for half in (key, value)]
    present = builder.op("Concat", *pair, axis=0) if _wants(call, 1) else None
    return [attended, present]


def multi_head_attention(builder: ComputationGraphBuilder, call: NodeCall) -> _Some:
    """Heads of three tensors; and the keys and values, those of earlier calls among them."""
    given = [call.required(index) for index in range(3)]
    if given[0].ndim != 3 or given[1].ndim != given[2].ndim or given[1].ndim not in (3, 4):
        raise call.refused(
            "operator com.microsoft.MultiHeadAttention is not supported on packed operands",
            expected="query, key and value of [batch, length, width]",
            got=", ".join(str(list(one.shape)) for one in given),
        )  # fmt: skip
    bias = call.operand(3)
    if bias is not None:
        widths = [one.shape[-1] for one in given]
        if given[1].ndim == 4:
            raise call.refused(
                "operator com.microsoft.MultiHeadAttention is not supported with a "
                "bias of keys in heads",
            )  # fmt: skip
        parts = builder.apply("Split", [bias, widths], 3, {"axis": 0})
        given = [one + part for one, part in zip(given, parts, strict=True)]
    query, key, value = (
        one if one.ndim == 4 else _heads(builder, call, one) for one in given
    )  # fmt: skip
    old = [call.operand(6), call.operand(7)]
    key, value = (
        new if before is None else builder.op("Concat", before, new, axis=2)
        for before, new in zip(old, (key, value), strict=True)
    )
    attended = _attended(builder, call, query, key, value, call.operand(4), call.operand(5))
    return [attended, key, value]


def _wants(call: NodeCall, index: int) -> bool:
    return len(call.outputs) > index and call.outputs[index] != ""


def _heads(builder: ComputationGraphBuilder, call: NodeCall, x: SymbolicTensor) -> SymbolicTensor:
    """[batch, length, width] as [batch, heads, length, width of a head]."""
    heads = call.whole("num_heads")
    if heads < 1 or x.shape[-1] % heads:
        raise call.unfit("num_heads", f"a divisor of {x.shape[-1]}", heads)
    apart = builder.op("Reshape", x, [*x.shape[:2], heads, x.shape[-1] // heads])
    return builder.op("Transpose", apart, perm=[0, 2, 1, 3])


def _attended(
    builder: ComputationGraphBuilder,
    call: NodeCall,
    query: SymbolicTensor,
    key: SymbolicTensor,
    value: SymbolicTensor,
    mask: SymbolicTensor | None,
    added: SymbolicTensor | None,
) -> SymbolicTensor:
    """What the queries attend to, heads side by side again."""
    if query.ndim != 4 or query.shape[-1] == 0 or not query.data_type.is_floating:
        raise call.malformed(f"{call.op} takes heads of real numbers", got=str(query.type))
    scale = call.real("scale") or 1 / math.sqrt(query.shape[-1])
    turned = builder.op("Transpose", key, perm=[0, 1, 3, 2])
    scores = builder.op("MatMul", query, turned) * scale
    hidden = _hidden(builder, call, mask, scores)
    scores = scores if hidden is None else scores + hidden
    scores = scores if added is None else scores + added
    attended = builder.op("MatMul", builder.op("Softmax", scores, axis=-1), value)
    if attended.ndim != 4:
        raise call.malformed(
            f"the operands of {call.op} do not fit", expected="[batch, heads, length, width]",
            got=str(list(attended.shape)),
        )  # fmt: skip
    batch, heads, length, width = attended.shape
    side_by_side = builder.op("Transpose", attended, perm=[0, 2, 1, 3])
    return builder.op("Reshape", side_by_side, [batch, length, heads * width])


def _hidden(
    builder: ComputationGraphBuilder,
    call: NodeCall,
    mask: SymbolicTensor | None,
    scores: SymbolicTensor,
) -> SymbolicTensor | None:
    """What is added to scores of places that may not be seen, or None where all may be."""
    length, total = scores.shape[-2:]
    dtype = scores.dtype
    hidden = None
    if mask is not None:
        seen = _seen(builder, call, mask, scores)
        filled = np.asarray(call.real("mask_filter_value", -10000.0), dtype)
        hidden = builder.op("Where", seen, np.zeros((), dtype), filled)
    if call.whole("unidirectional"):
        later = np.triu(np.ones((length, total), np.bool_), total - length + 1)
        # A row sees itself, so that none is -inf all along.
        least = np.asarray(-np.inf, dtype)
        before = np.zeros((), dtype) if hidden is None else hidden
        hidden = builder.op("Where", builder.constant(later), least, before)
    return hidden


def _seen(
    builder: ComputationGraphBuilder, call: NodeCall, mask: SymbolicTensor, scores: SymbolicTensor
) -> SymbolicTensor:
    """Flags of [batch, 1, length or 1, total length]."""
    batch, _, length, total = scores.shape
    if mask.shape == (batch, total):
        return builder.op("Unsqueeze", mask > 0, [1, 2])
    if mask.shape == (batch, length, total):
        return builder.op("Unsqueeze", mask > 0, [1])
    places = np.arange(total).astype(mask.dtype)
    if mask.shape == (batch,):
        return _before(builder, places, mask)
    if mask.shape == (2 * batch,):
        ends, starts = builder.apply("Split", [mask, [batch, batch]], 2, {"axis": 0})
        started = builder.op("Not", _before(builder, places, starts))
        return builder.op("And", started, _before(builder, places, ends))
    raise call.refused(
        f"operator com.microsoft.{call.op} is not supported with a mask of this shape",
        expected=f"{[batch, total]}, {[batch, length, total]}, {[batch]} or {[2 * batch]}",
        got=str(list(mask.shape)),
    )


def _before(
    builder: ComputationGraphBuilder, places: Array, ends: SymbolicTensor
) -> SymbolicTensor:
    """Whether places lie before the end of each row, as [batch, 1, 1, places]."""
    return builder.op("Less", builder.constant(places),
                      builder.op("Reshape", ends, [ends.size, 1, 1, 1]))  # fmt: skip


def embeddings(builder: ComputationGraphBuilder, call: NodeCall) -> _Some:
    """Words, places and segments: added and normalized; the rows' lengths; the sum."""
    ids, words, places = call.required(0), call.required(2), call.required(3)
    segments, kinds, mask, where = (call.operand(index) for index in (1, 4, 7, 8))
    if ids.ndim != 2:
        raise call.malformed("operand 0 of EmbedLayerNormalization is [batch, length]")
    batch, length = ids.shape
    if where is None:
        where = builder.constant(np.arange(length).reshape(1, length))
    added = builder.op("Gather", words, ids) + builder.op("Gather", places, where)
    if segments is not None and kinds is not None:
        added = added + builder.op("Gather", kinds, segments)
    operands, epsilon = (added, call.required(5), call.required(6)), call.real("epsilon", 1e-12)
    normalized = builder.op("LayerNormalization", *operands, axis=-1, epsilon=epsilon)
    counted: SymbolicTensor | None = None
    if _wants(call, 1) and mask is None:
        counted = builder.constant(np.zeros(batch, np.int32))
    elif _wants(call, 1) and mask is not None:
        ones = builder.op("Cast", mask == 1, to=ops.onnx_code(DataType.INT32))
        counted = builder.op("ReduceSum", ones, [1], keepdims=0)
    return [normalized, counted, added]
