"""Sums over rounds: what the rounds of a scan add up to, computed after it where that costs less.

Comes in: the graph of a round, and which of its inputs all rounds share or come from sequences.
Goes out: what the scan is to collect and to add up in states; then the sums, written into a graph.
Must not know: gradients.

A product of two values that differ from round to round is one product over all rounds: the sum of
AᵀB is the product of all rows of A and all rows of B. What is linear is computed once, of the sum.
What each round gives as a product with a matrix that all share is one product, too.
The rest is added up in a state, or after the scan where its rounds are collected anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stitch.compiler.body_graphs import write_operation
from stitch.compiler.passes import is_repeatable
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import ABSENT, Operation

#: The same elements in the same order.
_RESHAPING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
#: Linear in operand 0, where the others are the same in all rounds.
_LINEAR = _RESHAPING | {"Div", "Expand", "Neg", "Slice", "Split", "Transpose"}
#: Linear in either operand, where the other is the same in all rounds.
_BILINEAR = frozenset({"Gemm", "MatMul", "Mul"})
#: Linear in all of them together.
_ADDITIVE = frozenset({"Add", "Concat", "Sub"})
#: How many linear operations are looked through: sums of sums are walked with Python's stack.
_MOST_DEEP = 32

#: Writes a sum, once the scan is there.
Sum = Callable[[], SymbolicTensor]


@dataclass(frozen=True, slots=True)
class AllRows:
    """All elements of a sequence, and whether the last round comes first."""

    tensor: SymbolicTensor
    is_backward: bool


@dataclass(frozen=True, slots=True)
class _Factor:
    """An operand of a product: a value, and the axis of it that is summed over."""

    value: int
    axis: int


class RoundSums:
    """The sums over the rounds of one scan.

    After `sum_of` for each and `settle`, the scan is to collect what `collected` lists, each with
    whether the last round comes first, and to add up `added`; `take` tells what came of both.
    """

    def __init__(
        self,
        graph: ComputationGraph,
        builder: ComputationGraphBuilder,
        shared: Mapping[int, SymbolicTensor],
        sequences: Mapping[int, AllRows],
        count: int,
        adds_up: bool = False,
    ) -> None:
        """`adds_up`: all sums are states of the scan."""
        self.adds_up = adds_up
        self.graph = graph
        self.builder = builder
        self.count = count
        self.maker = {v: o for o in graph.operations for v in o.outputs}
        self.constants = graph.constant_data()
        self._rows = {(v, rows.is_backward): rows.tensor for v, rows in sequences.items()}
        self._outside = dict(shared)
        self._varying = self._differing()
        self._terms: list[int] = []
        self._results: dict[int, SymbolicTensor] = {}
        self.collected: list[tuple[int, bool]] = []
        self.added: list[int] = []

    def _differing(self) -> set[int]:
        """The values that are not the same in all rounds."""
        same = {*self._outside, *self.constants}
        found = {slot.value for slot in self.graph.inputs} - same
        for operation in self.graph.operations:
            unsteady = operation.body != ABSENT or not is_repeatable(operation)
            if unsteady or not found.isdisjoint(operation.inputs):
                found.update(operation.outputs)
        return found - {ABSENT}

    def sum_of(self, value: int, depth: int = 0) -> Sum:
        """The sum of a value over all rounds."""
        addends = [value] if self.adds_up else self._addends(value)
        terms = [self._term(v, depth) for v in addends]

        def total() -> SymbolicTensor:
            found = terms[0]()
            for term in terms[1:]:
                found = found + term()
            return found

        return total

    def _addends(self, value: int) -> list[int]:
        found: list[int] = []
        pending = [value]
        while pending:
            one = pending.pop()
            operation = self.maker.get(one)
            if operation is not None and operation.op == "Add" and not operation.domain:
                kinds = {self.graph.values[v].type for v in (one, *operation.inputs)}
                if len(kinds) == 1 and self._varying.issuperset(operation.inputs):
                    pending += operation.inputs[::-1]
                    continue
            found.append(one)
        return found

    def _term(self, value: int, depth: int) -> Sum:
        operation = self.maker.get(value)
        if (
            operation is not None
            and value in self._varying
            and not (operation.domain or self.adds_up)
        ):
            differing = [i for i, v in enumerate(operation.inputs) if v in self._varying]
            if depth < _MOST_DEEP and self._is_linear(operation, differing):
                inner = {i: self.sum_of(operation.inputs[i], depth + 1) for i in differing}
                return lambda: self._again(operation, {i: s() for i, s in inner.items()})[value]
            factors = self._factors(operation) if len(differing) == 2 else None
            if factors is not None:
                return self._product(operation, *factors)
        self._terms.append(value)
        return lambda: self._results[value]

    def _is_linear(self, operation: Operation, differing: Sequence[int]) -> bool:
        """Whether what the sums of the operands that differ give is the sum of what they give."""
        op, operands = operation.op, len(operation.inputs)
        if op in _ADDITIVE:
            return len(differing) == operands
        if len(differing) != 1:
            return False
        if op in _BILINEAR:
            return operands == 2
        if op == "Pad":
            filled = [self.constants.get(v) for v in operation.inputs[2:3] if v != ABSENT]
            if operation.attributes.get("mode", "constant") != "constant":
                return False
            if any(data is None or data.any() for data in filled):
                return False
        return (op in _LINEAR or op == "Pad") and differing[0] == 0

    # What rounds share ------------------------------------------------------------------------

    def _again(
        self, operation: Operation, given: Mapping[int, SymbolicTensor]
    ) -> dict[int, SymbolicTensor]:
        """The results of an operation, after the scan, on these operands and what rounds share."""
        operands = [
            given[i] if i in given else None if v == ABSENT else self._same(v)
            for i, v in enumerate(operation.inputs)
        ]
        return write_operation(self.builder, operation, operands, self.graph.values, ())

    def _same(self, value: int) -> SymbolicTensor:
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

    # Products ---------------------------------------------------------------------------------

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.graph.values[value].type.shape

    def _factors(self, operation: Operation) -> tuple[_Factor, _Factor] | None:
        """The operands of a product of matrices, as they lie before they are transposed."""
        if operation.op not in ("Gemm", "MatMul") or len(operation.inputs) != 2:
            return None
        first, second = map(self._shape, operation.inputs)
        if len(first) != len(second) or len(first) < 2 or first[:-2] != second[:-2]:
            return None
        flags = (operation.attributes.get(name, 0) for name in ("transA", "transB"))
        rows, columns = len(first) - 2, len(first) - 1
        axes = (columns, rows)
        return tuple(  # type: ignore[return-value]  # two of them
            self._untransposed(v, rows + columns - axis if flag else axis)
            for v, axis, flag in zip(operation.inputs, axes, flags, strict=True)
        )

    def _untransposed(self, value: int, axis: int) -> _Factor:
        operation = self.maker.get(value)
        if operation is None or operation.op != "Transpose" or operation.domain:
            return _Factor(value, axis)
        rank = len(self._shape(value))
        exchange = (*range(rank - 2), rank - 1, rank - 2)
        if operation.attributes.get("perm", tuple(range(rank))[::-1]) != exchange:
            return _Factor(value, axis)
        return _Factor(operation.inputs[0], 2 * rank - 3 - axis)

    def _product(self, operation: Operation, first: _Factor, second: _Factor) -> Sum:
        """One product over all rounds."""
        known = [back for f in (first, second) for v, back in self._rows if v == self._root(f)]
        listed = [back for f in (first, second) for v, back in self.collected if v == self._root(f)]
        is_backward = [*known, *listed, False][0]
        for factor in (first, second):
            self._collect(self._root(factor), is_backward)
        batched = len(self._shape(operation.outputs[0])) > 2
        attributes = {k: v for k, v in operation.attributes.items() if k == "alpha"}

        def product() -> SymbolicTensor:
            a, b = (self._all(factor, is_backward) for factor in (first, second))
            if batched:
                left = self._lying(a, first, last=True)
                right = self._lying(b, second, last=False)
                return self.builder.apply("MatMul", [left, right], 1, {})[0]
            sides = [self._lying(a, first), self._lying(b, second)]
            turned = {"transA": 1 - first.axis, "transB": second.axis}
            return self.builder.apply("Gemm", sides, 1, {**attributes, **turned})[0]

        return product

    def _root(self, factor: _Factor) -> int:
        """What a factor is another shape of."""
        value = factor.value
        while True:
            operation = self.maker.get(value)
            if operation is None or operation.domain or operation.op not in _RESHAPING:
                return value
            value = operation.inputs[0]

    def _collect(self, value: int, is_backward: bool) -> None:
        key = (value, is_backward)
        if key not in self._rows and key not in self.collected:
            self.collected.append(key)

    def _all(self, factor: _Factor, is_backward: bool) -> SymbolicTensor:
        """A factor in all rounds, along a new axis 0."""
        whole = self._rows[self._root(factor), is_backward]
        return self._shaped(whole, (self.count, *self._shape(factor.value)))

    def _lying(
        self, whole: SymbolicTensor, factor: _Factor, last: bool | None = None
    ) -> SymbolicTensor:
        """A factor in all rounds, these beside the axis that is summed over; it is the last one, or
        the last but one, if that is told."""
        shape = self._shape(factor.value)
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
        return self._shaped(whole, lengths)

    def _shaped(self, value: SymbolicTensor, shape: Sequence[int]) -> SymbolicTensor:
        if value.shape == tuple(shape):
            return value
        attributes = {"allowzero": int(0 in shape)}
        return self.builder.apply("Reshape", [value, list(shape)], 1, attributes)[0]

    # The rest ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """No further sums are asked for."""
        for value in dict.fromkeys(self._terms):
            if self.adds_up or self._collected_form(value) is None:
                self.added.append(value)

    def rows_of(self, value: int, is_backward: bool) -> Sum | None:
        """A value of all rounds along a new axis 0, where it is a product of what is collected in
        that order anyway and a matrix that all rounds share: one product after the scan."""
        operation = self.maker.get(self._root(_Factor(value, 0)))
        if self.adds_up or operation is None or operation.domain:
            return None
        if operation.op not in ("Gemm", "MatMul") or len(operation.inputs) != 2:
            return None
        left, right = operation.inputs
        shape = self._shape(left)
        if right in self._varying or len(self._shape(right)) != 2 or len(shape) < 2:
            return None
        key = (self._root(_Factor(left, 0)), is_backward)
        if operation.attributes.get("transA") or not (key in self._rows or key in self.collected):
            return None
        attributes = {k: v for k, v in operation.attributes.items() if k in ("alpha", "transB")}

        def rows() -> SymbolicTensor:
            whole = self._all(_Factor(left, 0), is_backward)
            flat = self._shaped(whole, (self.count * math.prod(shape[:-1]), shape[-1]))
            product = self.builder.apply("Gemm", [flat, self._same(right)], 1, attributes)[0]
            return self._shaped(product, (self.count, *self._shape(value)))

        return rows

    def take(
        self, collected: Sequence[SymbolicTensor], added: Sequence[SymbolicTensor]
    ) -> None:  # fmt: skip
        """What the scan has collected and added up."""
        self._rows.update(zip(self.collected, collected, strict=True))
        self._results.update(zip(self.added, added, strict=True))
        for value in dict.fromkeys(self._terms):
            if value not in self._results:
                self._results[value] = self._sum_of_rows(value)

    def _collected_form(self, value: int) -> tuple[_Factor, bool, tuple[int, ...]] | None:
        """What is collected anyway, and the axes of it that are summed over to give a value."""
        operation, source = self.maker.get(value), value
        axes: tuple[int, ...] = ()
        if operation is not None and operation.op == "ReduceSum" and len(operation.inputs) == 2:
            data = self.constants.get(operation.inputs[1])
            if data is not None and data.size:
                source = operation.inputs[0]
                rank = len(self._shape(source))
                axes = tuple(int(axis) % rank for axis in data.ravel())
        factor = _Factor(source, 0)
        root = self._root(factor)
        for v, is_backward in (*self._rows, *self.collected):
            if v == root:
                return factor, is_backward, axes
        return None

    def _sum_of_rows(self, value: int) -> SymbolicTensor:
        found = self._collected_form(value)
        assert found is not None
        factor, is_backward, axes = found
        whole = self._all(factor, is_backward)
        over = [0, *(axis + 1 for axis in axes)]
        total = self.builder.apply("ReduceSum", [whole, over], 1, {"keepdims": 0})[0]
        return self._shaped(total, self._shape(value))
