"""The values of a round of a scan, and where they are for all rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stitch.compiler.body_graphs import write_operation
from stitch.compiler.dependence import reached
from stitch.compiler.passes import axis_order, exchange, is_repeatable
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.ops import RESHAPING
from stitch.program import ABSENT, Operation


@dataclass(frozen=True, slots=True)
class AllRows:
    """All elements of a sequence, and whether the last round comes first."""

    tensor: SymbolicTensor
    is_backward: bool


@dataclass(frozen=True, slots=True)
class Factor:
    """An operand of a product: a value, and the axis of it that is summed over."""

    value: int
    axis: int


class RoundValues:
    """The values of the rounds of one scan.

    The scan is to collect what `collected` lists, each with whether the last round comes first.
    """

    def __init__(
        self,
        graph: ComputationGraph,
        builder: ComputationGraphBuilder,
        shared: Mapping[int, SymbolicTensor],
        sequences: Mapping[int, AllRows],
        count: int,
    ) -> None:
        self.graph = graph
        self.builder = builder
        self.count = count
        self.maker = {v: o for o in graph.operations for v in o.outputs}
        self.constants = graph.constant_data()
        self._rows = {(v, rows.is_backward): rows.tensor for v, rows in sequences.items()}
        self._outside = dict(shared)
        #: The values that are not the same in all rounds.
        self.varying = self._differing()
        self.collected: list[tuple[int, bool]] = []

    def _differing(self) -> set[int]:
        """The values that are not the same in all rounds."""
        same = {*self._outside, *self.constants}
        found = {slot.value for slot in self.graph.inputs} - same
        return reached(
            self.graph.operations, found,
            lambda o: o.body != ABSENT or not is_repeatable(o),
        )  # fmt: skip

    def again(
        self, operation: Operation, given: Mapping[int, SymbolicTensor]
    ) -> dict[int, SymbolicTensor]:
        """The results of an operation, after the scan, on these operands and what rounds share."""
        operands = [
            given[i] if i in given else None if v == ABSENT else self.same(v)
            for i, v in enumerate(operation.inputs)
        ]
        return write_operation(self.builder, operation, operands, self.graph.values, ())

    def same(self, value: int) -> SymbolicTensor:
        """A value that is the same in all rounds, outside."""
        pending = [value]
        while pending:
            one = pending[-1]
            missing: list[int] = []
            if one in self._outside:
                pending.pop()
            elif one in self.constants:
                self._outside[one] = self.builder.constant(self.constants[one])
            else:
                operation = self.maker[one]
                read = [v for v in operation.inputs if v != ABSENT]
                missing = [v for v in read if v not in self._outside]
                if not missing:
                    operands = [None if v == ABSENT else self._outside[v] for v in operation.inputs]
                    values = self.graph.values
                    made = write_operation(self.builder, operation, operands, values, ())
                    self._outside |= made
            pending += missing
        return self._outside[value]

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.graph.values[value].type.shape

    def untransposed(self, value: int, axis: int) -> Factor:
        """An operand of a product as it lies before it is transposed, if it is."""
        operation = self.maker.get(value)
        rank = len(self.shape(value))
        if operation is None or axis_order(operation, self.graph.values) != exchange(rank):
            return Factor(value, axis)
        return Factor(operation.inputs[0], 2 * rank - 3 - axis)

    def root(self, factor: Factor) -> int:
        """What a factor is another shape of."""
        value = factor.value
        while True:
            operation = self.maker.get(value)
            if operation is None or operation.domain or operation.op not in RESHAPING:
                return value
            value = operation.inputs[0]

    def orders(self, value: int) -> list[bool]:
        """In which orders all rounds of a value are there, or are to be collected."""
        return [is_backward for v, is_backward in (*self._rows, *self.collected) if v == value]

    def take(self, collected: Sequence[SymbolicTensor]) -> None:
        """What the scan has collected."""
        self._rows.update(zip(self.collected, collected, strict=True))

    def collect(self, value: int, is_backward: bool) -> None:
        """Have the scan collect a value in this order, unless all rounds of it are there."""
        key = (value, is_backward)
        if key not in self._rows and key not in self.collected:
            self.collected.append(key)

    def all_rows(self, factor: Factor, is_backward: bool) -> SymbolicTensor:
        """A factor in all rounds, along a new axis 0."""
        whole = self._rows[self.root(factor), is_backward]
        return self.shaped(whole, (self.count, *self.shape(factor.value)))

    def lying(
        self, whole: SymbolicTensor, factor: Factor, last: bool | None = None
    ) -> SymbolicTensor:
        """A factor in all rounds, these beside the axis that is summed over; it is the last one, or
        the last but one, if that is told."""
        shape = self.shape(factor.value)
        axes = [*range(len(shape) - 2), len(shape) - 2, len(shape) - 1]
        axis = factor.axis
        if last is not None and last != (axis == len(shape) - 1):
            axes[-2:] = axes[:-3:-1]
        place = axes.index(axis)
        order = [a + 1 for a in axes]
        order.insert(place, 0)
        if order != sorted(order):
            whole = self.builder.apply("Transpose", [whole], 1, {"perm": order})[0]
        lengths = [shape[a] for a in axes]
        lengths[place] *= self.count
        return self.shaped(whole, lengths)

    def shaped(self, value: SymbolicTensor, shape: Sequence[int]) -> SymbolicTensor:
        """The same elements in another shape."""
        if value.shape == tuple(shape):
            return value
        attributes = {"allowzero": int(0 in shape)}
        return self.builder.apply("Reshape", [value, list(shape)], 1, attributes)[0]
