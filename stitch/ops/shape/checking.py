"""Checks at run time: `stitch.Expect`, for programs made for one value of an input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.errors import TaskError
from stitch.ops.attributes import string_of
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import MOVED
from stitch.ops.inference import operand, require_same_type, require_shape, require_type
from stitch.ops.steps import copy_steps, given
from stitch.ops.workspaces import few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, MOVED)
    require_type(context, 1, MOVED)
    require_same_type(context, (1, 2))
    require_shape(context, 2, operand(context, 1).shape)
    return (data,)


def _expect(arguments: KernelArguments) -> Sequence[Thunk]:
    data, actual, wanted = (given(arguments, i) for i in range(3))
    name = string_of(arguments.attributes, "name")

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
