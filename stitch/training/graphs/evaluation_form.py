"""Evaluation: a trainable graph as it predicts, without what only training does.

Comes in: a graph with batch statistics and next values of its state. Goes out: the graph over the
same inputs that normalizes by the running statistics. Must not know: front ends, programs.
"""

from __future__ import annotations

from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import InputKind, Operation


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
