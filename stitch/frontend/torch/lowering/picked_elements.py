"""ATen operators that read or write elements by index: gather, scatter, x[i, :, j].

Boolean masks are refused: the number of selected elements depends on data.
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
from stitch.frontend.torch.lowering.shapes import is_whole, permuted, slice_tensor
from stitch.frontend.torch.lowering.single_elements import detached
from stitch.graph import SymbolicTensor
from stitch.program import DataType, is_same_size, is_symbolic, slice_bounds

aten = torch.ops.aten
Indices = Sequence[SymbolicTensor | None]


def _row(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    """A scalar tensor as a row of one element: torch accepts axis 0 for it."""
    return x if x.shape else call.builder.reshape(x, (1,))


def _gather(
    call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, **_: Any
) -> SymbolicTensor:
    b = call.builder
    if not index.size:
        return call.filled(0)
    return b.reshape(b.gather_elements(_row(call, x), _row(call, index), dim), call.shape)


def _index_select(call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor) -> SymbolicTensor:
    b = call.builder
    return b.reshape(b.gather(_row(call, x), b.reshape(index, (-1,)), dim), call.shape)


def _scatter(
    reduction: str, call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, src: Value, *,
    reduce: str | None = None,
) -> SymbolicTensor:  # fmt: skip
    b, index = call.builder, _row(call, index)
    if not index.size:
        return x
    kind = {None: reduction, "add": "add", "multiply": "mul"}[reduce]
    updates = _updates(call, index, src)
    written = b.op("ScatterElements", _row(call, x), index, updates, axis=dim, reduction=kind)
    return b.reshape(written, x.shape)


def _updates(call: Call, index: SymbolicTensor, src: Value) -> SymbolicTensor:
    """The updates of a scatter: torch takes the corner of src with the index's shape."""
    if not isinstance(src, SymbolicTensor):
        return call.builder.broadcast(call.cast(src), index.shape)
    updates = _row(call, src)
    for axis, length in enumerate(index.shape):
        updates = slice_tensor(call, updates, axis, 0, length)
    return updates


def slice_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, dim: int = 0, start: int | None = None,
    end: int | None = None, step: int = 1,
) -> SymbolicTensor:  # fmt: skip
    if is_whole(start, end, step):
        return call.cast(src)
    b, axis, written = call.builder, dim % len(x.shape), call.cast(src)
    if step == 1:
        first, last, _, _ = slice_bounds(slice(start, end), x.shape[axis])
        parts = [written]
        if is_symbolic(start) or start:
            parts.insert(0, b.slice(x, [0], [first], [axis]))
        if not is_whole(None, end, 1):
            parts.append(b.slice(x, [max(first, last)], [x.shape[axis]], [axis]))
        return b.concat(parts, axis)
    # The elements of x, but the numbers of those of src where it is written.
    numbers = np.arange(x.shape[axis])
    numbers[start:end:step] = numbers.size + np.arange(numbers[start:end:step].size)
    return b.gather(b.concat([x, written], axis), numbers, axis)


def _diagonal_scatter(
    call: Call, x: SymbolicTensor, src: SymbolicTensor, offset: int = 0, dim1: int = 0,
    dim2: int = 1,
) -> SymbolicTensor:  # fmt: skip
    b, numbers = call.builder, np.arange(x.size, dtype=np.int64).reshape(x.shape)
    index = np.diagonal(numbers, offset, dim1, dim2).reshape(-1)
    if not index.size:
        return x
    flat, parts = b.reshape(x, (-1,)), b.reshape(call.cast(src), (-1,))
    return b.reshape(b.op("ScatterElements", flat, index, parts, axis=0), x.shape)


_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _scatter_reduce(
    call: Call, x: SymbolicTensor, dim: int, index: SymbolicTensor, src: SymbolicTensor,
    reduce: str, *, include_self: bool = True,
) -> SymbolicTensor:  # fmt: skip
    """Reduce the updates of each element, with its own value if `include_self`."""
    if not index.size:
        return x
    b, start, index = call.builder, _row(call, x), _row(call, index)
    updates, scattered = _updates(call, index, src), partial(b.op, "ScatterElements", axis=dim)
    if not include_self:
        # Elements without updates keep their value.
        neutral = b.broadcast(call.cast(_neutral(reduce, x.data_type)), index.shape)
        start = scattered(start, index, neutral)
    result = scattered(start, index, updates, reduction=_REDUCTIONS[reduce])
    if reduce == "mean":
        ones = b.broadcast(call.cast(1), index.shape)
        before = b.broadcast(call.cast(int(include_self)), start.shape)
        count = b.op("Max", scattered(before, index, ones, reduction="add"), call.cast(1))
        result = (b.div if x.data_type.is_floating else b.floordiv)(result, count)
    return b.reshape(result, x.shape)


def _neutral(reduce: str, data_type: DataType) -> Any:
    """The neutral element of a reduction."""
    if reduce in ("amax", "amin"):
        sign = -1 if reduce == "amax" else 1
        if data_type.is_floating:
            return sign * np.inf
        limits = np.iinfo(data_type.dtype)
        return limits.min if sign < 0 else limits.max
    return 1 if reduce == "prod" else 0


# Indexing with tensors -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Selection:
    """Indexed axes, their index tensors, the broadcast shape of these, and its first axis in the
    result."""

    axes: tuple[int, ...]
    indices: tuple[SymbolicTensor, ...]
    shape: tuple[int, ...]
    front: int


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape to which shapes broadcast; torch has checked that they do."""
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    return tuple([
        next((size for size in column if not is_same_size(size, 1)), 1) for column in columns
    ])  # fmt: skip


def _selection(call: Call, indices: Indices) -> _Selection:
    chosen = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.data_type in (DataType.BOOL, DataType.UINT8) for _, index in chosen):
        raise CompileError(
            "the number of elements that a boolean mask selects depends on data",
            remedy="use torch.where(mask, x, other), or torch.compile, which breaks the graph "
            "there",
        )
    axes = tuple(axis for axis, _ in chosen)
    shape = _common_shape([index.shape for _, index in chosen])
    together = axes == tuple(range(axes[0], axes[0] + len(axes)))
    # torch puts the indices' axes at the position of the indexed ones if these are adjacent.
    return _Selection(axes, tuple(i for _, i in chosen), shape, axes[0] if together else 0)


def _orders(selection: _Selection, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of x with the indexed ones first, and the result's axes with the indices' first."""
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
    """x[indices]: Gather for one index, GatherND for several."""
    b, chosen = call.builder, _selection(call, indices)
    if len(chosen.axes) == 1:
        return b.gather(x, chosen.indices[0], chosen.axes[0])
    source, result = _orders(chosen, len(x.shape))
    picked = b.op("GatherND", permuted(call, x, source), _joined(call, chosen))
    return permuted(call, picked, np.argsort(result).tolist())


def _index_put(
    call: Call, x: SymbolicTensor, indices: Indices, values: Any, accumulate: bool = False
) -> SymbolicTensor:
    """x with x[indices] replaced by values, or increased by them."""
    b, present = call.builder, [(a, i) for a, i in enumerate(indices) if i is not None]
    if len(present) == 1 and present[0][1].data_type is DataType.BOOL and not values.shape:
        # x[mask] = number: no shape depends on data.
        ((axis, mask),), number = present, call.cast(values)
        wide = b.reshape(mask, mask.shape + (1,) * (len(x.shape) - axis - len(mask.shape)))
        return b.where(wide, b.add(x, number) if accumulate else number, x)
    chosen = _selection(call, indices)
    source, result = _orders(chosen, len(x.shape))
    rest = tuple(d for a, d in enumerate(x.shape) if a not in chosen.axes)
    selected = (*rest[: chosen.front], *chosen.shape, *rest[chosen.front :])
    updates = permuted(call, b.broadcast(call.cast(values), selected), result)
    whole, reduction = permuted(call, x, source), "add" if accumulate else "none"
    written = b.op("ScatterND", whole, _joined(call, chosen), updates, reduction=reduction)
    return permuted(call, written, np.argsort(source).tolist())


def embedded(
    call: Call, weight: SymbolicTensor, index: SymbolicTensor, padding: int = -1,
    scales_gradients: bool = False, sparse: bool = False,
) -> SymbolicTensor:  # fmt: skip
    """The rows of a trained embedding; no gradient flows to that of the padding."""
    if scales_gradients:
        raise CompileError("an embedding with scale_grad_by_freq is not trained",
                           remedy="scale_grad_by_freq=False")  # fmt: skip
    b = call.builder
    rows = b.gather(weight, index, 0)
    if padding < 0:
        return rows
    row = detached(call, b.gather(weight, np.array([padding]), 0))
    return b.where(b.unsqueeze(b.equal(index, padding), -1), row, rows)


LOWERINGS: dict[Any, Row] = {
    embedded: embedded,
    aten.gather.default: _gather, aten.index_select.default: _index_select,
    aten.embedding.default: lambda call, weight, index, *_: call.builder.gather(weight, index, 0),
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.scatter.src: partial(_scatter, "none"), aten.scatter.value: partial(_scatter, "none"),
    aten.scatter.reduce: partial(_scatter, "none"),
    aten.scatter.value_reduce: partial(_scatter, "none"),
    aten.scatter_add.default: partial(_scatter, "add"),
    aten.scatter_reduce.two: _scatter_reduce, aten.diagonal_scatter.default: _diagonal_scatter,
    aten.slice_scatter.default: slice_scatter,
}  # fmt: skip
