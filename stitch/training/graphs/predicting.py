"""A trained model as it predicts: without what only training does, and with its weights inside.

Comes in: a graph with batch statistics and next values of its state; a program for evaluation, the
values of its weights. Goes out: graphs that can be compiled for inference. Must not know: losses,
files, front ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import Array, Constant, InputKind, Operation, Program

_WEIGHTS = (InputKind.PARAMETER, InputKind.STATE)


def evaluation_form(graph: ComputationGraph) -> ComputationGraph:
    """The graph with BatchNormalization out of training mode, and without next values of state."""
    state = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    return replace(
        graph,
        name=f"{graph.name}_evaluation",
        outputs=tuple(slot for slot in graph.outputs if slot.name not in state),
        operations=tuple(map(_evaluating, graph.operations)),
        wishes=tuple(w for w in graph.wishes if w.side == "input"),
    )


def _evaluating(operation: Operation) -> Operation:
    if operation.domain or operation.op != "BatchNormalization":
        return operation
    if not operation.attributes.get("training_mode"):
        return operation
    attributes = {**operation.attributes, "training_mode": 0}
    return replace(operation, outputs=operation.outputs[:1], attributes=attributes)


def graph_of(program: Program) -> ComputationGraph:
    """The graph that a program was before it was placed."""
    return ComputationGraph(
        program.name,
        program.inputs,
        tuple(replace(slot, aliases_input=None) for slot in program.outputs),
        tuple(replace(value, layout=None) for value in program.values),
        program.operations,
        program.constants,
    )


def with_weights(graph: ComputationGraph, values: Mapping[str, Array]) -> ComputationGraph:
    """The graph with parameters and buffers as constants, in the types that it computes in."""
    fixed = tuple(
        Constant(slot.value, values[slot.name].astype(graph.input_type(i).data_type.dtype))
        for i, slot in enumerate(graph.inputs)
        if slot.kind in _WEIGHTS
    )
    inputs = tuple(slot for slot in graph.inputs if slot.kind not in _WEIGHTS)
    return replace(graph, inputs=inputs, constants=(*graph.constants, *fixed))
