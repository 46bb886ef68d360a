"""The body of a scan as a program of its own, on the host: what an executor prepares once.

Comes in: a program, the index of a body. Goes out: a program whose slots are the body's inputs and
outputs, dense on the host. Must not know: executors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from stitch.linker.scratch import pack_scratch, place_intermediates
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    InputSlot,
    OperationList,
    OutputSlot,
    Program,
    Scratch,
    Space,
    host_layout,
)

NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})


def program_of_body(
    listed: OperationList, index: int, known: Mapping[int, Array] = NO_ARRAYS
) -> Program:
    """The body `index` as a program; the inputs that are `known`, by their numbers, are constants,
    the others are called by their numbers."""
    body = listed.bodies[index]
    inputs = [(i, v) for i, v in enumerate(body.inputs) if v != ABSENT and i not in known]
    constants = [*body.constants, *(Constant(body.inputs[i], known[i]) for i in sorted(known))]
    fixed = {*body.inputs, *body.outputs, *(c.value for c in constants)}
    plan = pack_scratch(body.values, body.operations, fixed)
    scratch = Scratch(Space.HOST, plan.nbytes)
    values = list(place_intermediates(body.values, plan, scratch))
    values = [
        v if v.layout is not None else replace(v, layout=host_layout(v.type.data_type))
        for v in values
    ]
    return Program(
        f"body {index} of {listed.name}",
        tuple(InputSlot(f"input {i}", v) for i, v in inputs),
        tuple(OutputSlot(f"output {i}", v) for i, v in enumerate(body.outputs)),
        tuple(values), body.operations, tuple(constants), scratch, bodies=listed.bodies,
    )  # fmt: skip
