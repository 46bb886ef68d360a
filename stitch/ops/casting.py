"""Changes of data type: Cast and CastLike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.ops.attributes import int_of
from stitch.ops.conversions import conversion_steps, workspace_nbytes
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import EVERY, data_type_of_code
from stitch.ops.inference import require_type
from stitch.ops.steps import BLOCK_SIZE, copy_steps, given
from stitch.program import DataType, ValueType

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


def _infer_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, EVERY)
    target = data_type_of_code(int_of(context.attributes, "to"), context.op)
    return (ValueType(data.shape, target),)


def _infer_cast_like(context: InferenceContext) -> tuple[ValueType, ...]:
    data, like = require_type(context, 0, EVERY), require_type(context, 1, EVERY)
    return (ValueType(data.shape, like.data_type),)


def _cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = given(arguments, 0), arguments.outputs[0]
    narrow = "to" in arguments.attributes and (
        data_type_of_code(int_of(arguments.attributes, "to")) in _NARROW
    )
    per_element = workspace_nbytes(source.dtype, out.dtype, narrow)
    if not per_element:
        return copy_steps(source, out)
    flat, goal = source.reshape(-1), out.reshape(-1)
    workspace = np.empty(per_element * min(goal.size, BLOCK_SIZE), np.uint8)
    steps: list[Thunk] = []
    for start in range(0, goal.size, BLOCK_SIZE):
        part = slice(start, start + BLOCK_SIZE)
        steps += conversion_steps(flat[part], goal[part], workspace, rounds_again=narrow)
    return steps


#: Those whose bits a kernel sees: narrow floats are computed in float32.
_PLAIN = EVERY.difference(_NARROW)


def _infer_bit_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, _PLAIN)
    made = data_type_of_code(int_of(context.attributes, "to"), context.op)
    if made not in _PLAIN or made.itemsize != data.data_type.itemsize:
        raise context.fail(
            "BitCast does not make this type of that one",
            expected=" or ".join(
                sorted(t.value for t in _PLAIN if t.itemsize == data.data_type.itemsize)
            ),
            got=made.value,
        )
    return (ValueType(data.shape, made),)


def _bit_cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = given(arguments, 0), arguments.outputs[0]
    return copy_steps(source.reshape(-1).view(out.dtype), out.reshape(-1))


_ROUNDING = {"round_mode": Attribute("string", "up"), "saturate": Attribute("int", 1)}

OPERATORS = (
    OpDef(
        "Cast",
        (1, 1),
        _infer_cast,
        _cast,
        attributes={"to": Attribute("int", required=True), **_ROUNDING},
        elementwise=True,
        doc="round_mode and saturate concern float8 types, which Stitch does not compute in. "
        "From floating to integer, where ONNX leaves it undefined: out of range saturates, and "
        "NaN becomes 0.",
    ),
    OpDef(
        "BitCast",
        (1, 1),
        _infer_bit_cast,
        _bit_cast,
        attributes={"to": Attribute("int", required=True)},
    ),
    OpDef("CastLike", (2, 2), _infer_cast_like, _cast, attributes=_ROUNDING),
)
