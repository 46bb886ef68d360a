"""Gradients of scans: a scan backwards over the backward graph of the body.

The body is differentiated as any graph is. What its rules ask for is collected by the forward scan
and taken as sequences by the backward one, whose states are the gradients of states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch.compiler.body_graphs import (
    graph_of_body,
    operand_name,
    result_name,
    write_graph,
)
from stitch.compiler.dependence import through_rounds
from stitch.compiler.gradients.differentiated import Differentiated
from stitch.compiler.gradients.forward_values import ForwardValues
from stitch.compiler.gradients.round_sums import RoundSums
from stitch.compiler.gradients.round_values import AllRows, RoundValues
from stitch.graph import (
    BodyBuilder,
    ComputationGraph,
    ComputationGraphBuilder,
    SymbolicTensor,
    scan_in_body,
)
from stitch.linker import remove_dead_code
from stitch.ops import onnx_code
from stitch.program import DataType, Operation, OutputSlot, ScanForm, ValueType

#: Differentiates the graph of a body: the inputs whose gradients are wanted, and the outputs whose
#: gradients come in.
DifferentiateBody = Callable[[ComputationGraph, tuple[str, ...], tuple[str, ...]], Differentiated]
#: In these, a sum over many rounds would lose its digits.
_COARSE = frozenset({DataType.BFLOAT16, DataType.FLOAT16})


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value of the forward graph that holds a value of all rounds, the last one first or not.

    Where `first` is told, the value wanted is that in the first round, and in each other round what
    the value was in the round before.
    """

    value: int
    is_backward: bool
    first: int | None = None


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of a backward scan, whose graph takes gradients of states, elements and what is
    shared by name, and makes values by their numbers.

    Of each state: what its gradient is called, and what it is after the round, where it is either.
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
        """What a round makes: states, sums as far as they have come, what is collected."""
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
    """The gradient of one scan; making it has the forward scan collect what it takes."""

    def __init__(
        self,
        operation: Operation,
        forward: ForwardValues,
        path: set[int],
        differentiate: DifferentiateBody,
        adds_up: bool = False,
    ) -> None:
        """`path`: the values of the graph that gradients flow through. What `adds_up` collects
        nothing to compute sums after the scan: rounds are few, and hold much."""
        self._operation = operation
        self._adds_up = adds_up
        self._forward = forward
        self._form = ScanForm.of(operation)
        self._wanted = {i for i, v in enumerate(operation.inputs) if v in path}
        results = {i for i, v in enumerate(operation.outputs) if v in path}
        bodies = forward.bodies.bodies
        self._body = bodies[operation.body]
        #: Of the body: inputs that have a gradient, outputs whose gradient comes in.
        self._inputs, self._outputs = through_rounds(operation, bodies, self._wanted, results)
        self._both: Differentiated | None = None
        self._kept: dict[str, _Kept] = {}
        if self._form.count and self._inputs and self._outputs:
            graph = graph_of_body(f"{forward.graph.name}_round", self._body, bodies)
            wanted = tuple(map(operand_name, self._inputs))
            self._both = differentiate(graph, wanted, tuple(map(result_name, self._outputs)))
            self._keep(self._both)

    def _keep(self, both: Differentiated) -> None:
        """Have the forward scan collect what the backward graph of the body reads."""
        form, graph = self._form, both.forward
        at = _slots(graph)
        read = {slot.name for slot in both.backward.inputs}
        results = len(self._body.outputs)
        #: What the scan collects in any case, by the value in the body.
        there = {at[result_name(i)]: i for i in reversed(range(form.states, results))}
        more: dict[int, list[str]] = {}
        for name in both.saved:
            found = there.get(at[name])
            if found is None:
                more.setdefault(at[name], []).append(name)
            else:
                self._kept[name] = self._collected(found)
        #: States before a round that are known from what is collected of the round before it.
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
            self._kept |= dict.fromkeys(names, _Kept(at_last[v], False))
        for i, v in after.items():
            first = self._operation.inputs[i]
            self._kept[operand_name(i)] = _Kept(at_last[v], False, first)

    def _collected(self, result: int) -> _Kept:
        """What the scan collects in any case."""
        backward = self._form.given_backward[result - self._form.states]
        return _Kept(self._forward.output(self._operation, result), backward)

    def pull(
        self, builder: ComputationGraphBuilder, gradients: Sequence[SymbolicTensor | None]
    ) -> tuple[SymbolicTensor | None, ...]:
        """The gradients of operands from those of results, None where nothing flows."""
        found: dict[int, SymbolicTensor] = {}
        if self._both is not None:
            found = self._scan_back(self._both, builder, gradients)
        elif not self._form.count:
            # The last states are the first.
            found = {i: g for i, g in enumerate(gradients[: self._form.states]) if g is not None}
        places = range(len(self._operation.inputs))
        return tuple(found.get(i) if i in self._wanted else None for i in places)

    def _scan_back(
        self,
        both: Differentiated,
        builder: ComputationGraphBuilder,
        gradients: Sequence[SymbolicTensor | None],
    ) -> dict[int, SymbolicTensor]:
        form, graph = self._form, both.backward
        at = _slots(graph)
        #: Where the gradients of the body's inputs are.
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
            graph,
            builder,
            {at[name]: tensor for name, tensor in shared.items()},
            {at[name]: each for name, each in rows.items()},
            form.count,
        )
        sums = RoundSums(inside, self._adds_up)
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
            rounds,
            {name: tensor for name, tensor in shared.items() if name in read},
            tuple(taken),
            tuple(seeds.get(i) for i in states),
            tuple(gradient.get(i) for i in states),
            tuple(sums.added),
            tuple(kept),
        )
        last: tuple[SymbolicTensor, ...] = ()
        collected: tuple[SymbolicTensor, ...] = ()
        # Where all of it is computed after the scan, there is none.
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
        """What the backward graph of the body reads of the forward scan, of all rounds."""
        form = self._form
        found = {name: self._all_of(kept) for name, kept in self._kept.items()}
        for i, backward in enumerate(form.taken_backward, form.states):
            if operand_name(i) in read:
                whole = self._forward.value(self._operation.inputs[i])
                found[operand_name(i)] = AllRows(whole, backward)
        return found

    def _all_of(self, kept: _Kept) -> AllRows:
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
        self,
        builder: ComputationGraphBuilder,
        gradients: Sequence[SymbolicTensor | None],
        result: int,
    ) -> SymbolicTensor:
        """The gradient of a result, zeros where none has come in."""
        found = gradients[result]
        kind = self._form.result_types(self._body.output_types)[result]
        assert kind is not None
        return zeros(builder, kind) if found is None else found


def _slots(graph: ComputationGraph) -> dict[str, int]:
    """Values by the names of the slots that they are."""
    found = {slot.name: slot.value for slot in graph.inputs}
    return found | {slot.name: slot.value for slot in graph.outputs}


def _read(graph: ComputationGraph) -> set[str]:
    """The inputs that a graph reads or hands on."""
    read = {v for operation in graph.operations for v in operation.inputs}
    read.update(slot.value for slot in graph.outputs)
    return {slot.name for slot in graph.inputs if slot.value in read}


def _added_type(kind: ValueType) -> ValueType:
    """The type to add up values of a type in."""
    return replace(kind, data_type=DataType.FLOAT32) if kind.data_type in _COARSE else kind


def _in_type(builder: Any, value: SymbolicTensor, data_type: DataType) -> SymbolicTensor:
    if value.data_type == data_type:
        return value
    cast: SymbolicTensor = builder.apply("Cast", [value], 1, {"to": onnx_code(data_type)})[0]
    return cast


def zeros(builder: Any, kind: ValueType) -> SymbolicTensor:
    """Zeros that take no room in a file."""
    zero = builder.constant(kind.data_type.dtype.type(0))
    made: SymbolicTensor = builder.apply("Expand", [zero, list(kind.shape)], 1, {})[0]
    return made
