"""Batching: the terms in which an operator says what it becomes when it is applied to many lanes.

A lane axis is put in front of every operand that differs and of every result; what is the same for
all lanes has none. What rules of all families write often the context writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.ops.element_types import onnx_code
from stitch.ops.gradient import Given, GradientBuilder
from stitch.ops.inference import WithAttributes
from stitch.program import Array, AttributeValue, DataType, ValueType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchingContext(WithAttributes):
    """One operation that is to be applied to `lanes` lanes, one at least.

    Types are those of one lane, None for what is absent. `operands[i]` is a value or an array, with
    the lane axis in front if `batched[i]`; `constants[i]` is its data where it is known at compile
    time and the same for all lanes. Attributes are resolved.
    """

    op: str
    builder: GradientBuilder
    attributes: Mapping[str, AttributeValue]
    input_types: tuple[ValueType | None, ...]
    output_types: tuple[ValueType | None, ...]
    operands: tuple[Any, ...]
    batched: tuple[bool, ...]
    lanes: int
    constants: tuple[Array | None, ...]
    domain: str = ""
    location: str = ""

    # What there is -----------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Whether operand `index` is present."""
        return index < len(self.input_types) and self.input_types[index] is not None

    def varies(self, *indices: int) -> bool:
        """Whether one of these operands differs from lane to lane."""
        return any(i < len(self.batched) and self.batched[i] for i in indices)

    def type_of(self, index: int) -> ValueType:
        """The type of operand `index`, which is present, in one lane."""
        kind = self.input_types[index]
        assert kind is not None, f"operand {index} of {self.op} is absent"
        return kind

    def shape(self, index: int = 0) -> Shape:
        """The shape of operand `index` in one lane."""
        return self.type_of(index).shape

    def rank(self, index: int = 0) -> int:
        """The rank of operand `index` in one lane."""
        return len(self.shape(index))

    def result_shape(self, index: int = 0) -> Shape:
        """The shape of result `index`, which is wanted, in one lane."""
        kind = self.output_types[index]
        assert kind is not None, f"result {index} of {self.op} is not wanted"
        return kind.shape

    def ints_at(self, index: int) -> Shape | None:
        """The integers of an operand that inference has asked for, None where it is absent."""
        if not self.has(index):
            return None
        data = self.constants[index]
        assert data is not None, f"operand {index} of {self.op} is not known"
        return tuple(int(value) for value in data.ravel())

    def axis_behind(self, axis: int, index: int = 0) -> int:
        """Where an axis of operand `index`, perhaps counted from the end, is behind the lanes."""
        return axis % max(self.rank(index), 1) + 1

    # What may be written -----------------------------------------------------------------------

    def apply(self, op: str, *operands: Given, domain: str = "", **attributes: Any) -> Any:
        """One operation with one result."""
        return self.builder.apply(op, operands, 1, attributes, domain)[0]

    def apply_many(
        self, op: str, outputs: int, *operands: Given, domain: str = "", **attributes: Any
    ) -> tuple[Any, ...]:
        """One operation with several results."""
        return self.builder.apply(op, operands, outputs, attributes, domain)

    def again(self, *operands: Given, **changed: Any) -> tuple[Any, ...]:
        """The operation itself on other operands, with some attributes changed (None: left out)."""
        words = {**self.attributes, **changed}
        return self.builder.apply(self.op, operands, len(self.output_types), words, self.domain)

    def with_first(self, first: Given, **changed: Any) -> tuple[Any, ...]:
        """The operation itself with another first operand; the others are the same for all."""
        assert not any(self.batched[1:])
        return self.again(first, *self.operands[1:], **changed)

    def constant(self, array: Any) -> Any:
        """A constant."""
        return self.builder.constant(array)

    # Operands with their lanes -----------------------------------------------------------------

    def shaped(self, value: Any, shape: Sequence[int]) -> Any:
        """The same elements in another shape, where it is another."""
        if tuple(value.shape) == tuple(shape):
            return value
        # No 0 of an empty tensor may be read as "as before".
        return self.apply("Reshape", value, list(shape), allowzero=int(0 in shape))

    def repeated(self, value: Any, shape: Shape) -> Any:
        """A value of one lane, of this shape, for each lane: [lanes, *shape]."""
        if not DataType.from_dtype(value.dtype).is_narrow:
            return self.apply("Expand", value, [self.lanes, *shape])
        # Eight bits and fewer are moved by few operators: Expand is none of these.
        row, none = self.shaped(value, (1, *shape)), [0] * (len(shape) + 1)
        pads = [*none, self.lanes - 1, *none[1:]]
        return self.apply("Pad", row, pads, mode="edge")

    def broadcast(self, index: int) -> Any:
        """Operand `index` with the lane axis in front, also where it is the same for all lanes;
        None where it is absent."""
        if not self.has(index) or self.batched[index]:
            return self.operands[index] if index < len(self.operands) else None
        return self.repeated(self.operands[index], self.shape(index))

    def all_broadcast(self) -> tuple[Any, ...]:
        """All operands as by `broadcast`."""
        return tuple(self.broadcast(index) for index in range(len(self.operands)))

    def aligned(self, index: int, rank: int) -> Any:
        """Operand `index` so that it broadcasts, lane by lane, against what has `rank` axes in a
        lane: [lanes, 1 .., *shape] where it differs, else as it is."""
        operand = self.operands[index] if index < len(self.operands) else None
        if operand is None or not self.varies(index):
            return operand
        shape = self.shape(index)
        return self.shaped(operand, (self.lanes, *(1,) * (rank - len(shape)), *shape))

    def folded(self, index: int, axis: int = 0) -> Any:
        """Operand `index` for all lanes, the lanes as part of its axis `axis`: the lane counts
        more than the place in it; None where the operand is absent."""
        value = self.broadcast(index)
        return None if value is None else self.merged(value, axis)

    def merged(self, value: Any, axis: int = 0) -> Any:
        """What has the lane axis in front, [lanes, *s], with the lanes as part of axis `axis`."""
        shape = list(value.shape[1:])
        if axis:
            value = self.apply("Transpose", value, perm=_moved(len(shape) + 1, 0, axis))
        shape[axis] *= self.lanes
        return self.shaped(value, shape)

    def split(self, value: Any, axis: int = 0) -> Any:
        """The other way: lanes that are part of axis `axis` as an axis in front."""
        shape = value.shape
        size = shape[axis] // self.lanes
        value = self.shaped(value, (*shape[:axis], self.lanes, size, *shape[axis + 1 :]))
        if not axis:
            return value
        return self.apply("Transpose", value, perm=_moved(len(shape) + 1, axis, 0))

    def in_front(self, value: Any, axis: int) -> Any:
        """A value whose lane axis is `axis`, with it in front."""
        if axis == 0:
            return value
        return self.apply("Transpose", value, perm=_moved(len(value.shape), axis, 0))

    def lane_numbers(self, rank: int, step: int = 1) -> Any:
        """The number of each lane times `step`, int64: [lanes, 1 ..] with `rank` ones."""
        numbers = np.arange(self.lanes, dtype=np.int64) * step
        return self.constant(numbers.reshape(self.lanes, *(1,) * rank))

    # Types -------------------------------------------------------------------------------------

    def in_type(self, value: Any, data_type: DataType) -> Any:
        """A value in another type, where it has another."""
        if DataType.from_dtype(value.dtype) == data_type:
            return value
        return self.apply("Cast", value, to=onnx_code(data_type))

    def wide(self, value: Any) -> Any:
        """A value in the type that kernels compute it in: several operations then round once."""
        computed = DataType.from_dtype(value.dtype).compute_dtype
        return self.in_type(value, DataType.from_dtype(computed))

    def filled(self, number: Any, shape: Shape, data_type: DataType) -> Any:
        """A value of one number that takes no room in a file."""
        value = self.constant(np.array(number, data_type.dtype))
        return self.apply("Expand", value, list(shape)) if shape else value


def _moved(rank: int, source: int, target: int) -> list[int]:
    """The order of axes in which one is moved."""
    order = [axis for axis in range(rank) if axis != source]
    return [*order[:target], source, *order[target:]]


#: Gives the results for all lanes, the lane axis in front, None for those that are absent; or None
#: if it has nothing better for this form of the operator than one lane after the other. It is asked
#: only where an operand differs from lane to lane.
Batching = Callable[[BatchingContext], "Sequence[Any] | None"]


def broadcasting(context: BatchingContext) -> Sequence[Any]:
    """Operators whose operands broadcast against each other."""
    rank = max(len(kind.shape) for kind in context.input_types if kind is not None)
    return context.again(*(context.aligned(i, rank) for i in range(len(context.operands))))


def of_equal_shapes(context: BatchingContext) -> Sequence[Any]:
    """Operators of operands of one shape, each place for itself."""
    return context.again(*context.all_broadcast())


def of_last_axes(context: BatchingContext) -> Sequence[Any]:
    """Operators of the last axes of their first operand, however many others are in front."""
    return context.with_first(context.operands[0])


def along_axis(context: BatchingContext) -> Sequence[Any]:
    """Operators along the axis that an attribute counts: it is one further behind."""
    return context.again(*context.all_broadcast(), axis=context.axis_behind(context.int_of("axis")))


def in_first_axis(*shared: int) -> Batching:
    """The rule of operators to whose first axis nothing happens: lanes are more of it.

    The operands `shared` have no such axis; where one of them differs, there is no rule.
    """

    def batching(context: BatchingContext) -> Sequence[Any] | None:
        if context.varies(*shared):
            return None
        operands = (
            context.operands[i] if i in shared else context.folded(i)
            for i in range(len(context.operands))
        )
        return tuple(context.split(result) for result in context.again(*operands))

    return batching
