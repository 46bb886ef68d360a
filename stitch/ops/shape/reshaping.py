"""Operators that keep every element in its order: Identity, Reshape, Flatten, Squeeze, Dropout ...

Their result may take the memory of their operand; then nothing is left to do. `stitch.Expect` is
an Identity that checks at run time: for programs made for one value of an input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared, few
from stitch.ops.element_types import BOOLEAN, FLOATS, INT64, MOVED
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import Inference, InferenceContext, Shape, same_as_first
from stitch.ops.steps import copy_steps, fill_step
from stitch.program import Array, DataType, Operation, ValueType

# Batching -----------------------------------------------------------------------------------------


def batch_same_order(c: BatchingContext) -> Sequence[Any]:
    """Reshape, Flatten, Squeeze, Unsqueeze: reshape to the batch size and the result's shape."""
    return (c.shaped(c.operands[0], (c.batch_size, *c.result_shape())),)


def batch_dropout(c: BatchingContext) -> Sequence[Any]:
    """Nothing is dropped, whatever the ratio; where the mode is asked for, the ratio is known."""
    ratio = None if c.varies(1) else c.operands[1] if c.has(1) else None
    return c.again(c.broadcast(0), ratio, c.operands[2] if c.has(2) else None)


def batch_shape(c: BatchingContext) -> Sequence[Any]:
    """Shape: the same for all examples."""
    shape = c.shape()
    end = c.attributes.get("end")
    assert end is None or isinstance(end, int)
    listed = np.array(shape[c.int_of("start") : end], np.int64)
    return (c.repeated(c.constant(listed), listed.shape),)


def batch_size(c: BatchingContext) -> Sequence[Any]:
    return (c.repeated(c.constant(np.array(math.prod(c.shape()), np.int64)), ()),)


def batch_expect(c: BatchingContext) -> Sequence[Any]:
    """Check all examples at once."""
    checked = c.varies(1, 2)
    return c.again(c.broadcast(0), *(c.broadcast(i) if checked else c.operands[i] for i in (1, 2)))


def batch_transpose(c: BatchingContext) -> Sequence[Any]:
    rank = c.rank()
    order = c.ints_of("perm") or tuple(range(rank))[::-1]
    return c.again(c.operands[0], perm=[0, *(axis + 1 for axis in order)])


def batch_split(c: BatchingContext) -> Sequence[Any]:
    return c.with_first(c.operands[0], axis=c.axis_behind(c.int_of("axis")))


def batch_slice(c: BatchingContext) -> Sequence[Any]:
    listed = c.ints_at(3)
    if listed is None:
        listed = tuple(range(len(c.ints_at(1) or ())))
    axes = [c.axis_behind(axis) for axis in listed]
    steps = c.operands[4] if c.has(4) else None
    return c.again(c.operands[0], c.operands[1], c.operands[2], axes, steps)


def batch_expand(c: BatchingContext) -> Sequence[Any]:
    shape = c.result_shape()
    return c.again(c.aligned(0, len(shape)), [c.batch_size, *shape])


def batch_tile(c: BatchingContext) -> Sequence[Any]:
    return c.again(c.operands[0], [1, *(c.ints_at(1) or ())])


def batch_pad(c: BatchingContext) -> Sequence[Any]:
    listed = c.ints_at(3)
    axes = list(range(c.rank())) if listed is None else listed
    behind = [c.axis_behind(axis) for axis in axes]
    value = c.operands[2] if c.has(2) else None
    if not c.varies(2) or c.string_of("mode") != "constant":
        return c.again(c.broadcast(0), c.operands[1], None if c.varies(2) else value, behind)
    # One pad value per example: pad a mask to find the padded elements.
    inside = c.filled(True, c.shape(), DataType.BOOL)
    mask = c.apply("Pad", inside, c.operands[1], np.array(False), list(axes))
    # One after the other: what is batched has an axis more in front.
    padded = c.again(c.operands[0], c.operands[1], None, behind if c.varies(0) else list(axes))[0]
    number = c.shaped(value, (c.batch_size, *(1,) * c.rank()))
    return (c.apply("Where", mask, padded, number),)


def batch_eye_like(c: BatchingContext) -> Sequence[Any]:
    """Of its operand only the shape and the type are asked for."""
    like = c.filled(0, c.shape(), c.type_of(0).data_type)
    return (c.repeated(c.again(like)[0], c.result_shape()),)


def reinterpret(arguments: KernelArguments) -> Sequence[Thunk]:
    """The operand's elements, in order, in the output's shape."""
    out = arguments.outputs[0]
    return copy_steps(arguments.given(0).reshape(out.shape), out)


def _infer_reshape(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_type(1, INT64)
    wanted = list(context.known_ints(1, "shape"))
    keep_zero = bool(context.int_of("allowzero"))
    if (
        wanted.count(-1) > 1
        or any(size < -1 for size in wanted)
        or (keep_zero and -1 in wanted and 0 in wanted)
    ):
        raise context.fail("Reshape cannot read this shape", got=wanted)
    if not keep_zero:
        if any(size == 0 and i >= len(data.shape) for i, size in enumerate(wanted)):
            raise context.fail("Reshape has no dimension to copy for a 0", got=wanted)
        copied = [i for i, size in enumerate(wanted) if size == 0]
        wanted = [data.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
    count = math.prod(data.shape)
    if -1 in wanted:
        rest = count
        others = math.prod(size for size in wanted if size != -1)
        if not others and not keep_zero:
            # Of no elements the lengths that are not copied tell which is left.
            rest = math.prod(size for i, size in enumerate(data.shape) if i not in copied)
            others = math.prod(s for i, s in enumerate(wanted) if s != -1 and i not in copied)
        fits = others and rest % others == 0
        wanted[wanted.index(-1)] = rest // others if fits else 0
    if math.prod(wanted) != count:
        raise context.fail(
            "Reshape must keep the number of elements",
            expected=f"{count} elements",
            got=f"shape {list(context.known_ints(1, 'shape'))}",
        )
    return (ValueType(tuple(wanted), data.data_type),)


def _infer_flatten(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    rank, axis = len(data.shape), context.int_of("axis")
    if not -rank <= axis <= rank:
        raise context.fail(f"Flatten has no axis {axis}", expected=f"{-rank} to {rank}", got=axis)
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
        raise context.fail(f"Squeeze removes dimensions of size 1 only, not axis {wrong[0]}")
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
        still = context.present(1) is not None and ratio is not None and not ratio.any()
        if (training is None or training.any()) and not still:
            raise context.fail(
                "Dropout in training mode draws random numbers, and ONNX's Dropout takes no key "
                "to draw them from",
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
    """The dimensions that Shape lists."""
    return shape[attributes.get("start", 0) : attributes.get("end")]


def _shape(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    listed = _listed(arguments.attributes, arguments.given(0).shape)
    return copy_steps(np.array(listed, out.dtype), out)


def known_by_type(operation: Operation, kind: ValueType | None) -> Array | None:
    """The result of an operator that asks for the shape of its first operand only, else None.

    >>> size = Operation("Size", (0,), (1,))
    >>> known_by_type(size, ValueType((10**6, 10**6), DataType.FLOAT32)).item()
    1000000000000
    """
    if operation.domain or kind is None or operation.op not in ("Shape", "Size"):
        return None
    if operation.op == "Size":
        return np.array(math.prod(kind.shape), np.int64)
    return np.array(_listed(operation.attributes, kind.shape), np.int64)


def _infer_size(context: InferenceContext) -> tuple[ValueType, ...]:
    context.operand(0)
    return (ValueType((), DataType.INT64),)


def _size(arguments: KernelArguments) -> Sequence[Thunk]:
    return (fill_step(arguments.outputs[0], arguments.given(0).size),)


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


def _same_order(name: str, inputs: tuple[int, int], infer: Inference, **defaults: int) -> OpDef:
    return OpDef(
        name, inputs, infer, reinterpret, attributes=declared(**defaults), elementwise=True,
        gradient=reshape_gradient, batching=batch_same_order, workspace=few,
    )  # fmt: skip


def reshape_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradient in the operand's shape: Reshape, Flatten, Squeeze, Unsqueeze, Identity."""
    gradient = context.shaped(context.gradient, context.type_of(0).shape)
    return (gradient, *(None,) * (len(context.input_types) - 1))


_RESHAPING = (
    _same_order("Identity", (1, 1), _require_any),
    _same_order("Reshape", (2, 2), _infer_reshape, allowzero=0),
    _same_order("Flatten", (1, 1), _infer_flatten, axis=1),
    _same_order("Squeeze", (1, 2), _infer_squeeze),
    _same_order("Unsqueeze", (2, 2), _infer_unsqueeze),
)
#: ONNX's operators that give the elements of their first operand in the same order.
RESHAPING = frozenset(definition.name for definition in _RESHAPING)


OPERATORS: tuple[OpDef, ...] = (
    *_RESHAPING,
    OpDef(
        "Dropout", (1, 3), _infer_dropout, _dropout, outputs=(1, 2),
        attributes=declared(seed=Attribute("int")), elementwise=True, gradient=reshape_gradient,
        batching=batch_dropout, workspace=few,
    ),
    OpDef(
        "Shape", (1, 1), _infer_shape, _shape, attributes=declared(end=Attribute("int"), start=0),
        batching=batch_shape, workspace=few,
    ),
    # Operand 0 as it is, if operands 1 and 2 are equal; else a TaskError that names what the
    # attribute says. ONNX expansion: Identity(operand 0), without the check.
    OpDef(
        "Expect", (3, 3), _infer_expect, _expect,
        attributes=declared(name=Attribute("string", required=True)), domain="stitch",
        batching=batch_expect, workspace=few, checks=True,
    ),
    OpDef("Size", (1, 1), _infer_size, _size, batching=batch_size, workspace=few),
)  # fmt: skip
