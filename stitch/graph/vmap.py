"""Lifting: the operations of a body, or of a graph, for many lanes at once.

What differs between no two lanes is computed once. How an operator is applied to all lanes its
batching rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stitch import ops
from stitch.errors import CompileError
from stitch.graph.emitter import Emitter, Given
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import ABSENT, Constant, InputSlot, Operation, OutputSlot, Value, ValueType

# --------------------------------------------------------------------------------------------------
# Lifting: the operations of a body, or of a graph, for many lanes at once.


class Operations(Protocol):
    """What bodies and graphs have in common: operations in run order, and what they are about."""

    @property
    def inputs(self) -> Sequence[int] | Sequence[InputSlot]: ...

    @property
    def outputs(self) -> Sequence[int] | Sequence[OutputSlot]: ...

    @property
    def values(self) -> Sequence[Value]: ...

    @property
    def operations(self) -> Sequence[Operation]: ...

    @property
    def constants(self) -> Sequence[Constant]: ...


#: Writes an operation that has no rule, or carries a body, for all lanes; gives its results as a
#: batching rule does, the lane axis in front, None for those that are absent. Of an operation with
#: a body no operand may differ from lane to lane: it is then wanted once, without that axis.
Unliftable = Callable[[Operation, ops.BatchingContext], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class LiftedValue:
    """A value, and whether it has a lane axis in front; if not, it is the same for all lanes."""

    tensor: SymbolicTensor
    is_batched: bool


@dataclass(frozen=True, slots=True)
class Lifted:
    """What became of the outputs, and the operations that were written without a rule."""

    results: tuple[LiftedValue, ...]
    without_rule: tuple[Operation, ...]


def lift(
    holder: Operations,
    operands: Sequence[Given],
    batched: Sequence[bool],
    lanes: int,
    builder: Emitter,
    unliftable: Unliftable,
) -> Lifted:
    """Writes every operation of a body or graph to `builder`, for `lanes` lanes.

    `operands[i]` stands for input i, None where it is absent: [lanes, *shape] if `batched[i]`, else
    of the input's shape. Raises `CompileError` for operands of other types.
    """
    return _Lifting(holder, lanes, builder, unliftable).run(operands, batched)


class _Lifting:
    def __init__(
        self, holder: Operations, lanes: int, builder: Emitter, unliftable: Unliftable
    ) -> None:
        self._holder = holder
        self._lanes = lanes
        self._builder = builder
        self._unliftable = unliftable
        self._constants = {constant.value: constant.data for constant in holder.constants}
        self._values: dict[int, LiftedValue] = {}
        self._without_rule: list[Operation] = []

    def run(self, operands: Sequence[Given], batched: Sequence[bool]) -> Lifted:
        places = [_place(slot) for slot in self._holder.inputs]
        for place, operand, varies in zip(places, operands, batched, strict=True):
            if place != ABSENT:
                self._keep(place, self._builder.tensor(operand), varies)
        for operation in self._holder.operations:
            # Lines of the user's stay with what becomes of them.
            with self._builder.at(operation.location):
                self._write(operation)
        results = tuple(self._lifted(_place(slot)) for slot in self._holder.outputs)
        return Lifted(results, tuple(self._without_rule))

    def _lifted(self, value: int) -> LiftedValue:
        if value not in self._values:
            # Constants are written where they are first wanted: rules want some of them changed.
            tensor = self._builder.constant(self._constants[value])
            self._values[value] = LiftedValue(tensor, False)
        return self._values[value]

    def _keep(self, value: int, tensor: SymbolicTensor, varies: bool) -> None:
        kind = self._holder.values[value].type
        expected = ValueType((self._lanes, *kind.shape), kind.data_type) if varies else kind
        if tensor.type != expected:
            raise CompileError(
                f"{self._holder.values[value].name!r} does not fit {self._lanes} lanes",
                expected=expected.text(), got=tensor.type.text(),
            )  # fmt: skip
        self._values[value] = LiftedValue(tensor, varies)

    def _write(self, operation: Operation) -> None:
        given = [None if v == ABSENT else self._lifted(v) for v in operation.inputs]
        varies = any(one is not None and one.is_batched for one in given)
        if varies and not self._lanes:
            results = self._of_no_lanes(operation)
        elif operation.body != ABSENT:
            results = self._unliftable(operation, self._context(operation, given))
            self._without_rule += [operation] if varies else []
        elif not varies:
            results = self._as_it_is(operation, given)
        else:
            known = ops.known_by_type(operation, self._type(operation.inputs[0]))
            if known is not None:
                # A shape is the same in all lanes, and what comes of it too.
                results, varies = (self._builder.constant(known),), False
            else:
                results = self._by_rule(operation, self._context(operation, given))
        for value, result in zip(operation.outputs, results, strict=True):
            if value != ABSENT:
                assert result is not None, f"a result of {operation.op} is missing"
                self._keep(value, result, varies)

    def _of_no_lanes(self, operation: Operation) -> Sequence[SymbolicTensor | None]:
        """Nothing, in the results' types; a rule could not tell lanes from what it puts beside."""
        kinds = map(self._type, operation.outputs)
        return [
            None
            if kind is None
            else self._builder.constant(np.empty((0, *kind.shape), kind.data_type.dtype))
            for kind in kinds
        ]

    def _as_it_is(
        self, operation: Operation, given: Sequence[LiftedValue | None]
    ) -> Sequence[SymbolicTensor]:
        names = [
            operation.op.lower() if v == ABSENT else self._holder.values[v].name
            for v in operation.outputs
        ]
        operands = [None if one is None else one.tensor for one in given]
        types = list(map(self._type, operation.outputs))
        return self._builder.repeat(operation, operands, names, types)

    def _by_rule(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        rule = ops.definition_of(operation).batching
        results = None if rule is None else rule(context)
        if results is None:
            self._without_rule.append(operation)
            results = self._unliftable(operation, context)
        return results

    def _context(
        self, operation: Operation, given: Sequence[LiftedValue | None]
    ) -> ops.BatchingContext:
        attributes = operation.attributes
        if operation.body == ABSENT:
            attributes = ops.attributes_of(operation)
        return ops.BatchingContext(
            op=operation.op, domain=operation.domain, builder=self._builder, attributes=attributes,
            input_types=tuple(map(self._type, operation.inputs)),
            output_types=tuple(map(self._type, operation.outputs)),
            operands=tuple(None if one is None else one.tensor for one in given),
            batched=tuple(one is not None and one.is_batched for one in given),
            batch_size=self._lanes,
            constants=tuple(
                None if one is None or one.is_batched else self._builder.known_data(one.tensor)
                for one in given
            ),
            location=operation.location,
        )  # fmt: skip

    def _type(self, value: int) -> ValueType | None:
        return None if value == ABSENT else self._holder.values[value].type


def _place(slot: int | InputSlot | OutputSlot) -> int:
    """The index of the value of an input or output."""
    return slot if isinstance(slot, int) else slot.value
