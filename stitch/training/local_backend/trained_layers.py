"""What a backend trains: a user's graph as layers, and the values that its parameters start with.

Comes in: any computation graph, whose parameters may be constants still. Goes out: a `LayerGraph`.
Must not know: tasks, machines, devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stitch.errors import CompileError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.program import InputKind
from stitch.training.graphs import KEPT_KINDS, as_trainable
from stitch.training.local_backend.layer_graph import LayerGraph, layer_graph
from stitch.training.losses import Loss
from stitch.training.programs import prediction_of


def trained_layers(
    graph: ComputationGraph, loss: Loss | None, wanted: Iterable[str] | None,
    weights: Mapping[str, Any],
) -> tuple[LayerGraph, Mapping[str, Any]]:  # fmt: skip
    """The layers of a graph, and the values of its parameters, as far as there are any.

    Gradients come in for the prediction where there is a loss, else for all floating outputs.
    Raises `CompileError` for wishes, and naming operators without a gradient; `UsageError` for
    weights of other names.
    """
    _check_wishes(graph)
    trained, values = _with_parameters(graph, weights)
    if wanted is None:
        wanted = [
            slot.name for i, slot in enumerate(trained.inputs)
            if slot.kind is InputKind.PARAMETER and trained.input_type(i).data_type.is_floating
        ]  # fmt: skip
    states = {slot.name for slot in trained.inputs if slot.kind is InputKind.STATE}
    if loss is None:
        outputs = [
            slot.name for i, slot in enumerate(trained.outputs)
            if slot.name not in states and trained.output_type(i).data_type.is_floating
        ]  # fmt: skip
    else:
        outputs = [prediction_of(trained)]
    return layer_graph(trained, tuple(wanted), outputs), values


def _with_parameters(
    graph: ComputationGraph, weights: Mapping[str, Any]
) -> tuple[ComputationGraph, Mapping[str, Any]]:
    """The graph with its parameters as inputs, and the values that they start with, if any."""
    kept = [slot.name for slot in graph.inputs if slot.kind in KEPT_KINDS]
    if kept or not graph.constants:
        check_names("weights", weights, kept)
        return graph, weights
    try:
        model = as_trainable(graph, weights)
    except CompileError:
        return graph, weights
    return model.graph, model.values


def check_names(parameter: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise `UsageError` for names that are no tensors."""
    for name in given:
        if name not in known:
            raise UsageError(
                f"LocalTaskBackend has no tensor {name!r} for {parameter}=",
                expected=", ".join(sorted(known)) or "none", remedy=closest(name, known) or None,
            )  # fmt: skip


def _check_wishes(graph: ComputationGraph) -> None:
    """Raise `CompileError` for wishes that tasks of single operators cannot keep."""
    if graph.wishes:
        raise CompileError(
            f"tasks of graph {graph.name!r} cannot keep its wishes",
            got=", ".join(wish.text() for wish in graph.wishes[:8]),
            remedy="drop them, and give LocalTaskBackend spaces={name: space}",
        )
