"""ATen's embedding bags (rows of a table, reduced bag by bag) and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Row, Several, rounded_once
from stitch.frontend.torch.lowering.ordered_elements import counted, sorted_positions
from stitch.frontend.torch.lowering.shapes import slice_tensor
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
#: torch's numbers for the reductions of a bag.
_SUM, _MEAN, _MAX = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Bags:
    """The rows of the table that are read, the bag of each, and whether it counts (not padding);
    None if all do."""

    call: Call
    rows: SymbolicTensor
    bags: SymbolicTensor
    counts: SymbolicTensor | None

    def sum(self, values: SymbolicTensor, count: int) -> SymbolicTensor:
        """Sum values [rows, width] to [count, width]."""
        b, values = self.call.builder, self.counting(values)
        empty = b.broadcast(b.constant(np.asarray(0, values.dtype)), (count, values.shape[1]))
        index = b.broadcast(b.unsqueeze(self.bags, 1), values.shape)
        return b.op("ScatterElements", empty, index, values, axis=0, reduction="add")

    def counting(self, values: SymbolicTensor) -> SymbolicTensor:
        """Values [rows, width] with zeros for rows that do not count."""
        b = self.call.builder
        return values if self.counts is None else b.where(b.unsqueeze(self.counts, 1), values, 0.0)

    def sizes(self, count: int, data_type: DataType) -> SymbolicTensor:
        """The number of counting rows of each bag."""
        b = self.call.builder
        bags = self.bags if self.counts is None else b.where(self.counts, self.bags, -1)
        return counted(self.call, bags, count, data_type)


def _bags(
    call: Call, indices: SymbolicTensor, offsets: SymbolicTensor, count: int, padding: int
) -> _Bags:
    b = call.builder
    starts = b.cast(slice_tensor(call, offsets, 0, 0, count), DataType.INT64)
    numbers = b.constant(np.arange(indices.shape[0], dtype=np.int64))
    bags = b.sub(sorted_positions(call, starts, numbers, right=True), 1)
    bags = b.clip(bags, 0, max(count - 1, 0))
    rows = b.cast(indices, DataType.INT64)
    return _Bags(call, rows, bags, b.not_equal(rows, padding) if padding >= 0 else None)


def _check_mode(mode: int) -> None:
    if mode == _MAX:
        raise CompileError(
            "embedding bags with mode 'max' are not supported",
            remedy="use mode 'sum' or 'mean', or torch.compile, which leaves them to torch",
        )


@rounded_once
def _embedding_bag(
    call: Call, weight: SymbolicTensor, indices: SymbolicTensor, offsets: SymbolicTensor,
    scale_grad_by_freq: bool = False, mode: int = _SUM, sparse: bool = False,
    per_sample_weights: SymbolicTensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Several:  # fmt: skip
    _check_mode(mode)
    b, count = call.builder, call.shape[0]
    # The other results are zeros unless the backward pass reads them.
    rest: list[SymbolicTensor | None] = [
        None if r is None else b.broadcast(call.cast(0, r.data_type), r.shape)
        for r in call.results[1:]
    ]
    if not indices.shape[0] or not count:
        return call.filled(0), *rest
    padding = padding_idx + weight.shape[0] if padding_idx < -1 else padding_idx
    bags = _bags(call, indices, offsets, count, padding)
    if call.results[1] is not None and call.results[1].shape == indices.shape:
        rest[0] = call.cast(bags.bags, call.results[1].data_type)
    if call.results[2] is not None and call.results[2].shape == (count,):
        rest[1] = bags.sizes(count, call.results[2].data_type)
    taken = b.gather(weight, bags.rows, 0)
    if per_sample_weights is not None:
        taken = b.mul(taken, b.unsqueeze(b.cast(per_sample_weights, taken.data_type), 1))
    total = bags.sum(taken, count)
    if mode == _MEAN:
        total = b.div(total, b.unsqueeze(b.op("Max", bags.sizes(count, total.data_type), 1.0), 1))
    return total, *rest


@rounded_once
def _embedding_bag_backward(
    call: Call, grad: SymbolicTensor, indices: SymbolicTensor, offsets: SymbolicTensor,
    offset2bag: SymbolicTensor, bag_size: SymbolicTensor, maximum_indices: SymbolicTensor,
    num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: SymbolicTensor | None, padding_idx: int = -1,
) -> SymbolicTensor:  # fmt: skip
    _check_mode(mode)
    b, count = call.builder, grad.shape[0]
    table = call.filled(0)
    if 0 in grad.shape or not indices.shape[0]:
        return table
    padding = padding_idx + num_weights if padding_idx < -1 else padding_idx
    bags = _bags(call, indices, offsets, count, padding)
    if mode == _MEAN:
        grad = b.div(grad, b.unsqueeze(b.op("Max", bags.sizes(count, grad.data_type), 1.0), 1))
    parts = bags.counting(b.gather(grad, bags.bags, 0))
    if per_sample_weights is not None:
        parts = b.mul(parts, b.unsqueeze(b.cast(per_sample_weights, parts.data_type), 1))
    if scale_grad_by_freq:
        frequency = b.gather(counted(call, bags.rows, num_weights, parts.data_type), bags.rows, 0)
        parts = b.div(parts, b.unsqueeze(frequency, 1))
    index = b.broadcast(b.unsqueeze(bags.rows, 1), parts.shape)
    return b.op("ScatterElements", table, index, parts, axis=0, reduction="add")


LOWERINGS: dict[Any, Row] = {
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
}  # fmt: skip
