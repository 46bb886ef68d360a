"""Values of the forward graph in a backward graph: inputs, saved, or recomputed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from stitch import ops
from stitch.compiler.body_graphs import body_of_graph, write_operation
from stitch.errors import unknown
from stitch.graph import ComputationGraph, ComputationGraphBuilder, KnownValues, SymbolicTensor
from stitch.linker import drop_unused_values
from stitch.program import (
    ABSENT,
    BodyPool,
    InputKind,
    Operation,
    OutputSlot,
    ScanForm,
    Value,
    ValueType,
    result_types,
)

#: What the backward graph recomputes: nothing, values as cheap to compute as to read, everything.
Recompute = Literal["none", "cheap", "all"]


def check_recompute(word: object) -> Recompute:
    """Return what is recomputed; raise `UsageError` for an unknown word."""
    for kind in get_args(Recompute):
        if word == kind:
            return kind  # type: ignore[no-any-return]  # one of the literals
    what = "recompute must be none, cheap or all"
    raise unknown(what, word, get_args(Recompute), expected=None, got=repr(word))


#: Operators that move elements: as cheap as elementwise ones.
_CHEAP = ops.RESHAPING | {"Cast", "Concat", "Expand", "Slice", "Split", "Transpose"}
#: Operators whose result is not saved: it has the elements of the operand.
_RESHAPING = ops.RESHAPING - {"Identity"}


class ForwardValues:
    """The forward graph, as seen by a backward graph under construction.

    Attributes:
        known: Data of small values.
        saved: Names of the values that the forward graph saves, by value.
        forward: The values of the forward graph, including added ones.
        grown: Operations with added results, by their original outputs.
    """

    def __init__(
        self, graph: ComputationGraph, builder: ComputationGraphBuilder, recompute: Recompute
    ) -> None:
        self.graph = graph
        self.builder = builder
        self.recompute = recompute
        self.constants = graph.constant_data()
        self.known = KnownValues(self.constants)
        self.maker: dict[int, Operation] = {}
        for operation in graph.operations:
            types = [None if v == ABSENT else graph.values[v].type for v in operation.inputs]
            self.known.add_operation(operation, types)
            self.maker.update((v, operation) for v in operation.outputs if v != ABSENT)
        self.given = {slot.value: slot for slot in graph.inputs}
        self.values: dict[int, SymbolicTensor] = {}
        self.saved: dict[int, str] = {}
        self.forward = list(graph.values)
        self.grown: dict[tuple[int, ...], Operation] = {}
        #: The bodies of the forward graph; the original ones come first.
        self.bodies = BodyPool()
        self.bodies.add_all(graph.bodies)
        self.names = {slot.name for slot in graph.inputs} | {slot.name for slot in graph.outputs}

    def value(self, wanted: int) -> SymbolicTensor:
        """Return a forward value in the backward graph: an input, constant, saved or recomputed."""
        pending = [wanted]
        while pending:
            value = pending[-1]
            source = self._reshaped(value)
            if value in self.values:
                pending.pop()
            elif source is not None:
                # Save one shape only: the backward graph reshapes it (a view).
                if source in self.values:
                    self.values[value] = self._in_shape(source, value)
                else:
                    pending.append(source)
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

    def _reshaped(self, value: int) -> int | None:
        """Return the operand if the value is a mere reshape of it."""
        operation = self.maker.get(value)
        if operation is None or operation.domain or operation.op not in _RESHAPING:
            return None
        return operation.inputs[0]

    def _in_shape(self, source: int, value: int) -> SymbolicTensor:
        shape = self.forward[value].type.shape
        with self.builder.at(self.maker[value].location):
            data, attributes = self.values[source], {"allowzero": int(0 in shape)}
            return self.builder.apply("Reshape", [data, list(shape)], 1, attributes)[0]

    def _is_recomputed(self, value: int) -> bool:
        operation = self.maker.get(value)
        if operation is None:
            return False
        if self.recompute == "all":
            return True
        if self.recompute == "none":
            return False
        return ops.is_elementwise(operation) or (not operation.domain and operation.op in _CHEAP)

    def _emit_again(self, operation: Operation) -> None:
        operands = [None if v == ABSENT else self.values[v] for v in operation.inputs]
        bodies = self.bodies.bodies
        self.values |= write_operation(self.builder, operation, operands, self.forward, bodies)

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
            output = self.fresh(f"saved.{name}")
        self.saved[value] = output
        return self.builder.input(output, kind.shape, kind.data_type, InputKind.SAVED)

    def output(self, operation: Operation, index: int) -> int:
        """Return the value of output `index`; add the output to the operation if it is absent."""
        grown = self.grown.get(operation.outputs, operation)
        if index < len(grown.outputs) and grown.outputs[index] != ABSENT:
            return grown.outputs[index]
        outputs = [*grown.outputs, *(ABSENT,) * (index + 1 - len(grown.outputs))]
        operands = [None if v == ABSENT else self.forward[v].type for v in operation.inputs]
        wider = replace(grown, outputs=tuple(outputs))
        types = ops.infer_operation(
            wider, operands, self.known.operands(operation), bodies=self.bodies.bodies
        )
        # Do not allocate other collected results that have no readers.
        places = range(len(outputs)) if operation.body == ABSENT else [index]
        return self._grow(operation, wider, types, places)[index]

    def collect(self, operation: Operation, whole: ComputationGraph, count: int) -> tuple[int, ...]:
        """Let a scan collect more values.

        Args:
            operation: The scan.
            whole: Its new body; the last `count` outputs are the values to collect.
            count: The number of added outputs.

        Returns:
            The collected values, first round first.
        """
        body = self.bodies.add(body_of_graph(whole, self.bodies))
        form = ScanForm.of(operation)
        given = (*form.given_backward, *(False,) * count)
        form = replace(form, collected=form.collected + count, given_backward=given)
        first = len(operation.outputs)
        outputs = (*operation.outputs, *(ABSENT,) * count)
        wider = replace(operation, outputs=outputs, body=body, attributes=form.attributes)
        types = result_types(wider, self.bodies.bodies)
        return self._grow(operation, wider, types, range(first, first + count))[first:]

    def _grow(
        self, operation: Operation, wider: Operation, types: Sequence[ValueType],
        places: Iterable[int],
    ) -> tuple[int, ...]:  # fmt: skip
        """Replace an operation by `wider`, with new results at `places`; return all results."""
        outputs = list(wider.outputs)
        for place in places:
            if outputs[place] == ABSENT:
                outputs[place] = len(self.forward)
                self.forward.append(Value(f"{operation.op.lower()}.{place}", types[place]))
        grown = self.grown[operation.outputs] = replace(wider, outputs=tuple(outputs))
        self.maker.update((v, grown) for v in outputs if v != ABSENT)
        return grown.outputs

    def fresh(self, name: str) -> str:
        """Return an unused slot name."""
        chosen, times = name, 0
        while chosen in self.names:
            times += 1
            chosen = f"{name}_{times}"
        self.names.add(chosen)
        return chosen

    def forget(self, names: Container[str]) -> None:
        """Do not save the values with these names after all."""
        self.saved = {v: name for v, name in self.saved.items() if name not in names}

    def saving_graph(self) -> ComputationGraph:
        """Return the forward graph with the saved values as further outputs."""
        have = {slot.name for slot in self.graph.outputs}
        more = tuple(OutputSlot(n, v) for v, n in self.saved.items() if n not in have)
        operations = tuple(map(self._saving, self.graph.operations))
        return drop_unused_values(
            replace(
                self.graph,
                outputs=(*self.graph.outputs, *more),
                operations=operations,
                values=tuple(self.forward),
                bodies=tuple(self.bodies.bodies),
            )
        )

    def _saving(self, operation: Operation) -> Operation:
        """Return an operation with its added results, if any of them is saved."""
        grown = self.grown.get(operation.outputs, operation)
        more = set(grown.outputs) - set(operation.outputs)
        return operation if self.saved.keys().isdisjoint(more) else grown


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A forward graph, its backward graph, and how their slots correspond.

    Attributes:
        forward: Has the `saved` values as further outputs.
        backward: Inputs have the names of the forward inputs or outputs that they take.
        saved: Names of outputs of `forward` that `backward` reads.
        seeds: Pairs of a forward output and the backward input for its gradient.
        gradients: Pairs of a forward input and the backward output with its gradient.
    """

    forward: ComputationGraph
    backward: ComputationGraph
    saved: tuple[str, ...]
    seeds: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
