"""Changes of data type: Cast and CastLike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import broadcasting
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import MOVED, data_type_of_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import CHUNK_SIZE, copy_steps, stretches
from stitch.ops.types import type_batching as batching
from stitch.ops.types.conversions import conversion_steps, workspace_nbytes
from stitch.ops.types.narrow_conversions import Rounding
from stitch.ops.workspaces import few, operands
from stitch.program import DataType, ValueType

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)
_MODES = ("up", "down", "nearest")


def _infer_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    """To the type that `to` says, or to that of a second operand."""
    data = context.require_type(0, MOVED)
    like = None if "to" in context.attributes else context.require_type(1, MOVED).data_type
    mode = context.string_of("round_mode")
    if mode not in _MODES:
        raise context.fail(
            f"{context.op} has no such round_mode", expected=" or ".join(_MODES), got=mode
        )
    target = like or data_type_of_code(context.int_of("to"), context.op)
    return (ValueType(data.shape, target),)


def _cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    narrow = bool(arguments.types) and arguments.types[0] in _NARROW
    if source.dtype == out.dtype and not narrow:
        return copy_steps(source, out)
    rounding = Rounding(bool(arguments.int_of("saturate")), arguments.string_of("round_mode"))
    per_element = workspace_nbytes(source.dtype, out.dtype, narrow)
    if not per_element:
        return copy_steps(source, out)
    flat, goal = source.reshape(-1), out.reshape(-1)
    workspace = np.empty(per_element * min(goal.size, CHUNK_SIZE), np.uint8)
    steps: list[Thunk] = []
    for part in stretches(goal.size, CHUNK_SIZE):
        steps += conversion_steps(
            flat[part], goal[part], workspace, rounds_again=narrow, rounding=rounding
        )
    return steps


#: Those whose bits a kernel sees: 16-bit floats are computed in float32.
_PLAIN = MOVED.difference(_NARROW)


def _infer_bit_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, _PLAIN)
    target = data_type_of_code(context.int_of("to"), context.op)
    if target not in _PLAIN or target.bits != data.data_type.bits:
        raise context.fail(
            "BitCast does not make this type of that one",
            expected=" or ".join(sorted(t.value for t in _PLAIN if t.bits == data.data_type.bits)),
            got=target.value,
        )
    return (ValueType(data.shape, target),)


def _bit_cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    return copy_steps(source.reshape(-1).view(out.dtype), out.reshape(-1))


_ROUNDING = declared(round_mode="up", saturate=1)


def cast_gradient(context: GradientContext) -> Sequence[Any]:
    """Between floats: the gradient in the operand's type."""
    return (context.in_type(context.gradient, context.type_of(0).data_type), None)[
        : len(context.input_types)
    ]


OPERATORS = (
    # saturate concerns float8 types, round_mode float8_e8m0 alone. From floating to integer, where
    # ONNX leaves it undefined: out of range saturates, and NaN becomes 0; int4 and int2 then keep
    # the low bits.
    OpDef(
        "Cast", (1, 1), _infer_cast, _cast,
        attributes=declared(to=Attribute("int", required=True), **_ROUNDING), elementwise=True,
        batching=broadcasting,
        gradient=cast_gradient, workspace=operands(1 / 2),
    ),
    OpDef(
        "BitCast", (1, 1), _infer_bit_cast, _bit_cast,
        attributes=declared(to=Attribute("int", required=True)),
        batching=broadcasting, workspace=few,
    ),
    OpDef(
        "CastLike", (2, 2), _infer_cast, _cast, attributes=_ROUNDING, gradient=cast_gradient,
        batching=batching.cast_like, workspace=operands(1 / 2),
    ),
)  # fmt: skip
