"""Rules of shape and type that many operators share.

Comes in: an `InferenceContext`. Goes out: types and shapes, or the `CompileError` to raise.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stitch.ops.attributes import ints_of
from stitch.ops.definition import Inference, InferenceContext
from stitch.program import Array, DataType, ValueType

Shape = tuple[int, ...]
#: No window is longer, and none moves on by more: what is computed from that fits 64 bits.
MAX_STEP = 1 << 48


def operand(context: InferenceContext, index: int) -> ValueType:
    """The type of an operand that has to be there."""
    kind = context.inputs[index] if index < len(context.inputs) else None
    if kind is None:
        raise context.fail(f"{context.op} needs its operand {index}")
    return kind


def present(context: InferenceContext, index: int) -> ValueType | None:
    """The type of an optional operand."""
    return context.inputs[index] if index < len(context.inputs) else None


def constant(context: InferenceContext, index: int) -> Array | None:
    """The data of an operand where it is known at compile time."""
    return context.constants[index] if index < len(context.constants) else None


def require_type(context: InferenceContext, index: int, allowed: frozenset[DataType]) -> ValueType:
    """The type of operand `index`, which must be one of `allowed`."""
    kind = operand(context, index)
    if kind.data_type not in allowed:
        raise context.fail(
            f"{context.op} does not take this type as operand {index}",
            expected=" or ".join(sorted(t.value for t in allowed)),
            got=kind.data_type.value,
        )
    return kind


def require_same_type(context: InferenceContext, indices: Iterable[int]) -> None:
    """Those operands that are there must agree in data type."""
    types = {t.data_type for i in indices if (t := present(context, i)) is not None}
    if len(types) > 1:
        raise context.fail(
            f"the operands of {context.op} differ in type",
            expected="one type for all",
            got=", ".join(sorted(t.value for t in types)),
        )


def require_rank(context: InferenceContext, index: int, least: int, most: int | None = None) -> int:
    """The rank of operand `index`, which must be in `least..most`."""
    rank = len(operand(context, index).shape)
    if rank < least or (most is not None and rank > most):
        wanted = f"{least}" if most == least else f"{least} to {'any' if most is None else most}"
        raise context.fail(
            f"operand {index} of {context.op} has the wrong rank", expected=wanted, got=str(rank)
        )
    return rank


def require_shape(context: InferenceContext, index: int, shape: Shape) -> None:
    """Operand `index` must have exactly this shape."""
    given = operand(context, index).shape
    if given != shape:
        raise context.fail(
            f"operand {index} of {context.op} has the wrong shape",
            expected=str(list(shape)),
            got=str(list(given)),
        )


def broadcast(context: InferenceContext, *shapes: Shape) -> Shape:
    """The common shape of ONNX's multidirectional broadcasting."""
    rank = max(map(len, shapes), default=0)
    result = []
    for column in zip(*[(1,) * (rank - len(s)) + s for s in shapes], strict=True):
        sizes = set(column) - {1}
        if len(sizes) > 1:
            listed = " and ".join(str(list(s)) for s in shapes)
            raise context.fail(f"the shapes {listed} do not broadcast to one shape")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def require_broadcast_to(context: InferenceContext, index: int, shape: Shape) -> None:
    """Operand `index` must broadcast to `shape` without changing it."""
    given = operand(context, index).shape
    if broadcast(context, given, shape) != shape:
        raise context.fail(
            f"operand {index} of {context.op} does not broadcast to the first",
            expected=str(list(shape)),
            got=str(list(given)),
        )


def axis_of(context: InferenceContext, axis: int, rank: int) -> int:
    """A possibly negative axis as an index into a shape of `rank` dimensions."""
    if not -rank <= axis < rank:
        raise context.fail(
            f"{context.op} has no axis {axis}", expected=f"{-rank} to {rank - 1}", got=str(axis)
        )
    return axis % rank


def axes_of(context: InferenceContext, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Possibly negative axes as distinct indices into a shape of `rank` dimensions."""
    indices = tuple(axis_of(context, axis, rank) for axis in axes)
    if len(set(indices)) != len(indices):
        raise context.fail(f"{context.op} names an axis twice", got=str(list(indices)))
    return indices


def known_ints(context: InferenceContext, index: int, name: str) -> tuple[int, ...]:
    """The integers of an operand that decides a shape, so it must be known at compile time."""
    kind = require_type(context, index, frozenset({DataType.INT64, DataType.INT32}))
    data = constant(context, index)
    if data is None:
        raise context.fail(
            f"operand {index} ({name}) of {context.op} must be known at compile time: "
            "it decides a shape",
            expected=f"a constant for {name}",
            got=f"a computed {kind.text()}",
        )
    return tuple(int(value) for value in np.ravel(data))


def known_scalar(context: InferenceContext, index: int, name: str) -> int:
    """The one integer of an operand that must be known at compile time."""
    values = known_ints(context, index, name)
    if len(values) != 1:
        raise context.fail(f"operand {index} ({name}) holds one number", got=str(len(values)))
    return values[0]


def same_as_first(allowed: frozenset[DataType]) -> Inference:
    """Inference for operators whose one output looks like their first operand."""

    def infer(context: InferenceContext) -> tuple[ValueType, ...]:
        return (require_type(context, 0, allowed),)

    return infer


def spatial_ints(context: InferenceContext, name: str, default: Shape, least: int = 1) -> Shape:
    """A list attribute with one integer per element of `default`, each at least `least`."""
    listed = ints_of(context.attributes, name)
    if listed is None:
        return default
    if len(listed) != len(default) or not all(least <= v <= MAX_STEP for v in listed):
        raise context.fail(
            f"attribute {name!r} of {context.op} does not fit",
            expected=f"{len(default)} integers from {least} to {MAX_STEP}",
            got=str(list(listed)),
        )
    return listed
