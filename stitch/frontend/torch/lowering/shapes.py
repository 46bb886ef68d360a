"""ATen operators that create elements (fills, ranges, the identity) or move them: views, slices,
concatenations, pads. Views become values of their own, because graphs are functional."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, KeptWhole, Number, Row, Value, built
from stitch.graph import ComputationGraphBuilder as Builder
from stitch.graph import SymbolicTensor
from stitch.program import Array, DataType, int64_array, is_symbolic, slice_bounds

aten = torch.ops.aten

# Creation -----------------------------------------------------------------------------------


def _full(call: Call, size: Any, value: Value, **_: Any) -> SymbolicTensor:
    """Also full_like, new_full, copy and fill: the result has the shape and type."""
    return call.builder.broadcast(call.cast(value), call.shape)


def _zeros(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    return call.filled(0)


def _range_step(
    call: Call, start: Number, end: Number, step: Number = 1, **_: Any
) -> SymbolicTensor:
    b = call.builder
    numbers = b.op("Range", 0, int64_array([call.shape[0]], ()), 1)
    if call.data_type.is_floating:
        # As torch does: in float64, rounded once.
        numbers = b.cast(numbers, DataType.FLOAT64)
    elif not is_symbolic(start):
        start, step = int(start), int(step)
    first: Any = start
    if is_symbolic(start):
        first = b.cast(b.constant(int64_array([start], ())), numbers.data_type)
    return call.cast(b.add(b.mul(numbers, step), first))


def _item(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    raise CompileError(
        "a number is read from a tensor, so the graph depends on data",
        remedy="keep it a tensor, or use torch.compile, which breaks the graph there",
    )


#: torch's end of a slice to the end.
MAX_END = (1 << 63) - 1

# Movement ------------------------------------------------------------------------------------


def _reshape(call: Call, x: SymbolicTensor, *_: Any) -> SymbolicTensor:
    """Any operator that keeps the order of elements; torch gives the result's shape."""
    return call.builder.reshape(x, call.shape)


def permuted(call: Call, x: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    order = tuple(d % len(dims) for d in dims)
    return x if order == tuple(range(len(dims))) else call.builder.transpose(x, order)


def _expand(call: Call, x: SymbolicTensor, *_: Any, **__: Any) -> SymbolicTensor:
    return call.builder.broadcast(x, call.shape)


def is_whole(start: int | None, end: int | None, step: int) -> bool:
    """Whether a slice is all of an axis as it is written, not as sizes are."""
    ends = end is None or (not is_symbolic(end) and end >= MAX_END)
    return not start and step == 1 and ends


def slice_tensor(
    call: Call, x: SymbolicTensor, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> SymbolicTensor:  # fmt: skip
    """x[start:end:step] along one axis."""
    if is_whole(start, end, step):
        return x
    first, last, _, _ = slice_bounds(slice(start, end, step), x.shape[dim])
    steps = None if step == 1 else [step]
    return call.builder.slice(x, [first], [max(first, last)], [dim % len(x.shape)], steps)


def _select(call: Call, x: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    index = index + x.shape[dim] if index < 0 else index
    return call.builder.op("Gather", x, int64_array([index], ()), axis=dim)


def _concat(call: Call, tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    rank = len(call.shape)
    parts = [call.cast(t) for t in tensors if len(t.shape) == rank]
    return parts[0] if len(parts) == 1 else call.builder.concat(parts, dim)


def _stack(call: Call, tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    return call.builder.stack([call.cast(t) for t in tensors], dim % len(call.shape))


def _repeat(call: Call, x: SymbolicTensor, repeats: Sequence[int]) -> SymbolicTensor:
    b = call.builder
    lead = len(repeats) - len(x.shape)
    wide = b.reshape(x, (1,) * lead + x.shape)
    return b.op("Tile", wide, list(repeats))


def _pad(call: Call, x: SymbolicTensor, pad: Sequence[int], value: Number = 0) -> SymbolicTensor:
    """torch lists pairs from the last axis on; a negative pad removes elements."""
    b, rank = call.builder, len(x.shape)
    pairs = [(0, 0)] * (rank - len(pad) // 2)
    pairs += [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    for axis, (low, high) in enumerate(pairs):
        if low < 0 or high < 0:
            x = slice_tensor(call, x, axis, max(0, -low), x.shape[axis] + min(0, high))
    grown = [max(0, low) for low, _ in pairs] + [max(0, high) for _, high in pairs]
    return b.op("Pad", x, grown, call.cast(value)) if any(grown) else x


def _diagonal(
    call: Call, x: SymbolicTensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> SymbolicTensor:
    """The diagonal of two axes, as the last axis."""
    b, rank = call.builder, len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    rest = [a for a in range(rank) if a not in (first, second)]
    width = x.shape[second]
    flat = b.reshape(permuted(call, x, [*rest, first, second]), [*(x.shape[a] for a in rest), -1])
    start = offset if offset >= 0 else -offset * width
    return b.gather(flat, start + np.arange(call.shape[-1], dtype=np.int64) * (width + 1), -1)


def _unfold(call: Call, x: SymbolicTensor, dimension: int, size: int, step: int) -> SymbolicTensor:
    """Windows along an axis; the last axis of the result has their elements."""
    b = call.builder
    if not x.shape:
        return b.broadcast(x, call.shape)
    axis = dimension % len(x.shape)
    windows = np.arange(call.shape[axis])[:, None] * step + np.arange(size)
    spread = b.gather(x, windows.astype(np.int64), axis)
    order = [a for a in range(len(spread.shape)) if a != axis + 1]
    return permuted(call, spread, [*order, axis + 1])


# Strided views ------------------------------------------------------------------------------------

Sizes = Sequence[int]


def _as_strided(
    call: Call, x: SymbolicTensor, size: Sizes, stride: Sizes, storage_offset: int | None = None
) -> SymbolicTensor:
    if 0 in call.shape:
        return call.filled(0)
    rows = _rows(call, x, _viewed(call, x, call.shape, stride, storage_offset))
    return call.builder.reshape(rows, call.shape)


def _as_strided_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, size: Sizes, stride: Sizes,
    storage_offset: int | None = None,
) -> SymbolicTensor:  # fmt: skip
    """x with the elements of such a view replaced by those of src."""
    if not src.size:
        return x
    b, index = call.builder, _viewed(call, x, size, stride, storage_offset)
    flat = b.reshape(x, (-1,))
    written = b.op("ScatterElements", flat, index, b.reshape(call.cast(src), (-1,)), axis=0)
    return b.reshape(written, x.shape)


def _viewed(
    call: Call, x: SymbolicTensor, shape: Sizes, strides: Sizes, storage_offset: int | None
) -> Array:
    """The numbers of the elements of x that a view of its memory has, in one row."""
    traced = call.traced[0]
    if not all(isinstance(stride, int) for stride in traced.stride()):
        raise CompileError("as_strided of a tensor with symbolic sizes is not supported")
    start = 0 if storage_offset is None else storage_offset - traced.storage_offset()
    wanted = _offsets(start, shape, strides).reshape(-1)
    numbers = _element_numbers(x.shape, traced.stride())
    if int(wanted.min()) >= 0 and int(wanted.max()) < len(numbers):
        found: Array = numbers[wanted]
        if int(found.min()) >= 0:
            return found
    raise CompileError(
        "as_strided reads memory outside of the tensor's elements",
        remedy="call .contiguous() on the tensor, or view its base",
    )


def _element_numbers(shape: Sizes, strides: Sizes) -> Array:
    """For each offset in memory the number of the element there, or -1."""
    offsets = _offsets(0, shape, strides)
    numbers = np.full(int(offsets.max(initial=-1)) + 1, -1, np.int64)
    numbers[offsets.reshape(-1)] = np.arange(offsets.size)
    return numbers


def _offsets(start: int, shape: Sizes, strides: Sizes) -> Array:
    offsets = np.asarray(start, np.int64)
    for length, stride in zip(shape, strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(length, dtype=np.int64) * stride)
    return offsets


def _rows(call: Call, x: SymbolicTensor, wanted: Array) -> SymbolicTensor:
    """Gather elements by number, in rows that are as long as possible."""
    b, count = call.builder, x.size
    if wanted.size == count and bool((wanted == np.arange(count)).all()):
        return x
    breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
    width = math.gcd(count, wanted.size, int(wanted[0]), *map(int, np.unique(breaks)))
    width = math.gcd(width, *map(int, np.unique(wanted[breaks])))
    return b.gather(b.reshape(x, (-1, width)), wanted[::width] // width, 0)


FILLS = (
    aten.full.default, aten.full_like.default, aten.copy.default,
)  # fmt: skip
#: Uninitialized memory is zero too, to be reproducible.
ZEROS = (
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty_strided.default,
    aten.empty_permuted.default,
)  # fmt: skip

LOWERINGS: dict[Any, Row] = {
    **dict.fromkeys(FILLS, _full), **dict.fromkeys(ZEROS, _zeros),
    aten.arange.start_step: _range_step,
    aten.scalar_tensor.default: lambda call, value, **_: call.cast(value),
    torch.ops.prims.scalar_tensor.default: lambda call, value, **_: call.cast(value),
    aten._local_scalar_dense.default: _item,
    **dict.fromkeys(
        (aten.view.default, aten.squeeze.dims, aten.unsqueeze.default), _reshape
    ),
    aten.permute.default: permuted, aten.expand.default: _expand,
    aten.slice.Tensor: slice_tensor, aten.select.int: _select,
    aten.cat.default: _concat, aten.stack.default: KeptWhole(_stack),
    aten.split_with_sizes.default: built(Builder.split),
    aten.flip.default: built(Builder.reverse), aten.repeat.default: _repeat,
    aten.constant_pad_nd.default: _pad,
    aten.diagonal.default: _diagonal, aten.unfold.default: _unfold,
    aten.as_strided.default: _as_strided, aten.as_strided_scatter.default: _as_strided_scatter,
}  # fmt: skip
