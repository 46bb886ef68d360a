"""ATen operators on ordered elements: running extremes, medians, k-th values, sorted searches,
histograms.

Running operators are scans by doubling (Hillis and Steele, 1986); searches are binary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Number, Row, Value, rounded_once
from stitch.frontend.torch.lowering.shapes import slice_tensor
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
Two = tuple[SymbolicTensor, SymbolicTensor]

# Along an axis -------------------------------------------------------------------------------


def _running_extreme(op: str, call: Call, x: SymbolicTensor, dim: int) -> Two:
    """Running extremes and their indices: the last of equal elements; NaN after the first NaN."""
    b = call.builder
    if not x.shape:
        return x, b.constant(0)
    axis, length, reach = dim % len(x.shape), x.shape[dim], 1
    numbers = np.arange(length).reshape([-1] + [1] * (len(x.shape) - axis - 1))
    values = call.cast(x, DataType.INT32) if x.data_type is DataType.BOOL else x
    parts = [values, b.broadcast(b.constant(numbers), x.shape)]
    while reach < length:
        before = [slice_tensor(call, part, axis, 0, length - reach) for part in parts]
        here = [slice_tensor(call, part, axis, reach, length) for part in parts]
        takes = b.op(op, here[0], before[0])
        if x.data_type.is_floating:
            takes = b.logical_or(takes, b.op("IsNaN", here[0]))
        parts = [
            b.concat([slice_tensor(call, part, axis, 0, reach), b.where(takes, new, old)], axis)
            for part, new, old in zip(parts, here, before, strict=True)
        ]
        reach *= 2
    return call.cast(parts[0]), parts[1]


# An element of a sorted row -------------------------------------------------------------------


def _kth(call: Call, x: SymbolicTensor, k: int, dim: int = -1, keepdim: bool = False) -> Two:
    """The k-th smallest; a NaN is larger than all numbers."""
    if not x.shape:
        return x, call.builder.constant(0)
    return _at_position(call, x, dim, np.int64(k - 1), keepdim)


def _at_position(call: Call, x: SymbolicTensor, dim: int, position: Any, keepdim: bool) -> Two:
    """The element at a position of each sorted row, and its index; the position is one for all
    rows, or a tensor."""
    b, axis = call.builder, dim % len(x.shape)
    ordered = b.topk(x, x.shape[axis], axis, False)
    if isinstance(position, SymbolicTensor):
        values, index = (b.gather_elements(part, position, axis) for part in ordered)
    else:
        values, index = (b.gather(part, np.asarray([position]), axis) for part in ordered)
    return (values, index) if keepdim else (b.squeeze(values, axis), b.squeeze(index, axis))


def _median_along(
    skips: bool, call: Call, x: SymbolicTensor, dim: int, keepdim: bool = False
) -> Two:
    """The median (the lower one of two); with `skips` NaN are ignored, else one gives NaN."""
    b = call.builder
    if not x.shape:
        return x, b.constant(0)
    length = x.shape[dim]
    if not x.data_type.is_floating:
        return _at_position(call, x, dim, np.int64((length - 1) // 2), keepdim)
    # NaN are last in the order.
    nans = b.reduce_sum(b.cast(b.op("IsNaN", x), DataType.INT64), dim, keepdims=True)
    if skips:
        middle = b.op("Div", b.op("Max", b.sub(length - 1, nans), 0), 2)
    else:
        middle = b.where(b.greater(nans, 0), b.sub(length, nans), (length - 1) // 2)
    return _at_position(call, x, dim, middle, keepdim)


def _median(skips: bool, call: Call, x: SymbolicTensor) -> SymbolicTensor:
    if not x.size:
        return call.filled(math.nan if x.data_type.is_floating else np.iinfo(x.dtype).min)
    return _median_along(skips, call, call.builder.reshape(x, (-1,)), 0)[0]


# Positions in sorted rows --------------------------------------------------------------------


def sorted_positions(
    call: Call, ordered: SymbolicTensor, values: SymbolicTensor, right: bool
) -> SymbolicTensor:
    """The number of elements of a sorted row below each value; with `right` also equal ones.

    `ordered` is one row for all values, or has the leading axes of `values`.
    """
    b, count = call.builder, ordered.shape[-1]
    positions = b.broadcast(b.constant(np.int64(0)), values.shape)
    if not count:
        return positions
    # Not "Less": NaN are sorted last, as in torch.
    after = "Greater" if right else "GreaterOrEqual"
    for power in range(count.bit_length() - 1, -1, -1):
        further = b.add(positions, 1 << power)
        index = b.sub(b.op("Min", further, count), 1)
        one_row = len(ordered.shape) == 1
        seen = b.gather(ordered, index, 0) if one_row else b.gather_elements(ordered, index, -1)
        is_below = b.logical_and(
            b.less_or_equal(further, count), b.logical_not(b.op(after, seen, values))
        )
        positions = b.where(is_below, further, positions)
    return positions


def _search_sorted(
    call: Call, ordered: SymbolicTensor, values: Value, *, out_int32: bool = False,
    right: bool = False, side: str | None = None, sorter: SymbolicTensor | None = None,
) -> SymbolicTensor:  # fmt: skip
    b = call.builder
    if sorter is not None:
        ordered = b.gather_elements(ordered, sorter, -1)
    if not isinstance(values, SymbolicTensor):
        values = call.cast(values, ordered.data_type)
    return call.cast(sorted_positions(call, ordered, values, right or side == "right"))


def _bucketize(
    call: Call, values: Value, boundaries: SymbolicTensor, *, out_int32: bool = False,
    right: bool = False,
) -> SymbolicTensor:  # fmt: skip
    wanted, limits = call.promoted(values, boundaries)
    return call.cast(sorted_positions(call, limits, wanted, right))


def counted(call: Call, numbers: SymbolicTensor, count: int, data_type: DataType) -> SymbolicTensor:
    """The frequency of each number below `count` among integers; others are ignored."""
    b, flat = call.builder, call.builder.reshape(numbers, (-1,))
    inside = b.logical_and(b.greater_or_equal(flat, 0), b.less(flat, count))
    empty = b.constant(np.zeros(count + 1, data_type.dtype))
    ones = b.constant(np.ones(flat.shape, data_type.dtype))
    index = b.where(inside, flat, count)
    counts = b.op("ScatterElements", empty, index, ones, axis=0, reduction="add")
    return slice_tensor(call, counts, 0, 0, count)


@rounded_once
def _histogram(
    call: Call, x: SymbolicTensor, bins: int = 100, min: Number = 0, max: Number = 0
) -> SymbolicTensor:
    """Frequencies in `bins` equal intervals from min to max, by default those of the elements."""
    b = call.builder
    if not x.size:
        return call.filled(0)
    flat, kind = b.reshape(x, (-1,)), x.data_type
    if not kind.is_floating:
        flat, kind = b.cast(flat, DataType.FLOAT32), DataType.FLOAT32
    if min == max:
        low, high = b.reduce_min(flat), b.reduce_max(flat)
        alone = b.equal(low, high)
        low, high = (b.where(alone, b.add(v, d), v) for v, d in ((low, -1.0), (high, 1.0)))
    else:
        low, high = call.cast(min, kind), call.cast(max, kind)
    inside = b.logical_and(b.greater_or_equal(flat, low), b.less_or_equal(flat, high))
    shares = b.div(b.mul(b.sub(flat, low), float(bins)), b.sub(high, low))
    # Replace outside elements before the cast, because infinities have no integer.
    whole = b.cast(b.where(inside, shares, -1.0), DataType.INT64)
    numbers = b.where(inside, b.op("Min", whole, bins - 1), -1)
    return counted(call, numbers, bins, call.data_type)


def _masked_scatter(
    call: Call, x: SymbolicTensor, mask: SymbolicTensor, source: SymbolicTensor
) -> SymbolicTensor:
    """x with the masked elements replaced by those of source, one after the other."""
    b = call.builder
    if not source.size or not math.prod(call.shape):
        return b.broadcast(x, call.shape)
    covers = b.broadcast(mask, call.shape)
    elements = b.gather(b.reshape(source, (-1,)), _rank(call, covers, source.size), 0)
    return b.where(covers, b.reshape(elements, call.shape), b.broadcast(x, call.shape))


def _rank(call: Call, covers: SymbolicTensor, count: int) -> SymbolicTensor:
    """For each element of a flattened mask, the number of set ones before it, below `count`."""
    b = call.builder
    ones = b.cast(b.reshape(covers, (-1,)), DataType.INT64)
    before = b.sub(b.op("CumSum", ones, b.constant(0)), 1)
    return b.clip(before, 0, count - 1)


LOWERINGS: dict[Any, Row] = {
    aten.cummax.default: partial(_running_extreme, "GreaterOrEqual"),
    aten.cummin.default: partial(_running_extreme, "LessOrEqual"),
    aten.kthvalue.default: _kth,
    aten.median.default: partial(_median, False), aten.nanmedian.default: partial(_median, True),
    aten.median.dim: partial(_median_along, False),
    aten.nanmedian.dim: partial(_median_along, True),
    aten.searchsorted.Tensor: _search_sorted, aten.searchsorted.Scalar: _search_sorted,
    aten.bucketize.Tensor: _bucketize, aten.bucketize.Scalar: _bucketize,
    aten.histc.default: _histogram,
    aten.masked_scatter.default: _masked_scatter,
}  # fmt: skip
