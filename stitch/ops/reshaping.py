"""Operators that keep the order of elements (Identity, Reshape, Flatten, Squeeze, Dropout), and
those that depend on shapes and numbers only (Shape, Size, ConstantOfShape, Range, EyeLike).

The result may share the operand's memory; then there is no step. `stitch.Expect` is an Identity
that checks at run time the value of an input which decided shapes at compile time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import BatchingContext, of_last_axes
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import (
    BOOLEAN,
    FLOATS,
    INT64,
    MOVED,
    SIGNED_NUMERIC,
    data_type_of_code,
)
from stitch.ops.gradient import GradientContext, no_gradient
from stitch.ops.inference import Inference, InferenceContext, Shape, float_of, int_of, same_as_first
from stitch.ops.steps import CHUNK_SIZE, copy_steps, fill_step, slice_range
from stitch.program import (
    Array,
    DataType,
    Operation,
    ValueType,
    has_symbols,
    int64_array,
    integers_of,
    is_symbolic,
)

# Batching -----------------------------------------------------------------------------------------


def batch_same_order(c: BatchingContext) -> Sequence[Any]:
    """Reshape, Flatten, Squeeze, Unsqueeze: reshape to the batch size and the result's shape."""
    return (c.reshape(c.operands[0], (c.batch_size, *c.result_shape())),)


def batch_expect(c: BatchingContext) -> Sequence[Any]:
    checked = c.varies(1, 2)
    return c.emit(c.broadcast(0), *(c.broadcast(i) if checked else c.operands[i] for i in (1, 2)))


def reinterpret(arguments: KernelArguments) -> Sequence[Thunk]:
    """Copy the operand's elements, in order, to the output's shape."""
    out = arguments.outputs[0]
    return copy_steps(arguments.operand(0).reshape(out.shape), out)


def _infer_reshape(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, INT64)
    wanted = list(context.known_ints(1, "shape"))
    keep_zero = bool(context.int_of("allowzero"))
    is_valid = wanted.count(-1) <= 1 and all(size >= -1 for size in wanted)
    is_valid &= not (keep_zero and -1 in wanted and 0 in wanted)
    context.require(
        is_valid, "shape of Reshape is invalid", expected="sizes >= 0 and at most one -1",
        got=wanted,
    )  # fmt: skip
    if not keep_zero:
        if any(size == 0 and i >= len(data.shape) for i, size in enumerate(wanted)):
            raise context.fail(
                f"shape of Reshape has a 0 beyond the operand's rank {len(data.shape)}", got=wanted
            )
        copied = [i for i, size in enumerate(wanted) if size == 0]
        wanted = [data.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
    count = math.prod(data.shape)
    if -1 in wanted:
        rest = count
        others = math.prod(size for size in wanted if size != -1)
        if not others and not keep_zero:
            # For an empty tensor, -1 follows from the sizes that are not copied.
            rest = math.prod(size for i, size in enumerate(data.shape) if i not in copied)
            others = math.prod(s for i, s in enumerate(wanted) if s != -1 and i not in copied)
        fits = others and rest % others == 0
        wanted[wanted.index(-1)] = rest // others if fits else 0
    if math.prod(wanted) != count:
        raise context.fail(
            "shape of Reshape has another number of elements than the operand",
            expected=f"{count} elements", got=f"shape {list(context.known_ints(1, 'shape'))}",
        )  # fmt: skip
    return (ValueType(tuple(wanted), data.data_type),)


def _infer_flatten(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    rank, axis = len(data.shape), context.int_of("axis")
    if not -rank <= axis <= rank:
        what = f"axis {axis} of Flatten is out of range"
        raise context.fail(what, expected=f"{-rank} to {rank}", got=axis)
    axis += rank if axis < 0 else 0
    shape = (math.prod(data.shape[:axis]), math.prod(data.shape[axis:]))
    return (ValueType(shape, data.data_type),)


def _infer_squeeze(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    if context.present(1) is None:
        axes = tuple(i for i, size in enumerate(data.shape) if size == 1)
    else:
        context.require_type(1, INT64)
        axes = context.axes_of(context.known_ints(1, "axes"), len(data.shape))
    wrong = [axis for axis in axes if data.shape[axis] != 1]
    if wrong:
        raise context.fail(
            f"axis {wrong[0]} of Squeeze has size {data.shape[wrong[0]]}", expected="size 1",
            got=data.shape,
        )  # fmt: skip
    shape: Shape = tuple(size for i, size in enumerate(data.shape) if i not in axes)
    return (ValueType(shape, data.data_type),)


def _infer_unsqueeze(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, INT64)
    listed = context.known_ints(1, "axes")
    rank = len(data.shape) + len(listed)
    axes = context.axes_of(listed, rank)
    sizes = iter(data.shape)
    shape = tuple(1 if i in axes else next(sizes) for i in range(rank))
    return (ValueType(shape, data.data_type),)


def _infer_dropout(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, FLOATS)
    if context.present(1) is not None:
        context.require_type(1, FLOATS)
        context.require_shape(1, ())
    if context.present(2) is not None:
        context.require_type(2, BOOLEAN)
        training, ratio = context.constant(2), context.constant(1)
        drops = context.present(1) is None or ratio is None or ratio.any()
        if (training is None or training.any()) and drops:
            raise context.fail(
                "Dropout in training mode is not supported: it draws random numbers without a key",
                expected="training_mode known to be false, or ratio known to be 0",
                got="training_mode " + ("computed" if training is None else "true"),
            )
    return (data, ValueType(data.shape, DataType.BOOL))[: context.outputs]


def _dropout(arguments: KernelArguments) -> Sequence[Thunk]:
    mask = (fill_step(out, 1) for out in arguments.outputs[1:])
    return (*reinterpret(arguments), *mask)


def _infer_shape(context: InferenceContext) -> tuple[ValueType, ...]:
    listed = _listed(context.attributes, context.operand(0).shape)
    return (ValueType((len(listed),), DataType.INT64),)


def _listed(attributes: Mapping[str, Any], shape: Shape) -> Shape:
    return shape[attributes.get("start", 0) : attributes.get("end")]


def _shape(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    listed = _listed(arguments.attributes, arguments.operand(0).shape)
    return copy_steps(np.array(listed, out.dtype), out)


def known_by_type(operation: Operation, kind: ValueType | None) -> Array | None:
    """Return the result of Shape or Size from the operand's type, None for other operators.

    >>> size = Operation("Size", (0,), (1,))
    >>> known_by_type(size, ValueType((10**6, 10**6), DataType.FLOAT32)).item()
    1000000000000
    """
    if operation.domain or kind is None or operation.op not in ("Shape", "Size"):
        return None
    if operation.op == "Size":
        return int64_array([math.prod(kind.shape)], ())
    return int64_array(_listed(operation.attributes, kind.shape))


def _infer_size(context: InferenceContext) -> tuple[ValueType, ...]:
    context.operand(0)
    return (ValueType((), DataType.INT64),)


def _size(arguments: KernelArguments) -> Sequence[Thunk]:
    return (fill_step(arguments.outputs[0], arguments.operand(0).size),)


def _require_any(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_rank(0, 0)
    return same_as_first(MOVED)(context)


def _infer_expect(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, MOVED)
    context.require_same_type((1, 2))
    context.require_shape(2, context.operand(1).shape)
    return (data,)


def _expect(arguments: KernelArguments) -> Sequence[Thunk]:
    data, actual, wanted = (arguments.operand(i) for i in range(3))
    name = arguments.string_of("name")

    def check() -> None:
        if not np.array_equal(actual, wanted):
            raise TaskError(
                f"the program was compiled for one value of {name!r}, which decides shapes",
                expected=_shown(wanted.tolist()), got=_shown(actual.tolist()),
                remedy="compile the model again with this value as the example input",
            )  # fmt: skip

    return (check, *copy_steps(data, arguments.outputs[0]))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def _same_order(name: str, inputs: tuple[int, int], infer: Inference, **defaults: int) -> OpDef:
    return OpDef(
        name, inputs, infer, reinterpret, attributes=declared(**defaults), elementwise=True,
        gradient=reshape_gradient, batching=batch_same_order,
    )  # fmt: skip


def reshape_gradient(context: GradientContext) -> Sequence[Any]:
    gradient = context.reshape(context.gradient, context.type_of(0).shape)
    return (gradient, *no_gradient(context)[1:])


_RESHAPING = (
    _same_order("Identity", (1, 1), _require_any),
    _same_order("Reshape", (2, 2), _infer_reshape, allowzero=0),
    _same_order("Flatten", (1, 1), _infer_flatten, axis=1),
    _same_order("Squeeze", (1, 2), _infer_squeeze),
    _same_order("Unsqueeze", (2, 2), _infer_unsqueeze),
)
#: ONNX operators whose result has the elements of the first operand in the same order.
RESHAPING = frozenset(definition.name for definition in _RESHAPING)


def _infer_filled(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_type(0, INT64)
    context.require_rank(0, 1, 1)
    shape = context.known_ints(0, "input")
    if any(size < 0 for size in shape):
        raise context.fail("shape of ConstantOfShape has a negative size", got=shape)
    return (ValueType(shape, data_type_of_code(context.int_of("dtype"), context.op)),)


def _filled(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    floating = out.dtype.kind == "f"
    read = float_of if floating else int_of
    value = read(arguments.attributes, "value_float" if floating else "value_int")
    return (fill_step(out, value),)


_RANGES = SIGNED_NUMERIC - {DataType.INT8, DataType.FLOAT16, DataType.BFLOAT16}


def _range_length(start: Array, limit: Array, delta: Array) -> int:
    first, last, step = (v.reshape(()).item() for v in (start, limit, delta))
    if start.dtype.kind != "f":
        return max(0, int(-((first - last) // step)))
    length: float = (last - first) / step
    return math.ceil(min(max(length, 0.0), float(1 << 63)))


def _infer_range(context: InferenceContext) -> tuple[ValueType, ...]:
    first = context.require_type(0, _RANGES)
    context.require_same_type((0, 1, 2))
    known = []
    for index, name in enumerate(("start", "limit", "delta")):
        if math.prod(context.operand(index).shape) != 1:
            context.require_shape(index, ())
        known.append(context.known_data(index, name))
    if any(map(has_symbols, known)):
        start, limit, delta = (integers_of(number)[0] for number in known)
        if not is_symbolic(delta) and delta == 1:
            return (ValueType((limit - start if start < limit else 0,), first.data_type),)
    known = [number.astype(first.data_type.compute_dtype) for number in known]
    context.require(known[2].any(), "delta of Range must not be 0")
    if not all(np.isfinite(number).all() for number in known):
        raise context.fail("operands of Range must be finite")
    return (ValueType((_range_length(*known),), first.data_type),)


def _range(arguments: KernelArguments) -> Sequence[Thunk]:
    start, _, delta = (arguments.operand(i).reshape(()) for i in range(3))
    out = arguments.outputs[0]

    def write() -> None:
        for part in slice_range(out.size, CHUNK_SIZE):
            np.copyto(out[part], start + np.arange(part.start, part.stop) * delta, "unsafe")

    return [write]


OPERATORS: tuple[OpDef, ...] = (
    *_RESHAPING,
    OpDef(
        "Dropout", (1, 3), _infer_dropout, _dropout, outputs=(1, 2),
        attributes=declared(seed=Attribute("int")), elementwise=True, gradient=reshape_gradient,
        batching=of_last_axes,
    ),
    OpDef(
        "Shape", (1, 1), _infer_shape, _shape, attributes=declared(end=Attribute("int"), start=0),
    ),
    # Returns operand 0 if operands 1 and 2 are equal, else raises a TaskError that names the
    # attribute. ONNX expansion: Identity(operand 0), without the check.
    OpDef(
        "Expect", (3, 3), _infer_expect, _expect,
        attributes=declared(name=Attribute("string", required=True)), domain="stitch",
        batching=batch_expect, checks=True,
    ),
    OpDef("Size", (1, 1), _infer_size, _size),
    # ONNX's tensor attribute `value` is stored as `dtype` (an ONNX code) and value_float (float
    # types) or value_int (other types).
    OpDef(
        "ConstantOfShape", (1, 1), _infer_filled, _filled,
        attributes=declared(dtype=1, value_float=0.0, value_int=0),
    ),
    OpDef("Range", (3, 3), _infer_range, _range),
)  # fmt: skip
