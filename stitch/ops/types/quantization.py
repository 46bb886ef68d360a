"""Integers and float8 that stand for real numbers: QuantizeLinear, DequantizeLinear.

A real number is (integer - zero point) * scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.ops.attributes import Attributes, int_of
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BYTES, FLOATS, NARROW, data_type_of_code
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import along
from stitch.ops.types.conversions import conversion_steps, workspace_nbytes
from stitch.ops.types.narrow_conversions import WIDER, Rounding
from stitch.ops.types.type_batching import quantized
from stitch.ops.workspaces import operands
from stitch.program import Array, DataType, ValueType

_E8M0 = frozenset({DataType.FLOAT8_E8M0})
QUANTIZED = BYTES | {DataType.INT16, DataType.UINT16} | (NARROW - _E8M0)
REALS = FLOATS - {DataType.FLOAT64}
SCALES = REALS | _E8M0


def _check_scale(context: InferenceContext, shape: Shape) -> None:
    """The scale is one number, one per element of the axis, or one per block along it."""
    scale = context.operand(1).shape
    zero = context.present(2)
    is_one = math.prod(scale) == 1 and len(scale) <= 1
    # One number is one number, whether or not it is written as a vector.
    if zero is not None and not (is_one and zero.shape in ((), (1,))):
        context.require_shape(2, scale)
    if is_one:
        return
    axis = context.axis_of(context.int_of("axis"), len(shape))
    block = context.int_of("block_size")
    if block < 0:
        raise context.fail(
            f"a block of {context.op} has at least one element", expected="0: none, or its size",
            got=f"block_size={block}",
        )  # fmt: skip
    wanted: Shape = (shape[axis],)
    if block:
        blocks = -(-shape[axis] // block)
        wanted = (*shape[:axis], blocks, *shape[axis + 1 :])
    if scale != wanted:
        raise context.fail(
            f"the scale of {context.op} does not fit",
            expected=f"one number or {list(wanted)}",
            got=scale,
        )


def _output_type(context: InferenceContext, default: DataType) -> DataType:
    code = context.int_of("output_dtype")
    return data_type_of_code(code, context.op) if code else default


def _infer_quantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, REALS | {DataType.INT32})
    context.require_type(1, SCALES | {DataType.INT32})
    zero = context.present(2)
    if zero is not None:
        context.require_type(2, QUANTIZED)
    precision = context.int_of("precision")
    if precision and data_type_of_code(precision, context.op) not in REALS:
        raise context.fail(
            "the precision of QuantizeLinear is that of real numbers",
            expected=" or ".join(sorted(t.value for t in REALS)),
            got=data_type_of_code(precision, context.op).value,
        )
    target = _output_type(context, DataType.UINT8 if zero is None else zero.data_type)
    if target not in QUANTIZED or (zero is not None and zero.data_type is not target):
        raise context.fail(
            "QuantizeLinear does not make this type",
            expected=" or ".join(sorted(t.value for t in QUANTIZED))
            if zero is None
            else zero.data_type.value,
            got=target.value,
        )
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _infer_dequantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, QUANTIZED | {DataType.INT32})
    scale = context.require_type(1, SCALES)
    context.require_same_type((0, 2))
    target = _output_type(context, scale.data_type)
    if target not in REALS:
        raise context.fail("DequantizeLinear makes real numbers", got=target.value)
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _spread(values: Array, shape: Shape, attributes: Attributes) -> Array:
    """Scales or zero points, shaped to broadcast against the data."""
    if values.size == 1 and values.ndim <= 1:
        return values.reshape(())
    axis = int_of(attributes, "axis") % len(shape)
    block = int_of(attributes, "block_size")
    if block:
        places = np.arange(shape[axis]) // block
        return np.take(values, places, axis)
    return along(values, axis, len(shape))


def _wide(values: Array) -> Array:
    """Numbers of a type that NumPy computes in."""
    return values.astype(WIDER.get(values.dtype, values.dtype), copy=False)


def _quantize(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, zero = arguments.given(0), arguments.given(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    target = DataType.from_dtype(out.dtype)
    code = int_of(attributes, "precision")
    exact = data_type_of_code(code).dtype if code else None

    def divided() -> Array:
        steps = _spread(_wide(scale), x.shape, attributes)
        if exact is None:
            return np.asarray(x / steps)
        # A division in a narrower type: what it gives is rounded to it.
        return np.asarray(x.astype(exact) / steps.astype(exact)).astype(np.float32)

    def run() -> None:
        # A wide zero point would not fit beside rounded values in the type of the data.
        whole = np.asarray(np.rint(divided()), np.float64)
        if zero is not None:
            whole += _spread(_wide(zero), x.shape, attributes)
        # What is no number becomes the least one, as in ONNX Runtime; a cast would leave it open.
        least, most = target.limits
        np.minimum(np.fmax(whole, least, out=whole), most, out=whole)
        np.copyto(out, whole.astype(np.int32) if target.is_narrow else whole, casting="unsafe")

    def run_floating() -> None:
        work = divided().astype(np.float32)
        if zero is not None and _wide(zero).any():
            work = work + _spread(_wide(zero), x.shape, attributes)
        flat = work.reshape(-1)
        workspace = np.empty(flat.size * workspace_nbytes(flat.dtype, out.dtype, False), np.uint8)
        rounding = Rounding(bool(int_of(attributes, "saturate")))
        for step in conversion_steps(
            flat, out.reshape(-1), workspace, rounds_again=False, rounding=rounding
        ):
            step()

    return (run_floating if target.is_floating else run,)


def _dequantize(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, zero = arguments.given(0), arguments.given(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    exact = out.dtype if DataType.from_dtype(x.dtype).is_floating else np.dtype(np.int64)

    def run() -> None:
        work = _wide(x).astype(exact)
        if zero is not None:
            work -= _spread(_wide(zero), x.shape, attributes)
        np.multiply(work.astype(out.dtype), _spread(_wide(scale), x.shape, attributes), out)

    return (run,)


_AXIS = declared(axis=1, block_size=0)

OPERATORS = (
    OpDef(
        "QuantizeLinear", (2, 3), _infer_quantize, _quantize,
        attributes=declared(**_AXIS, output_dtype=0, precision=0, saturate=1), batching=quantized,
        workspace=operands(4, is_kept=False),
    ),
    OpDef(
        "DequantizeLinear", (2, 3), _infer_dequantize, _dequantize,
        attributes=declared(**_AXIS, output_dtype=0), batching=quantized,
        workspace=operands(3, is_kept=False),
    ),
)  # fmt: skip
