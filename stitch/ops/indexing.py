"""Gather and Scatter operators, TopK, OneHot, TensorScatter.

An index out of range raises `TaskError` when the step runs, or at binding if the indices are
constant.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import BatchingContext, along_axis, first_along_axis
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, INDICES, INT64, MOVED, NUMERIC
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.steps import (
    along,
    bound,
    copy_steps,
    index_steps,
    pieces_of,
    strides_of,
)
from stitch.ops.workspaces import workspace
from stitch.program import Array, DataType, ValueType

# Batching (of Gather and Scatter) -----------------------------------------------------------------


def batch_gather(c: BatchingContext) -> Sequence[Any]:
    data, indices = c.operands
    axis = c.axis_behind(c.int_of("axis")) - 1
    if not c.varies(1):
        return c.emit(data, indices, axis=axis + 1)
    if not c.varies(0):
        return (c.move_to_front(c.emit(data, indices, axis=axis)[0], axis),)
    # Each example indexes its own data: move the gathered axis behind the batch axis.
    rank, picked = c.rank(), c.rank(1)
    if axis:
        order = [0, axis + 1, *(a for a in range(1, rank + 1) if a != axis + 1)]
        data = c.apply("Transpose", data, perm=order)
    rows = c.reshape(c.cast(indices, DataType.INT64), (c.batch_size, *c.shape(1), 1))
    result = c.apply("GatherND", data, rows, batch_dims=1)
    if not axis:
        return (result,)
    before = [1 + picked + a for a in range(axis)]
    order = [0, *before, *range(1, picked + 1), *range(1 + picked + axis, picked + rank)]
    return (c.apply("Transpose", result, perm=order),)


def batch_gather_rows(c: BatchingContext) -> Sequence[Any]:
    """GatherND: add a batch axis, unless the data is shared and has no batch axes."""
    batch = c.int_of("batch_dims")
    if not batch and not c.varies(0):
        return c.emit(*c.operands)
    return c.emit(*c.broadcast_all(), batch_dims=batch + 1)


def batch_cache(c: BatchingContext) -> Sequence[Any]:
    """TensorScatter: fold the batch into its first axis."""
    axis = c.int_of("axis") % c.rank()
    operands = (c.fold(i) for i in range(len(c.operands)))
    return (c.split(c.emit(*operands, axis=axis)[0]),)


def batch_scatter_rows(c: BatchingContext) -> Sequence[Any]:
    """ScatterND: prepend the example's index to each index."""
    shape = c.shape(1)
    numbers = c.example_indices(len(shape))
    example = c.apply("Expand", numbers, [c.batch_size, *shape[:-1], 1])
    rows = c.apply("Concat", example, c.broadcast(1), axis=-1)
    return c.emit(c.broadcast(0), rows, c.broadcast(2))


def batch_one_hot(c: BatchingContext) -> Sequence[Any] | None:
    if c.varies(2):
        return None
    return c.emit(*c.operands, axis=c.int_of("axis") % (c.rank() + 1) + 1)


# Gradients (of Gather and Scatter) ----------------------------------------------------------------


def gather_gradient(context: GradientContext) -> Sequence[Any]:
    """Scatter-add rows: gradients [indices, rest] into [size, rest]."""
    data, indices = context.type_of(0), context.type_of(1).shape
    gradient, index = context.gradient, context.constants[1]
    axis = context.int_of("axis") % len(data.shape)
    size = data.shape[axis]
    if index is not None and index.size == 1:
        return _one_index_gradient(context, axis, int(index.reshape(())) % size), None
    before, after = math.prod(data.shape[:axis]), math.prod(data.shape[axis + 1 :])
    count = math.prod(indices)
    rows = context.reshape(gradient, (before, count, after))
    if before > 1:
        rows = context.apply("Transpose", rows, perm=[1, 0, 2])
    rows = context.reshape(rows, (count, before * after))
    positions = context.reshape(context.input(1), (count, 1))
    positions = context.cast(positions, DataType.INT64)
    table = context.fill(0, (size, before * after), data.data_type)
    sums = context.apply("ScatterND", table, positions, rows, reduction="add")
    if before > 1:
        sums = context.reshape(sums, (size, before, after))
        sums = context.apply("Transpose", sums, perm=[1, 0, 2])
    return context.reshape(sums, data.shape), None


def _one_index_gradient(context: GradientContext, axis: int, index: int) -> Any:
    """Return the gradient of gathering one known index along an axis: pad with zeros."""
    shape = context.type_of(0).shape
    kept_shape = (*shape[:axis], 1, *shape[axis + 1 :])
    begins, ends = [0] * len(shape), [0] * len(shape)
    begins[axis], ends[axis] = index, shape[axis] - 1 - index
    return context.pad(context.reshape(context.gradient, kept_shape), begins, ends)


def gather_elements_gradient(context: GradientContext) -> Sequence[Any]:
    data = context.type_of(0)
    sums = context.apply(
        "ScatterElements", context.fill(0, data.shape, data.data_type), context.input(1),
        context.gradient, axis=context.int_of("axis"), reduction="add",
    )  # fmt: skip
    return sums, None


def gather_nd_gradient(context: GradientContext) -> Sequence[Any]:
    """Scatter-add slices; batch axes become leading indices."""
    data, indices = context.type_of(0), context.input(1)
    for axis in reversed(range(context.int_of("batch_dims"))):
        shape = indices.shape
        count = along(np.arange(shape[axis], dtype=np.int64), axis, len(shape))
        leading = context.constant(np.broadcast_to(count, (*shape[:-1], 1)).copy())
        indices = context.apply("Concat", leading, indices, axis=-1)
    table = context.fill(0, data.shape, data.data_type)
    sums = context.apply("ScatterND", table, indices, context.gradient, reduction="add")
    return sums, None


def top_gradient(context: GradientContext) -> Sequence[Any]:
    """Scatter the values' gradients by the indices."""
    data, axis = context.type_of(0), context.int_of("axis")
    if context.gradient is None:
        return None, None
    indices = context.output(1)
    table = context.fill(0, data.shape, data.data_type)
    return context.apply("ScatterElements", table, indices, context.gradient, axis=axis), None


def scatter_gradient(read: str, context: GradientContext) -> Sequence[Any]:
    """Updates gather the gradient by the operator `read`; the data gets it with the written
    elements zeroed, or all of it if updates are added."""
    axis = context.attributes.get("axis")
    along: dict[str, Any] = {} if axis is None else {"axis": axis}
    reduction = context.string_of("reduction")
    if reduction not in ("none", "add"):
        raise context.fail(
            f"reduction={reduction!r} is not supported",
            "use reduction='none' or reduction='add' on the way to the loss",
        )
    first = second = None
    indices = context.input(1)
    if context.wants(0):
        first = context.gradient
        if reduction == "none":
            kind = context.type_of(2)
            nothing = context.fill(0, kind.shape, kind.data_type)
            first = context.apply(context.op, first, indices, nothing, **along)
    if context.wants(2):
        second = context.apply(read, context.gradient, indices, **along)
    return first, None, second


def one_hot_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradient of `values` sums the gradient over off and on elements."""
    gradient = context.gradient
    depth = context.constants[1]
    assert depth is not None
    off_on = context.constant(np.array([0, 1], gradient.data_type.dtype))
    axis = context.int_of("axis")
    hit = context.apply("OneHot", context.input(0), depth, off_on, axis=axis)
    on = context.apply("ReduceSum", gradient * hit, keepdims=0)
    off = context.apply("ReduceSum", gradient, keepdims=0) - on
    parts = [context.apply("Unsqueeze", part, [0]) for part in (off, on)]
    return None, None, context.apply("Concat", *parts, axis=0)


def _infer_gather(context: InferenceContext) -> tuple[ValueType, ...]:
    data, indices = context.require_type(0, EVERY), context.require_type(1, INDICES)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return (ValueType(shape, data.data_type),)


def _gather(arguments: KernelArguments) -> Sequence[Thunk]:
    data, out = arguments.operand(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % data.ndim
    indices, checks = index_steps(
        "Gather", arguments.operand(1), data.shape[axis], arguments.is_constant(1)
    )
    if out.size == 0:
        return checks
    # Indices are checked, so mode "clip" is safe; mode "raise" would buffer the output.
    return (*checks, partial(np.take, data, indices, axis, out, "clip"))


def check_element_indices(context: InferenceContext) -> int:
    """Check the indices of GatherElements or ScatterElements, and return the axis."""
    data, indices = context.require_type(0, EVERY), context.require_type(1, INDICES)
    rank = context.require_rank(0, 1)
    context.require_rank(1, rank, rank)
    axis = context.axis_of(context.int_of("axis"), rank)
    for i, (size, count) in enumerate(zip(data.shape, indices.shape, strict=True)):
        if i != axis and count > size:
            raise context.fail(
                f"indices of {context.op} are longer than the data along axis {i}",
                expected=f"at most {size}", got=count,
            )  # fmt: skip
    return axis


def _infer_elements(context: InferenceContext) -> tuple[ValueType, ...]:
    check_element_indices(context)
    shape = context.operand(1).shape
    return (ValueType(shape, context.operand(0).data_type),)


def flat_element_steps(
    op: str, shape: Shape, indices: Array, axis: int, fixed: bool
) -> tuple[Array, Sequence[Thunk]]:
    """Return indices along one axis as indices into the flat data, and their refresh steps."""
    checked, checks = index_steps(op, indices, shape[axis], fixed)
    strides = strides_of(shape)
    base = np.zeros(indices.shape, np.intp)
    for i, (length, stride) in enumerate(zip(indices.shape, strides, strict=True)):
        if i != axis:
            base += along(np.arange(length) * stride, i, indices.ndim)
    flat = np.empty(indices.shape, np.intp)
    steps: Sequence[Thunk] = (
        *checks,
        partial(np.multiply, checked, strides[axis], flat),
        partial(np.add, flat, base, flat),
    )
    return flat, bound(steps, fixed)


def _gather_elements(arguments: KernelArguments) -> Sequence[Thunk]:
    data, out = arguments.operand(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % data.ndim
    fixed = arguments.is_constant(1)
    flat, steps = flat_element_steps(
        "GatherElements", data.shape, arguments.operand(1), axis, fixed
    )
    if out.size == 0:
        return ()
    return (*steps, partial(np.take, data.reshape(-1), flat, None, out, "clip"))


def check_row_indices(context: InferenceContext, batch: int) -> int:
    """Check the indices of GatherND or ScatterND, and return the length of an index tuple."""
    data, indices = context.require_type(0, EVERY), context.require_type(1, INT64)
    context.require_rank(0, 1)
    context.require_rank(1, 1)
    depth = indices.shape[-1]
    if not 0 <= batch < min(len(data.shape), len(indices.shape)):
        raise context.fail(
            f"batch_dims={batch} of {context.op} is out of range",
            expected=f"0 to {min(len(data.shape), len(indices.shape)) - 1}", got=batch,
        )  # fmt: skip
    if data.shape[:batch] != indices.shape[:batch]:
        raise context.fail(
            f"batch axes of data and indices of {context.op} differ",
            expected=data.shape[:batch], got=indices.shape[:batch],
        )  # fmt: skip
    if not 1 <= depth <= len(data.shape) - batch:
        raise context.fail(
            f"last axis of the indices of {context.op} has size {depth}",
            expected=f"1 to {len(data.shape) - batch}", got=depth,
        )  # fmt: skip
    return depth


def _infer_gather_nd(context: InferenceContext) -> tuple[ValueType, ...]:
    batch = context.int_of("batch_dims")
    depth = check_row_indices(context, batch)
    data, indices = context.operand(0), context.operand(1)
    shape = (*indices.shape[:-1], *data.shape[batch + depth :])
    return (ValueType(shape, data.data_type),)


def flat_row_steps(
    op: str, shape: Shape, indices: Array, batch: int, fixed: bool
) -> tuple[Array, Sequence[Thunk]]:
    """Return index tuples as rows of the data seen as [rows, row size], and refresh steps."""
    depth = indices.shape[-1]
    strides = strides_of(shape[: batch + depth])
    rows = np.empty(indices.shape[:-1], np.intp)
    base = np.zeros(rows.shape, np.intp)
    for i in range(batch):
        base += along(np.arange(shape[i]) * strides[i], i, rows.ndim)
    steps: list[Thunk] = [partial(np.copyto, rows, base)]
    for i in range(depth):
        checked, checks = index_steps(op, indices[..., i], shape[batch + i], fixed)
        scaled = np.empty(rows.shape, np.intp)
        steps += [
            *checks,
            partial(np.multiply, checked, strides[batch + i], scaled),
            partial(np.add, rows, scaled, rows),
        ]
    return rows, bound(steps, fixed)


def _gather_nd(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    batch = arguments.int_of("batch_dims")
    fixed = arguments.is_constant(1)
    rows, steps = flat_row_steps("GatherND", data.shape, indices, batch, fixed)
    if out.size == 0:
        return ()
    depth = batch + indices.shape[-1]
    table = data.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    target = out.reshape(*rows.shape, table.shape[1])
    return (*steps, partial(np.take, table, rows, 0, target, "clip"))


def _infer_top(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, NUMERIC)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    context.require_type(1, INT64)
    k = context.known_scalar(1, "K")
    if not 0 <= k <= data.shape[axis]:
        raise context.fail(
            f"K={k} of TopK is out of range", expected=f"0 to {data.shape[axis]}", got=k
        )
    shape = (*data.shape[:axis], k, *data.shape[axis + 1 :])
    return (ValueType(shape, data.data_type), ValueType(shape, DataType.INT64))[: context.outputs]


def _top_into(source: Array, largest: bool, values: Array, indices: Array) -> None:
    """Select along the last axis, sorted; of equal values the lower index comes first."""
    k, last = values.shape[-1], source.shape[-1] - 1
    if largest:
        # A stable ascending sort of the reversed row, read backwards.
        order = last - np.argsort(source[..., ::-1], -1, "stable")[..., ::-1]
    else:
        order = np.argsort(source, -1, "stable")
    indices[...] = order[..., :k]
    values[...] = np.take_along_axis(source, order[..., :k], -1)


def _top(arguments: KernelArguments) -> Sequence[Thunk]:
    axis = arguments.int_of("axis")
    source, values = arguments.operand(0), arguments.outputs[0]
    indices = (
        arguments.outputs[1]
        if len(arguments.outputs) > 1
        else workspace(values.shape, np.dtype(np.int64))
    )
    largest = bool(arguments.int_of("largest"))
    data, best, positions = (np.moveaxis(a, axis, -1) for a in (source, values, indices))
    if data.ndim == 1:
        return (partial(_top_into, data, largest, best, positions),)
    return [
        partial(_top_into, data[part], largest, best[part], positions[part])
        for part in pieces_of(len(data), _top_nbytes(data.shape[1:], best.shape[-1]))
    ]


def _top_nbytes(shape: Shape, k: int) -> int:
    """The bytes of sorting the last axis: indices, a reversed copy, and results."""
    return 32 * math.prod(shape) + 24 * math.prod(shape[:-1]) * k


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _check_reduction(context: InferenceContext) -> None:
    if context.require_word("reduction", ("none", *_REDUCTIONS)) != "none":
        context.require_type(0, NUMERIC)


def _infer_scatter_elements(context: InferenceContext) -> tuple[ValueType, ...]:
    check_element_indices(context)
    _check_reduction(context)
    context.require_same_type((0, 2))
    context.require_shape(2, context.operand(1).shape)
    return (context.operand(0),)


def _write(reduction: str, target: Array, places: Array, updates: Array) -> Thunk:
    if reduction == "none":
        return partial(operator.setitem, target, places, updates)
    return partial(_REDUCTIONS[reduction].at, target, places, updates)


#: From this row size on, rows are reduced one by one, which is faster than `ufunc.at`.
_LONG_ROW = 16


def _reduce_rows(function: np.ufunc, table: Array, rows: Array, updates: Sequence[Array]) -> None:
    for place, update in zip(rows.tolist(), updates, strict=True):
        row = table[place]
        function(row, update, out=row)


def _write_rows(reduction: str, table: Array, rows: Array, updates: Array) -> Thunk:
    if reduction == "none" or table.shape[1] < _LONG_ROW:
        return _write(reduction, table, rows, updates)
    return partial(_reduce_rows, _REDUCTIONS[reduction], table, rows, list(updates))


def _scatter_elements(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, updates = (arguments.operand(i) for i in range(3))
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


def _infer_scatter_nd(context: InferenceContext) -> tuple[ValueType, ...]:
    depth = check_row_indices(context, 0)
    _check_reduction(context)
    context.require_same_type((0, 2))
    data, indices = context.operand(0), context.operand(1)
    context.require_shape(2, (*indices.shape[:-1], *data.shape[depth:]))
    return (data,)


def _scatter_nd(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, updates = (arguments.operand(i) for i in range(3))
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


def _infer_one_hot(context: InferenceContext) -> tuple[ValueType, ...]:
    indices = context.require_type(0, NUMERIC)
    values = context.require_type(2, EVERY)
    context.require_shape(2, (2,))
    depth = context.known_scalar(1, "depth")
    if depth < 0:
        raise context.fail(f"depth={depth} of OneHot is out of range", expected=">= 0", got=depth)
    rank = len(indices.shape) + 1
    axis = context.axis_of(context.int_of("axis"), rank)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    return (ValueType(shape, values.data_type),)


def _one_hot_into(indices: Array, classes: Array, hit: Array) -> None:
    """Set `hit` where the class equals the index; negative ones count from the end, floats are
    truncated."""
    whole = np.trunc(indices)
    np.add(whole, whole.dtype.type(classes.size), out=whole, where=whole < 0)
    np.equal(whole, classes, hit)


def _one_hot(arguments: KernelArguments) -> Sequence[Thunk]:
    indices, values, out = arguments.operand(0), arguments.operand(2), arguments.outputs[0]
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


def _infer_tensor_scatter(context: InferenceContext) -> tuple[ValueType, ...]:
    cache = context.require_type(0, MOVED)
    context.require_same_type((0, 1))
    rank = context.require_rank(0, 2)
    context.require_rank(1, rank, rank)
    axis = context.axis_of(context.int_of("axis"), rank)
    context.require_word("mode", ("linear", "circular"))
    context.require(axis != 0, "axis of TensorScatter must not be the batch axis 0", got=axis)
    length = context.operand(1).shape[axis]
    context.require(
        length <= cache.shape[axis], "the update of TensorScatter is longer than the cache",
        expected=f"at most {cache.shape[axis]}", got=length,
    )  # fmt: skip
    context.require_shape(1, (*cache.shape[:axis], length, *cache.shape[axis + 1 :]))
    if context.present(2) is not None:
        context.require_type(2, INT64)
    context.require_shape(2, cache.shape[:1])
    return (cache,)


def _write_cache(cache: Array, update: Array, starts: Array | None, circular: bool) -> None:
    """Write the update to the cache; both are [batch, sequence, ...]."""
    size, length = cache.shape[1], update.shape[1]
    for row in range(cache.shape[0]):
        start = 0 if starts is None else int(starts[row])
        if start < 0 or (not circular and start + length > size):
            raise TaskError(
                "TensorScatter: a write index is out of range",
                expected=f"0 to {size - length}",
                got=str(start),
            )
        # Reduce the start first: the sum could overflow.
        positions = (start % max(size, 1) + np.arange(length)) % max(size, 1)
        cache[row, positions] = update[row]


def _tensor_scatter(arguments: KernelArguments) -> Sequence[Thunk]:
    past, update, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    axis = arguments.int_of("axis") % past.ndim
    circular = arguments.string_of("mode") == "circular"
    starts = arguments.optional(2)
    target, source = np.moveaxis(out, axis, 1), np.moveaxis(update, axis, 1)

    def write() -> None:
        _write_cache(target, source, starts, circular)

    return (*copy_steps(past, out), write)


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Gather", (2, 2), _infer_gather, _gather, attributes=declared(axis=0),
        gradient=gather_gradient, batching=batch_gather, checks=True,
    ),
    OpDef(
        "GatherElements", (2, 2), _infer_elements, _gather_elements, attributes=declared(axis=0),
        gradient=gather_elements_gradient, batching=along_axis, checks=True,
    ),
    OpDef(
        "GatherND", (2, 2), _infer_gather_nd, _gather_nd, attributes=declared(batch_dims=0),
        gradient=gather_nd_gradient, batching=batch_gather_rows, checks=True,
    ),
    OpDef(
        "TopK", (2, 2), _infer_top, _top, outputs=(1, 2),
        attributes=declared(axis=-1, largest=1, sorted=1), gradient=top_gradient,
        batching=first_along_axis,
    ),
    OpDef(
        "TensorScatter", (2, 3), _infer_tensor_scatter, _tensor_scatter,
        attributes=declared(axis=-2, mode="linear"), batching=batch_cache, checks=True,
    ),
    OpDef(
        "ScatterElements", (3, 3), _infer_scatter_elements, _scatter_elements,
        attributes=declared(axis=0, reduction="none"),
        gradient=partial(scatter_gradient, "GatherElements"), batching=along_axis, checks=True,
    ),
    OpDef(
        "ScatterND", (3, 3), _infer_scatter_nd, _scatter_nd, attributes=declared(reduction="none"),
        gradient=partial(scatter_gradient, "GatherND"), batching=batch_scatter_rows, checks=True,
    ),
    OpDef(
        "OneHot", (3, 3), _infer_one_hot, _one_hot, attributes=declared(axis=-1),
        gradient=one_hot_gradient, batching=batch_one_hot,
    ),
)  # fmt: skip
