"""`vmap`: write the operations of a body or graph for a whole batch at once.

Values that are equal for all batch elements are computed once. Each operator's batching rule says
how it is applied to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stitch import ops
from stitch.errors import CompileError
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.emitter import Emitter, OperandLike
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import ABSENT, Body, InputSlot, Operation, OutputSlot, ValueType

#: What has operations.
Operations: TypeAlias = Body | ComputationGraph

#: Writes an operation without a batching rule, or with a body, for the whole batch. Returns results
#: like a batching rule: batch axis first, None if absent. An operation with a body none of whose
#: operands is batched is written once, without a batch axis.
WriteUnbatched = Callable[[Operation, ops.BatchingContext], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class BatchedValue:
    """A value, and whether its first axis is the batch axis (else all elements share it)."""

    tensor: SymbolicTensor
    is_batched: bool


@dataclass(frozen=True, slots=True)
class VmapResult:
    """The batched outputs, and the operations for which there was no batching rule."""

    results: tuple[BatchedValue, ...]
    without_rule: tuple[Operation, ...]


def vmap(
    holder: Operations,
    operands: Sequence[OperandLike],
    batched: Sequence[bool],
    batch_size: int,
    builder: Emitter,
    write_unbatched: WriteUnbatched,
) -> VmapResult:
    """Write every operation of `holder` to `builder`, for `batch_size` batch elements.

    Args:
        holder: A body or a graph.
        operands: One per input, None if absent; `[batch_size, *shape]` if batched, else `shape`.
        batched: For each operand, whether its first axis is the batch axis.
        batch_size: Number of batch elements.
        builder: Receives the operations.
        write_unbatched: Called for operations without a batching rule or with a body.

    Raises:
        CompileError: The type of an operand differs from that of its input.
    """
    return _Vmap(holder, batch_size, builder, write_unbatched).run(operands, batched)


def inline(
    holder: Operations, operands: Sequence[OperandLike], builder: Emitter,
    write_unbatched: WriteUnbatched,
) -> list[SymbolicTensor]:  # fmt: skip
    """Write every operation of a body or graph to `builder` as it is; return its outputs."""
    unbatched = [False] * len(operands)
    results = vmap(holder, operands, unbatched, 1, builder, write_unbatched).results
    return [result.tensor for result in results]


class _Vmap:
    def __init__(
        self, holder: Operations, batch_size: int, builder: Emitter, write_unbatched: WriteUnbatched
    ) -> None:
        self._holder = holder
        self._batch_size = batch_size
        self._builder = builder
        self._write_unbatched = write_unbatched
        self._constants = {constant.value: constant.data for constant in holder.constants}
        self._values: dict[int, BatchedValue] = {}
        self._without_rule: list[Operation] = []

    def run(self, operands: Sequence[OperandLike], batched: Sequence[bool]) -> VmapResult:
        places = [_place(slot) for slot in self._holder.inputs]
        for place, operand, varies in zip(places, operands, batched, strict=True):
            if place != ABSENT:
                self._keep(place, self._builder.tensor(operand), varies)
        for operation in self._holder.operations:
            # Keep the user's source location.
            with self._builder.at(operation.location):
                self._write(operation)
        results = tuple(self._vmapped(_place(slot)) for slot in self._holder.outputs)
        return VmapResult(results, tuple(self._without_rule))

    def _vmapped(self, value: int) -> BatchedValue:
        if value not in self._values:
            # Write constants on first use: batching rules replace some of them.
            tensor = self._builder.constant(self._constants[value])
            self._values[value] = BatchedValue(tensor, False)
        return self._values[value]

    def _keep(self, value: int, tensor: SymbolicTensor, varies: bool) -> None:
        kind = self._holder.values[value].type
        expected = ValueType((self._batch_size, *kind.shape), kind.data_type) if varies else kind
        if tensor.type != expected:
            raise CompileError(
                f"{self._holder.values[value].name!r} does not fit a batch of {self._batch_size}",
                expected=expected.text(), got=tensor.type.text(),
            )  # fmt: skip
        self._values[value] = BatchedValue(tensor, varies)

    def _write(self, operation: Operation) -> None:
        given = [None if v == ABSENT else self._vmapped(v) for v in operation.inputs]
        varies = any(one is not None and one.is_batched for one in given)
        if varies and not self._batch_size:
            results = self._of_empty_batch(operation)
        elif operation.body != ABSENT:
            results = self._write_unbatched(operation, self._context(operation, given))
            self._without_rule += [operation] if varies else []
        elif not varies:
            results = self._as_it_is(operation, given)
        else:
            known = ops.known_by_type(operation, self._type(operation.inputs[0]))
            if known is not None:
                # Shapes are equal for the whole batch, and so is everything computed from them.
                results, varies = (self._builder.constant(known),), False
            else:
                results = self._by_rule(operation, self._context(operation, given))
        for value, result in zip(operation.outputs, results, strict=True):
            if value != ABSENT:
                assert result is not None, f"a result of {operation.op} is missing"
                self._keep(value, result, varies)

    def _of_empty_batch(self, operation: Operation) -> Sequence[SymbolicTensor | None]:
        """Return empty results: with batch size 0, rules cannot infer element shapes."""
        kinds = map(self._type, operation.outputs)
        return [
            None
            if kind is None
            else self._builder.constant(np.empty((0, *kind.shape), kind.data_type.dtype))
            for kind in kinds
        ]

    def _as_it_is(
        self, operation: Operation, given: Sequence[BatchedValue | None]
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
            results = self._write_unbatched(operation, context)
        return results

    def _context(
        self, operation: Operation, given: Sequence[BatchedValue | None]
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
            batch_size=self._batch_size,
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
