"""The parallel operators: they change how a value is divided among devices.

A divided value is one array with its shards stacked along axis 0. `Repartition` and `Replicate`
divide each shard further: its parts or copies follow one another. `Combine` and `Reduction` undo
that. The gradient of each is another of them: scatter and gather, broadcast and sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import Batching, BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.gradient import Gradient, GradientContext
from stitch.ops.inference import Inference, InferenceContext
from stitch.program import Array, DataType, ValueType

_REQUIRED = Attribute("int", required=True)


def _inference(name: str, *, joins: bool) -> Inference:
    """Return the rule of an operator that joins shards, or divides them."""
    along_axis = name in ("Repartition", "Combine")

    def infer(context: InferenceContext) -> tuple[ValueType, ...]:
        context.require_rank(0, 2 if along_axis else 1)
        kind, degree = context.operand(0), context.int_of("degree")
        context.require(degree >= 1, "degree must be at least 1", got=degree)
        if name == "Reduction":
            context.require_type(0, frozenset(d for d in DataType if d.is_floating))
        count, *shard = kind.shape
        if joins:
            context.require(
                count % degree == 0, f"{count} shards cannot be joined {degree} at a time",
                expected=f"a number of shards that is a multiple of {degree}",
            )  # fmt: skip
        if along_axis:
            axis = context.axis_of(context.int_of("axis"), len(shard))
            context.require(
                joins or shard[axis] % degree == 0,
                f"axis {axis} of {shard[axis]} does not divide into {degree} equal parts",
            )
            shard[axis] = shard[axis] * degree if joins else shard[axis] // degree
        count = count // degree if joins else count * degree
        return (ValueType((count, *shard), kind.data_type),)

    return infer


def _parts(whole: Array, divided: Array, arguments: KernelArguments) -> tuple[Array, Array]:
    """Return views of whole and divided shards with equal shapes: [shards, parts, *shard]."""
    degree, axis = arguments.int_of("degree"), arguments.int_of("axis")
    count, *shard = whole.shape
    axis %= len(shard)
    split = (count, *shard[:axis], degree, shard[axis] // degree, *shard[axis + 1 :])
    parts = np.moveaxis(whole.reshape(split), axis + 1, 1)
    return parts, divided.reshape(parts.shape)


def _repartition(arguments: KernelArguments) -> Sequence[Thunk]:
    parts, divided = _parts(arguments.operand(0), arguments.outputs[0], arguments)
    return [partial(np.copyto, divided, parts)]


def _combine(arguments: KernelArguments) -> Sequence[Thunk]:
    parts, divided = _parts(arguments.outputs[0], arguments.operand(0), arguments)
    return [partial(np.copyto, parts, divided)]


def _grouped(divided: Array, arguments: KernelArguments) -> Array:
    """Return a view [shards, copies or addends, *shard]."""
    degree = arguments.int_of("degree")
    return divided.reshape(len(divided) // degree, degree, *divided.shape[1:])


def _replicate(arguments: KernelArguments) -> Sequence[Thunk]:
    out = _grouped(arguments.outputs[0], arguments)
    return [partial(np.copyto, out, arguments.operand(0)[:, None])]


def _reduction(arguments: KernelArguments) -> Sequence[Thunk]:
    """Add in the order of the shards, so that the bits do not depend on arrival."""
    parts, out = _grouped(arguments.operand(0), arguments), arguments.outputs[0]
    steps: list[Thunk] = [partial(np.copyto, out, parts[:, 0])]
    return steps + [partial(np.add, out, parts[:, i], out) for i in range(1, parts.shape[1])]


def _gradient(op: str) -> Gradient:
    def gradient(context: GradientContext) -> Sequence[Any]:
        return (context.apply(op, context.gradient, domain="stitch", **context.attributes),)

    return gradient


def _batch(context: BatchingContext) -> Sequence[Any]:
    """Stack the shards of all examples."""
    return (context.split(context.emit(context.fold(0))[0]),)


_BATCH: Batching = _batch

OPERATORS: tuple[OpDef, ...] = tuple([
    OpDef(
        name, (1, 1), _inference(name, joins=name in ("Combine", "Reduction")), kernel,
        attributes=declared(**attributes), domain="stitch", gradient=_gradient(opposite),
        batching=_BATCH,
    )
    for name, kernel, opposite, attributes in (
        ("Repartition", _repartition, "Combine", {"axis": _REQUIRED, "degree": _REQUIRED}),
        ("Combine", _combine, "Repartition", {"axis": _REQUIRED, "degree": _REQUIRED}),
        ("Replicate", _replicate, "Reduction", {"degree": _REQUIRED}),
        ("Reduction", _reduction, "Replicate", {"degree": _REQUIRED}),
    )
])  # fmt: skip
#: The names of the parallel operators.
PARALLEL_OPERATORS = frozenset(definition.name for definition in OPERATORS)
