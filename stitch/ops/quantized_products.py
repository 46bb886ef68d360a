"""Products of 8-bit integers: MatMulInteger, ConvInteger, QLinearMatMul, QLinearConv.

Sums are exact in float64. They wrap to int32 as in ONNX, or are scaled and rounded to 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.ops.batching import in_first_axis
from stitch.ops.convolution import CONVOLUTION
from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import BYTES
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.matmul import product_shape
from stitch.ops.types import REALS
from stitch.program import Array, DataType, ValueType


def _infer_product(context: InferenceContext, b: int, data_type: DataType) -> tuple[ValueType, ...]:
    """Return the type of operand 0 times operand `b`, with MatMul's shape."""
    context.require_type(0, BYTES)
    context.require_type(b, BYTES)
    return (ValueType(product_shape(context, b), data_type),)


def _check_points(context: InferenceContext, index: int, shape: Shape, axis: int) -> None:
    """Check scales or zero points: one number, or one per row (axis -2) or column (axis -1)."""
    kind = context.present(index)
    if kind is None or (math.prod(kind.shape) == 1 and len(kind.shape) <= 1):
        return
    rows = len(shape) > 1 and axis == -2
    wide = (*shape[:-2], shape[-2], 1) if rows else (*shape[:-2], 1, *shape[-1:])
    if len(shape) > 1 and kind.shape in ((shape[axis],), wide):
        return
    raise context.fail(
        f"operand {index} of {context.op} (scale or zero point) has the wrong shape",
        expected=f"1 or {shape[axis]} elements" if len(shape) > 1 else "1 element",
        got=kind.shape,
    )


def _points(values: Array, rows: bool) -> Array:
    """Return scales or zero points in float64, as a column if they are per row."""
    wide = values.astype(np.float64)
    if wide.size == 1 and wide.ndim <= 1:
        return wide.reshape(())
    return wide[:, None] if rows and wide.ndim == 1 else wide


def _exact_product(a: Array, a_zero: Array | None, b: Array, b_zero: Array | None) -> Array:
    left, right = a.astype(np.float64), b.astype(np.float64)
    if a_zero is not None:
        left = left - _points(a_zero, True)
    if b_zero is not None:
        right = right - _points(b_zero, False)
    return np.asarray(np.matmul(left, right))


def _infer_matmul_integer(context: InferenceContext) -> tuple[ValueType, ...]:
    product = _infer_product(context, 1, DataType.INT32)
    context.require_same_type((0, 2))
    context.require_same_type((1, 3))
    _check_points(context, 2, context.operand(0).shape, -2)
    _check_points(context, 3, context.operand(1).shape, -1)
    return product


def _matmul_integer(arguments: KernelArguments) -> Sequence[Thunk]:
    a, b, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    points = arguments.optional(2), arguments.optional(3)

    def run() -> None:
        out[...] = _exact_product(a, points[0], b, points[1]).astype(np.int64)

    return (run,)


def _infer_qlinear_matmul(context: InferenceContext) -> tuple[ValueType, ...]:
    data_type = context.require_type(7, BYTES).data_type
    product = _infer_product(context, 3, data_type)
    context.require_same_type((0, 2))
    context.require_same_type((3, 5))
    for index in (1, 4, 6):
        context.require_type(index, REALS)
    context.require_same_type((1, 4, 6))
    for index, side, axis in ((1, 0, -2), (2, 0, -2), (4, 3, -1), (5, 3, -1)):
        _check_points(context, index, context.operand(side).shape, axis)
    for index in (6, 7):
        _check_points(context, index, product[0].shape, -2)
    return product


def _requantize(exact: Array, scale: Array, zero: Array, out: Array) -> None:
    limits = np.iinfo(out.dtype)
    whole = np.rint(exact * scale) + zero
    # NaN becomes the least number; the result of a cast is undefined.
    np.copyto(out, np.minimum(np.fmax(whole, limits.min), limits.max), casting="unsafe")


def _qlinear_matmul(arguments: KernelArguments) -> Sequence[Thunk]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (
        arguments.operand(index) for index in range(8)
    )
    out = arguments.outputs[0]

    def run() -> None:
        scale = _points(a_scale, True) * _points(b_scale, False) / _points(y_scale, True)
        exact = _exact_product(a, a_zero, b, b_zero)
        _requantize(exact, scale, _points(y_zero, True), out)

    return (run,)


def _conv_context(context: InferenceContext, w: int, bias: int | None) -> InferenceContext:
    """Return the context of a Conv with the same shapes in float64."""
    picked = [0, w, *([] if bias is None else [bias])]
    types = [context.present(index) for index in picked]
    floats = [None if t is None else ValueType(t.shape, DataType.FLOAT64) for t in types]
    none = (None,) * len(floats)
    return InferenceContext(
        context.op, tuple(floats), none, context.attributes, 1, context.location
    )


def _check_channels(context: InferenceContext, index: int, w: int) -> None:
    """Check scales or zero points of filters: one number, or one for each filter."""
    kind = context.present(index)
    filters = context.operand(w).shape[:1]
    if kind is not None and kind.shape != filters and math.prod(kind.shape) != 1:
        context.require_shape(index, filters)


def _infer_conv_integer(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_type(0, BYTES)
    context.require_type(1, BYTES)
    context.require_same_type((0, 2))
    context.require_same_type((1, 3))
    (result,) = CONVOLUTION.infer(_conv_context(context, 1, None))
    if context.present(2) is not None and math.prod(context.operand(2).shape) != 1:
        context.require_shape(2, ())
    _check_channels(context, 3, 1)
    return (ValueType(result.shape, DataType.INT32),)


def _infer_qlinear_conv(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_type(0, BYTES)
    context.require_type(3, BYTES)
    context.require_same_type((0, 2))
    context.require_same_type((3, 5))
    for index in (1, 4, 6):
        context.require_type(index, frozenset({DataType.FLOAT32}))
    if context.present(8) is not None:
        context.require_type(8, frozenset({DataType.INT32}))
    (result,) = CONVOLUTION.infer(_conv_context(context, 3, 8))
    for index in (1, 2, 6, 7):
        if math.prod(context.operand(index).shape) != 1:
            context.require_shape(index, ())
    for index in (4, 5):
        _check_channels(context, index, 3)
    return (ValueType(result.shape, context.require_type(7, BYTES).data_type),)


def _per_filter(values: Array, rank: int) -> Array:
    """Return one number, or one per filter, shaped to broadcast against weights of some rank."""
    wide = values.astype(np.float64)
    return wide.reshape(()) if wide.size == 1 else wide.reshape(-1, *(1,) * (rank - 1))


def _exact_conv(
    arguments: KernelArguments,
    x: Array,
    x_zero: Array | None,
    w: Array,
    w_zero: Array | None,
    bias: Array | None,
) -> tuple[Array, list[Thunk]]:
    """Return the convolution of the integers in float64, and the steps that compute it."""
    left, right = np.empty(x.shape), np.empty(w.shape)
    result = np.empty(arguments.outputs[0].shape)
    wide = None if bias is None else np.empty(bias.shape)

    def refresh() -> None:
        left[...] = x if x_zero is None else x.astype(np.float64) - x_zero.reshape(())
        right[...] = w if w_zero is None else w - _per_filter(w_zero, w.ndim)
        if wide is not None and bias is not None:
            wide[...] = bias

    call = KernelArguments((left, right, wide), (result,), arguments.attributes, (False,) * 3)
    return result, [refresh, *CONVOLUTION.kernel(call)]


def _conv_integer(arguments: KernelArguments) -> Sequence[Thunk]:
    points = arguments.optional(2), arguments.optional(3)
    out = arguments.outputs[0]
    x, w = arguments.operand(0), arguments.operand(1)
    result, steps = _exact_conv(arguments, x, points[0], w, points[1], None)

    def wrap() -> None:
        out[...] = result.astype(np.int64)

    return [*steps, wrap]


def _qlinear_conv(arguments: KernelArguments) -> Sequence[Thunk]:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (
        arguments.operand(index) for index in range(8)
    )
    out = arguments.outputs[0]
    result, steps = _exact_conv(arguments, x, x_zero, w, w_zero, arguments.optional(8))

    def requantize() -> None:
        scale = x_scale.reshape(()) * _per_filter(w_scale, w.ndim - 1) / y_scale.reshape(())
        _requantize(result, np.asarray(scale), y_zero.reshape(()), out)

    return [*steps, requantize]


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "MatMulInteger", (2, 4), _infer_matmul_integer, _matmul_integer,
    ),
    OpDef(
        "QLinearMatMul", (8, 8), _infer_qlinear_matmul, _qlinear_matmul,
    ),
    OpDef(
        "ConvInteger", (2, 4), _infer_conv_integer, _conv_integer,
        attributes=CONVOLUTION.attributes, batching=in_first_axis(1, 2, 3),
    ),
    OpDef(
        "QLinearConv", (8, 9), _infer_qlinear_conv, _qlinear_conv,
        attributes=CONVOLUTION.attributes, batching=in_first_axis(*range(1, 9)),
    ),
)  # fmt: skip
