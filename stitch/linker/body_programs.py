"""The body of a scan as a program of its own, on the host: what an executor prepares once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stitch.linker.scratch import pack_scratch, place_intermediates
from stitch.program import (
    ABSENT,
    Array,
    Body,
    Constant,
    InputSlot,
    Operation,
    OperationList,
    OutputSlot,
    Program,
    Scratch,
    Space,
    host_layout,
)

NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})


def repeated_outputs(body: Body, states: int) -> dict[int, int]:
    """What rounds collect that is another output of the body again, a state perhaps: by number; the
    first so many are states."""
    numbers = {value: number for number, value in enumerate(body.outputs)}
    return {
        numbers[o.outputs[0]]: numbers[o.inputs[0]]
        for o in body.operations
        if o.op == "Identity" and not o.domain
        and numbers.get(o.outputs[0], -1) >= states and o.inputs[0] in numbers
    }  # fmt: skip


def program_of_body(
    listed: OperationList, index: int, states: int, known: Mapping[int, Array] = NO_ARRAYS
) -> Program:
    """The body `index` as a program; the inputs that are `known`, by their numbers, are constants,
    the others are called by their numbers. `repeated_outputs` are not made again."""
    body = listed.bodies[index]
    again = {body.outputs[number] for number in repeated_outputs(body, states)}
    operations = tuple(o for o in body.operations if again.isdisjoint(o.outputs))
    inputs = [(i, v) for i, v in enumerate(body.inputs) if v != ABSENT and i not in known]
    constants = [*body.constants, *(Constant(body.inputs[i], known[i]) for i in sorted(known))]
    fixed = {*body.inputs, *body.outputs, *(c.value for c in constants)}
    plan = pack_scratch(body.values, operations, fixed)
    scratch = Scratch(Space.HOST, plan.nbytes)
    values = list(place_intermediates(body.values, plan, scratch))
    values = [
        v if v.layout is not None else replace(v, layout=host_layout(v.type.data_type))
        for v in values
    ]
    operations, bodies = _carried(operations, listed.bodies)
    return Program(
        f"body {index} of {listed.name}",
        tuple(InputSlot(f"input {i}", v) for i, v in inputs),
        tuple(OutputSlot(f"output {i}", v) for i, v in enumerate(body.outputs) if v not in again),
        tuple(values), operations, tuple(constants), scratch, bodies=bodies,
    )  # fmt: skip


def _carried(
    operations: Sequence[Operation], bodies: Sequence[Body]
) -> tuple[tuple[Operation, ...], tuple[Body, ...]]:
    """Operations with those of the bodies that they need: a program checks all that it has."""
    needed = {o.body for o in operations}
    for index in reversed(range(len(bodies))):
        if index in needed:
            needed.update(o.body for o in bodies[index].operations)
    at = {ABSENT: ABSENT} | {old: new for new, old in enumerate(sorted(needed - {ABSENT}))}

    def moved(held: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple([o if at[o.body] == o.body else replace(o, body=at[o.body]) for o in held])

    kept = [bodies[index] for index in sorted(needed - {ABSENT})]
    return moved(operations), tuple([replace(b, operations=moved(b.operations)) for b in kept])
