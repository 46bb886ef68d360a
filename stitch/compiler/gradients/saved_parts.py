"""Saved parts: what is a part of another saved value is cut from it in the backward graph.

Comes in: a backward graph, its forward graph, which of its values are saved. Goes out: the backward
graph without the inputs that are parts of others, and their names. Gates that are computed together
are used apart: both would be saved. Must not know: rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stitch.graph import ComputationGraph
from stitch.program import ABSENT, Constant


@dataclass(frozen=True, slots=True)
class CutParts:
    """A backward graph, and the names of the saved inputs that it does not take any more."""

    backward: ComputationGraph
    names: frozenset[str]


def cut_parts(
    backward: ComputationGraph, forward: ComputationGraph, saved: Mapping[int, str]
) -> CutParts:
    """The backward graph with each saved part of a saved value cut from it; `saved` has the names
    of the inputs that are values of the forward graph."""
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
    return CutParts(cut if cuts else backward, frozenset(gone))
