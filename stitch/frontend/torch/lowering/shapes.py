"""ATen operators that move elements as their shapes say: views, slices, joins, pads.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Views become
values of their own: the graph is functional. Must not know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Number, Row
from stitch.graph import SymbolicTensor

aten = torch.ops.aten


def _reshape(call: Call, x: SymbolicTensor, *_: Any) -> SymbolicTensor:
    """Anything that keeps the elements in their order: torch knows the result's shape."""
    return call.builder.reshape(x, call.shape)


def _permute(call: Call, x: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    order = tuple(d % len(dims) for d in dims)
    return x if order == tuple(range(len(dims))) else call.builder.transpose(x, order)


def _swap(call: Call, x: SymbolicTensor, first: int, second: int) -> SymbolicTensor:
    return call.builder.swapaxes(x, first, second) if len(x.shape) > 1 else x


def _matrix_transpose(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    return call.builder.transpose(x)


def _expand(call: Call, x: SymbolicTensor, *_: Any, **__: Any) -> SymbolicTensor:
    return call.builder.broadcast(x, call.shape)


def slice_tensor(
    call: Call,
    x: SymbolicTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> SymbolicTensor:
    """From `start` up to `end` along one axis, both cut to its length as in Python."""
    length = x.shape[dim]
    first, last, _ = slice(start, end, step).indices(length)
    if (first, last, step) == (0, length, 1):
        return x
    steps = None if step == 1 else [step]
    return call.builder.slice(x, [first], [max(first, last)], [dim % len(x.shape)], steps)


def _select(call: Call, x: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    place = np.asarray(index % x.shape[dim], np.int64)
    return call.builder.gather(x, place, dim)


def _concat(call: Call, tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    rank = len(call.shape)
    parts = [call.cast(t) for t in tensors if len(t.shape) == rank]
    return parts[0] if len(parts) == 1 else call.builder.concat(parts, dim)


def _stack(call: Call, tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    return call.builder.stack([call.cast(t) for t in tensors], dim % len(call.shape))


def _split(
    call: Call, x: SymbolicTensor, sizes: int | Sequence[int], dim: int = 0
) -> tuple[SymbolicTensor, ...]:
    return call.builder.split(x, sizes, dim)


def _chunk(call: Call, x: SymbolicTensor, chunks: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
    return call.builder.chunk(x, chunks, dim)


def _unbind(call: Call, x: SymbolicTensor, dim: int = 0) -> tuple[SymbolicTensor, ...]:
    parts = call.builder.split(x, 1, dim)
    return tuple(call.builder.squeeze(part, dim) for part in parts)


def _flip(call: Call, x: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    return call.builder.reverse(x, tuple(dims))


def _repeat(call: Call, x: SymbolicTensor, repeats: Sequence[int]) -> SymbolicTensor:
    b = call.builder
    lead = len(repeats) - len(x.shape)
    wide = b.reshape(x, (1,) * lead + x.shape)
    return b.apply("Tile", [wide, list(repeats)], 1, {})[0]


def _pad(call: Call, x: SymbolicTensor, pad: Sequence[int], value: Number = 0) -> SymbolicTensor:
    """torch lists pairs from the last axis on; a negative pad cuts away."""
    b, rank = call.builder, len(x.shape)
    pairs = [(0, 0)] * (rank - len(pad) // 2)
    pairs += [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    for axis, (low, high) in enumerate(pairs):
        if low < 0 or high < 0:
            x = slice_tensor(call, x, axis, max(0, -low), x.shape[axis] + min(0, high))
    grown = [max(0, low) for low, _ in pairs] + [max(0, high) for _, high in pairs]
    return b.apply("Pad", [x, grown, call.cast(value)], 1, {})[0] if any(grown) else x


def _triangle(upper: int, call: Call, x: SymbolicTensor, diagonal: int = 0) -> SymbolicTensor:
    b = call.builder
    return b.apply("Trilu", [x, b.constant(diagonal)], 1, {"upper": upper})[0]


def _diagonal(
    call: Call, x: SymbolicTensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> SymbolicTensor:
    """The diagonal of two axes, which becomes the last one."""
    b, rank = call.builder, len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    rest = [a for a in range(rank) if a not in (first, second)]
    width = x.shape[second]
    flat = b.reshape(_permute(call, x, [*rest, first, second]), [*(x.shape[a] for a in rest), -1])
    start = offset if offset >= 0 else -offset * width
    return b.gather(flat, start + np.arange(call.shape[-1], dtype=np.int64) * (width + 1), -1)


def _unfold(call: Call, x: SymbolicTensor, dimension: int, size: int, step: int) -> SymbolicTensor:
    """Windows along an axis; their elements become the last one."""
    b, axis = call.builder, dimension % len(x.shape)
    windows = np.arange(call.shape[axis])[:, None] * step + np.arange(size)
    spread = b.gather(x, windows.astype(np.int64), axis)
    order = [a for a in range(len(spread.shape)) if a != axis + 1]
    return _permute(call, spread, [*order, axis + 1])


LOWERINGS: dict[Any, Row] = {
    aten.view.default: _reshape, aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape, aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape, aten.squeeze.default: _reshape, aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape, aten.unsqueeze.default: _reshape,
    aten.permute.default: _permute, aten.transpose.int: _swap, aten.t.default: _matrix_transpose,
    aten.expand.default: _expand, aten.expand_as.default: _expand,
    aten.slice.Tensor: slice_tensor, aten.select.int: _select,
    aten.cat.default: _concat, aten.stack.default: KeptWhole(_stack), aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split, aten.chunk.default: _chunk, aten.unbind.int: _unbind,
    aten.flip.default: _flip, aten.repeat.default: _repeat, aten.constant_pad_nd.default: _pad,
    aten.tril.default: partial(_triangle, 0), aten.triu.default: partial(_triangle, 1),
    aten.diagonal.default: _diagonal, aten.unfold.default: _unfold,
}  # fmt: skip
