"""Dead code: operations, constants and values that no output needs are dropped."""

from __future__ import annotations

from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import ABSENT, Operation


def remove_dead_code(graph: ComputationGraph) -> ComputationGraph:
    """The graph without what its outputs do not depend on; input slots stay, also unused ones."""
    needed = {slot.value for slot in graph.outputs}
    live: list[Operation] = []
    for operation in reversed(graph.operations):
        if not needed.isdisjoint(operation.outputs):
            live.append(operation)
            needed.update(v for v in operation.inputs if v != ABSENT)
    constants = tuple(c for c in graph.constants if c.value in needed)
    kept = replace(graph, operations=tuple(reversed(live)), constants=constants)
    return drop_unused_values(kept)


def drop_unused_values(graph: ComputationGraph) -> ComputationGraph:
    """The graph without values that no slot, constant or operation mentions."""
    used = {slot.value for slot in graph.inputs} | {slot.value for slot in graph.outputs}
    used |= {constant.value for constant in graph.constants}
    for operation in graph.operations:
        used.update(operation.inputs, operation.outputs)
    used.discard(ABSENT)
    order = sorted(used)
    at = {old: new for new, old in enumerate(order)} | {ABSENT: ABSENT}
    return replace(
        graph,
        values=tuple(graph.values[v] for v in order),
        inputs=tuple(replace(s, value=at[s.value]) for s in graph.inputs),
        outputs=tuple(replace(s, value=at[s.value]) for s in graph.outputs),
        constants=tuple(replace(c, value=at[c.value]) for c in graph.constants),
        operations=tuple(
            replace(
                o, inputs=tuple(at[v] for v in o.inputs), outputs=tuple(at[v] for v in o.outputs)
            )
            for o in graph.operations
        ),
    )
