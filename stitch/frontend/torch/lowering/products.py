"""ATen's matrix products, linear layers, convolutions and grouped products.

A grouped product multiplies each group of rows by the group's own matrix. The number of rows of a
group depends on data, so rows are padded to blocks of a fixed height, each of one group: at most
twice as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import (
    Call,
    KeptWhole,
    Lowering,
    Number,
    Row,
    Several,
    rounded_once,
)
from stitch.frontend.torch.lowering.ordered_elements import sorted_positions
from stitch.frontend.torch.lowering.shapes import slice_tensor
from stitch.frontend.torch.lowering.window_operators import spread
from stitch.graph import SymbolicTensor
from stitch.program import DataType

# Linear layers ------------------------------------------------------------------------------------

aten = torch.ops.aten


def _matmul(call: Call, a: SymbolicTensor, b: SymbolicTensor) -> SymbolicTensor:
    kind = _summed_type(call)
    return call.cast(call.builder.matmul(call.cast(a, kind), call.cast(b, kind)))


def _summed_type(call: Call) -> DataType:
    """The type of sums: int32 for narrow integers, which ONNX's MatMul lacks; torch's sums are the
    same modulo the range of the type."""
    is_narrow = not call.data_type.is_floating and call.data_type.dtype.itemsize < 4
    return DataType.INT32 if is_narrow else call.data_type


def _linear(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None = None
) -> SymbolicTensor:
    b = call.builder
    is_matrix = len(weight.shape) == 2 and x.shape
    if is_matrix and call.data_type.is_floating:
        return b.linear(x, weight, bias)
    product = _matmul(call, x, b.transpose(weight, (1, 0)) if is_matrix else weight)
    return product if bias is None else b.add(product, bias)


def _add_product(
    call: Call, added: SymbolicTensor, first: SymbolicTensor, second: SymbolicTensor, *,
    beta: Number = 1, alpha: Number = 1,
) -> SymbolicTensor:  # fmt: skip
    """beta * added + alpha * (first @ second); a Gemm for matrices."""
    b, tensors = call.builder, [call.cast(t) for t in (first, second, added)]
    if len(first.shape) == len(second.shape) == 2 and call.data_type.is_floating:
        attributes: dict[str, Any] = {
            name: float(value) for name, value in (("alpha", alpha), ("beta", beta)) if value != 1
        }
        return b.apply("Gemm", tensors if beta != 0 else tensors[:2], 1, attributes)[0]
    product = _matmul(call, tensors[0], tensors[1])
    scaled = product if alpha == 1 else b.mul(product, call.cast(alpha))
    if beta == 0:
        return b.broadcast(scaled, call.shape)
    return b.add(tensors[2] if beta == 1 else b.mul(tensors[2], call.cast(beta)), scaled)


def _convolution(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> SymbolicTensor:  # fmt: skip
    b, spatial = call.builder, len(weight.shape) - 2
    if not transposed and not weight.shape[1]:
        # Without input channels torch makes no output channels, for any number of weights.
        return b.constant(np.zeros(call.shape, call.data_type.dtype))
    single = len(x.shape) == spatial + 1
    batch = b.unsqueeze(x, 0) if single else x
    attributes: dict[str, Any] = {
        "strides": spread(stride, spatial), "pads": spread(padding, spatial) * 2,
        "dilations": spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    if transposed:
        attributes["output_padding"] = spread(output_padding, spatial)
    result = b.op("ConvTranspose" if transposed else "Conv", batch, weight, bias, **attributes)
    return b.squeeze(result, 0) if single else result


# Grouped matrix products --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The mapping between rows of groups and blocks of `height` rows.

    `starts`, `ends`: the rows of each group. `before`: the number of blocks before each group.
    `groups`: the group of each block. `rows`, `is_row`: [blocks, height], the row at each position
    of a block, and whether there is one.
    """

    call: Call
    count: int
    height: int
    starts: SymbolicTensor
    ends: SymbolicTensor
    before: SymbolicTensor
    groups: SymbolicTensor
    rows: SymbolicTensor
    is_row: SymbolicTensor

    @staticmethod
    def of(call: Call, count: int, offsets: SymbolicTensor) -> _Blocks:
        """Blocks for `count` rows in groups that end at these offsets."""
        b, groups = call.builder, offsets.shape[0]
        height = -(-count // groups)
        most = (count + groups * (height - 1)) // height
        ends = b.cast(offsets, DataType.INT64)
        zero = b.constant(np.zeros(1, np.int64))
        starts = b.concat([zero, slice_tensor(call, ends, 0, 0, groups - 1)], 0)
        lengths = b.op("Div", b.add(b.sub(ends, starts), height - 1), height)
        after = b.op("CumSum", lengths, b.constant(0))
        before = b.sub(after, lengths)
        numbers = b.constant(np.arange(most, dtype=np.int64))
        # Unused blocks belong to the last group and have no rows.
        of_block = b.op("Min", sorted_positions(call, after, numbers, right=True), groups - 1)
        first = b.mul(b.sub(numbers, b.gather(before, of_block, 0)), height)
        first = b.add(first, b.gather(starts, of_block, 0))
        within = b.constant(np.arange(height, dtype=np.int64))
        rows = b.add(b.unsqueeze(first, 1), within)
        is_row = b.less(rows, b.unsqueeze(b.gather(ends, of_block, 0), 1))
        rows = b.clip(rows, 0, count - 1)
        return _Blocks(call, count, height, starts, ends, before, of_block, rows, is_row)

    def pack(self, x: SymbolicTensor) -> SymbolicTensor:
        """Rows [count, width] as blocks [blocks, height, width], padded with zeros."""
        b = self.call.builder
        return b.where(b.unsqueeze(self.is_row, 2), b.gather(x, self.rows, 0), 0)

    def unpack(self, blocks: SymbolicTensor) -> SymbolicTensor:
        """The rows of blocks; zeros for rows after the last group."""
        b, last = self.call.builder, self.ends.shape[0] - 1
        numbers = b.constant(np.arange(self.count, dtype=np.int64))
        group = b.op("Min", sorted_positions(self.call, self.ends, numbers, right=True), last)
        inside = b.sub(numbers, b.gather(self.starts, group, 0))
        # The rows of a block are consecutive, and so are the blocks of a group.
        index = b.add(b.mul(b.gather(self.before, group, 0), self.height), inside)
        flat = b.reshape(blocks, (-1, blocks.shape[-1]))
        rows = b.gather(flat, b.clip(index, 0, flat.shape[0] - 1), 0)
        is_of_a_group = b.less(numbers, b.gather(self.ends, np.asarray([last], np.int64), 0))
        return b.where(b.unsqueeze(is_of_a_group, 1), rows, 0)


def _grouped_product(
    call: Call, first: SymbolicTensor, second: SymbolicTensor,
    offsets: SymbolicTensor | None = None, bias: SymbolicTensor | None = None,
    out_dtype: Any = None,
) -> SymbolicTensor:  # fmt: skip
    """Groups are stacked in the right operand, in the left one, in neither or in both."""
    b, ranks = call.builder, (len(first.shape), len(second.shape))
    if 0 in call.shape:
        return call.filled(0)
    if offsets is None or 0 in first.shape or 0 in second.shape:
        result = call.filled(0) if offsets is not None else b.matmul(first, second)
    elif ranks == (2, 3):
        result = _of_rows(call, first, second, offsets)
    elif ranks == (3, 2):
        result = b.transpose(_of_rows(call, b.transpose(second), b.swapaxes(first, 1, 2), offsets))
    else:
        result = _summed_by_group(call, first, second, offsets)
    return call.cast(result if bias is None else b.add(result, b.cast(bias, result.data_type)))


def _of_rows(
    call: Call, x: SymbolicTensor, matrices: SymbolicTensor, offsets: SymbolicTensor
) -> SymbolicTensor:
    """[rows, inner] @ [groups, inner, columns]."""
    blocks = _Blocks.of(call, x.shape[0], offsets)
    own = call.builder.gather(matrices, blocks.groups, 0)
    return blocks.unpack(call.builder.matmul(blocks.pack(x), own))


@rounded_once
def _summed_by_group(
    call: Call, first: SymbolicTensor, second: SymbolicTensor, offsets: SymbolicTensor
) -> SymbolicTensor:
    """[rows, inner] @ [inner, columns], a product for each group of the inner axis."""
    b, shape = call.builder, (offsets.shape[0], first.shape[0], second.shape[1])
    blocks = _Blocks.of(call, second.shape[0], offsets)
    left = b.swapaxes(blocks.pack(b.transpose(first)), 1, 2)
    products = b.matmul(left, blocks.pack(second))
    empty = b.broadcast(b.constant(np.asarray(0, products.dtype)), shape)
    return b.op("ScatterND", empty, b.unsqueeze(blocks.groups, 1), products, reduction="add")


def _grouped_product_backward(
    call: Call, x: SymbolicTensor, matrices: SymbolicTensor, offsets: SymbolicTensor,
    grad: SymbolicTensor,
) -> Several:  # fmt: skip
    """The gradients of rows and of the groups' matrices."""
    b, second = call.builder, call.results[1]
    if 0 in (*x.shape, *matrices.shape):
        return tuple(b.broadcast(call.cast(0, t.data_type), t.shape) for t in (x, matrices))
    assert second is not None, "both operands have a gradient"
    of_x = _of_rows(call, grad, b.swapaxes(matrices, 1, 2), offsets)
    own = Call(b, (second,))
    return of_x, call.cast(_summed_by_group(own, b.transpose(x), grad, offsets), second.data_type)


#: Operators of the package transformers: torch's take only bfloat16.
LOWERINGS_BY_NAME: dict[str, Lowering] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "transformers.grouped_mm_fallback_backward.default": _grouped_product_backward,
}


LOWERINGS: dict[Any, Row] = {
    aten.mm.default: _matmul, aten.bmm.default: _matmul, aten.matmul.default: KeptWhole(_matmul),
    aten.linear.default: KeptWhole(_linear), aten.addmm.default: _add_product,
    aten.addmv.default: _add_product,
    aten.convolution.default: _convolution,
    aten._grouped_mm.default: _grouped_product,
}  # fmt: skip
