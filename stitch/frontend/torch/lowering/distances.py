"""ATen's distances between rows: of two sets (cdist), of all pairs of one (pdist), and gradients.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Row, rounded_once
from stitch.graph import SymbolicTensor

aten = torch.ops.aten


#: From how many rows on torch has Euclidean distances from products, if it is not told otherwise.
_ROWS = 25
_ALWAYS, _NEVER = 1, 2
#: Differences of rows that gradients are not to hold: more are products of matrices.
_MANY = 1 << 24


def _by_products(first: SymbolicTensor, second: SymbolicTensor, mode: int | None) -> bool:
    """Whether torch takes products for these sets: then digits are those."""
    if mode in (_ALWAYS, _NEVER):
        return mode == _ALWAYS
    return max(first.shape[-2], second.shape[-2]) > _ROWS


def _euclidean(call: Call, first: SymbolicTensor, second: SymbolicTensor) -> SymbolicTensor:
    """sqrt(x x' + y y' - 2 x y')."""
    b = call.builder
    squares = [b.reduce_sum(b.square(x), -1, keepdims=True) for x in (first, second)]
    product = b.matmul(b.mul(first, -2.0), b.swapaxes(second, -1, -2))
    both = b.add(b.add(product, squares[0]), b.swapaxes(squares[1], -1, -2))
    return b.sqrt(b.op("Max", both, 0.0))


def _apart(call: Call, first: SymbolicTensor, second: SymbolicTensor) -> SymbolicTensor:
    """Every row of one less every row of the other: [..., rows, other rows, width]."""
    return call.builder.sub(call.builder.unsqueeze(first, -2), call.builder.unsqueeze(second, -3))


def _length(call: Call, apart: SymbolicTensor, p: float) -> SymbolicTensor:
    """The norm of the last axis; of no elements it is zero."""
    b, size = call.builder, call.builder.abs(apart)
    if not apart.shape[-1]:
        return b.reduce_sum(size, -1)
    if p == 0:
        # NaN is neither equal nor different.
        differs = b.cast(b.not_equal(size, 0), size.data_type)
        return b.reduce_sum(b.where(b.op("IsNaN", size), size, differs), -1)
    if math.isinf(p):
        return b.reduce_max(size, -1)
    if p in (1, 2):
        return b.reduce(f"l{int(p)}", size, -1, False)
    return b.pow(b.reduce_sum(b.pow(size, p), -1), 1.0 / p)


def _slopes(
    call: Call, apart: SymbolicTensor, distance: SymbolicTensor, p: float
) -> SymbolicTensor:
    """How each distance changes with each difference; not at all where it is zero."""
    b, size, sign = call.builder, call.builder.abs(apart), call.builder.sign(apart)
    if p == 0:
        return b.mul(apart, 0.0)
    if p == 1:
        return sign
    wide = b.unsqueeze(distance, -1)
    if math.isinf(p):
        return b.mul(sign, b.cast(b.equal(size, wide), sign.data_type))
    is_zero = b.logical_or(b.equal(wide, 0), b.equal(size, 0)) if p < 2 else b.equal(wide, 0)
    share = b.div(b.where(is_zero, 1.0, size), b.where(is_zero, 1.0, wide))
    grown = share if p == 2 else b.pow(share, p - 1.0)
    return b.where(is_zero, 0.0, b.mul(sign, grown))


@rounded_once
def _between_sets(
    call: Call, first: SymbolicTensor, second: SymbolicTensor, p: float, mode: int | None
) -> SymbolicTensor:
    if p == 2 and _by_products(first, second, mode):
        return _euclidean(call, first, second)
    return _length(call, _apart(call, first, second), p)


@rounded_once
def _between_sets_backward(
    call: Call, grad: SymbolicTensor, first: SymbolicTensor, second: SymbolicTensor, p: float,
    distance: SymbolicTensor,
) -> SymbolicTensor:  # fmt: skip
    b = call.builder
    if 0 in grad.shape or 0 in call.shape:
        return call.filled(0)
    if p == 2 and first.size * second.shape[-2] > _MANY:
        # The sum over rows of share (first - second), as products of matrices.
        is_zero = b.equal(distance, 0)
        share = b.div(b.where(is_zero, 0.0, grad), b.where(is_zero, 1.0, distance))
        own = b.mul(first, b.reduce_sum(share, -1, keepdims=True))
        return b.reshape(b.sub(own, b.matmul(share, second)), call.shape)
    slopes = _slopes(call, _apart(call, first, second), distance, p)
    return b.reshape(b.reduce_sum(b.mul(b.unsqueeze(grad, -1), slopes), -2), call.shape)


def _pairs(count: int) -> tuple[Any, Any]:
    first, second = np.triu_indices(count, 1)
    return first.astype(np.int64), second.astype(np.int64)


def _of_pairs(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    first, second = (call.builder.gather(x, places, 0) for places in _pairs(x.shape[0]))
    return call.builder.sub(first, second)


@rounded_once
def _within_set(call: Call, x: SymbolicTensor, p: float = 2) -> SymbolicTensor:
    if 0 in call.shape:
        return call.filled(0)
    return _length(call, _of_pairs(call, x), p)


@rounded_once
def _within_set_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, p: float, distance: SymbolicTensor
) -> SymbolicTensor:
    b = call.builder
    if 0 in grad.shape or 0 in x.shape:
        return call.filled(0)
    parts = b.mul(b.unsqueeze(grad, -1), _slopes(call, _of_pairs(call, x), distance, p))
    total = call.filled(0)
    for places, part in zip(_pairs(x.shape[0]), (parts, b.neg(parts)), strict=True):
        index = b.constant(np.ascontiguousarray(np.broadcast_to(places[:, None], part.shape)))
        total = b.op("ScatterElements", total, index, part, axis=0, reduction="add")
    return total


LOWERINGS: dict[Any, Row] = {
    aten._cdist_forward.default: _between_sets,
    aten._cdist_backward.default: _between_sets_backward,
    aten._pdist_forward.default: _within_set, aten._pdist_backward.default: _within_set_backward,
}  # fmt: skip
