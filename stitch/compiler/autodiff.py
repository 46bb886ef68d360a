"""Autodiff: a forward graph becomes a forward graph that saves, and a backward graph.

Comes in: a graph, and the inputs whose gradients are wanted. Goes out: two ordinary graphs that are
stitched by the names of their slots. The rules are the operators' own. What a rule asks for becomes
an extra output of the forward graph, or is computed again in the backward graph. Must not know:
losses, optimizers, machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from stitch import ops
from stitch.compiler.compile_graph import optimize
from stitch.errors import CompileError
from stitch.graph.builder import ComputationGraphBuilder
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.known_values import KnownValues
from stitch.graph.symbolic import SymbolicTensor
from stitch.graph.wish import closest
from stitch.program import ABSENT, InputKind, Operation, OutputSlot, Value

#: What backward computes again: nothing, what costs no more than reading it, or everything.
Recompute = Literal["none", "cheap", "all"]
#: Besides elementwise operators: those that only rearrange.
_CHEAP = frozenset(
    {"Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Split",
     "Transpose", "Unsqueeze"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A forward graph and its backward graph, and which slots belong together.

    Inputs of `backward` carry the names of the forward slots that they are: inputs keep theirs,
    `saved` are outputs of `forward`. `seeds` pairs forward outputs with the backward inputs for
    their gradients; `gradients` pairs forward inputs with the backward outputs.
    """

    forward: ComputationGraph
    backward: ComputationGraph
    saved: tuple[str, ...]
    seeds: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]


def differentiate(
    graph: ComputationGraph,
    wanted: Iterable[str] | None = None,
    *,
    outputs: Iterable[str] | None = None,
    recompute: Recompute = "none",
) -> Differentiated:
    """Forward and backward graphs for the gradients of `wanted` inputs (the floating parameters).

    Gradients come in for `outputs` (all floating ones). Raises `CompileError` naming every operator
    on the way that has no gradient, unknown names, and a graph that depends on no wanted input.
    """
    graph = optimize(graph)
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
    walk = _Backward(graph, recompute)
    return walk.run(wanted, outputs)


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
    """One backward graph under construction."""

    def __init__(self, graph: ComputationGraph, recompute: Recompute) -> None:
        self.graph = graph
        self.recompute = recompute
        self.builder = ComputationGraphBuilder(f"{graph.name}_backward")
        self.known = KnownValues()
        self.constants = graph.constant_data()
        for v, data in self.constants.items():
            self.known.add_constant(v, data)
        self.maker: dict[int, Operation] = {}
        for operation in graph.operations:
            types = [None if v == ABSENT else graph.values[v].type for v in operation.inputs]
            self.known.add_operation(operation, types)
            self.maker.update((v, operation) for v in operation.outputs if v != ABSENT)
        self.given = {slot.value: slot for slot in graph.inputs}
        #: Forward values that the backward graph has, and those that forward must hand over.
        self.values: dict[int, SymbolicTensor] = {}
        self.saved: dict[int, str] = {}
        self.parts: dict[int, list[Any]] = {}
        #: The values of the forward graph, and operations that give more of them than they did, by
        #: their former outputs.
        self.forward = list(graph.values)
        self.grown: dict[tuple[int, ...], Operation] = {}
        self.names = {slot.name for slot in graph.inputs} | {slot.name for slot in graph.outputs}

    def run(self, wanted: tuple[str, ...], outputs: tuple[str, ...]) -> Differentiated:
        graph = self.graph
        targets = {slot.value: slot.name for slot in graph.inputs if slot.name in wanted}
        path = self._path(set(targets), outputs)
        self._check_rules(path)
        seeds = self._seeds(path, outputs)
        if not seeds:
            raise CompileError(
                f"no output of graph {graph.name!r} depends on an input to differentiate",
                where=f"wanted: {', '.join(wanted) or 'none'}",
                remedy="give the parameters kind=parameter, or name the wanted inputs",
            )
        for operation in reversed(graph.operations):
            if not path.isdisjoint(operation.outputs):
                with self.builder.at(operation.location):
                    self._pull(operation, path)
        gradients = []
        for value, name in sorted(targets.items()):
            made = self._total(value)
            if made is None:
                made = self._zeros(value)
            self.builder.output(f"{name}.grad", made)
            gradients.append((name, f"{name}.grad"))
        forward = self._forward()
        return Differentiated(
            forward, self.builder.build(), tuple(self.saved.values()), seeds, tuple(gradients)
        )

    def _path(self, targets: set[int], outputs: tuple[str, ...]) -> set[int]:
        """The floating values that depend on a target and that an output depends on."""
        values, after = self.graph.values, set(targets)
        for operation in self.graph.operations:
            if not after.isdisjoint(operation.inputs):
                after.update(
                    v for v in operation.outputs
                    if v != ABSENT and values[v].type.data_type.is_floating
                )  # fmt: skip
        before = {s.value for s in self.graph.outputs if s.name in outputs}
        for operation in reversed(self.graph.operations):
            if not before.isdisjoint(operation.outputs):
                before.update(operation.inputs)
        return after & before

    def _check_rules(self, path: set[int]) -> None:
        missing: dict[str, str] = {}
        for operation in self.graph.operations:
            if path.isdisjoint(operation.outputs) or path.isdisjoint(operation.inputs):
                continue
            if ops.lookup(operation.op, operation.domain).gradient is None:
                name = f"{operation.domain}.{operation.op}".lstrip(".")
                missing.setdefault(name, operation.location)
        if missing:
            listed = ", ".join(n + (f" at {at}" if at else "") for n, at in missing.items())
            raise CompileError(
                f"graph {self.graph.name!r} cannot be differentiated: no gradient for {listed}",
                remedy="take parameters before these operators out of the wanted inputs",
            )

    def _seeds(self, path: set[int], outputs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        seeds = []
        for i, slot in enumerate(self.graph.outputs):
            if slot.name in outputs and slot.value in path:
                kind, name = self.graph.output_type(i), self._fresh(f"{slot.name}.grad")
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

    def _zeros(self, value: int) -> SymbolicTensor:
        kind = self.graph.values[value].type
        zero = self.builder.constant(kind.data_type.dtype.type(0))
        made = self.builder.op("Expand", zero, list(kind.shape))
        assert isinstance(made, SymbolicTensor)
        return made

    def _pull(self, operation: Operation, path: set[int]) -> None:
        """Apply an operation's rule, where something flows back into it and out of it."""
        if path.isdisjoint(operation.inputs):
            return
        gradients = tuple(None if v == ABSENT else self._total(v) for v in operation.outputs)
        if all(g is None for g in gradients):
            return
        definition = ops.lookup(operation.op, operation.domain)
        assert definition.gradient is not None
        values = self.graph.values
        context = ops.GradientContext(
            operation.op,
            self.builder,
            ops.resolve_attributes(definition, operation.attributes, operation.location),
            tuple(None if v == ABSENT else values[v].type for v in operation.inputs),
            tuple(None if v == ABSENT else values[v].type for v in operation.outputs),
            self.known.operands(operation),
            gradients,
            tuple(v in path for v in operation.inputs),
            self._reader(operation),
            operation.location,
        )
        for v, part in zip(operation.inputs, definition.gradient(context), strict=False):
            if part is None or v not in path:
                continue
            assert part.type == values[v].type, (
                f"{operation.op}: gradient {part.type.text()} of a {values[v].type.text()}"
            )
            self.parts.setdefault(v, []).append(part)

    def _reader(self, operation: Operation) -> Callable[[str, int], SymbolicTensor]:
        def read(side: str, index: int) -> SymbolicTensor:
            if side == "input":
                return self._value(operation.inputs[index])
            return self._value(self._output(operation, index))

        return read

    def _output(self, operation: Operation, index: int) -> int:
        """The value of an output, which is added where the forward operation does not give it."""
        grown = self.grown.get(operation.outputs, operation)
        if index < len(grown.outputs) and grown.outputs[index] != ABSENT:
            return grown.outputs[index]
        outputs = [*grown.outputs, *(ABSENT,) * (index + 1 - len(grown.outputs))]
        types = ops.infer_types(
            operation.op,
            [None if v == ABSENT else self.forward[v].type for v in operation.inputs],
            domain=operation.domain,
            constants=self.known.operands(operation),
            attributes=operation.attributes,
            outputs=len(outputs),
            location=operation.location,
        )
        for place, kind in enumerate(types):
            if outputs[place] == ABSENT:
                outputs[place] = len(self.forward)
                self.forward.append(Value(f"{operation.op.lower()}.{place}", kind))
        made = self.grown[operation.outputs] = replace(operation, outputs=tuple(outputs))
        self.maker.update((v, made) for v in made.outputs)
        return outputs[index]

    # -- forward values -------------------------------------------------------------------------

    def _value(self, wanted: int) -> SymbolicTensor:
        """A forward value in the backward graph: given, a constant, saved, or computed again."""
        pending = [wanted]
        while pending:
            value = pending[-1]
            if value in self.values:
                pending.pop()
            elif self._is_recomputed(value):
                missing = [
                    v for v in self.maker[value].inputs if v != ABSENT and v not in self.values
                ]
                pending += missing
                if not missing:
                    self._emit_again(self.maker[value])
            else:
                self.values[value] = self._taken(value)
        return self.values[wanted]

    def _is_recomputed(self, value: int) -> bool:
        operation = self.maker.get(value)
        if operation is None or self.recompute == "none":
            return False
        if self.recompute == "all":
            return True
        elementwise = ops.lookup(operation.op, operation.domain).elementwise
        return elementwise or (not operation.domain and operation.op in _CHEAP)

    def _emit_again(self, operation: Operation) -> None:
        operands = [None if v == ABSENT else self.values[v] for v in operation.inputs]
        names = [self.forward[v].name for v in operation.outputs if v != ABSENT]
        present = [v for v in operation.outputs if v != ABSENT]
        with self.builder.at(operation.location):
            made = self.builder.apply(
                operation.op, operands, names or 1, dict(operation.attributes), operation.domain
            )
        self.values.update(zip(present, made, strict=True))

    def _taken(self, value: int) -> SymbolicTensor:
        kind, name = self.forward[value].type, self.forward[value].name
        if value in self.constants:
            data = self.constants[value]
            if data.size > 1:
                return self.builder.parameter(name, data)
            return self.builder.constant(data)
        slot = self.given.get(value)
        if slot is not None:
            return self.builder.input(slot.name, kind.shape, kind.data_type, slot.kind)
        output = next((s.name for s in self.graph.outputs if s.value == value), None)
        if output is None or output in {s.name for s in self.graph.inputs}:
            output = self._fresh(f"saved.{name}")
        self.saved[value] = output
        return self.builder.input(output, kind.shape, kind.data_type, InputKind.SAVED)

    def _fresh(self, name: str) -> str:
        chosen, times = name, 0
        while chosen in self.names:
            times += 1
            chosen = f"{name}_{times}"
        self.names.add(chosen)
        return chosen

    def _forward(self) -> ComputationGraph:
        """The graph with the saved values as further outputs."""
        have = {slot.name for slot in self.graph.outputs}
        more = tuple(OutputSlot(n, v) for v, n in self.saved.items() if n not in have)
        operations = tuple(self.grown.get(o.outputs, o) for o in self.graph.operations)
        outputs, values = (*self.graph.outputs, *more), tuple(self.forward)
        return replace(self.graph, outputs=outputs, operations=operations, values=values)
