"""Dead code: operations, constants, values and bodies that no output needs are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from stitch.program import ABSENT, BodyPool, OperationList

_Body = TypeVar("_Body", bound=OperationList)


def remove_dead_code(body: _Body) -> _Body:
    """The list without what its outputs do not depend on; input slots stay, also unused ones."""
    return drop_unused_values(only_operations(body, live_operations(body)))


def drop_unused_values(body: _Body) -> _Body:
    """The list without values and bodies that no slot, constant or operation mentions."""
    return renumbered(body, used_values(body))


def live_operations(body: OperationList) -> list[int]:
    """The indices of the operations that outputs depend on, rising."""
    needed = {slot.value for slot in body.outputs}
    live: list[int] = []
    for index in range(len(body.operations) - 1, -1, -1):
        operation = body.operations[index]
        if not needed.isdisjoint(operation.outputs):
            live.append(index)
            needed.update(v for v in operation.inputs if v != ABSENT)
    return live[::-1]


def only_operations(body: _Body, indices: Sequence[int]) -> _Body:
    """The list with these operations, and the constants that they or outputs mention."""
    operations = tuple([body.operations[i] for i in indices])
    needed = {slot.value for slot in body.outputs}
    needed.update(v for operation in operations for v in operation.inputs)
    constants = tuple([c for c in body.constants if c.value in needed])
    if len(operations) == len(body.operations) and len(constants) == len(body.constants):
        return body
    return replace(body, operations=operations, constants=constants)


def used_values(body: OperationList) -> dict[int, int]:
    """The new number of each value that a slot, constant or operation mentions, by its old one."""
    used = body.placed_values()
    for operation in body.operations:
        used.update(operation.inputs, operation.outputs)
    used.discard(ABSENT)
    return {old: new for new, old in enumerate(sorted(used))}


def renumbered(body: _Body, numbers: Mapping[int, int]) -> _Body:
    """The list with only these values, under their new numbers, which rise as the old ones do, and
    the bodies that its operations carry."""
    body = with_used_bodies(body)
    if len(numbers) == len(body.values):
        return body
    at = {**numbers, ABSENT: ABSENT}
    return replace(
        body,
        values=tuple(body.values[v] for v in numbers),
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


def with_used_bodies(body: _Body) -> _Body:
    """The list with the bodies that its operations carry, each once, and no others."""
    if not body.bodies:
        return body
    pool = BodyPool()
    now = pool.add_all(body.bodies, (o.body for o in body.operations))
    if len(pool.bodies) == len(body.bodies) and all(old == new for old, new in now.items()):
        return body
    operations = tuple(
        o if now[o.body] == o.body else replace(o, body=now[o.body]) for o in body.operations
    )
    return replace(body, operations=operations, bodies=tuple(pool.bodies))
