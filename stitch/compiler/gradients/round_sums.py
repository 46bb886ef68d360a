"""Sums over rounds: what the rounds of a scan add up to, computed after it where that costs less.

A product of two values that differ from round to round is one product over all rounds: the sum of
AᵀB is the product of all rows of A and all rows of B. What is linear is computed once, of the sum.
What each round gives as a product with a matrix that all share is one product, too.
The rest is added up in a state, or after the scan where its rounds are collected anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stitch.compiler.gradients.round_values import Factor, RoundValues
from stitch.graph import SymbolicTensor
from stitch.ops import RESHAPING
from stitch.program import ABSENT, Operation

#: Linear in operand 0, where the others are the same in all rounds.
_LINEAR = RESHAPING | {"Div", "Expand", "Neg", "Slice", "Split", "Transpose"}
#: Linear in either operand, where the other is the same in all rounds.
_BILINEAR = frozenset({"Gemm", "MatMul", "Mul"})
#: Linear in all of them together.
_ADDITIVE = frozenset({"Add", "Concat", "Sub"})
#: How many linear operations are looked through: sums of sums are walked with Python's stack.
_MOST_DEEP = 32

#: Writes a sum, once the scan is there.
Sum = Callable[[], SymbolicTensor]


class RoundSums:
    """The sums over the rounds of one scan.

    After `sum_of` for each and `settle`, the scan is to collect what the values' `collected` lists,
    and to add up `added`; `take` tells what came of both.
    """

    def __init__(self, values: RoundValues, adds_up: bool = False) -> None:
        """`adds_up`: all sums are states of the scan."""
        self.values = values
        self.adds_up = adds_up
        self._terms: list[int] = []
        self._results: dict[int, SymbolicTensor] = {}
        self.added: list[int] = []

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
            operation = self.values.maker.get(one)
            if operation is not None and operation.op == "Add" and not operation.domain:
                kinds = {self.values.graph.values[v].type for v in (one, *operation.inputs)}
                if len(kinds) == 1 and self.values.varying.issuperset(operation.inputs):
                    pending += operation.inputs[::-1]
                    continue
            found.append(one)
        return found

    def _term(self, value: int, depth: int) -> Sum:
        operation = self.values.maker.get(value)
        if (
            operation is not None
            and value in self.values.varying
            and not (operation.domain or self.adds_up)
        ):
            differing = [i for i, v in enumerate(operation.inputs) if v in self.values.varying]
            if depth < _MOST_DEEP and self._is_linear(operation, differing):
                inner = {i: self.sum_of(operation.inputs[i], depth + 1) for i in differing}
                return lambda: self.values.again(operation, {i: s() for i, s in inner.items()})[
                    value
                ]
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
            filled = [self.values.constants.get(v) for v in operation.inputs[2:3] if v != ABSENT]
            if operation.attributes.get("mode", "constant") != "constant":
                return False
            if any(data is None or data.any() for data in filled):
                return False
        return (op in _LINEAR or op == "Pad") and differing[0] == 0

    # Products ---------------------------------------------------------------------------------

    def _factors(self, operation: Operation) -> tuple[Factor, Factor] | None:
        """The operands of a product of matrices, as they lie before they are transposed."""
        if operation.op not in ("Gemm", "MatMul") or len(operation.inputs) != 2:
            return None
        first, second = map(self.values.shape, operation.inputs)
        if len(first) != len(second) or len(first) < 2 or first[:-2] != second[:-2]:
            return None
        flags = (operation.attributes.get(name, 0) for name in ("transA", "transB"))
        rows, columns = len(first) - 2, len(first) - 1
        axes = (columns, rows)
        return tuple(  # type: ignore[return-value]  # two of them
            self.values.untransposed(v, rows + columns - axis if flag else axis)
            for v, axis, flag in zip(operation.inputs, axes, flags, strict=True)
        )

    def _product(self, operation: Operation, first: Factor, second: Factor) -> Sum:
        """One product over all rounds."""
        values = self.values
        roots = [values.root(factor) for factor in (first, second)]
        is_backward = next((back for root in roots for back in values.orders(root)), False)
        for root in roots:
            values.collect(root, is_backward)
        batched = len(values.shape(operation.outputs[0])) > 2
        attributes = {k: v for k, v in operation.attributes.items() if k == "alpha"}

        def product() -> SymbolicTensor:
            a, b = (values.all_rows(factor, is_backward) for factor in (first, second))
            if batched:
                left = values.lying(a, first, last=True)
                right = values.lying(b, second, last=False)
                return values.builder.apply("MatMul", [left, right], 1, {})[0]
            sides = [values.lying(a, first), values.lying(b, second)]
            turned = {"transA": 1 - first.axis, "transB": second.axis}
            return values.builder.apply("Gemm", sides, 1, {**attributes, **turned})[0]

        return product

    # The rest ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """No further sums are asked for."""
        for value in dict.fromkeys(self._terms):
            if self.adds_up or self._collected_form(value) is None:
                self.added.append(value)

    def rows_of(self, value: int, is_backward: bool) -> Sum | None:
        """A value of all rounds along a new axis 0, where it is a product of what is collected in
        that order anyway and a matrix that all rounds share: one product after the scan."""
        values = self.values
        operation = values.maker.get(values.root(Factor(value, 0)))
        if self.adds_up or operation is None or operation.domain:
            return None
        if operation.op not in ("Gemm", "MatMul") or len(operation.inputs) != 2:
            return None
        left, right = operation.inputs
        shape = values.shape(left)
        if right in values.varying or len(values.shape(right)) != 2 or len(shape) < 2:
            return None
        there = values.orders(values.root(Factor(left, 0)))
        if operation.attributes.get("transA") or is_backward not in there:
            return None
        attributes = {k: v for k, v in operation.attributes.items() if k in ("alpha", "transB")}

        def rows() -> SymbolicTensor:
            whole = values.all_rows(Factor(left, 0), is_backward)
            flat = values.shaped(whole, (values.count * math.prod(shape[:-1]), shape[-1]))
            sides = [flat, values.same(right)]
            product = values.builder.apply("Gemm", sides, 1, attributes)[0]
            return values.shaped(product, (values.count, *values.shape(value)))

        return rows

    def take(
        self, collected: Sequence[SymbolicTensor], added: Sequence[SymbolicTensor]
    ) -> None:  # fmt: skip
        """What the scan has collected and added up."""
        self.values.take(collected)
        self._results.update(zip(self.added, added, strict=True))
        for value in dict.fromkeys(self._terms):
            if value not in self._results:
                self._results[value] = self._sum_of_rows(value)

    def _collected_form(self, value: int) -> tuple[Factor, bool, tuple[int, ...]] | None:
        """What is collected anyway, and the axes of it that are summed over to give a value."""
        operation, source = self.values.maker.get(value), value
        axes: tuple[int, ...] = ()
        if operation is not None and operation.op == "ReduceSum" and len(operation.inputs) == 2:
            data = self.values.constants.get(operation.inputs[1])
            if data is not None and data.size:
                source = operation.inputs[0]
                rank = len(self.values.shape(source))
                axes = tuple(int(axis) % rank for axis in data.ravel())
        factor = Factor(source, 0)
        orders = self.values.orders(self.values.root(factor))
        return (factor, orders[0], axes) if orders else None

    def _sum_of_rows(self, value: int) -> SymbolicTensor:
        found = self._collected_form(value)
        assert found is not None
        factor, is_backward, axes = found
        whole = self.values.all_rows(factor, is_backward)
        over = [0, *(axis + 1 for axis in axes)]
        total = self.values.builder.apply("ReduceSum", [whole, over], 1, {"keepdims": 0})[0]
        return self.values.shaped(total, self.values.shape(value))
