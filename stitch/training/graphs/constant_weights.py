"""The trained model as it is used: a graph with the weights inside.

Comes in: a program for evaluation, the values of its weights. Goes out: a graph that can be
compiled for inference. Must not know: losses, files, front ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import Array, Constant, InputKind, Program

_WEIGHTS = (InputKind.PARAMETER, InputKind.STATE)


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
