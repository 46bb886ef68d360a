"""Checks at run time: `stitch.Expect`, for programs made for one value of an input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.errors import TaskError
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import MOVED
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import copy_steps
from stitch.ops.workspaces import few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, MOVED)
    context.require_same_type((1, 2))
    context.require_shape(2, context.operand(1).shape)
    return (data,)


def _expect(arguments: KernelArguments) -> Sequence[Thunk]:
    data, actual, wanted = (arguments.given(i) for i in range(3))
    name = arguments.string_of("name")

    def check() -> None:
        if not np.array_equal(actual, wanted):
            raise TaskError(
                f"the program was compiled for one value of {name!r}: it decides shapes",
                expected=_shown(wanted.tolist()),
                got=_shown(actual.tolist()),
                remedy="compile the model again, with this value as the example input",
            )

    return (check, *copy_steps(data, arguments.outputs[0]))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


OPERATORS = (
    OpDef(
        "Expect",
        (3, 3),
        _infer,
        _expect,
        attributes={"name": Attribute("string", required=True)},
        domain="stitch",
        doc="Operand 0 as it is, if operands 1 and 2 are equal; else a TaskError that names what "
        "the attribute says. ONNX expansion: Identity(operand 0), without the check.",
        workspace=few,
    ),
)
