"""ATen operators that read or write elements by their indices: gathering, scattering, x[i, :, j].

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder; indexing
with tensors becomes GatherND and ScatterND. A mask of booleans is refused: how much it selects
depends on data. Must not know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Row, Value
from stitch.frontend.torch.lowering.shapes import permuted, slice_tensor
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
Indices = Sequence[SymbolicTensor | None]


def _gather(
    call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, **_: Any
) -> SymbolicTensor:
    return call.builder.gather_elements(x, index, dim)


def _index_select(call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor) -> SymbolicTensor:
    return call.builder.gather(x, call.builder.reshape(index, (-1,)), dim)


def _scatter(
    reduction: str, call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, src: Value
) -> SymbolicTensor:
    b = call.builder
    if isinstance(src, SymbolicTensor):
        updates = src
        for axis, length in enumerate(index.shape):
            updates = slice_tensor(call, updates, axis, 0, length)
    else:
        updates = b.broadcast(call.cast(src), index.shape)
    return b.op("ScatterElements", x, index, updates, axis=dim, reduction=reduction)


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
    return b.op("ScatterElements", x, index, call.cast(src), axis=axis)


def _select_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, dim: int, index: int
) -> SymbolicTensor:
    place = index % x.shape[dim]
    wide = call.builder.unsqueeze(src, dim % len(x.shape))
    return slice_scatter(call, x, wide, dim, place, place + 1)


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


# Indexing with tensors -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Selection:
    """Indexed axes, the index tensors broadcast to one shape, and where that shape comes to lie."""

    axes: tuple[int, ...]
    indices: tuple[SymbolicTensor, ...]
    shape: tuple[int, ...]
    front: int


def _selection(call: Call, indices: Indices) -> _Selection:
    chosen = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.data_type in (DataType.BOOL, DataType.UINT8) for _, index in chosen):
        raise CompileError(
            "indexing with a mask selects as many elements as the data say",
            remedy="torch.where(mask, x, other), or torch.compile, which breaks the graph there",
        )
    axes = tuple(axis for axis, _ in chosen)
    shape = np.broadcast_shapes(*(index.shape for _, index in chosen))
    together = axes == tuple(range(axes[0], axes[0] + len(axes)))
    # torch puts the indices' axes where the indexed ones were, or first if those lie apart.
    return _Selection(axes, tuple(i for _, i in chosen), shape, axes[0] if together else 0)


def _orders(selection: _Selection, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of x with the indexed ones first, and those of the result with its index first."""
    rest = tuple(a for a in range(rank) if a not in selection.axes)
    count, front = len(selection.shape), selection.front
    index_axes = tuple(range(front, front + count))
    others = tuple(a for a in range(count + len(rest)) if a not in index_axes)
    return (*selection.axes, *rest), (*index_axes, *others)


def _joined(call: Call, selection: _Selection) -> SymbolicTensor:
    b = call.builder
    return b.stack(
        [b.broadcast(b.cast(i, DataType.INT64), selection.shape) for i in selection.indices],
        len(selection.shape),
    )


def _index(call: Call, x: SymbolicTensor, indices: Indices) -> SymbolicTensor:
    """x[indices]: a Gather for one index, a GatherND for several."""
    b, chosen = call.builder, _selection(call, indices)
    if len(chosen.axes) == 1:
        return b.gather(x, chosen.indices[0], chosen.axes[0])
    source, result = _orders(chosen, len(x.shape))
    picked = b.op("GatherND", permuted(call, x, source), _joined(call, chosen))
    return permuted(call, picked, np.argsort(result).tolist())


def _index_put(
    call: Call, x: SymbolicTensor, indices: Indices, values: Any, accumulate: bool = False
) -> SymbolicTensor:
    """x with x[indices] replaced by (or increased by) values."""
    b, given = call.builder, [(a, i) for a, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].data_type is DataType.BOOL and not values.shape:
        # x[mask] = number, which needs no shape that depends on data.
        ((axis, mask),), put = given, call.cast(values)
        wide = b.reshape(mask, mask.shape + (1,) * (len(x.shape) - axis - len(mask.shape)))
        return b.where(wide, b.add(x, put) if accumulate else put, x)
    chosen = _selection(call, indices)
    source, result = _orders(chosen, len(x.shape))
    rest = tuple(d for a, d in enumerate(x.shape) if a not in chosen.axes)
    selected = (*rest[: chosen.front], *chosen.shape, *rest[chosen.front :])
    updates = permuted(call, b.broadcast(call.cast(values), selected), result)
    whole, reduction = permuted(call, x, source), "add" if accumulate else "none"
    written = b.op("ScatterND", whole, _joined(call, chosen), updates, reduction=reduction)
    return permuted(call, written, np.argsort(source).tolist())


LOWERINGS: dict[Any, Row] = {
    aten.gather.default: _gather, aten.index_select.default: _index_select,
    aten.embedding.default: lambda call, weight, places, *_: call.builder.gather(weight, places, 0),
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put, aten._unsafe_index.Tensor: _index,
    aten.scatter.src: partial(_scatter, "none"), aten.scatter.value: partial(_scatter, "none"),
    aten.scatter_add.default: partial(_scatter, "add"),
    aten.scatter_reduce.two: _scatter_reduce,
    aten.slice_scatter.default: slice_scatter, aten.select_scatter.default: _select_scatter,
}  # fmt: skip
