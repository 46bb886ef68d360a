"""ATen's grouped products: rows of one matrix, group by group, times a matrix of each group's own.

How many rows a group has depends on data, the shapes do not: rows are laid into blocks of a fixed
height, each of one group, so that there is at most twice as much to multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Lowering, Row, Several, rounded_once
from stitch.frontend.torch.lowering.ordered_elements import places_in
from stitch.frontend.torch.lowering.shapes import slice_tensor
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where rows of groups lie, that end at these places, and in which blocks they come to lie.

    `before`: how many blocks the groups before each one take. `groups`: of which group each block
    is. `rows`, `holds`: [blocks, height], which row is at each place of a block, if one is.
    """

    call: Call
    count: int
    height: int
    starts: SymbolicTensor
    ends: SymbolicTensor
    before: SymbolicTensor
    groups: SymbolicTensor
    rows: SymbolicTensor
    holds: SymbolicTensor

    @staticmethod
    def of(call: Call, count: int, offsets: SymbolicTensor) -> _Blocks:
        """Of `count` rows, in groups that end at these offsets."""
        b, groups = call.builder, offsets.shape[0]
        height = -(-count // groups)
        most = (count + groups * (height - 1)) // height
        ends = b.cast(offsets, DataType.INT64)
        zero = b.constant(np.zeros(1, np.int64))
        starts = b.concat([zero, slice_tensor(call, ends, 0, 0, groups - 1)], 0)
        taken = b.op("Div", b.add(b.sub(ends, starts), height - 1), height)
        after = b.op("CumSum", taken, b.constant(0))
        before = b.sub(after, taken)
        numbers = b.constant(np.arange(most, dtype=np.int64))
        # Blocks that no group asks for are the last one's, and hold nothing.
        of_block = b.op("Min", places_in(call, after, numbers, right=True), groups - 1)
        first = b.mul(b.sub(numbers, b.gather(before, of_block, 0)), height)
        first = b.add(first, b.gather(starts, of_block, 0))
        within = b.constant(np.arange(height, dtype=np.int64))
        rows = b.add(b.unsqueeze(first, 1), within)
        holds = b.less(rows, b.unsqueeze(b.gather(ends, of_block, 0), 1))
        rows = b.clip(rows, 0, count - 1)
        return _Blocks(call, count, height, starts, ends, before, of_block, rows, holds)

    def laid(self, x: SymbolicTensor) -> SymbolicTensor:
        """Rows [count, width] in blocks [blocks, height, width], zeros where there is none."""
        b = self.call.builder
        return b.where(b.unsqueeze(self.holds, 2), b.gather(x, self.rows, 0), 0)

    def taken(self, blocks: SymbolicTensor) -> SymbolicTensor:
        """The rows back from their blocks; zeros for those after the last group."""
        b, last = self.call.builder, self.ends.shape[0] - 1
        numbers = b.constant(np.arange(self.count, dtype=np.int64))
        group = b.op("Min", places_in(self.call, self.ends, numbers, right=True), last)
        inside = b.sub(numbers, b.gather(self.starts, group, 0))
        # A block's rows follow each other, as the blocks of a group do.
        place = b.add(b.mul(b.gather(self.before, group, 0), self.height), inside)
        flat = b.reshape(blocks, (-1, blocks.shape[-1]))
        found = b.gather(flat, b.clip(place, 0, flat.shape[0] - 1), 0)
        is_of_a_group = b.less(numbers, b.gather(self.ends, np.asarray([last], np.int64), 0))
        return b.where(b.unsqueeze(is_of_a_group, 1), found, 0)


def _grouped_product(
    call: Call,
    first: SymbolicTensor,
    second: SymbolicTensor,
    offsets: SymbolicTensor | None = None,
    bias: SymbolicTensor | None = None,
    out_dtype: Any = None,
) -> SymbolicTensor:
    """By which of the two has its groups stacked: the right one, the left, neither or both."""
    b, ranks = call.builder, (len(first.shape), len(second.shape))
    if 0 in call.shape:
        return call.filled(0)
    if offsets is None or 0 in first.shape or 0 in second.shape:
        result = call.filled(0) if offsets is not None else b.matmul(first, second)
    elif ranks == (2, 3):
        result = _of_rows(call, first, second, offsets)
    elif ranks == (3, 2):
        turned = _of_rows(call, b.transpose(second), b.swapaxes(first, 1, 2), offsets)
        result = b.transpose(turned)
    else:
        result = _summed_by_group(call, first, second, offsets)
    return call.cast(result if bias is None else b.add(result, b.cast(bias, result.data_type)))


def _of_rows(
    call: Call, x: SymbolicTensor, matrices: SymbolicTensor, offsets: SymbolicTensor
) -> SymbolicTensor:
    """[rows, inner] times [groups, inner, columns]."""
    blocks = _Blocks.of(call, x.shape[0], offsets)
    own = call.builder.gather(matrices, blocks.groups, 0)
    return blocks.taken(call.builder.matmul(blocks.laid(x), own))


@rounded_once
def _summed_by_group(
    call: Call, first: SymbolicTensor, second: SymbolicTensor, offsets: SymbolicTensor
) -> SymbolicTensor:
    """[rows, inner] times [inner, columns], a product for each group of the inner axis."""
    b, shape = call.builder, (offsets.shape[0], first.shape[0], second.shape[1])
    blocks = _Blocks.of(call, second.shape[0], offsets)
    left = b.swapaxes(blocks.laid(b.transpose(first)), 1, 2)
    products = b.matmul(left, blocks.laid(second))
    empty = b.broadcast(b.constant(np.asarray(0, products.dtype)), shape)
    return b.op("ScatterND", empty, b.unsqueeze(blocks.groups, 1), products, reduction="add")


def _grouped_product_backward(
    call: Call,
    x: SymbolicTensor,
    matrices: SymbolicTensor,
    offsets: SymbolicTensor,
    grad: SymbolicTensor,
) -> Several:
    """Of rows times the matrices of their groups."""
    b, second = call.builder, call.results[1]
    if 0 in (*x.shape, *matrices.shape):
        return tuple(b.broadcast(call.cast(0, t.data_type), t.shape) for t in (x, matrices))
    assert second is not None, "both operands have a gradient"
    of_x = _of_rows(call, grad, b.swapaxes(matrices, 1, 2), offsets)
    own = Call(b, (second,))
    return of_x, call.cast(_summed_by_group(own, b.transpose(x), grad, offsets), second.data_type)


LOWERINGS: dict[Any, Row] = {aten._grouped_mm.default: _grouped_product}
#: Of the package transformers, which has operators of its own where torch's takes bfloat16 alone.
LOWERINGS_BY_NAME: dict[str, Lowering] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "transformers.grouped_mm_fallback_backward.default": _grouped_product_backward,
}
