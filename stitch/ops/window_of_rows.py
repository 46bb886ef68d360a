"""`stitch.Window`: a strided window of rows with any number of axes (slides, dilations, repeats).

The first row and the strides are operands, so they may change from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, INT64
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along
from stitch.program import Array, ValueType

# Row indices --------------------------------------------------------------------------------------


def reached_rows(base: int, strides: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return the least and the greatest row that a window reads; (0, -1) if it reads none.

    >>> reached_rows(3, [2, -1], [4, 3])
    (1, 9)
    """
    if 0 in lengths:
        return 0, -1
    spans = [(n - 1) * stride for n, stride in zip(lengths, strides, strict=True)]
    return base + sum(min(s, 0) for s in spans), base + sum(max(s, 0) for s in spans)


def are_in_range(base: int, strides: Sequence[int], lengths: Sequence[int], count: int) -> bool:
    """Return whether all rows that a window reads are in `range(count)`."""
    least, most = reached_rows(base, strides, lengths)
    return least > most or 0 <= least <= most < count


def _used_strides(strides: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield lengths and strides, with stride 0 for axes of at most one row."""
    reads = 0 not in lengths
    for length, stride in zip(lengths, strides, strict=True):
        yield length, stride if reads and length > 1 else 0


def row_numbers(base: int, strides: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return the row numbers of a window, int64, in the shape `lengths`.

    >>> row_numbers(1, [2, 1], [2, 3]).tolist()
    [[1, 2, 3], [3, 4, 5]]
    """
    rows = np.full(tuple(lengths), base, np.int64)
    for axis, (length, stride) in enumerate(_used_strides(strides, lengths)):
        rows += along(np.arange(length, dtype=np.int64) * stride, axis, len(lengths))
    return rows


def windowed(data: Array, base: int, strides: Sequence[int], lengths: Sequence[int]) -> Array:
    """Return the rows of a window, which must all be in range, as a view of the data."""
    moved = [stride * data.strides[0] for _, stride in _used_strides(strides, lengths)]
    shape = (*lengths, *data.shape[1:])
    first = data if 0 in lengths else data[base:]
    return np.lib.stride_tricks.as_strided(first, shape, (*moved, *data.strides[1:]))


# Copies of strided elements as runs of bytes ------------------------------------------------------

#: A last axis of at most `_FEW` runs of at most `_SHORT_NBYTES` bytes, with `_MANY` times as many
#: runs in front of it, is copied index by index, unless the arrays exceed `_CACHED_NBYTES`: NumPy's
#: inner loop has a high fixed cost.
_FEW, _MANY, _SHORT_NBYTES, _CACHED_NBYTES = 8, 32, 64, 1 << 20


def row_copies(there: Array, taken: Array) -> Sequence[tuple[Array, Array]]:
    """Split a strided copy into fewer, cheaper copies: pairs of target and source.

    Trailing axes that are dense in both arrays merge to one element. 4096 rows of 8 float32 in
    runs of 4: 9 us merged, 7 us index by index, 14 us as one copy.
    """
    shape, nbytes, axes = there.shape, there.itemsize, there.ndim
    if 0 in shape:
        return ()
    while axes and _is_dense(shape[axes - 1], nbytes, there.strides, taken.strides, axes - 1):
        axes -= 1
        nbytes *= shape[axes]
    if not axes:
        return [(there, taken)]
    if nbytes > there.itemsize:
        joined = (*shape[:axes], nbytes // there.itemsize)
        kind = np.dtype((np.void, nbytes))
        there, taken = (
            np.reshape(array, joined, copy=False).view(kind)[..., 0] for array in (there, taken)
        )
    *outer, last = there.shape
    is_cached = nbytes <= _SHORT_NBYTES and there.nbytes <= _CACHED_NBYTES
    if is_cached and last <= _FEW and math.prod(outer) >= _MANY * last:
        return [(there[..., i], taken[..., i]) for i in range(last)]
    return [(there, taken)]


def _is_dense(
    length: int, nbytes: int, there: Sequence[int], taken: Sequence[int], axis: int
) -> bool:
    return length == 1 or there[axis] == nbytes == taken[axis]


# Gradient and batching ----------------------------------------------------------------------------


def gradient(c: GradientContext) -> Sequence[Any]:
    """Scatter-add rows; sum first over axes of stride 0."""
    data, lengths, flowing = c.type_of(0), c.ints_of("lengths"), c.gradient
    assert lengths is not None
    table = c.fill(0, data.shape, data.data_type)
    if 0 in lengths:
        return table, None, None
    base, strides = c.constants[1], c.constants[2]
    if base is not None and strides is not None:
        axes = zip(lengths, strides.tolist(), strict=True)
        still = [axis for axis, (length, step) in enumerate(axes) if length > 1 and not step]
        if still:
            flowing = c.apply("ReduceSum", flowing, still, keepdims=1)
            lengths = tuple(1 if axis in still else n for axis, n in enumerate(lengths))
        rows = c.constant(row_numbers(int(base), strides.tolist(), lengths)[..., None])
    else:
        rows = c.reshape(_computed_rows(c, c.input(1), c.input(2), lengths), (*lengths, 1))
    return c.apply("ScatterND", table, rows, flowing, reduction="add"), None, None


def _computed_rows(
    c: GradientContext | BatchingContext, base: Any, strides: Any, lengths: Sequence[int]
) -> Any:
    """Return row numbers of windows whose first row and strides are values, batched or not."""
    rank, leading = len(lengths), strides.shape[:-1]
    rows = c.reshape(base, (*base.shape, *(1,) * rank))
    for axis, length in enumerate(lengths):
        step = c.apply("Slice", strides, [axis], [axis + 1], [-1])
        step = c.reshape(step, (*leading, *(1,) * rank))
        places = along(np.arange(length, dtype=np.int64), axis, rank)
        rows = c.apply("Add", rows, c.apply("Mul", step, places))
    return rows


def batching(c: BatchingContext) -> Sequence[Any]:
    lengths = c.ints_of("lengths")
    assert lengths is not None
    data, base, strides = c.operands
    if c.varies(1, 2):
        return (_own_windows(c, lengths),)
    count, leaf = c.shape()[0], c.shape()[1:]
    first, steps = c.constants[1], c.constants[2]
    if (
        first is not None
        and steps is not None
        and are_in_range(int(first), steps.tolist(), lengths, count)
    ):
        # The batch is one more axis of the window, over the rows of all examples.
        rows = c.reshape(data, (c.batch_size * count, *leaf))
        joined = np.array([count, *steps.tolist()], np.int64)
        return c.emit(rows, base, joined, lengths=(c.batch_size, *lengths))
    # Move the batch axis into each row: rows of one example are not consecutive otherwise.
    order = [1, 0, *range(2, len(leaf) + 2)]
    (found,) = c.emit(c.apply("Transpose", data, perm=order), base, strides)
    return (c.move_to_front(found, len(lengths)),)


def _own_windows(c: BatchingContext, lengths: Sequence[int]) -> Any:
    """Gather by row numbers if the first row or the strides vary over the batch."""
    data, base, strides = c.operands
    count, whole = c.shape()[0], (c.batch_size, *lengths)
    # Clipped values stay out of range, but their sums cannot overflow.
    base = c.apply("Clip", base, np.array(-1), np.array(count))
    strides = c.apply("Clip", strides, np.array(-count), np.array(count))
    rows = _computed_rows(c, base, strides, lengths)
    if rows.shape != whole:
        rows = c.apply("Expand", rows, list(whole))
    # Negative numbers would count from the end.
    is_before = c.apply("Less", rows, np.array(0))
    rows = c.apply("Where", is_before, np.array(count), rows)
    if not c.varies(0):
        return c.apply("Gather", data, rows, axis=0)
    return c.apply("GatherND", data, c.reshape(rows, (*whole, 1)), batch_dims=1)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_rank(0, 1)
    for index in (1, 2):
        context.require_type(index, INT64)
    context.require_shape(1, ())
    context.require_rank(2, 1, 1)
    count = context.operand(2).shape[0]
    lengths = context.spatial_ints("lengths", (1,) * count, least=0)
    return (ValueType((*lengths, *data.shape[1:]), data.data_type),)


def _copies(
    data: Array, base: Array, strides: Array, lengths: tuple[int, ...], out: Array
) -> Sequence[tuple[Array, Array]]:
    """Return pairs of target and source; raise `TaskError` for rows out of range."""
    first, steps, count = int(base), strides.tolist(), len(data)
    least, most = reached_rows(first, steps, lengths)
    if least <= most and (least < 0 or most >= count):
        raise TaskError(
            "Window: a row is out of range",
            expected=f"0 to {count - 1}" if count else "no row: axis of size 0",
            got=f"{least} to {most}",
        )
    return row_copies(out, windowed(data, first, steps, lengths)) if out.size else ()


def _copy(data: Array, base: Array, strides: Array, lengths: tuple[int, ...], out: Array) -> None:
    for pair in _copies(data, base, strides, lengths, out):
        np.copyto(*pair)


def _copy_run(
    data: Array, base: Array, strides: Array, lengths: tuple[int, ...], out: Array
) -> None:
    """As `_copy` for at most one axis: a tenth of the time if rows are consecutive."""
    first = int(base)
    if not lengths:
        if 0 <= first < len(data):
            out[...] = data[first]
            return
    elif strides[0] == 1 and 0 <= first <= len(data) - lengths[0]:
        out[...] = data[first : first + lengths[0]]
        return
    _copy(data, base, strides, lengths, out)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    data, base, strides = (arguments.operand(i) for i in range(3))
    lengths, out = arguments.ints_of("lengths"), arguments.outputs[0]
    assert lengths is not None
    if not (arguments.is_constant(1) and arguments.is_constant(2)):
        copy = _copy_run if len(lengths) < 2 else _copy
        return (partial(copy, data, base, strides, lengths, out),)
    return [partial(np.copyto, *pair) for pair in _copies(data, base, strides, lengths, out)]


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Window", (3, 3), _infer, _kernel,
        attributes=declared(lengths=Attribute("ints", required=True)), domain="stitch",
        gradient=gradient, batching=batching, checks=True,
    ),
)  # fmt: skip
