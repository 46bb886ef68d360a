"""New entries into a key-value cache: TensorScatter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.errors import TaskError
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import INT64, MOVED
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import copy_steps
from stitch.ops.workspaces import few
from stitch.program import Array, ValueType

_MODES = ("linear", "circular")


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    cache = context.require_type(0, MOVED)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 2)
    context.require_rank(1, rank, rank)
    axis = context.axis_of(context.int_of("axis"), rank)
    mode = context.string_of("mode")
    if axis == 0 or mode not in _MODES:
        raise context.fail(
            "TensorScatter does not write so",
            expected=f"an axis other than 0, mode {' or '.join(_MODES)}",
            got=f"axis {axis}, mode {mode}",
        )
    length = context.operand(1).shape[axis]
    if length > cache.shape[axis]:
        raise context.fail(
            "the update is longer than the cache",
            expected=f"at most {cache.shape[axis]}",
            got=str(length),
        )
    context.require_shape(1, (*cache.shape[:axis], length, *cache.shape[axis + 1 :]))
    if context.present(2) is not None:
        context.require_type(2, INT64)
        context.require_shape(2, cache.shape[:1])
    return (cache,)


def _write(cache: Array, update: Array, starts: Array | None, circular: bool) -> None:
    """`cache` and `update` have the batch first and the sequence second."""
    size, length = cache.shape[1], update.shape[1]
    for row in range(cache.shape[0]):
        start = 0 if starts is None else int(starts[row])
        if start < 0 or (not circular and start + length > size):
            raise TaskError(
                "TensorScatter: a write index is out of range",
                expected=f"0 to {size - length}",
                got=str(start),
            )
        # A start may be as large as integers are.
        places = (start % max(size, 1) + np.arange(length)) % max(size, 1)
        cache[row, places] = update[row]


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    past, update, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    axis = arguments.int_of("axis") % past.ndim
    circular = arguments.string_of("mode") == "circular"
    starts = arguments.optional(2)
    target, source = np.moveaxis(out, axis, 1), np.moveaxis(update, axis, 1)

    def write() -> None:
        _write(target, source, starts, circular)

    return (*copy_steps(past, out), write)


OPERATORS = (
    OpDef(
        "TensorScatter", (2, 3), _infer, _kernel,
        attributes={"axis": Attribute("int", -2), "mode": Attribute("string", "linear")},
        workspace=few,
    ),
)  # fmt: skip
