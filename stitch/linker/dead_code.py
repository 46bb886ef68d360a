"""Dead code: operations, constants and values that no output needs are dropped.

Comes in: a graph, or programs that were joined. Goes out: the same, smaller.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from stitch.program import ABSENT, Operation, OperationList

_Body = TypeVar("_Body", bound=OperationList)


def remove_dead_code(body: _Body) -> _Body:
    """The list without what its outputs do not depend on; input slots stay, also unused ones."""
    needed = {slot.value for slot in body.outputs}
    live: list[Operation] = []
    for operation in reversed(body.operations):
        if not needed.isdisjoint(operation.outputs):
            live.append(operation)
            needed.update(v for v in operation.inputs if v != ABSENT)
    constants = tuple(c for c in body.constants if c.value in needed)
    kept = replace(body, operations=tuple(reversed(live)), constants=constants)
    return drop_unused_values(kept)


def drop_unused_values(body: _Body) -> _Body:
    """The list without values that no slot, constant or operation mentions."""
    used = body.placed_values()
    for operation in body.operations:
        used.update(operation.inputs, operation.outputs)
    used.discard(ABSENT)
    order = sorted(used)
    at = {old: new for new, old in enumerate(order)} | {ABSENT: ABSENT}
    return replace(
        body,
        values=tuple(body.values[v] for v in order),
        inputs=tuple(replace(s, value=at[s.value]) for s in body.inputs),
        outputs=tuple(replace(s, value=at[s.value]) for s in body.outputs),
        constants=tuple(replace(c, value=at[c.value]) for c in body.constants),
        operations=tuple(
            replace(
                o, inputs=tuple(at[v] for v in o.inputs), outputs=tuple(at[v] for v in o.outputs)
            )
            for o in body.operations
        ),
    )
