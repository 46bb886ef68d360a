"""ATen operators that read or write a tensor's memory by strides: as_strided and what undoes it.

Values of a graph have no strides: memory is their elements in the order in which torch's would lie,
and a view takes rows of that, as long as the view allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Row
from stitch.frontend.torch.lowering.shapes import permuted
from stitch.graph import SymbolicTensor
from stitch.program import Array

aten = torch.ops.aten
Sizes = Sequence[int]


def _as_strided(
    call: Call, x: SymbolicTensor, size: Sizes, stride: Sizes, storage_offset: int | None = None
) -> SymbolicTensor:
    b, traced = call.builder, call.traced[0]
    offset = traced.storage_offset() if storage_offset is None else storage_offset
    start = offset - traced.storage_offset()
    if 0 in call.shape:
        return call.filled(0)
    memory, places = _memory(call, x, traced)
    # Axes of one element move nowhere, and repeated ones are spread at the end.
    axes = [a for a, n in enumerate(call.shape) if n > 1 and stride[a]]
    axes.sort(key=lambda a: -stride[a])
    kept = [call.shape[a] for a in axes]
    wanted = _places(start, kept, [stride[a] for a in axes])
    if places is not None:
        wanted = _found(places, wanted)
    picked = b.reshape(_rows(call, memory, wanted), kept)
    result = permuted(call, picked, np.argsort(axes).tolist())
    lengths = [n if a in axes else 1 for a, n in enumerate(call.shape)]
    return b.broadcast(b.reshape(result, lengths), call.shape)


def _as_strided_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, size: Sizes, stride: Sizes,
    storage_offset: int | None = None,
) -> SymbolicTensor:  # fmt: skip
    """x with the elements that such a view would show replaced by those of src."""
    b, traced = call.builder, call.traced[0]
    offset = traced.storage_offset() if storage_offset is None else storage_offset
    wanted = _places(offset - traced.storage_offset(), size, stride)
    if not wanted.size:
        return x
    index = _found(_owners(x.shape, traced.stride()), wanted).reshape(-1)
    flat = b.reshape(x, (-1,))
    written = b.op("ScatterElements", flat, index, b.reshape(call.cast(src), (-1,)), axis=0)
    return b.reshape(written, x.shape)


def _memory(call: Call, x: SymbolicTensor, traced: Any) -> tuple[SymbolicTensor, Array | None]:
    """The elements in one line as they lie; and, where memory has gaps, which element of x is at
    each place (then the line is x's own order)."""
    strides = traced.stride()
    order = sorted((a for a, n in enumerate(x.shape) if n > 1), key=lambda a: -strides[a])
    dense = math.prod(x.shape)
    for axis in order:
        dense //= x.shape[axis]
        if strides[axis] != dense:
            return call.builder.reshape(x, (-1,)), _owners(x.shape, strides)
    rest = [a for a in range(len(x.shape)) if a not in order]
    return call.builder.reshape(permuted(call, x, [*order, *rest]), (-1,)), None


def _owners(shape: Sizes, strides: Sizes) -> Array:
    """For each place of memory from the first element on: the element that lies there, or -1."""
    if not math.prod(shape):
        return np.zeros(0, np.int64)
    places = _places(0, shape, strides)
    owners = np.full(int(places.max()) + 1, -1, np.int64)
    owners[places.reshape(-1)] = np.arange(places.size)
    return owners


def _places(start: int, shape: Sizes, strides: Sizes) -> Array:
    places = np.asarray(start, np.int64)
    for length, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(length, dtype=np.int64) * stride)
    return places


def _found(owners: Array, wanted: Array) -> Array:
    _check_inside(len(owners), wanted)
    found: Array = owners[wanted]
    if found.size and int(found.min()) < 0:
        raise _outside()
    return found


def _check_inside(length: int, wanted: Array) -> None:
    if int(wanted.min()) < 0 or int(wanted.max()) >= length:
        raise _outside()


def _outside() -> CompileError:
    return CompileError(
        "a view by strides reads memory that is not of the tensor's elements",
        remedy="call .contiguous() on the tensor, or view its base",
    )


def _rows(call: Call, memory: SymbolicTensor, wanted: Array) -> SymbolicTensor:
    """These elements of a line, taken in rows that are as long as the places allow."""
    b, count = call.builder, memory.shape[0]
    _check_inside(count, wanted)
    flat = wanted.reshape(-1)
    if flat.size == count and bool((flat == np.arange(count)).all()):
        return memory
    breaks = np.flatnonzero(np.diff(flat) != 1) + 1
    width = math.gcd(count, flat.size, int(flat[0]), *map(int, np.unique(breaks)))
    width = math.gcd(width, *map(int, np.unique(flat[breaks])))
    if width <= 1:
        return b.gather(memory, flat, 0)
    return b.gather(b.reshape(memory, (-1, width)), flat[::width] // width, 0)


LOWERINGS: dict[Any, Row] = {
    aten.as_strided.default: _as_strided, aten.as_strided_scatter.default: _as_strided_scatter,
}  # fmt: skip
