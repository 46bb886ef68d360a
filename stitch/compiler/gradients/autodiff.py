"""Reverse-mode automatic differentiation of computation graphs, by the operators' gradient rules.

A forward value that a rule reads becomes an extra output of the forward graph, or is recomputed in
the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler.compile_graph import optimize
from stitch.compiler.dependence import dependencies, dependents
from stitch.compiler.gradients.forward_values import (
    Differentiated,
    ForwardValues,
    Recomputation,
    Recompute,
)
from stitch.compiler.gradients.scan_gradients import ScanGradient, zeros
from stitch.compiler.passes import (
    fold_transposes,
    merge_common_subexpressions,
    sink_relu_below_max_pool,
    transpose_products,
)
from stitch.errors import CompileError, closest
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import (
    ABSENT,
    MAX_RANK,
    Body,
    BodyPool,
    Constant,
    DataType,
    InputKind,
    Operation,
    ScanForm,
    Value,
    ValueType,
    is_scan,
)


def slice_saved_parts(
    backward: ComputationGraph, forward: ComputationGraph, saved: Mapping[int, str]
) -> tuple[ComputationGraph, frozenset[str]]:
    """Compute saved parts of a saved value in the backward graph, by a Split.

    Args:
        backward: The backward graph.
        forward: The forward graph.
        saved: Names of backward inputs by their forward value.

    Returns:
        The backward graph, and the names of the inputs that it does not need any more.
    """
    inputs = {slot.name: slot.value for slot in backward.inputs}
    constants = forward.constant_data()
    splits = [
        operation
        for operation in forward.operations
        if operation.op == "Split" and not operation.domain and operation.inputs[0] in saved
        and not saved.keys().isdisjoint(operation.outputs)
        and all(v in constants for v in operation.inputs[1:])
    ]  # fmt: skip
    gone = {saved[v] for operation in splits for v in operation.outputs if v in saved}
    values = forward.values
    numbers, more, cuts = list(backward.values), list(backward.constants), []
    for operation in splits:
        read = [inputs[saved[operation.inputs[0]]]]
        for v in operation.inputs[1:]:
            numbers.append(values[v])
            more.append(Constant(len(numbers) - 1, constants[v]))
            read.append(len(numbers) - 1)
        made = []
        for v in operation.outputs:
            if v in saved:
                made.append(inputs[saved[v]])
            elif v == ABSENT:
                made.append(ABSENT)
            else:
                numbers.append(values[v])
                made.append(len(numbers) - 1)
        cuts.append(replace(operation, inputs=tuple(read), outputs=tuple(made)))
    cut = replace(
        backward,
        inputs=tuple(slot for slot in backward.inputs if slot.name not in gone),
        values=tuple(numbers),
        constants=tuple(more),
        operations=(*cuts, *backward.operations),
    )
    return (cut if cuts else backward), frozenset(gone)


# Checkpoint segments ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentedGraph:
    """A graph with segmented scans: outputs of their outer scans, and sliced sequences."""

    graph: ComputationGraph
    scans: frozenset[tuple[int, ...]] = frozenset()
    parts: frozenset[int] = frozenset()


def segment_scans(graph: ComputationGraph, path: Collection[int], every: int) -> SegmentedGraph:
    """Turn the scans that compute some of `path` into scans over segments of `every` rounds."""
    writing = _SegmentWriter(graph, every)
    for operation in graph.operations:
        if is_scan(operation) and not set(path).isdisjoint(operation.outputs):
            writing.segment(operation)
        else:
            writing.operations.append(operation)
    segmented = replace(
        graph,
        values=tuple(writing.values),
        operations=tuple(writing.operations),
        constants=tuple(writing.constants),
        bodies=tuple(writing.bodies.bodies),
    )
    return SegmentedGraph(segmented, frozenset(writing.scans), frozenset(writing.parts))


class _SegmentWriter:
    """A graph under construction."""

    def __init__(self, graph: ComputationGraph, every: int) -> None:
        self.every = every
        self.values = list(graph.values)
        self.constants = list(graph.constants)
        self.operations: list[Operation] = []
        self.bodies = BodyPool()
        self.bodies.add_all(graph.bodies)
        self.scans: list[tuple[int, ...]] = []
        self.parts: list[int] = []

    def segment(self, operation: Operation) -> None:
        """Write a scan as scans over segments."""
        form = ScanForm.of(operation)
        whole, rest = divmod(form.count, self.every)
        parts = [(whole, self.every)] * (whole > 0) + [(1, rest)] * (rest > 0)
        ranks = [len(self.values[v].type.shape) for v in operation.inputs]
        ranks += [len(self.values[v].type.shape) for v in operation.outputs if v != ABSENT]
        if not parts or max(ranks) >= MAX_RANK:
            self.operations.append(operation)
            return
        first = form.states + form.sequences
        states, shared = operation.inputs[: form.states], operation.inputs[first:]
        sequences = operation.inputs[form.states : first]
        made: list[tuple[int, ...]] = []
        begin = 0
        for many, rounds in parts:
            end = begin + many * rounds
            elements = [
                self._elements(v, operation, (form.count, begin, end), rounds, backward)
                for v, backward in zip(sequences, form.taken_backward, strict=True)
            ]
            # The last segment computes the last states under their own values.
            ends = operation.outputs[: form.states] if end == form.count else ()
            operands = (*states, *elements, *shared)
            results = self._scan(operation, form, operands, (many, rounds), ends)
            states = results[: form.states]
            made.append(results[form.states :])
            begin = end
        for i, backward in enumerate(form.given_backward):
            target = operation.outputs[form.states + i]
            if target == ABSENT:
                continue
            if len(parts) == 1:
                self._reshape(made[0][i], target, operation)
                continue
            shape = self.values[target].type.shape[1:]
            pieces = [
                self._shaped(results[i], operation, (many * rounds, *shape))
                for results, (many, rounds) in zip(made, parts, strict=True)
            ]
            order = tuple(pieces[::-1] if backward else pieces)
            self._write(operation, "Concat", order, target, {"axis": 0})

    def _scan(
        self, near: Operation, form: ScanForm, operands: tuple[int, ...], part: tuple[int, int],
        ends: Sequence[int],
    ) -> tuple[int, ...]:  # fmt: skip
        """Write a scan over segments.

        Args:
            near: The original scan.
            form: Its form.
            operands: Operands of the outer scan.
            part: Number of segments, and rounds per segment.
            ends: Values for the last states; new ones if empty.

        Returns:
            The results of the outer scan.
        """
        many, rounds = part
        body = self.bodies.bodies[near.body]
        inner, outer = replace(form, count=rounds), replace(form, count=many)
        takes = [k for k in inner.operand_types(body.input_types) if k is not None]
        makes = [k for k in inner.result_types(body.output_types) if k is not None]
        values = tuple(Value(f"v{i}", kind) for i, kind in enumerate((*takes, *makes)))
        inputs = tuple(range(len(takes)))
        outputs = tuple(range(len(takes), len(values)))
        scan = replace(near, inputs=inputs, outputs=outputs, attributes=inner.attributes)
        segment = self.bodies.add(Body(inputs, outputs, values, (scan,)))
        results: list[int] = []
        for i, kind in enumerate(outer.result_types(makes)):
            assert kind is not None
            if i < form.states:
                result = ends[i] if ends else self._value("state", kind)
            else:
                result = ABSENT if near.outputs[i] == ABSENT else self._value("stretches", kind)
            results.append(result)
        made = tuple(results)
        attributes = outer.attributes
        self.operations.append(
            replace(near, inputs=operands, outputs=made, attributes=attributes, body=segment)
        )
        self.scans.append(made)
        return made

    def _elements(
        self, value: int, near: Operation, span: tuple[int, int, int], rounds: int, backward: bool
    ) -> int:
        """Return the elements of a sequence that some rounds take, by segment.

        `span` is the number of all rounds, the first of these rounds and their end.
        """
        count, begin, end = span
        if backward:
            begin, end = count - end, count - begin
        kind = self.values[value].type
        element = kind.shape[1:]
        if (begin, end) != (0, count):
            part = self._value("part", replace(kind, shape=(end - begin, *element)))
            cut = (self._ints([number]) for number in (begin, end, 0))
            self._write(near, "Slice", (value, *cut), part, {})
            self.parts.append(part)
            value = part
        return self._shaped(value, near, ((end - begin) // rounds, rounds, *element))

    def _shaped(self, value: int, near: Operation, shape: tuple[int, ...]) -> int:
        target = self._value("shaped", replace(self.values[value].type, shape=shape))
        self._reshape(value, target, near)
        return target

    def _reshape(self, value: int, target: int, near: Operation) -> None:
        shape = self.values[target].type.shape
        inputs, attributes = (value, self._ints(shape)), {"allowzero": int(0 in shape)}
        self._write(near, "Reshape", inputs, target, attributes)

    def _write(
        self, near: Operation, op: str, inputs: tuple[int, ...], target: int,
        attributes: dict[str, int],
    ) -> None:  # fmt: skip
        self.operations.append(Operation(op, inputs, (target,), attributes, "", near.location))

    def _ints(self, numbers: Sequence[int]) -> int:
        data = np.array(numbers, np.int64)
        value = self._value("constant", ValueType(data.shape, DataType.INT64))
        self.constants.append(Constant(value, data))
        return value

    def _value(self, name: str, kind: ValueType) -> int:
        self.values.append(Value(name, kind))
        return len(self.values) - 1


def differentiate(
    graph: ComputationGraph,
    wanted: Iterable[str] | None = None,
    *,
    outputs: Iterable[str] | None = None,
    recompute: str = "none",
    zeros: bool = True,
) -> Differentiated:
    """Return forward and backward graphs for the gradients of the `wanted` inputs.

    Args:
        graph: The graph to differentiate.
        wanted: Names of inputs; floating parameters by default.
        outputs: Names of outputs whose gradients are given; all floating ones by default.
        recompute: What the backward graph recomputes: none, cheap, all, or `every N`.
        zeros: Return zeros for a wanted input on which no output depends; otherwise no gradient.

    Raises:
        CompileError: An operator between the inputs and outputs has no gradient, a name is unknown,
            or no output depends on a wanted input.
        UsageError: `recompute` is invalid.
    """
    graph = _prepare(graph)
    inputs = {slot.name: i for i, slot in enumerate(graph.inputs)}
    results = {slot.name: i for i, slot in enumerate(graph.outputs)}
    if wanted is None:
        wanted = [
            slot.name for i, slot in enumerate(graph.inputs)
            if slot.kind is InputKind.PARAMETER and graph.input_type(i).data_type.is_floating
        ]  # fmt: skip
    if outputs is None:
        outputs = [n for n, i in results.items() if graph.output_type(i).data_type.is_floating]
    wanted, outputs = tuple(dict.fromkeys(wanted)), tuple(dict.fromkeys(outputs))
    _check_names(graph, wanted, inputs, "input")
    _check_names(graph, outputs, results, "output")
    again = Recomputation.parse(recompute)
    segmented = SegmentedGraph(graph)
    if again.every is not None:
        targets = {slot.value for slot in graph.inputs if slot.name in wanted}
        segmented = segment_scans(graph, _path(graph, targets, outputs), again.every)
    walk = _Backward(segmented, again.kind)
    return walk.run(wanted, outputs, with_zeros=zeros)


def _prepare(graph: ComputationGraph) -> ComputationGraph:
    """Prepare a graph for differentiation."""
    return merge_common_subexpressions(sink_relu_below_max_pool(fold_transposes(optimize(graph))))


def _path(graph: ComputationGraph, targets: Iterable[int], outputs: tuple[str, ...]) -> set[int]:
    """Return the floating values that depend on a target and that an output depends on."""
    ends = [slot.value for slot in graph.outputs if slot.name in outputs]
    return dependents(graph, graph.bodies, targets) & dependencies(graph, graph.bodies, ends)


def _check_names(
    graph: ComputationGraph, names: tuple[str, ...], slots: dict[str, int], side: str
) -> None:
    for name in names:
        if name not in slots:
            raise CompileError(
                f"graph {graph.name!r} has no {side} {name!r} to differentiate",
                expected=", ".join(slots),
                remedy=closest(name, slots) or None,
            )
        of = graph.input_type if side == "input" else graph.output_type
        if not of(slots[name]).data_type.is_floating:
            raise CompileError(
                f"{side} {name!r} of graph {graph.name!r} has no gradient: it is not floating",
                got=of(slots[name]).text(),
            )


class _Backward:
    """A backward graph under construction."""

    def __init__(self, segmented: SegmentedGraph, recompute: Recompute) -> None:
        self.graph = graph = segmented.graph
        self.segmented = segmented.scans
        self.builder = ComputationGraphBuilder(f"{graph.name}_backward")
        self.forward = ForwardValues(graph, self.builder, recompute, segmented.parts)
        self.parts: dict[int, list[Any]] = {}
        self.scans: dict[tuple[int, ...], ScanGradient] = {}

    def run(
        self, wanted: tuple[str, ...], outputs: tuple[str, ...], *, with_zeros: bool
    ) -> Differentiated:
        graph = self.graph
        targets = {slot.value: slot.name for slot in graph.inputs if slot.name in wanted}
        path = _path(graph, targets, outputs)
        self._check_rules(path)
        seeds = self._seeds(path, outputs)
        if not seeds:
            raise CompileError(
                f"no output of graph {graph.name!r} depends on the inputs to differentiate",
                where=f"wanted: {', '.join(wanted) or 'none'}",
                remedy="give the parameters kind=parameter, or name the wanted inputs",
            )
        self._prepare_scans(path)
        for operation in reversed(graph.operations):
            if not path.isdisjoint(operation.outputs):
                with self.builder.at(operation.location):
                    self._pull(operation, path)
        gradients = []
        for value, name in sorted(targets.items()):
            gradient = self._total(value)
            if gradient is None:
                if not with_zeros:
                    continue
                gradient = zeros(self.builder, graph.values[value].type)
            self.builder.output(f"{name}.grad", gradient)
            gradients.append((name, f"{name}.grad"))
        backward, sliced = slice_saved_parts(self.builder.build(), graph, self.forward.saved)
        self.forward.forget(sliced)
        return Differentiated(
            self.forward.saving_graph(), transpose_products(backward),
            tuple(self.forward.saved.values()), seeds, tuple(gradients),
        )  # fmt: skip

    def _prepare_scans(self, path: set[int]) -> None:
        """Create the gradients of scans first: they determine what the forward scans collect."""
        for operation in self.graph.operations:
            if is_scan(operation) and not path.isdisjoint(operation.outputs):
                if ScanForm.of(operation).has_condition:
                    raise CompileError(
                        f"graph {self.graph.name!r} cannot be differentiated: the number of rounds "
                        "of a loop depends on data",
                        where=operation.location or None,
                        remedy="use a loop with a fixed count, and select with Where in its body",
                    )
                is_segmented = operation.outputs in self.segmented
                body = self._segment if is_segmented else self._round
                self.scans[operation.outputs] = ScanGradient(
                    operation, self.forward, path, body, adds_up=is_segmented
                )

    def _round(
        self, graph: ComputationGraph, wanted: tuple[str, ...], outputs: tuple[str, ...]
    ) -> Differentiated:
        """Differentiate a round. If the whole scan is recomputed, rounds recompute nothing."""
        recompute: Recompute = "none" if self.forward.recompute == "all" else self.forward.recompute
        return _Backward(SegmentedGraph(_prepare(graph)), recompute).run(
            wanted, outputs, with_zeros=False
        )

    def _segment(
        self, graph: ComputationGraph, wanted: tuple[str, ...], outputs: tuple[str, ...]
    ) -> Differentiated:
        """Differentiate a segment of rounds; all of it is recomputed."""
        walk = _Backward(SegmentedGraph(_prepare(graph)), "all")
        return walk.run(wanted, outputs, with_zeros=False)

    def _check_rules(self, path: set[int]) -> None:
        missing: dict[str, str] = {}
        for operation in self.graph.operations:
            if path.isdisjoint(operation.outputs) or path.isdisjoint(operation.inputs):
                continue
            if is_scan(operation):
                continue  # Its body is checked when it is differentiated.
            if ops.definition_of(operation).gradient is None:
                missing.setdefault(operation.title, operation.location)
        if missing:
            listed = ", ".join(n + (f" at {at}" if at else "") for n, at in missing.items())
            raise CompileError(
                f"graph {self.graph.name!r} cannot be differentiated: no gradient for {listed}",
                remedy="remove parameters that these operators depend on from the wanted inputs",
            )

    def _seeds(self, path: set[int], outputs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        seeds = []
        for i, slot in enumerate(self.graph.outputs):
            if slot.name in outputs and slot.value in path:
                kind, name = self.graph.output_type(i), self.forward.fresh(f"{slot.name}.grad")
                seed = self.builder.input(name, kind.shape, kind.data_type)
                self.parts.setdefault(slot.value, []).append(seed)
                seeds.append((slot.name, name))
        return tuple(seeds)

    def _total(self, value: int) -> Any:
        parts = self.parts.pop(value, [])
        total = parts[0] if parts else None
        for part in parts[1:]:
            total = total + part
        return total

    def _pull(self, operation: Operation, path: set[int]) -> None:
        """Propagate gradients from the results of an operation to its operands."""
        if path.isdisjoint(operation.inputs):
            return
        gradients = tuple(None if v == ABSENT else self._total(v) for v in operation.outputs)
        if all(g is None for g in gradients):
            return
        scan = self.scans.get(operation.outputs)
        parts = (
            self._apply_rule(operation, gradients, path)
            if scan is None
            else scan.pull(self.builder, gradients)
        )
        values = self.graph.values
        for v, part in zip(operation.inputs, parts, strict=False):
            if part is None or v not in path:
                continue
            assert part.type == values[v].type, (
                f"{operation.op}: gradient {part.type.text()} of a {values[v].type.text()}"
            )
            self.parts.setdefault(v, []).append(part)

    def _apply_rule(
        self, operation: Operation, gradients: tuple[Any, ...], path: set[int]
    ) -> Sequence[Any]:
        """Return the gradients of the operands by the operator's rule."""
        definition = ops.lookup(operation.op, operation.domain)
        assert definition.gradient is not None
        values = self.graph.values
        context = ops.GradientContext(
            operation.op, self.builder, ops.attributes_of(operation),
            tuple(None if v == ABSENT else values[v].type for v in operation.inputs),
            tuple(None if v == ABSENT else values[v].type for v in operation.outputs),
            self.forward.known.operands(operation), gradients,
            tuple(v in path for v in operation.inputs), self._reader(operation), operation.location,
        )  # fmt: skip
        return definition.gradient(context)

    def _reader(self, operation: Operation) -> Callable[[str, int], SymbolicTensor]:
        def read(side: str, index: int) -> SymbolicTensor:
            if side == "input":
                return self.forward.value(operation.inputs[index])
            return self.forward.value(self.forward.output(operation, index))

        return read
