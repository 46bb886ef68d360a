"""Writing by index: ScatterElements, ScatterND, with or without a reduction; OneHot; new entries
into a key-value cache: TensorScatter."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import along_axis
from stitch.ops.definition import (
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
    few,
    operands,
)
from stitch.ops.element_types import EVERY, INT64, MOVED, NUMERIC
from stitch.ops.indexing import gathering
from stitch.ops.indexing.gathering import (
    check_element_indices,
    check_row_indices,
    element_index_nbytes,
    flat_element_steps,
    flat_row_steps,
    row_index_nbytes,
)
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along, copy_steps
from stitch.program import Array, ValueType

REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _check_reduction(context: InferenceContext) -> None:
    words = ("none", *REDUCTIONS)
    if context.require_word("reduction", words, f"{context.op} has no such reduction") != "none":
        context.require_type(0, NUMERIC)


def _infer_elements(context: InferenceContext) -> tuple[ValueType, ...]:
    check_element_indices(context)
    _check_reduction(context)
    context.require_same_type((0, 2))
    context.require_shape(2, context.operand(1).shape)
    return (context.operand(0),)


def _write(reduction: str, target: Array, places: Array, updates: Array) -> Thunk:
    if reduction == "none":
        return partial(operator.setitem, target, places, updates)
    return partial(REDUCTIONS[reduction].at, target, places, updates)


#: From this many elements on, rows are reduced one by one: `ufunc.at` takes longer for them.
_LONG_ROW = 16


def _reduce_rows(function: np.ufunc, table: Array, rows: Array, updates: Sequence[Array]) -> None:
    for place, update in zip(rows.tolist(), updates, strict=True):
        row = table[place]
        function(row, update, out=row)


def _write_rows(reduction: str, table: Array, rows: Array, updates: Array) -> Thunk:
    if reduction == "none" or table.shape[1] < _LONG_ROW:
        return _write(reduction, table, rows, updates)
    return partial(_reduce_rows, REDUCTIONS[reduction], table, rows, list(updates))


def _elements(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, updates = (arguments.given(i) for i in range(3))
    out = arguments.outputs[0]
    axis = arguments.int_of("axis") % data.ndim
    flat, steps = flat_element_steps(
        "ScatterElements", data.shape, indices, axis, arguments.is_constant(1)
    )
    copies = copy_steps(data, out)
    if updates.size == 0:
        return copies
    reduction = arguments.string_of("reduction")
    write = _write(reduction, out.reshape(-1), flat.reshape(-1), updates.reshape(-1))
    return (*copies, *steps, write)


def _infer_nd(context: InferenceContext) -> tuple[ValueType, ...]:
    depth = check_row_indices(context, 0)
    _check_reduction(context)
    context.require_same_type((0, 2))
    data, indices = context.operand(0), context.operand(1)
    context.require_shape(2, (*indices.shape[:-1], *data.shape[depth:]))
    return (data,)


def _nd(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, updates = (arguments.given(i) for i in range(3))
    out = arguments.outputs[0]
    rows, steps = flat_row_steps("ScatterND", data.shape, indices, 0, arguments.is_constant(1))
    copies = copy_steps(data, out)
    if updates.size == 0:
        return copies
    depth = indices.shape[-1]
    table = out.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    reduction = arguments.string_of("reduction")
    fresh = updates.reshape(rows.size, table.shape[1])
    return (*copies, *steps, _write_rows(reduction, table, rows.reshape(-1), fresh))


def _nd_workspace(context: WorkspaceContext) -> int:
    """Rows; where these are reduced one by one, an object for each and its place."""
    indices = context.operand(1)
    by_rows = context.string_of("reduction") != "none"
    objects = 256 * math.prod(indices.shape[:-1]) if by_rows else 0
    return row_index_nbytes(context) + objects


def _infer_one_hot(context: InferenceContext) -> tuple[ValueType, ...]:
    indices = context.require_type(0, NUMERIC)
    values = context.require_type(2, EVERY)
    context.require_shape(2, (2,))
    depth = context.known_scalar(1, "depth")
    if depth < 0:
        raise context.fail("the depth of a OneHot is at least 0", got=depth)
    rank = len(indices.shape) + 1
    axis = context.axis_of(context.int_of("axis"), rank)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    return (ValueType(shape, values.data_type),)


def _one_hot_into(indices: Array, classes: Array, hit: Array) -> None:
    """Whether each class is the one that an index, perhaps counted from the end, names.

    An index of a floating type counts as the whole number that it is cut to.
    """
    whole = np.trunc(indices)
    np.add(whole, whole.dtype.type(classes.size), out=whole, where=whole < 0)
    np.equal(whole, classes, hit)


def _one_hot(arguments: KernelArguments) -> Sequence[Thunk]:
    indices, values, out = arguments.given(0), arguments.given(2), arguments.outputs[0]
    depth = arguments.ints_at(1)[0]
    axis = arguments.int_of("axis") % out.ndim
    classes = along(np.arange(depth), axis, out.ndim)
    hit = np.empty(out.shape, np.bool_)
    off, on = values[0:1].reshape(()), values[1:2].reshape(())
    return (
        partial(_one_hot_into, np.expand_dims(indices, axis), classes, hit),
        partial(np.copyto, out, off),
        partial(np.copyto, out, on, where=hit),
    )


_CACHE_MODES = ("linear", "circular")


def _infer_cache(context: InferenceContext) -> tuple[ValueType, ...]:
    cache = context.require_type(0, MOVED)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 2)
    context.require_rank(1, rank, rank)
    axis = context.axis_of(context.int_of("axis"), rank)
    mode = context.string_of("mode")
    if axis == 0 or mode not in _CACHE_MODES:
        raise context.fail(
            "TensorScatter does not write so",
            expected=f"an axis other than 0, mode {' or '.join(_CACHE_MODES)}",
            got=f"axis {axis}, mode {mode}",
        )
    length = context.operand(1).shape[axis]
    if length > cache.shape[axis]:
        raise context.fail(
            "the update is longer than the cache",
            expected=f"at most {cache.shape[axis]}",
            got=length,
        )
    context.require_shape(1, (*cache.shape[:axis], length, *cache.shape[axis + 1 :]))
    if context.present(2) is not None:
        context.require_type(2, INT64)
        context.require_shape(2, cache.shape[:1])
    return (cache,)


def _write_cache(cache: Array, update: Array, starts: Array | None, circular: bool) -> None:
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


def _cache(arguments: KernelArguments) -> Sequence[Thunk]:
    past, update, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    axis = arguments.int_of("axis") % past.ndim
    circular = arguments.string_of("mode") == "circular"
    starts = arguments.optional(2)
    target, source = np.moveaxis(out, axis, 1), np.moveaxis(update, axis, 1)

    def write() -> None:
        _write_cache(target, source, starts, circular)

    return (*copy_steps(past, out), write)


OPERATORS = (
    OpDef(
        "TensorScatter", (2, 3), _infer_cache, _cache,
        attributes=declared(axis=-2, mode="linear"),
        batching=gathering.batch_cache, workspace=few, checks=True,
    ),
    OpDef(
        "ScatterElements", (3, 3), _infer_elements, _elements,
        attributes=declared(axis=0, reduction="none"), gradient=gathering.scatter_elements_gradient,
        batching=along_axis, workspace=WorkspaceRule(element_index_nbytes), checks=True,
    ),
    OpDef(
        "ScatterND", (3, 3), _infer_nd, _nd, attributes=declared(reduction="none"),
        gradient=gathering.scatter_nd_gradient,
        batching=gathering.batch_scatter_rows, workspace=WorkspaceRule(_nd_workspace), checks=True,
    ),
    OpDef(
        "OneHot", (3, 3), _infer_one_hot, _one_hot, attributes=declared(axis=-1),
        gradient=gathering.one_hot_gradient, batching=gathering.batch_one_hot,
        workspace=operands(1),
    ),
)  # fmt: skip
