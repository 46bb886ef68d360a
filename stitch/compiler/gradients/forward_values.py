"""Forward values in a backward graph: given, saved, or computed again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from stitch import ops
from stitch.compiler.body_graphs import body_of_graph, write_operation
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, KnownValues, SymbolicTensor
from stitch.linker import drop_unused_values
from stitch.program import (
    ABSENT,
    MAX_ROUNDS,
    BodyPool,
    InputKind,
    Operation,
    OutputSlot,
    ScanForm,
    Value,
    ValueType,
    result_types,
)

# --------------------------------------------------------------------------------------------------
# Recomputation options.

#: Values that the backward graph recomputes: none, those as cheap as reading them, or all.
Recompute = Literal["none", "cheap", "all"]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What backward computes again. Of scans all rounds, but for the states before each segment of
    `every` rounds, where that is told."""

    kind: Recompute
    every: int | None = None

    @staticmethod
    def parse(word: str) -> Recomputation:
        """What `none`, `cheap`, `all` or `every 8` says; raises `UsageError` for other words.

        >>> Recomputation.parse("every 8")
        Recomputation(kind='none', every=8)
        """
        for kind in get_args(Recompute):
            if word == kind:
                return Recomputation(kind)
        first, *rest = word.split(" ")
        if first != "every":
            raise UsageError(
                "recompute is none, cheap or all, or every and a number of rounds", got=repr(word)
            )
        number = rest[0] if len(rest) == 1 else ""
        # Python reads no number of any length.
        known = number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_ROUNDS))
        if not known or not 1 <= int(number) <= MAX_ROUNDS:
            raise UsageError(
                "a scan keeps the states before every so many rounds",
                expected=f"every and a number from 1 to {MAX_ROUNDS}, as in 'every 8'",
                got=repr(word),
            )
        return Recomputation("none", int(number))


#: Besides elementwise operators: those that only rearrange.
_CHEAP = ops.RESHAPING | {"Cast", "Concat", "Expand", "Slice", "Split", "Transpose"}
#: Those whose result is never saved itself, as it holds the same elements.
_RESHAPING = ops.RESHAPING - {"Identity"}


class ForwardValues:
    """What a backward graph under construction knows of its forward graph.

    `known` holds the data of small values; `saved` the names of those that forward hands over.
    """

    def __init__(
        self,
        graph: ComputationGraph,
        builder: ComputationGraphBuilder,
        recompute: Recompute,
        again: frozenset[int] = frozenset(),
    ) -> None:
        """`again`: values that are computed again in any case."""
        self.again = again
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
        #: The values of the forward graph, and operations that give more of them than they did, by
        #: their former outputs.
        self.forward = list(graph.values)
        self.grown: dict[tuple[int, ...], Operation] = {}
        #: The bodies of the forward graph, those of its own first.
        self.bodies = BodyPool()
        self.bodies.add_all(graph.bodies)
        self.names = {slot.name for slot in graph.inputs} | {slot.name for slot in graph.outputs}

    def value(self, wanted: int) -> SymbolicTensor:
        """A forward value in the backward graph: given, a constant, saved, or computed again."""
        pending = [wanted]
        while pending:
            value = pending[-1]
            source = self._reshaped(value)
            if value in self.values:
                pending.pop()
            elif source is not None:
                # Saved in both shapes it would be copied; backward, a reshape is a view.
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
        """What a value is another shape of, if nothing else makes it."""
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
        if value in self.again or self.recompute == "all":
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
        """The value of an output, which is added where the forward operation does not give it."""
        grown = self.grown.get(operation.outputs, operation)
        if index < len(grown.outputs) and grown.outputs[index] != ABSENT:
            return grown.outputs[index]
        outputs = [*grown.outputs, *(ABSENT,) * (index + 1 - len(grown.outputs))]
        operands = [None if v == ABSENT else self.forward[v].type for v in operation.inputs]
        wider = replace(grown, outputs=tuple(outputs))
        types = ops.infer_operation(
            wider, operands, self.known.operands(operation), bodies=self.bodies.bodies
        )
        # Allocate nothing for collected results without readers.
        places = range(len(outputs)) if operation.body == ABSENT else [index]
        return self._grow(operation, wider, types, places)[index]

    def collect(self, operation: Operation, whole: ComputationGraph, count: int) -> tuple[int, ...]:
        """The values that a scan collects too, first round first, if that graph becomes its body:
        its last `count` outputs."""
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
        self,
        operation: Operation,
        wider: Operation,
        types: Sequence[ValueType],
        places: Iterable[int],
    ) -> tuple[int, ...]:
        """All results of an operation, which becomes the wider one, and has results there."""
        outputs = list(wider.outputs)
        for place in places:
            if outputs[place] == ABSENT:
                outputs[place] = len(self.forward)
                self.forward.append(Value(f"{operation.op.lower()}.{place}", types[place]))
        grown = self.grown[operation.outputs] = replace(wider, outputs=tuple(outputs))
        self.maker.update((v, grown) for v in outputs if v != ABSENT)
        return grown.outputs

    def fresh(self, name: str) -> str:
        """A name that no slot has yet."""
        chosen, times = name, 0
        while chosen in self.names:
            times += 1
            chosen = f"{name}_{times}"
        self.names.add(chosen)
        return chosen

    def forget(self, names: Container[str]) -> None:
        """Forward does not hand over what has these names after all."""
        self.saved = {v: name for v, name in self.saved.items() if name not in names}

    def saving_graph(self) -> ComputationGraph:
        """The graph with the saved values as further outputs."""
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
        """An operation with its further results, if forward hands any of them over."""
        grown = self.grown.get(operation.outputs, operation)
        more = set(grown.outputs) - set(operation.outputs)
        return operation if self.saved.keys().isdisjoint(more) else grown


# --------------------------------------------------------------------------------------------------
# The result of differentiation.


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
