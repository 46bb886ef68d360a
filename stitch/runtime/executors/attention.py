"""Attention as one operator: operations that compute softmax(scale Q K' + masks) V are found in a
program, and computed by PyTorch's `scaled_dot_product_attention`.

The file of a program keeps its operations: only the CUDA executor binds them as one, and only where
no hook looks at the values between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from stitch.program import Array, DataType, Operation
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.host import WholeProgram

#: Below this, a number that replaces a score has no use for the score: their sum is the number.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of scores: a value that is added, or one that tells where `fill` replaces a score."""

    value: int
    fill: float | None = None
    is_filled_where: bool = True


@dataclass(slots=True)
class Attention:
    """Operations that are bound as one, and the values that it reads and writes.

    Attributes:
        operations: Their indices; the last one writes the result.
        keys: The transposed keys.
        order: How the last operation transposes the result; empty: not at all.
        hides_rows: Whether rows whose scores are all -inf become 0; else they become NaN.
        hiding: The mask by which it does so, None if by the weights.
    """

    query: int
    keys: int
    values: int
    shape: tuple[int, ...]
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    order: tuple[int, ...] = ()
    hides_rows: bool = False
    hiding: Mask | None = None

    @property
    def last(self) -> int:
        """The operation in whose place it is computed."""
        return max(self.operations)

    @property
    def operands(self) -> list[int]:
        """The values that it reads."""
        return [self.query, self.keys, self.values, *[mask.value for mask in self.masks]]


# Finding ------------------------------------------------------------------------------------------


class _Finder:
    """The operations of a program by the values that they write and read."""

    def __init__(self, whole: WholeProgram) -> None:
        self.whole, self.operations = whole, whole.program.operations
        self.writers = {v: i for i, o in enumerate(self.operations) for v in o.outputs}

    def type_of(self, value: int) -> Any:
        return self.whole.program.values[value].type

    def writer(self, value: int, *names: str) -> int | None:
        """The operation of one of these names that writes a value."""
        index = self.writers.get(value)
        return index if index is not None and self.is_a(index, *names) else None

    def is_a(self, index: int, *names: str) -> bool:
        return not self.operations[index].domain and self.operations[index].op in names

    def is_inner(self, value: int, inside: Sequence[int]) -> bool:
        """Whether a value is read by operations inside only."""
        is_read_inside = self.whole.readers.get(value, set()).issubset(inside)
        return is_read_inside and value not in self.whole.returned

    def reader(self, value: int, *names: str) -> int | None:
        """The only operation that reads a value, if it has one of these names."""
        readers = self.whole.readers.get(value, set())
        if len(readers) != 1 or value in self.whole.returned:
            return None
        (index,) = readers
        return index if self.is_a(index, *names) else None

    def number(self, value: int) -> float | None:
        """The number that a constant is, if it is one."""
        data = self.whole.data.get(value)
        return None if data is None or data.size != 1 else float(data.ravel()[0])

    def factor(self, operation: Operation) -> tuple[int, float] | None:
        """The value that a Mul or a Div scales, and by what; None if that is not positive."""
        one, other = operation.inputs
        if operation.op == "Mul" and self.number(one) is not None:
            one, other = other, one
        by = self.number(other)
        if by is None or not 0 < by < math.inf or self.type_of(one) != self.result(operation):
            return None
        return one, by if operation.op == "Mul" else 1 / by

    def result(self, operation: Operation) -> Any:
        return self.type_of(operation.outputs[0])


def attentions_of(whole: WholeProgram) -> list[Attention]:
    """Return the attentions of a program.

    They are not found where a value between their operations is returned or read elsewhere, where
    sizes are 0, and in types narrower than float32, whose roundings would be left out.
    """
    finder = _Finder(whole)
    indices = [i for i in range(len(finder.operations)) if finder.is_a(i, "Softmax")]
    found = [_behind(finder, index) for index in indices]
    return [
        one
        for one in found
        if one is not None
        and _before(finder, one)
        and (one.hiding is None or one.masks == [one.hiding])
        and not any(finder.writers.get(v) in one.operations for v in one.operands)
    ]


def _behind(finder: _Finder, index: int) -> Attention | None:
    """Return the attention of a Softmax with its product with the values; the rest is missing."""
    softmax = finder.operations[index]
    scores, weights = softmax.inputs[0], softmax.outputs[0]
    kind = finder.type_of(scores)
    rank = len(kind.shape)
    is_fitting = kind.data_type in (DataType.FLOAT32, DataType.FLOAT64) and rank in (3, 4)
    is_fitting &= 0 not in kind.shape and softmax.attributes.get("axis", -1) in (-1, rank - 1)
    if not is_fitting:
        return None
    one = Attention(-1, -1, -1, kind.shape, operations=[index])
    hidden, one.hiding = _hidden_rows(finder, weights)
    if hidden:
        one.operations += hidden
        one.hides_rows = True
        weights = finder.operations[hidden[-1]].outputs[0]
    product = finder.reader(weights, "MatMul")
    if product is None or not finder.is_inner(softmax.outputs[0], [*one.operations, product]):
        return None
    left, one.values = finder.operations[product].inputs
    shape = finder.type_of(one.values).shape
    is_fitting = left == weights != one.values and 0 not in shape
    if not is_fitting or not _fits(shape, kind.shape[:-2]):
        return None
    one.operations.append(product)
    turned = finder.reader(finder.operations[product].outputs[0], "Transpose")
    if turned is not None:
        one.operations.append(turned)
        order: Any = finder.operations[turned].attributes.get("perm") or range(rank)[::-1]
        one.order = tuple(order)
    return one


def _hidden_rows(finder: _Finder, weights: int) -> tuple[list[int], Mask | None]:
    """Return the operations that make weights 0 in rows that a mask hides, and this mask.

    As Stitch's frontend of torch writes them: Where(max(mask) == -inf, 0, weights), with Not(max(
    mask)) for a boolean mask; or as torch's exporter to ONNX does, without a mask: Where(IsNaN(
    weights), 0, weights). The last operation is the Where.
    """
    readers = finder.whole.readers.get(weights, set())
    wheres = [i for i in readers if finder.is_a(i, "Where")]
    if len(wheres) != 1:
        return [], None
    condition, zero, other = finder.operations[wheres[0]].inputs
    index = finder.writer(condition, "Equal", "Not", "IsNaN")
    if other != weights or finder.number(zero) != 0.0 or index is None:
        return [], None
    if finder.operations[index].op == "IsNaN":
        is_same = finder.operations[index].inputs[0] == weights and readers == {index, *wheres}
        return ([index, *wheres], None) if is_same else ([], None)
    most, *lowest = finder.operations[index].inputs
    largest = finder.writer(most, "ReduceMax")
    if largest is None or (lowest and finder.number(lowest[0]) != -math.inf):
        return [], None
    reduction = finder.operations[largest]
    mask = reduction.inputs[0]
    axes = reduction.inputs[1:] and finder.number(reduction.inputs[1])
    is_row = axes in (-1, len(finder.type_of(mask).shape) - 1)
    if not is_row or reduction.attributes.get("keepdims", 1) != 1:
        return [], None
    return wheres, Mask(mask) if lowest else Mask(mask, -math.inf, is_filled_where=False)


def _before(finder: _Finder, one: Attention) -> bool:
    """Add the operations from the scores up to queries and keys; False if there are others."""
    value = finder.operations[one.operations[0]].inputs[0]
    while True:
        index = finder.writer(value, "Add", "Where", "Mul", "Div", "MatMul")
        if index is None or not finder.is_inner(value, one.operations):
            return False
        operation = finder.operations[index]
        if finder.result(operation).shape != one.shape:
            return False
        one.operations.append(index)
        if operation.op == "MatMul":
            return _products(finder, one, operation)
        if operation.op in ("Mul", "Div"):
            factor = finder.factor(operation)
            if factor is None:
                return False
            value, one.scale = factor[0], one.scale * factor[1]
            continue
        masked = _mask(finder, operation, value) if one.scale == 1.0 else None
        if masked is None or finder.type_of(masked[1].value).shape[-1:] != one.shape[-1:]:
            return False
        value = masked[0]
        one.masks.append(_unopened(finder, one, masked[1]))


def _unopened(finder: _Finder, one: Attention, mask: Mask) -> Mask:
    """Return a mask as it was before its rows that hide all keys were made 0, if they were.

    Gradients need that; the operator makes the rows 0 itself.
    """
    index = finder.writer(mask.value, "Where")
    if one.hiding is None or index is None or mask.fill is not None:
        return mask
    condition, zero, masking = finder.operations[index].inputs
    is_hidden = finder.operations[one.operations[1]].inputs[0] == condition
    is_opened = is_hidden and masking == one.hiding.value and finder.number(zero) == 0.0
    return one.hiding if is_opened else mask


def _mask(finder: _Finder, operation: Operation, value: int) -> tuple[int, Mask] | None:
    """Return the scores that an Add or a Where masks, and the mask."""
    kind = finder.type_of(value)
    if operation.op == "Add":
        scores, mask = operation.inputs
        if finder.writer(scores, "MatMul", "Add", "Where", "Mul", "Div") is None or (
            finder.type_of(scores) != kind or scores in finder.whole.data
        ):
            scores, mask = mask, scores
        if finder.type_of(scores) != kind or scores == mask:
            return None
        return scores, Mask(mask)
    condition, first, second = operation.inputs
    is_filled_where = finder.number(first) is not None
    fill = finder.number(first if is_filled_where else second)
    scores = second if is_filled_where else first
    if fill is None or fill > LOWEST or math.isnan(fill) or finder.type_of(scores) != kind:
        return None
    return scores, Mask(condition, fill, is_filled_where)


def _products(finder: _Finder, one: Attention, product: Operation) -> bool:
    """Take queries and keys of the product of scores, without factors of their own."""
    taken = []
    for value in product.inputs:
        index = finder.writer(value, "Mul", "Div")
        inner = one.operations if product.inputs[0] != product.inputs[1] else ()
        factor = None if index is None else finder.factor(finder.operations[index])
        if index is not None and factor is not None and finder.is_inner(value, inner):
            one.operations.append(index)
            value, one.scale = factor[0], one.scale * factor[1]
        taken.append(value)
    one.query, one.keys = taken
    query, keys = (finder.type_of(v).shape for v in taken)
    *batch, length, others = one.shape
    is_plain = query[-2:] == (length, keys[-2]) and keys[-1] == others and keys[-2] > 0
    return bool(is_plain and _fits(query, batch) and _fits(keys, batch))


def _fits(shape: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether an operand has the heads of the scores, or one for several of these."""
    if len(shape) != len(batch) + 2:
        return False
    return all(size in (1, heads) for size, heads in zip(shape, batch, strict=False))


def may_leave_a_row(one: Attention, data: dict[int, Array], dtype: np.dtype[Any]) -> bool:
    """Whether masks may leave a row no score above -inf, which then has to become NaN.

    `dtype`: of the scores; masks may overflow in it where they are added.
    """
    if one.hides_rows or not one.masks:
        return False
    total = np.zeros(one.shape[-2:], dtype)
    for mask in reversed(one.masks):
        known = data.get(mask.value)
        if known is None:
            return True
        with np.errstate(all="ignore"):
            if mask.fill is None:
                total = total + known
            else:
                total = np.where(known == mask.is_filled_where, dtype.type(mask.fill), total)
    return bool(np.any(total.max(-1) == -math.inf))


# Computing ----------------------------------------------------------------------------------------


def attention_steps(
    one: Attention, operands: Sequence[torch.Tensor], mask: torch.Tensor | None,
    rows: torch.Tensor | None, out: torch.Tensor,
) -> list[Thunk]:  # fmt: skip
    """Return the steps of an attention.

    Args:
        one: The attention.
        operands: Queries, transposed keys and values.
        mask: What is added to scores.
        rows: What is added to the rows of the result: 0 or NaN.
        out: The tensor of the result, transposed as `one.order` says.
    """
    steps: list[Thunk] = []
    # The fused kernels take batches of heads only.
    batched = (None,) * (4 - len(one.shape))
    both = (operands[0], operands[1].mT, operands[2])
    query, keys, values = (x.expand(*one.shape[:-2], *x.shape[-2:])[batched] for x in both)
    mask = None if mask is None else mask.expand(one.shape)[batched]
    if keys.stride(-1) != 1:
        beside = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        steps.append(partial(beside.copy_, keys))
        keys = beside
    attend = _on_processor if out.device.type == "cpu" else functional.scaled_dot_product_attention
    function = partial(attend, query, keys, values, mask, scale=one.scale)
    if one.order:
        out = out.permute(tuple(np.argsort(one.order).tolist()))
    return [*steps, partial(_write, out[batched], function, rows)]


def _write(out: torch.Tensor, function: Callable[[], Any], rows: torch.Tensor | None) -> None:
    """Put a result into its place; no kernel of attention has `out=`."""
    # Else it would compute in the types of a caller's autocast.
    with torch.autocast(out.device.type, enabled=False):
        result = function()
    if rows is None:
        out.copy_(result)
    else:
        torch.add(result, rows, out=out)


def _on_processor(*operands: Any, scale: float) -> Any:
    # The fused kernel of the processor gives 0 in rows with a NaN.
    function = torch.ops.aten._scaled_dot_product_attention_math
    return function(*operands, 0.0, False, None, scale=scale)[0]


def mask_steps(
    masks: Sequence[Mask], tensors: Sequence[torch.Tensor], new: Callable[[Sequence[int]], Any]
) -> tuple[torch.Tensor, list[Thunk]]:
    """Return the sum of masks as numbers to add, and the steps that compute it.

    Args:
        masks: The masks; the last one is applied first.
        tensors: The tensor of each.
        new: Allocates a tensor of the scores' type.
    """
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
    total = new(shape)
    zero = torch.zeros((), dtype=total.dtype, device=total.device)
    steps: list[Thunk] = [partial(total.fill_, 0.0)]
    for mask, tensor in reversed([*zip(masks, tensors, strict=True)]):
        if mask.fill is None:
            steps.append(partial(torch.add, total, tensor, out=total))
            continue
        fill = torch.full_like(zero, mask.fill)
        picked = (tensor, fill, total) if mask.is_filled_where else (tensor, total, fill)
        steps.append(partial(torch.where, *picked, out=total))
    return total, steps


def row_steps(
    mask: torch.Tensor, new: Callable[[Sequence[int]], Any]
) -> tuple[torch.Tensor, list[Thunk]]:
    """Return what is added to each row of a result, NaN where its mask is -inf everywhere, else 0;
    and the steps that compute it."""
    rows = new((*mask.shape[:-1], 1))
    largest = partial(torch.amax, mask, -1, True, out=rows)
    return rows, [largest, partial(torch.sub, rows, rows, out=rows)]
