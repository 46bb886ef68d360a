"""Reverse-mode automatic differentiation of computation graphs, by the operators' gradient rules.

A forward value that a rule reads becomes an extra output of the forward graph, or is recomputed in
the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stitch import ops
from stitch.compiler.compile_graph import optimize
from stitch.compiler.dependence import dependencies, dependents
from stitch.compiler.gradients.forward_values import (
    Differentiated,
    ForwardValues,
    Recompute,
    check_recompute,
)
from stitch.compiler.gradients.scan_gradients import ScanGradient, zeros
from stitch.compiler.passes import (
    fold_transposes,
    merge_common_subexpressions,
    sink_relu_below_max_pool,
    transpose_products,
)
from stitch.compiler.split import split_graph
from stitch.errors import CompileError, closest
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.linker import drop_unused_values, remove_dead_code
from stitch.program import (
    ABSENT,
    Constant,
    InputKind,
    Operation,
    OutputSlot,
    ScanForm,
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
        recompute: What the backward graph recomputes: none, cheap or all.
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
    walk = _Backward(graph, check_recompute(recompute))
    result = walk.run(wanted, outputs, zeros_for=wanted if zeros else ())
    return _with_seeds(graph, result, wanted)


def _with_seeds(
    graph: ComputationGraph, result: Differentiated, wanted: Iterable[str]
) -> Differentiated:
    """Return the result; raise `CompileError` if no output depends on the wanted inputs."""
    if not result.seeds:
        raise CompileError(
            f"no output of graph {graph.name!r} depends on the inputs to differentiate",
            where=f"wanted: {', '.join(wanted) or 'none'}",
            remedy="give the parameters kind=parameter, or name the wanted inputs",
        )
    return result


def differentiate_parts(
    graph: ComputationGraph, cuts: int | Sequence[str], output: str, *, recompute: str = "none",
    is_prepared: bool = False,
) -> tuple[Differentiated, ...]:  # fmt: skip
    """Split a graph as `split_graph` does, and differentiate each part by its parameters.

    The gradients have the bits of those of the whole graph. The graph is split after the passes, so
    no two parts repeat an expression. The gradient of a value that several parts read passes
    through them, last part first: each takes the sum so far as a seed and returns the longer sum.
    The gradient of a parameter is complete in the first part that reads it.

    Inputs of the graph enter each part that reads them; parts pass on only what they compute.
    Outputs of the graph other than `output` and next states are dropped.

    Args:
        is_prepared: `prepare_for_parts` made the graph, or what it was made from: values that the
            passes would merge stay in parts of their own.

    Raises:
        CompileError: As `split_graph` and `differentiate`.
    """
    graph = graph if is_prepared else prepare_for_parts(graph, output)
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    parts = _with_inputs(graph, split_graph(graph, cuts))
    #: Names of the values that depend on parameters, and for each part its inputs among them.
    carriers = {
        slot.name for i, slot in enumerate(graph.inputs)
        if slot.kind is InputKind.PARAMETER and graph.input_type(i).data_type.is_floating
    }  # fmt: skip
    wanted = []
    for part in parts:
        targets = {slot.value: slot.name for slot in part.inputs if slot.name in carriers}
        dependent = dependents(part, part.bodies, targets)
        carriers |= {slot.name for slot in part.outputs if slot.value in dependent} - states
        wanted.append(tuple(targets.values()))
    #: Names of the values whose gradients later parts return.
    pending = {output}
    differentiated: list[Differentiated] = []
    for index in reversed(range(len(parts))):
        part, names = parts[index], wanted[index]
        ends = {slot.name for slot in part.outputs} & pending & carriers
        through = {name for name in names if name in pending - ends}
        slots = [OutputSlot(s.name, s.value) for s in part.inputs if s.name in through]
        part = _prepare(replace(part, outputs=(*part.outputs, *slots)))
        earlier = {slot.name for before in parts[:index] for slot in before.inputs}
        home = {s.name for s in part.inputs if s.kind is InputKind.PARAMETER} - earlier
        walk = _Backward(part, check_recompute(recompute))
        result = walk.run(names, (*ends, *through), zeros_for=home)
        if not differentiated:
            _with_seeds(part, result, names)
        pending = pending - ends | {name for name, _ in result.gradients}
        outputs = tuple(slot for slot in result.forward.outputs if slot.name not in through)
        forward = drop_unused_values(replace(result.forward, outputs=outputs))
        differentiated.append(replace(result, forward=forward))
    return tuple(reversed(differentiated))


def prepare_for_parts(graph: ComputationGraph, output: str) -> ComputationGraph:
    """Return the graph that `differentiate_parts` splits: after the passes, with one prediction."""
    graph = _prepare(graph)
    results = {slot.name: i for i, slot in enumerate(graph.outputs)}
    _check_names(graph, (output,), results, "output")
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    kept = tuple(slot for slot in graph.outputs if slot.name in {output, *states})
    return replace(graph, outputs=kept)


def _with_inputs(
    graph: ComputationGraph, parts: Sequence[ComputationGraph]
) -> list[ComputationGraph]:
    """Return the parts with inputs of the graph in place of those that another part passes on."""
    kinds = {slot.name: slot.kind for slot in graph.inputs}
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    return [
        drop_unused_values(
            remove_dead_code(
                replace(
                    part,
                    inputs=tuple(replace(s, kind=kinds.get(s.name, s.kind)) for s in part.inputs),
                    outputs=tuple(
                        s for s in part.outputs if s.name not in kinds or s.name in states
                    ),
                )
            )
        )
        for part in parts
    ]


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

    def __init__(self, graph: ComputationGraph, recompute: Recompute) -> None:
        self.graph = graph
        self.builder = ComputationGraphBuilder(f"{graph.name}_backward")
        self.forward = ForwardValues(graph, self.builder, recompute)
        self.parts: dict[int, list[Any]] = {}
        self.scans: dict[tuple[int, ...], ScanGradient] = {}

    def run(
        self, wanted: tuple[str, ...], outputs: tuple[str, ...], zeros_for: Container[str] = ()
    ) -> Differentiated:
        """Return the gradients; zeros for inputs in `zeros_for` on which no output depends."""
        graph = self.graph
        targets = {slot.value: slot.name for slot in graph.inputs if slot.name in wanted}
        path = _path(graph, targets, outputs)
        self._check_rules(path)
        seeds = self._seeds(path, outputs)
        self._prepare_scans(path)
        for operation in reversed(graph.operations):
            if not path.isdisjoint(operation.outputs):
                with self.builder.at(operation.location):
                    self._pull(operation, path)
        gradients = []
        for value, name in sorted(targets.items()):
            gradient = self._total(value)
            if gradient is None:
                if name not in zeros_for:
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
                self.scans[operation.outputs] = ScanGradient(
                    operation, self.forward, path, self._round
                )

    def _round(
        self, graph: ComputationGraph, wanted: tuple[str, ...], outputs: tuple[str, ...]
    ) -> Differentiated:
        """Differentiate a round. If the whole scan is recomputed, rounds recompute nothing."""
        recompute: Recompute = "none" if self.forward.recompute == "all" else self.forward.recompute
        return _Backward(_prepare(graph), recompute).run(wanted, outputs)

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
