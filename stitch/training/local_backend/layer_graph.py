"""A model's graph as layers: operators in order, tensors by name, and how far gradients reach."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stitch.compiler import Differentiated, differentiate, optimize
from stitch.errors import CompileError
from stitch.graph import ComputationGraph
from stitch.program import ABSENT, FreeNames, InputKind, Operation, Value
from stitch.training.local_backend.task_binding import gradient_name


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers are `graph.operations`; `names` are those of its values' tensors, by number.

    `reached`: the values that depend on an input whose gradient is wanted. `wanted` are those
    inputs, by name; `seeds` the outputs whose gradients come in from outside. `next_states`: the
    tensor that a state becomes, by its name.
    """

    graph: ComputationGraph
    names: tuple[str, ...]
    reached: frozenset[int]
    wanted: tuple[str, ...]
    seeds: tuple[str, ...]
    next_states: Mapping[str, str]
    differentiated: Differentiated | None

    @property
    def kinds(self) -> dict[int, InputKind]:
        """What the values are that are inputs."""
        return {slot.value: slot.kind for slot in self.graph.inputs}

    def layer_name(self, index: int) -> str:
        """A layer is called after its first result."""
        return self.names[next(v for v in self.graph.operations[index].outputs if v != ABSENT)]


def layer_graph(
    graph: ComputationGraph, wanted: Sequence[str], outputs: Sequence[str]
) -> LayerGraph:
    """The layers of a graph, with what gradients need: none where no input is wanted.

    Raises `CompileError` naming operators without a gradient, and for two tensors of one name.
    """
    differentiated = differentiate(graph, wanted, outputs=outputs) if wanted else None
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    seeds: tuple[str, ...] = ()
    given = {slot.name for slot in graph.outputs}
    if differentiated is None:
        whole = optimize(graph)
    else:
        seeds = tuple([name for name, _ in differentiated.seeds])
        # What a rule asks for is handed on as any tensor is.
        saving = differentiated.forward
        whole = replace(saving, outputs=tuple([s for s in saving.outputs if s.name in given]))
    whole = _with_outputs_apart(whole)
    names, after = _names(whole, states)
    return LayerGraph(
        whole, names, _reached(whole, wanted), tuple(wanted), seeds, after, differentiated
    )


def _with_outputs_apart(graph: ComputationGraph) -> ComputationGraph:
    """The graph whose outputs are made by an operation and read by none: else by an `Identity`.

    Their gradients come from outside then, and from nowhere else. The last of several comes first,
    so that going back the first one's gradient is the first to be added.
    """
    made = {v for operation in graph.operations for v in operation.outputs}
    read = {v for operation in graph.operations for v in operation.inputs}
    values, outputs, copies = list(graph.values), [], []
    for slot in graph.outputs:
        if slot.value not in made or slot.value in read:
            values.append(Value(slot.name, graph.values[slot.value].type))
            location = f"output {slot.name}"
            copies.append(
                Operation("Identity", (slot.value,), (len(values) - 1,), location=location)
            )
            slot = replace(slot, value=len(values) - 1)
        read.add(slot.value)
        outputs.append(slot)
    return replace(
        graph,
        values=tuple(values),
        operations=(*graph.operations, *reversed(copies)),
        outputs=tuple(outputs),
    )


def _names(
    graph: ComputationGraph, states: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """A name for each value, and for each state that of its next value.

    Slots keep theirs; other values are numbered where a name is taken.
    """
    names = {slot.value: slot.name for slot in graph.inputs}
    after = {}
    for slot in graph.outputs:
        names[slot.value] = slot.name
        if slot.name in states:
            names[slot.value] = after[slot.name] = f"{slot.name}.next"
    free = FreeNames(names.values())
    for v, value in enumerate(graph.values):
        if v in names:
            continue
        names[v] = free.free(value.name)
    taken = {*names.values()}
    both = [name for name in names.values() if gradient_name(name) in taken]
    if both or len(taken) < len(graph.values):
        known = list(names.values())
        name = gradient_name(both[0]) if both else next(n for n in known if known.count(n) > 1)
        raise CompileError(
            f"two tensors of graph {graph.name!r} would be called {name!r}",
            remedy="rename the input or output of this name",
        )
    return tuple([names[v] for v in range(len(graph.values))]), after


def _reached(graph: ComputationGraph, wanted: Collection[str]) -> frozenset[int]:
    """The floating values that depend on a wanted input."""
    reached = {slot.value for slot in graph.inputs if slot.name in wanted}
    for operation in graph.operations:
        if not reached.isdisjoint(operation.inputs):
            reached.update(
                v for v in operation.outputs
                if v != ABSENT and graph.values[v].type.data_type.is_floating
            )  # fmt: skip
    return frozenset(reached)
