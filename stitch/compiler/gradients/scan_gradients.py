"""Gradients of scans: a backward scan over the backward graph of the body.

The forward scan collects the values that the body's gradient rules read; the backward scan takes
them as sequences. Its states are the gradients of the forward states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch.compiler.body_graphs import (
    graph_of_body,
    operand_name,
    result_name,
    write_graph,
    write_operation,
)
from stitch.compiler.dependence import gradient_slots, reachable_from
from stitch.compiler.gradients.forward_values import Differentiated, ForwardValues
from stitch.compiler.passes import axis_order, exchange, is_repeatable
from stitch.graph import (
    BodyBuilder,
    ComputationGraph,
    ComputationGraphBuilder,
    SymbolicTensor,
    scan_in_body,
)
from stitch.linker import remove_dead_code
from stitch.ops import RESHAPING, onnx_code
from stitch.program import ABSENT, DataType, Operation, OutputSlot, ScanForm, ValueType


@dataclass(frozen=True, slots=True)
class AllRows:
    """A value in all rounds, stacked along axis 0, and whether the last round comes first."""

    tensor: SymbolicTensor
    is_backward: bool


@dataclass(frozen=True, slots=True)
class Factor:
    """An operand of a matrix product: a value, and its contracted axis."""

    value: int
    axis: int


class RoundValues:
    """The values of the rounds of one backward scan.

    `collected` lists values for the scan to collect, and whether the last round comes first.
    """

    def __init__(
        self, graph: ComputationGraph, builder: ComputationGraphBuilder,
        shared: Mapping[int, SymbolicTensor], sequences: Mapping[int, AllRows], count: int,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.builder = builder
        self.count = count
        self.maker = {v: o for o in graph.operations for v in o.outputs}
        self.constants = graph.constant_data()
        self._rows = {(v, rows.is_backward): rows.tensor for v, rows in sequences.items()}
        self._outside = dict(shared)
        #: Values that may differ between rounds.
        self.varying = self._differing()
        self.collected: list[tuple[int, bool]] = []

    def _differing(self) -> set[int]:
        same = {*self._outside, *self.constants}
        found = {slot.value for slot in self.graph.inputs} - same
        return reachable_from(
            self.graph.operations, found,
            lambda o: o.body != ABSENT or not is_repeatable(o),
        )  # fmt: skip

    def again(
        self, operation: Operation, given: Mapping[int, SymbolicTensor]
    ) -> dict[int, SymbolicTensor]:
        """Apply an operation, after the scan, to `given` and to values equal in all rounds."""
        operands = [
            given[i] if i in given else None if v == ABSENT else self.same(v)
            for i, v in enumerate(operation.inputs)
        ]
        return write_operation(self.builder, operation, operands, self.graph.values, ())

    def same(self, value: int) -> SymbolicTensor:
        """Return a value that is equal in all rounds, computed outside of the scan."""
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
        return self.graph.values[value].type.shape

    def before_transpose(self, value: int, axis: int) -> Factor:
        """Return the operand of a transpose that computes a factor, or the factor itself."""
        operation = self.maker.get(value)
        rank = len(self.shape(value))
        if operation is None or axis_order(operation, self.graph.values) != exchange(rank):
            return Factor(value, axis)
        return Factor(operation.inputs[0], 2 * rank - 3 - axis)

    def root(self, factor: Factor) -> int:
        """Return the value of which a factor is a reshape."""
        value = factor.value
        while True:
            operation = self.maker.get(value)
            if operation is None or operation.domain or operation.op not in RESHAPING:
                return value
            value = operation.inputs[0]

    def orders(self, value: int) -> list[bool]:
        """Return the orders in which a value is available for all rounds or will be collected."""
        return [is_backward for v, is_backward in (*self._rows, *self.collected) if v == value]

    def take(self, collected: Sequence[SymbolicTensor]) -> None:
        """Store what the scan has collected."""
        self._rows.update(zip(self.collected, collected, strict=True))

    def collect(self, value: int, is_backward: bool) -> None:
        """Let the scan collect a value in this order, unless it is available."""
        key = (value, is_backward)
        if key not in self._rows and key not in self.collected:
            self.collected.append(key)

    def all_rows(self, factor: Factor, is_backward: bool) -> SymbolicTensor:
        """Return a factor in all rounds along a new axis 0."""
        whole = self._rows[self.root(factor), is_backward]
        return self.shaped(whole, (self.count, *self.shape(factor.value)))

    def merge_rounds(
        self, whole: SymbolicTensor, factor: Factor, last: bool | None = None
    ) -> SymbolicTensor:
        """Merge the rounds into the contracted axis of a factor.

        `last` moves that axis to the last position (True) or the last but one (False).
        """
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
        """Reshape a tensor if its shape differs."""
        if value.shape == tuple(shape):
            return value
        attributes = {"allowzero": int(0 in shape)}
        return self.builder.apply("Reshape", [value, list(shape)], 1, attributes)[0]


# Sums over rounds, computed after the scan where that is cheaper ---------------------------------

#: Linear in operand 0 if the others are equal in all rounds.
_LINEAR = RESHAPING | {"Div", "Expand", "Neg", "Slice", "Split", "Transpose"}
#: Linear in either operand if the other is equal in all rounds.
_BILINEAR = frozenset({"Gemm", "MatMul", "Mul"})
#: Linear in all operands together.
_ADDITIVE = frozenset({"Add", "Concat", "Sub"})
#: Maximum depth of nested linear operations (the walk is recursive).
_MOST_DEEP = 32

#: Computes a sum after the scan has been written.
Sum = Callable[[], SymbolicTensor]


class RoundSums:
    """The sums over the rounds of one scan.

    Call `sum_of` for each sum, then `settle`: the scan must then collect `values.collected` and
    accumulate `added`. Pass its results to `take`.
    """

    def __init__(self, values: RoundValues) -> None:
        self.values = values
        self._terms: list[int] = []
        self._results: dict[int, SymbolicTensor] = {}
        self.added: list[int] = []

    def sum_of(self, value: int, depth: int = 0) -> Sum:
        """Return a function that computes the sum of a value over all rounds."""
        terms = [self._term(v, depth) for v in self._addends(value)]

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
        if operation is not None and value in self.values.varying and not operation.domain:
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
        """Whether the operation maps sums of its varying operands to the sum of its results."""
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
        """Return the operands of a matrix product, before transposes, or None."""
        if operation.op not in ("Gemm", "MatMul") or len(operation.inputs) != 2:
            return None
        first, second = map(self.values.shape, operation.inputs)
        if len(first) != len(second) or len(first) < 2 or first[:-2] != second[:-2]:
            return None
        flags = (operation.attributes.get(name, 0) for name in ("transA", "transB"))
        rows, columns = len(first) - 2, len(first) - 1
        axes = (columns, rows)
        return tuple(  # type: ignore[return-value]  # two of them
            self.values.before_transpose(v, rows + columns - axis if flag else axis)
            for v, axis, flag in zip(operation.inputs, axes, flags, strict=True)
        )

    def _product(self, operation: Operation, first: Factor, second: Factor) -> Sum:
        """Return a function that computes the sum of products as one product over all rounds."""
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
                left = values.merge_rounds(a, first, last=True)
                right = values.merge_rounds(b, second, last=False)
                return values.builder.apply("MatMul", [left, right], 1, {})[0]
            sides = [values.merge_rounds(a, first), values.merge_rounds(b, second)]
            turned = {"transA": 1 - first.axis, "transB": second.axis}
            return values.builder.apply("Gemm", sides, 1, {**attributes, **turned})[0]

        return product

    def settle(self) -> None:
        """Decide which sums the scan accumulates; no further sums may be requested."""
        for value in dict.fromkeys(self._terms):
            if self._collected_form(value) is None:
                self.added.append(value)

    def rows_of(self, value: int, is_backward: bool) -> Sum | None:
        """Return a function that computes a value of all rounds by one product after the scan.

        None unless the value is a product of a collected value and a matrix shared by all rounds.
        """
        values = self.values
        operation = values.maker.get(values.root(Factor(value, 0)))
        if operation is None or operation.domain:
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
        """Store what the scan has collected and accumulated."""
        self.values.take(collected)
        self._results.update(zip(self.added, added, strict=True))
        for value in dict.fromkeys(self._terms):
            if value not in self._results:
                self._results[value] = self._sum_of_rows(value)

    def _collected_form(self, value: int) -> tuple[Factor, bool, tuple[int, ...]] | None:
        """Return a collected value, its order, and the axes to sum over to get `value`; or None."""
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


#: Differentiates the graph of a body: wanted inputs, and outputs whose gradients are given.
DifferentiateBody = Callable[[ComputationGraph, tuple[str, ...], tuple[str, ...]], Differentiated]
#: Types in which a sum over many rounds would lose digits.
_COARSE = frozenset({DataType.BFLOAT16, DataType.FLOAT16})


@dataclass(frozen=True, slots=True)
class _SavedRows:
    """A value of the forward graph that has the values of all rounds, last round first or not.

    With `first`, the wanted value is `first` in round 0, and in each other round the value of the
    round before.
    """

    value: int
    is_backward: bool
    first: int | None = None


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The body of a backward scan.

    Attributes:
        graph: Takes gradients of states, elements and shared tensors by name.
        shared: Shared tensors by name.
        taken: Names of the elements.
        seeds: For each state, the name of its gradient in `graph`, if it has one.
        gradients: For each state, the value of its gradient after the round, if it has one.
        added: Values to accumulate.
        collected: Values to collect.
    """

    graph: ComputationGraph
    shared: Mapping[str, SymbolicTensor]
    taken: tuple[str, ...]
    seeds: tuple[str | None, ...]
    gradients: tuple[int | None, ...]
    added: tuple[int, ...]
    collected: tuple[int, ...]

    def one(
        self, inside: BodyBuilder, before: Sequence[Any], elements: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Write a round; return the next states, the sums so far, and what is collected."""
        given = dict(zip(self.taken, elements, strict=True)) | dict(self.shared)
        states, sums = before[: len(self.seeds)], before[len(self.seeds) :]
        given |= {n: g for n, g in zip(self.seeds, states, strict=True) if n is not None}
        made = write_graph(inside, self.graph, given)
        after = [
            zeros(inside, g.type) if value is None else made[str(value)]
            for value, g in zip(self.gradients, states, strict=True)
        ]
        for total, value in zip(sums, self.added, strict=True):
            after.append(total + _in_type(inside, made[str(value)], total.data_type))
        return after, [made[str(value)] for value in self.collected]


class ScanGradient:
    """The gradient of one scan. Its construction adds collected values to the forward scan."""

    def __init__(
        self, operation: Operation, forward: ForwardValues, path: set[int],
        differentiate: DifferentiateBody,
    ) -> None:  # fmt: skip
        """Differentiate the body of a scan.

        Args:
            operation: The scan.
            forward: The forward graph.
            path: Values through which gradients flow.
            differentiate: Differentiates the body.
        """
        self._operation = operation
        self._forward = forward
        self._form = ScanForm.of(operation)
        self._wanted = {i for i, v in enumerate(operation.inputs) if v in path}
        results = {i for i, v in enumerate(operation.outputs) if v in path}
        bodies = forward.bodies.bodies
        self._body = bodies[operation.body]
        #: Inputs of the body that have a gradient, outputs that receive one.
        self._inputs, self._outputs = gradient_slots(operation, bodies, self._wanted, results)
        self._both: Differentiated | None = None
        self._kept: dict[str, _SavedRows] = {}
        if self._form.count and self._inputs and self._outputs:
            graph = graph_of_body(f"{forward.graph.name}_round", self._body, bodies)
            wanted = tuple(map(operand_name, self._inputs))
            self._both = differentiate(graph, wanted, tuple(map(result_name, self._outputs)))
            self._keep(self._both)

    def _keep(self, both: Differentiated) -> None:
        """Let the forward scan collect what the backward graph of the body reads."""
        form, graph = self._form, both.forward
        at = _slots(graph)
        read = {slot.name for slot in both.backward.inputs}
        results = len(self._body.outputs)
        #: Collected results of the original scan, by value in the body.
        there = {at[result_name(i)]: i for i in reversed(range(form.states, results))}
        more: dict[int, list[str]] = {}
        for name in both.saved:
            found = there.get(at[name])
            if found is None:
                more.setdefault(at[name], []).append(name)
            else:
                self._kept[name] = self._collected(found)
        #: States before a round that equal a collected value of the round before.
        after: dict[int, int] = {}
        for i in range(form.states):
            if operand_name(i) not in read:
                continue
            made = at[result_name(i)]
            if made in there:
                kept = self._collected(there[made])
                self._kept[operand_name(i)] = replace(kept, first=self._operation.inputs[i])
            elif made in more:
                after[i] = made
            else:
                more.setdefault(at[operand_name(i)], []).append(operand_name(i))
        if not more:
            return
        slots = tuple(OutputSlot(f"kept_{v}", v) for v in more)
        whole = replace(graph, outputs=(*graph.outputs[:results], *slots))
        values = self._forward.collect(self._operation, remove_dead_code(whole), len(slots))
        at_last = dict(zip(more, values, strict=True))
        for v, names in more.items():
            self._kept |= dict.fromkeys(names, _SavedRows(at_last[v], False))
        for i, v in after.items():
            first = self._operation.inputs[i]
            self._kept[operand_name(i)] = _SavedRows(at_last[v], False, first)

    def _collected(self, result: int) -> _SavedRows:
        """Return a collected result of the original scan."""
        backward = self._form.given_backward[result - self._form.states]
        return _SavedRows(self._forward.output(self._operation, result), backward)

    def pull(
        self, builder: ComputationGraphBuilder, gradients: Sequence[SymbolicTensor | None]
    ) -> tuple[SymbolicTensor | None, ...]:
        """Return the gradients of the operands, None where there is none."""
        found: dict[int, SymbolicTensor] = {}
        if self._both is not None:
            found = self._scan_back(self._both, builder, gradients)
        elif not self._form.count:
            # Without rounds, the last states are the first.
            found = {i: g for i, g in enumerate(gradients[: self._form.states]) if g is not None}
        places = range(len(self._operation.inputs))
        return tuple(found.get(i) if i in self._wanted else None for i in places)

    def _scan_back(
        self, both: Differentiated, builder: ComputationGraphBuilder,
        gradients: Sequence[SymbolicTensor | None],
    ) -> dict[int, SymbolicTensor]:  # fmt: skip
        form, graph = self._form, both.backward
        at = _slots(graph)
        #: Values of the gradients of the body's inputs.
        named, seeded = dict(both.gradients), dict(both.seeds)
        gradient = {i: at[named[operand_name(i)]] for i in self._inputs if operand_name(i) in named}
        seeds = {i: seeded[result_name(i)] for i in self._outputs if result_name(i) in seeded}
        first = form.states + form.sequences
        shared = {
            name: self._forward.value(value)
            for i, value in enumerate(self._operation.inputs)
            if i >= first and (name := operand_name(i)) in at
        }
        rows = self._rows(at) | {
            name: AllRows(self._seed(builder, gradients, i), form.given_backward[i - form.states])
            for i, name in seeds.items()
            if i >= form.states
        }
        inside = RoundValues(
            graph, builder, {at[name]: tensor for name, tensor in shared.items()},
            {at[name]: each for name, each in rows.items()}, form.count,
        )  # fmt: skip
        sums = RoundSums(inside)
        totals = {i: sums.sum_of(value) for i, value in gradient.items() if i >= first}
        sums.settle()
        states = sorted({i for i in (*self._inputs, *self._outputs) if i < form.states})
        moved = [i for i in gradient if form.states <= i < first]
        outside = {
            i: whole
            for i in moved
            if (whole := sums.rows_of(gradient[i], form.taken_backward[i - form.states]))
        }
        moved = [i for i in moved if i not in outside]
        kept = [*(gradient[i] for i in moved), *(value for value, _ in inside.collected)]
        values = [*(gradient[i] for i in states if i in gradient), *sums.added, *kept]
        slots = tuple(OutputSlot(str(value), value) for value in dict.fromkeys(values))
        rounds = remove_dead_code(replace(graph, outputs=slots))
        read = _read(rounds)
        firsts = [
            *(self._seed(builder, gradients, i) for i in states),
            *(zeros(builder, _added_type(graph.values[v].type)) for v in sums.added),
        ]
        taken = {name: each for name, each in rows.items() if name in read}
        written = _Rounds(
            rounds, {name: tensor for name, tensor in shared.items() if name in read}, tuple(taken),
            tuple(seeds.get(i) for i in states), tuple(gradient.get(i) for i in states),
            tuple(sums.added), tuple(kept),
        )  # fmt: skip
        last: tuple[SymbolicTensor, ...] = ()
        collected: tuple[SymbolicTensor, ...] = ()
        # No scan is needed if everything is computed after it.
        if firsts or kept:
            last, collected = scan_in_body(
                builder,
                written.one,
                firsts,
                [each.tensor for each in taken.values()],
                count=form.count,
                taken_backward=[not each.is_backward for each in taken.values()],
                given_backward=[
                    *(not form.taken_backward[i - form.states] for i in moved),
                    *(not is_backward for _, is_backward in inside.collected),
                ],
            )
        added = [
            _in_type(builder, total, graph.values[v].type.data_type)
            for v, total in zip(sums.added, last[len(states) :], strict=True)
        ]
        sums.take(collected[len(moved) :], added)
        found = dict(zip(states, last, strict=False))
        found |= dict(zip(moved, collected, strict=False))
        return found | {i: made() for i, made in (totals | outside).items()}

    def _rows(self, read: Mapping[str, int]) -> dict[str, AllRows]:
        """Return the sequences that the backward graph of the body reads."""
        form = self._form
        found = {name: self._all_of(kept) for name, kept in self._kept.items()}
        for i, backward in enumerate(form.taken_backward, form.states):
            if operand_name(i) in read:
                whole = self._forward.value(self._operation.inputs[i])
                found[operand_name(i)] = AllRows(whole, backward)
        return found

    def _all_of(self, kept: _SavedRows) -> AllRows:
        whole = self._forward.value(kept.value)
        if kept.first is None:
            return AllRows(whole, kept.is_backward)
        builder, first = self._forward.builder, self._forward.value(kept.first)
        row, count = (1, *first.shape), self._form.count
        shape = builder.constant(np.array(row, np.int64))
        begins = builder.apply("Reshape", [first, shape], 1, {"allowzero": int(0 in row)})[0]
        place = int(kept.is_backward)
        others = [np.array([number], np.int64) for number in (place, count - 1 + place, 0)]
        rest = builder.apply("Slice", [whole, *others], 1, {})[0]
        pieces = [rest, begins] if kept.is_backward else [begins, rest]
        return AllRows(builder.apply("Concat", pieces, 1, {"axis": 0})[0], kept.is_backward)

    def _seed(
        self, builder: ComputationGraphBuilder, gradients: Sequence[SymbolicTensor | None],
        result: int,
    ) -> SymbolicTensor:  # fmt: skip
        """Return the gradient of a result, zeros if there is none."""
        found = gradients[result]
        kind = self._form.result_types(self._body.output_types)[result]
        assert kind is not None
        return zeros(builder, kind) if found is None else found


def _slots(graph: ComputationGraph) -> dict[str, int]:
    """Return values by slot name."""
    found = {slot.name: slot.value for slot in graph.inputs}
    return found | {slot.name: slot.value for slot in graph.outputs}


def _read(graph: ComputationGraph) -> set[str]:
    """Return the names of the inputs that operations or outputs use."""
    read = {v for operation in graph.operations for v in operation.inputs}
    read.update(slot.value for slot in graph.outputs)
    return {slot.name for slot in graph.inputs if slot.value in read}


def _added_type(kind: ValueType) -> ValueType:
    """Return the type for accumulating values of a type."""
    return replace(kind, data_type=DataType.FLOAT32) if kind.data_type in _COARSE else kind


def _in_type(builder: Any, value: SymbolicTensor, data_type: DataType) -> SymbolicTensor:
    if value.data_type == data_type:
        return value
    cast: SymbolicTensor = builder.apply("Cast", [value], 1, {"to": onnx_code(data_type)})[0]
    return cast


def zeros(builder: Any, kind: ValueType) -> SymbolicTensor:
    """Return zeros, stored as one element."""
    zero = builder.constant(kind.data_type.dtype.type(0))
    made: SymbolicTensor = builder.apply("Expand", [zero, list(kind.shape)], 1, {})[0]
    return made
