"""ATen operators that go by the order of elements: running extremes and sums of exponentials, the
median, the k-th, places in sorted rows, histograms.

What runs along an axis doubles its reach at each step (Hillis and Steele, 1986); what searches
halves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Number, Row, Value, rounded_once
from stitch.frontend.torch.lowering.activations import log1p
from stitch.frontend.torch.lowering.shapes import slice_tensor
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
Two = tuple[SymbolicTensor, SymbolicTensor]
Parts = Sequence[SymbolicTensor]

# Along an axis -------------------------------------------------------------------------------


def _running(call: Call, parts: Parts, axis: int, join: Callable[[Parts, Parts], Parts]) -> Parts:
    """Of all elements up to each along an axis, what `join` makes of two stretches of them."""
    b, length, reach = call.builder, parts[0].shape[axis], 1
    while reach < length:
        before = [slice_tensor(call, part, axis, 0, length - reach) for part in parts]
        here = [slice_tensor(call, part, axis, reach, length) for part in parts]
        first = [slice_tensor(call, part, axis, 0, reach) for part in parts]
        joined = join(before, here)
        parts = [b.concat([f, j], axis) for f, j in zip(first, joined, strict=True)]
        reach *= 2
    return parts


def _running_extreme(op: str, call: Call, x: SymbolicTensor, dim: int) -> Two:
    """Extremes and where they are; the last of equal ones, and a NaN from where it comes."""
    b = call.builder
    if not x.shape:
        return x, b.constant(0)
    axis, compared = dim % len(x.shape), _comparable(call, x)

    def join(before: Parts, here: Parts) -> Parts:
        takes = b.op(op, here[0], before[0])
        if x.data_type.is_floating:
            takes = b.logical_or(takes, b.op("IsNaN", here[0]))
        return [b.where(takes, new, old) for old, new in zip(before, here, strict=True)]

    places = np.arange(x.shape[axis]).reshape([-1] + [1] * (len(x.shape) - axis - 1))
    start = b.broadcast(b.constant(places), x.shape)
    values, found = _running(call, [compared, start], axis, join)
    return call.cast(values), found


def _comparable(call: Call, x: SymbolicTensor) -> SymbolicTensor:
    return call.cast(x, DataType.INT32) if x.data_type is DataType.BOOL else x


@rounded_once
def _running_log_sum(call: Call, x: SymbolicTensor, dim: int) -> SymbolicTensor:
    if not x.shape:
        return x

    def join(before: Parts, here: Parts) -> Parts:
        return [log_of_sum(call, before[0], here[0])]

    return _running(call, [call.cast(x)], dim % len(x.shape), join)[0]


def log_of_sum(call: Call, a: SymbolicTensor, b: SymbolicTensor) -> SymbolicTensor:
    """log(exp(a) + exp(b)), also of infinities."""
    build = call.builder
    high, low = build.op("Max", a, b), build.op("Min", a, b)
    same = build.equal(a, b)
    apart = build.where(same, 0.0, build.sub(low, high))
    return build.add(high, log1p(call, build.exp(apart)))


# One of a sorted row -------------------------------------------------------------------------


def _kth(call: Call, x: SymbolicTensor, k: int, dim: int = -1, keepdim: bool = False) -> Two:
    """The k-th smallest; a NaN is larger than all numbers."""
    if not x.shape:
        return x, call.builder.constant(0)
    return _place_of_sorted(call, x, dim, np.int64(k - 1), keepdim)


def _place_of_sorted(call: Call, x: SymbolicTensor, dim: int, place: Any, keepdim: bool) -> Two:
    """The element at this place, one for all rows or for each, of each row in its order."""
    b, axis = call.builder, dim % len(x.shape)
    ordered = b.topk(x, x.shape[axis], axis, False)
    if isinstance(place, SymbolicTensor):
        values, places = (b.gather_elements(part, place, axis) for part in ordered)
    else:
        values, places = (b.gather(part, np.asarray([place]), axis) for part in ordered)
    return (values, places) if keepdim else (b.squeeze(values, axis), b.squeeze(places, axis))


def _median_along(
    skips: bool, call: Call, x: SymbolicTensor, dim: int, keepdim: bool = False
) -> Two:
    """The lower of two in the middle. With `skips` NaN are left out, else one makes all NaN."""
    b = call.builder
    if not x.shape:
        return x, b.constant(0)
    length = x.shape[dim]
    if not x.data_type.is_floating:
        return _place_of_sorted(call, x, dim, np.int64((length - 1) // 2), keepdim)
    bad = b.op("IsNaN", x)
    lost = b.reduce_sum(b.cast(bad, DataType.INT64), dim, keepdims=True)
    # Of numbers only, what NaN leave behind: in order they come last.
    middle = b.op("Div", b.op("Max", b.sub(length - 1, lost), 0), 2)
    if not skips:
        last = b.sub(length, lost)
        middle = b.where(b.greater(lost, 0), last, (length - 1) // 2)
    return _place_of_sorted(call, x, dim, middle, keepdim)


def _median(skips: bool, call: Call, x: SymbolicTensor) -> SymbolicTensor:
    if not x.size:
        return call.filled(math.nan if x.data_type.is_floating else np.iinfo(x.dtype).min)
    return _median_along(skips, call, call.builder.reshape(x, (-1,)), 0)[0]


# Places in sorted rows -----------------------------------------------------------------------


def places_in(
    call: Call, ordered: SymbolicTensor, values: SymbolicTensor, right: bool
) -> SymbolicTensor:
    """How many elements of a sorted row come before each value; with `right` also its equals.

    `ordered` is one row for all values, or has the axes of `values` but for the last one's length.
    """
    b, count = call.builder, ordered.shape[-1]
    found = b.broadcast(b.constant(np.int64(0)), values.shape)
    if not count:
        return found
    # Not "less": what compares with a NaN goes to the end, as by torch.
    after = "Greater" if right else "GreaterOrEqual"
    for power in range(count.bit_length() - 1, -1, -1):
        further = b.add(found, 1 << power)
        place = b.sub(b.op("Min", further, count), 1)
        one_row = len(ordered.shape) == 1
        seen = b.gather(ordered, place, 0) if one_row else b.gather_elements(ordered, place, -1)
        goes = b.logical_and(
            b.less_or_equal(further, count), b.logical_not(b.op(after, seen, values))
        )
        found = b.where(goes, further, found)
    return found


def _search_sorted(
    call: Call, ordered: SymbolicTensor, values: Value, *, out_int32: bool = False,
    right: bool = False, side: str | None = None, sorter: SymbolicTensor | None = None,
) -> SymbolicTensor:  # fmt: skip
    b = call.builder
    if sorter is not None:
        ordered = b.gather_elements(ordered, sorter, -1)
    wanted = (
        call.cast(values, ordered.data_type) if not isinstance(values, SymbolicTensor) else values
    )
    return call.cast(places_in(call, ordered, wanted, right or side == "right"))


def _bucketize(
    call: Call, values: Value, boundaries: SymbolicTensor, *, out_int32: bool = False,
    right: bool = False,
) -> SymbolicTensor:  # fmt: skip
    wanted, limits = call.promoted(values, boundaries)
    return call.cast(places_in(call, limits, wanted, right))


def counted(call: Call, places: SymbolicTensor, count: int, data_type: DataType) -> SymbolicTensor:
    """How often each number below `count` comes among whole numbers; others are left out."""
    b, flat = call.builder, call.builder.reshape(places, (-1,))
    inside = b.logical_and(b.greater_or_equal(flat, 0), b.less(flat, count))
    empty = b.constant(np.zeros(count + 1, data_type.dtype))
    ones = b.constant(np.ones(flat.shape, data_type.dtype))
    where = b.where(inside, flat, count)
    return slice_tensor(
        call, b.op("ScatterElements", empty, where, ones, axis=0, reduction="add"), 0, 0, count
    )


@rounded_once
def _histogram(
    call: Call, x: SymbolicTensor, bins: int = 100, min: Number = 0, max: Number = 0
) -> SymbolicTensor:
    """Numbers in `bins` even stretches from min to max; of the elements' own where both agree."""
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
    # Outside first: what is not finite is no whole number.
    whole = b.cast(b.where(inside, shares, -1.0), DataType.INT64)
    places = b.where(inside, b.op("Min", whole, bins - 1), -1)
    return counted(call, places, bins, call.data_type)


def _masked_scatter(
    call: Call, x: SymbolicTensor, mask: SymbolicTensor, source: SymbolicTensor
) -> SymbolicTensor:
    """x with the elements under the mask replaced by those of source, one after the other."""
    b = call.builder
    if not source.size or not math.prod(call.shape):
        return b.broadcast(x, call.shape)
    covers = b.broadcast(mask, call.shape)
    taken = b.gather(b.reshape(source, (-1,)), _turn(call, covers, source.size), 0)
    return b.where(covers, b.reshape(taken, call.shape), b.broadcast(x, call.shape))


def _masked_scatter_backward(
    call: Call, grad: SymbolicTensor, mask: SymbolicTensor, sizes: Sequence[int]
) -> SymbolicTensor:
    b, count = call.builder, math.prod(sizes)
    if not count or not grad.size:
        return call.filled(0)
    covers = b.broadcast(mask, grad.shape)
    parts = b.reshape(b.where(covers, grad, 0), (-1,))
    empty = b.constant(np.zeros(count, grad.dtype))
    places = _turn(call, covers, count)
    return b.reshape(b.op("ScatterElements", empty, places, parts, axis=0, reduction="add"), sizes)


def _turn(call: Call, covers: SymbolicTensor, count: int) -> SymbolicTensor:
    """For each element of a mask in one line: how many are set before it, within `count`."""
    b = call.builder
    ones = b.cast(b.reshape(covers, (-1,)), DataType.INT64)
    before = b.sub(b.op("CumSum", ones, b.constant(0)), 1)
    return b.clip(before, 0, count - 1)


LOWERINGS: dict[Any, Row] = {
    aten.cummax.default: partial(_running_extreme, "GreaterOrEqual"),
    aten.cummin.default: partial(_running_extreme, "LessOrEqual"),
    aten.logcumsumexp.default: _running_log_sum,
    aten.kthvalue.default: _kth,
    aten.median.default: partial(_median, False), aten.nanmedian.default: partial(_median, True),
    aten.median.dim: partial(_median_along, False),
    aten.nanmedian.dim: partial(_median_along, True),
    aten.searchsorted.Tensor: _search_sorted, aten.searchsorted.Scalar: _search_sorted,
    aten.bucketize.Tensor: _bucketize, aten.bucketize.Scalar: _bucketize,
    aten.histc.default: _histogram,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
}  # fmt: skip
