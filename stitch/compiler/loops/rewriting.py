"""Rewriting: a graph written anew, with the slots and placement options it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import ABSENT, Operation


def rewritten(
    graph: ComputationGraph, builder: ComputationGraphBuilder,
    results_of: Callable[[Sequence[Any]], Sequence[Any]],
) -> ComputationGraph:  # fmt: skip
    """The graph in which the results of a graph are what a function writes for its inputs."""
    given = [
        builder.input(
            slot.name, graph.input_type(i).shape, graph.input_type(i).data_type, slot.kind,
            slot.ownership,
        )
        for i, slot in enumerate(graph.inputs)
    ]  # fmt: skip
    for slot, result in zip(graph.outputs, results_of(given), strict=True):
        builder.output(slot.name, result, aliases_input=slot.aliases_input)
    builder.place(*graph.placement)
    return builder.build()


def renumbered(operations: Sequence[Operation], now: Mapping[int, int]) -> tuple[Operation, ...]:
    """Operations that carry the bodies of another list."""
    return tuple(o if o.body == ABSENT else replace(o, body=now[o.body]) for o in operations)
