"""ATen operators that move or make elements: views, joins, indexing, scattering, constants.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Views become
values of their own: the graph is functional. Must not know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Lowering, Number, Value
from stitch.frontend.torch.lowering.tensor_indices import index_put, index_tensor
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


def _gather(
    call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, **_: Any
) -> SymbolicTensor:
    return call.builder.gather_elements(x, index, dim)


def _index_select(call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor) -> SymbolicTensor:
    return call.builder.gather(x, call.builder.reshape(index, (-1,)), dim)


def _embedding(
    call: Call, weight: SymbolicTensor, indices: SymbolicTensor, *_: Any
) -> SymbolicTensor:
    return call.builder.gather(weight, indices, 0)


def _scatter(
    reduction: str,
    call: Call,
    x: SymbolicTensor,
    dim: int,
    index: SymbolicTensor,
    src: Value,
) -> SymbolicTensor:
    b = call.builder
    if isinstance(src, SymbolicTensor):
        updates = src
        for axis, length in enumerate(index.shape):
            updates = slice_tensor(call, updates, axis, 0, length)
    else:
        updates = b.broadcast(call.cast(src), index.shape)
    attributes: dict[str, int | str] = {"axis": dim, "reduction": reduction}
    return b.apply("ScatterElements", [x, index, updates], 1, attributes)[0]


def slice_scatter(
    call: Call,
    x: SymbolicTensor,
    src: SymbolicTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> SymbolicTensor:
    b, axis = call.builder, dim % len(x.shape)
    places = np.arange(*slice(start, end, step).indices(x.shape[axis]), dtype=np.int64)
    if places.size == 0:
        return x
    lead = (slice(None),) + (None,) * (len(x.shape) - axis - 1)
    index = b.constant(np.ascontiguousarray(np.broadcast_to(places[lead], src.shape)))
    return b.apply("ScatterElements", [x, index, call.cast(src)], 1, {"axis": axis})[0]


def _select_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, dim: int, index: int
) -> SymbolicTensor:
    place = index % x.shape[dim]
    wide = call.builder.unsqueeze(src, dim % len(x.shape))
    return slice_scatter(call, x, wide, dim, place, place + 1)


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
    made = b.gather(x, windows.astype(np.int64), axis)
    order = [a for a in range(len(made.shape)) if a != axis + 1]
    return _permute(call, made, [*order, axis + 1])


def _scatter_reduce(
    call: Call,
    x: SymbolicTensor,
    dim: int,
    index: SymbolicTensor,
    src: SymbolicTensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> SymbolicTensor:
    names = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
    if reduce not in names or not include_self:
        raise CompileError(
            "this way of scatter_reduce is not supported",
            expected=f"{', '.join(names)}, with include_self",
            got=f"{reduce}{'' if include_self else ' without the tensor itself'}",
        )
    return _scatter(names[reduce], call, x, dim, index, src)


# Constants -----------------------------------------------------------------------------------


def _full(call: Call, size: Any, value: Value, **_: Any) -> SymbolicTensor:
    """Also full_like and new_full: the result's type says it all."""
    return call.builder.broadcast(call.cast(value), call.shape)


def _filled(number: Number, call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    return call.filled(number)


def _range_step(
    call: Call, start: Number, end: Number, step: Number = 1, **_: Any
) -> SymbolicTensor:
    places = start + np.arange(call.shape[0]) * step
    return call.builder.constant(places.astype(call.data_type.dtype))


def _range(call: Call, end: Number, **_: Any) -> SymbolicTensor:
    return _range_step(call, 0, end)


def _scalar_tensor(call: Call, value: Number, **_: Any) -> SymbolicTensor:
    return call.cast(value)


def _eye(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    return call.builder.constant(np.eye(*call.shape, dtype=call.data_type.dtype))


def _item(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    raise CompileError(
        "a number is read out of a tensor, so the graph depends on data",
        remedy="keep it a tensor, or use torch.compile, which breaks the graph there",
    )


LOWERINGS: dict[Any, Lowering] = {
    aten.view.default: _reshape, aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape, aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape, aten.squeeze.default: _reshape, aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape, aten.unsqueeze.default: _reshape,
    aten.permute.default: _permute, aten.transpose.int: _swap, aten.t.default: _matrix_transpose,
    aten.expand.default: _expand, aten.expand_as.default: _expand,
    aten.slice.Tensor: slice_tensor, aten.select.int: _select,
    aten.cat.default: _concat, aten.stack.default: _stack, aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split, aten.chunk.default: _chunk, aten.unbind.int: _unbind,
    aten.flip.default: _flip, aten.repeat.default: _repeat, aten.constant_pad_nd.default: _pad,
    aten.tril.default: partial(_triangle, 0), aten.triu.default: partial(_triangle, 1),
    aten.gather.default: _gather, aten.index_select.default: _index_select,
    aten.embedding.default: _embedding, aten.index.Tensor: index_tensor,
    aten.index_put.default: index_put, aten._unsafe_index.Tensor: index_tensor,
    aten.scatter.src: partial(_scatter, "none"), aten.scatter.value: partial(_scatter, "none"),
    aten.scatter_add.default: partial(_scatter, "add"),
    aten.scatter_reduce.two: _scatter_reduce, aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
    aten.slice_scatter.default: slice_scatter, aten.select_scatter.default: _select_scatter,
    aten.full.default: _full, aten.full_like.default: _full, aten.new_full.default: _full,
    aten.copy.default: _full, aten.fill.Scalar: _full, aten.fill.Tensor: _full,
    aten.zeros.default: partial(_filled, 0), aten.zeros_like.default: partial(_filled, 0),
    aten.new_zeros.default: partial(_filled, 0), aten.ones.default: partial(_filled, 1),
    aten.ones_like.default: partial(_filled, 1), aten.new_ones.default: partial(_filled, 1),
    # Memory that torch leaves as it is may hold anything: zeros are as good, and reproducible.
    aten.empty.memory_format: partial(_filled, 0), aten.empty_like.default: partial(_filled, 0),
    aten.new_empty.default: partial(_filled, 0), aten.empty_strided.default: partial(_filled, 0),
    aten.new_empty_strided.default: partial(_filled, 0),
    aten.arange.start_step: _range_step, aten.arange.start: _range_step,
    aten.arange.default: _range, aten.scalar_tensor.default: _scalar_tensor,
    aten.eye.default: _eye, aten.eye.m: _eye, aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
}  # fmt: skip
