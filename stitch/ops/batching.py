"""Batching rules: how an operator is applied to a batch of examples (`vmap`).

A batch axis is put in front of every operand that varies over the batch and of every result;
shared operands have none. `BatchingContext` provides the operations that rules share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.ops.gradient import EmittingContext, GradientBuilder, Operand
from stitch.ops.inference import Shape
from stitch.program import Array, AttributeValue, DataType, ValueType


@dataclass(frozen=True, slots=True)
class BatchingContext(EmittingContext):
    """One operation to be applied to a batch of `batch_size` >= 1 examples.

    Types are those of one example, None for absent operands. `operands[i]` is a value or an array,
    with the batch axis in front if `batched[i]`; `constants[i]` is its data if it is known at
    compile time and shared by the batch. Attributes are resolved.
    """

    op: str
    builder: GradientBuilder
    attributes: Mapping[str, AttributeValue]
    input_types: tuple[ValueType | None, ...]
    output_types: tuple[ValueType | None, ...]
    operands: tuple[Any, ...]
    batched: tuple[bool, ...]
    batch_size: int
    constants: tuple[Array | None, ...]
    domain: str = ""
    location: str = ""

    # Operands and types of one example ---------------------------------------------------------

    def varies(self, *indices: int) -> bool:
        """Return whether one of these operands varies over the batch."""
        return any(i < len(self.batched) and self.batched[i] for i in indices)

    def shape(self, index: int = 0) -> Shape:
        """Return the shape of operand `index` of one example."""
        return self.type_of(index).shape

    def rank(self, index: int = 0) -> int:
        """Return the rank of operand `index` of one example."""
        return len(self.shape(index))

    def result_shape(self, index: int = 0) -> Shape:
        """Return the shape of result `index`, which must be requested, of one example."""
        kind = self.output_types[index]
        assert kind is not None, f"result {index} of {self.op} is not wanted"
        return kind.shape

    def axis_behind(self, axis: int, index: int = 0) -> int:
        """Return axis `axis` (may be negative) of operand `index`, counted with the batch axis."""
        return axis % max(self.rank(index), 1) + 1

    # Emitting operations -----------------------------------------------------------------------

    def emit(self, *operands: Operand, **changed: Any) -> tuple[Any, ...]:
        """Emit the operation on other operands, with some attributes changed (None: removed)."""
        words = {**self.attributes, **changed}
        return self.builder.apply(self.op, operands, len(self.output_types), words, self.domain)

    def with_first(self, first: Operand, **changed: Any) -> tuple[Any, ...]:
        """Emit the operation with another first operand; the others must be shared."""
        assert not any(self.batched[1:])
        return self.emit(first, *self.operands[1:], **changed)

    # Batched operands --------------------------------------------------------------------------

    def repeat(self, value: Any, shape: Shape) -> Any:
        """Repeat a shared value of this shape over the batch: [batch_size, *shape]."""
        return self.apply("Expand", value, [self.batch_size, *shape])

    def broadcast(self, index: int) -> Any:
        """Return operand `index` with the batch axis in front, repeated if it is shared; None if
        it is absent."""
        if not self.has(index) or self.batched[index]:
            return self.operands[index] if index < len(self.operands) else None
        return self.repeat(self.operands[index], self.shape(index))

    def broadcast_all(self) -> tuple[Any, ...]:
        """Return all operands with the batch axis in front."""
        return tuple(self.broadcast(index) for index in range(len(self.operands)))

    def align(self, index: int, rank: int) -> Any:
        """Return operand `index` so that it broadcasts against values of rank `rank` per example:
        [batch_size, 1 .., *shape] if it varies, else unchanged."""
        operand = self.operands[index] if index < len(self.operands) else None
        if operand is None or not self.varies(index):
            return operand
        shape = self.shape(index)
        return self.reshape(operand, (self.batch_size, *(1,) * (rank - len(shape)), *shape))

    def fold(self, index: int, axis: int = 0) -> Any:
        """Return operand `index` with the batch folded into its axis `axis` (batch-major); None if
        the operand is absent."""
        value = self.broadcast(index)
        return None if value is None else self.merge(value, axis)

    def merge(self, value: Any, axis: int = 0) -> Any:
        """Fold the batch axis of a value [batch_size, *s] into axis `axis` of s."""
        shape = list(value.shape[1:])
        if axis:
            value = self.apply("Transpose", value, perm=_moved(len(shape) + 1, 0, axis))
        shape[axis] *= self.batch_size
        return self.reshape(value, shape)

    def split(self, value: Any, axis: int = 0) -> Any:
        """Inverse of `merge`: split the batch off axis `axis` and move it to the front."""
        shape = value.shape
        size = shape[axis] // self.batch_size
        value = self.reshape(value, (*shape[:axis], self.batch_size, size, *shape[axis + 1 :]))
        if not axis:
            return value
        return self.apply("Transpose", value, perm=_moved(len(shape) + 1, axis, 0))

    def move_to_front(self, value: Any, axis: int) -> Any:
        """Move the batch axis of a value from `axis` to the front."""
        if axis == 0:
            return value
        return self.apply("Transpose", value, perm=_moved(len(value.shape), axis, 0))

    def example_indices(self, rank: int, step: int = 1) -> Any:
        """Return each example's index times `step`, int64: [batch_size, 1 ..] with `rank` ones."""
        numbers = np.arange(self.batch_size, dtype=np.int64) * step
        return self.constant(numbers.reshape(self.batch_size, *(1,) * rank))

    def wide(self, value: Any) -> Any:
        """Cast a value to its compute type, so that several operations round once."""
        computed = DataType.from_dtype(value.dtype).compute_dtype
        return self.cast(value, DataType.from_dtype(computed))


def _moved(rank: int, source: int, target: int) -> list[int]:
    """Return the permutation that moves axis `source` to `target`."""
    order = [axis for axis in range(rank) if axis != source]
    return [*order[:target], source, *order[target:]]


#: Returns the batched results, batch axis in front (None for absent ones), or None if the operator
#: must run once per example. Called only if an operand varies over the batch.
Batching = Callable[[BatchingContext], "Sequence[Any] | None"]


def broadcasting(context: BatchingContext) -> Sequence[Any]:
    """Rule of operators whose operands broadcast against each other."""
    rank = max(len(kind.shape) for kind in context.input_types if kind is not None)
    return context.emit(*(context.align(i, rank) for i in range(len(context.operands))))


def of_equal_shapes(context: BatchingContext) -> Sequence[Any]:
    """Rule of elementwise operators whose operands have one shape."""
    return context.emit(*context.broadcast_all())


def of_last_axes(context: BatchingContext) -> Sequence[Any] | None:
    """Rule of operators on the last axes of the first operand, with any number of leading axes, if
    the other operands are shared."""
    return None if any(context.batched[1:]) else context.emit(*context.operands)


def first_along_axis(context: BatchingContext) -> Sequence[Any]:
    """As `along_axis`, if the operands but the first are shared."""
    return context.with_first(context.operands[0], axis=context.axis_behind(context.int_of("axis")))


def along_axis(context: BatchingContext) -> Sequence[Any]:
    """Rule of operators along the attribute `axis`: shift it by one."""
    return context.emit(*context.broadcast_all(), axis=context.axis_behind(context.int_of("axis")))


def in_first_axis(*shared: int) -> Batching:
    """Return the rule of operators that map over the first axis: fold the batch into it.

    Operands `shared` have no such axis; if one of them varies, there is no rule.
    """

    def batching(context: BatchingContext) -> Sequence[Any] | None:
        if context.varies(*shared):
            return None
        operands = (
            context.operands[i] if i in shared else context.fold(i)
            for i in range(len(context.operands))
        )
        return tuple(context.split(result) for result in context.emit(*operands))

    return batching
