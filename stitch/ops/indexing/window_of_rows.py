"""`stitch.Window`: rows at equal distances, along each of several axes: slides, dilations, repeats.

The first row and the distances are operands: they may change from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import BatchingContext
from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
)
from stitch.ops.element_types import EVERY, INT64
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import along
from stitch.program import Array, ValueType

# Row indices --------------------------------------------------------------------------------------


def reached_rows(base: int, strides: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest row that a window reads; (0, -1) where it reads none.

    >>> reached_rows(3, [2, -1], [4, 3])
    (1, 9)
    """
    if 0 in lengths:
        return 0, -1
    spans = [(n - 1) * stride for n, stride in zip(lengths, strides, strict=True)]
    return base + sum(min(s, 0) for s in spans), base + sum(max(s, 0) for s in spans)


def are_in_range(base: int, strides: Sequence[int], lengths: Sequence[int], count: int) -> bool:
    """Whether all rows that a window reads are among so many."""
    least, most = reached_rows(base, strides, lengths)
    return least > most or 0 <= least <= most < count


def moving(strides: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths and strides; where there is one row, or none, nothing moves, whatever its stride."""
    reads = 0 not in lengths
    for length, stride in zip(lengths, strides, strict=True):
        yield length, stride if reads and length > 1 else 0


def row_numbers(base: int, strides: Sequence[int], lengths: Sequence[int]) -> Any:
    """The rows of a window that reads some, int64: as many as its lengths say.

    >>> row_numbers(1, [2, 1], [2, 3]).tolist()
    [[1, 2, 3], [3, 4, 5]]
    """
    rows = np.full(tuple(lengths), base, np.int64)
    for axis, (length, stride) in enumerate(moving(strides, lengths)):
        rows += along(np.arange(length, dtype=np.int64) * stride, axis, len(lengths))
    return rows


def windowed(data: Array, base: int, strides: Sequence[int], lengths: Sequence[int]) -> Array:
    """The rows of a window, all of them in range, as a view of the data."""
    moved = [stride * data.strides[0] for _, stride in moving(strides, lengths)]
    shape = (*lengths, *data.shape[1:])
    first = data if 0 in lengths else data[base:]
    return np.lib.stride_tricks.as_strided(first, shape, (*moved, *data.strides[1:]))


# Copies of strided elements as runs of bytes ------------------------------------------------------

#: A last axis of so few short runs, with many times as many in front of it, is copied place by
#: place: a loop of NumPy's for three of them takes longer than to copy them. But memory beyond the
#: caches is gone through once.
_FEW, _MANY, _SHORT_NBYTES, _CACHED_NBYTES = 8, 32, 64, 1 << 20


def row_copies(there: Array, taken: Array) -> Sequence[tuple[Array, Array]]:
    """Where runs go, and where they are: all elements together.

    NumPy copies an axis of a few elements by a loop of its own; what lies dense in both arrays is
    one element here, moved at once. 4096 rows of 8 float32, 4 by 4 from far apart: 9 us so, 7 us
    place by place, and 14 us else.
    """
    shape, nbytes, axes = there.shape, there.itemsize, there.ndim
    if 0 in shape:
        return ()
    while axes and _goes_on(shape[axes - 1], nbytes, there.strides, taken.strides, axes - 1):
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


def _goes_on(
    length: int, nbytes: int, there: Sequence[int], taken: Sequence[int], axis: int
) -> bool:
    return length == 1 or there[axis] == nbytes == taken[axis]


# Gradient and batching ----------------------------------------------------------------------------


def gradient(c: GradientContext) -> Sequence[Any]:
    """Rows are added where they came from; what was one row all along an axis is summed first."""
    data, lengths, flowing = c.type_of(0), c.ints_of("lengths"), c.gradient
    assert lengths is not None
    table = c.zeros(data.shape, data.data_type)
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
        rows = c.shaped(_computed_rows(c, c.input(1), c.input(2), lengths), (*lengths, 1))
    return c.apply("ScatterND", table, rows, flowing, reduction="add"), None, None


def _computed_rows(
    c: GradientContext | BatchingContext, base: Any, strides: Any, lengths: Sequence[int]
) -> Any:
    """Row indices of windows whose first row and strides are values, batched or not."""
    rank, leading = len(lengths), strides.shape[:-1]
    rows = c.shaped(base, (*base.shape, *(1,) * rank))
    for axis, length in enumerate(lengths):
        step = c.apply("Slice", strides, [axis], [axis + 1], [-1])
        step = c.shaped(step, (*leading, *(1,) * rank))
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
        rows = c.shaped(data, (c.batch_size * count, *leaf))
        joined = np.array([count, *steps.tolist()], np.int64)
        return c.again(rows, base, joined, lengths=(c.batch_size, *lengths))
    # Move the batch axis into each row: rows of one example are not consecutive otherwise.
    order = [1, 0, *range(2, len(leaf) + 2)]
    (found,) = c.again(c.apply("Transpose", data, perm=order), base, strides)
    return (c.in_front(found, len(lengths)),)


def _own_windows(c: BatchingContext, lengths: Sequence[int]) -> Any:
    """Windows whose start varies over the batch: gather rows by index."""
    data, base, strides = c.operands
    count, whole = c.shape()[0], (c.batch_size, *lengths)
    # Far outside is outside; of numbers that are cut no sum is too large for its type.
    base = c.apply("Clip", base, np.array(-1), np.array(count))
    strides = c.apply("Clip", strides, np.array(-count), np.array(count))
    rows = _computed_rows(c, base, strides, lengths)
    if rows.shape != whole:
        rows = c.apply("Expand", rows, list(whole))
    # A number below 0 would count from the end.
    is_before = c.apply("Less", rows, np.array(0))
    rows = c.apply("Where", is_before, np.array(count), rows)
    if not c.varies(0):
        return c.apply("Gather", data, rows, axis=0)
    return c.apply("GatherND", data, c.shaped(rows, (*whole, 1)), batch_dims=1)


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
    """What goes where; raises `TaskError` for rows out of range."""
    first, steps, count = int(base), strides.tolist(), len(data)
    least, most = reached_rows(first, steps, lengths)
    if least <= most and (least < 0 or most >= count):
        raise TaskError(
            "Window: a row is out of range",
            expected=f"0 to {count - 1}" if count else "no row: there is none",
            got=f"{least} to {most}",
        )
    return row_copies(out, windowed(data, first, steps, lengths)) if out.size else ()


def _copy(data: Array, base: Array, strides: Array, lengths: tuple[int, ...], out: Array) -> None:
    for pair in _copies(data, base, strides, lengths, out):
        np.copyto(*pair)


def _copy_run(
    data: Array, base: Array, strides: Array, lengths: tuple[int, ...], out: Array
) -> None:
    """As `_copy`, of one axis at most: what is one run of memory takes a tenth of the time."""
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
    data, base, strides = (arguments.given(i) for i in range(3))
    lengths, out = arguments.ints_of("lengths"), arguments.outputs[0]
    assert lengths is not None
    if not (arguments.is_constant(1) and arguments.is_constant(2)):
        copy = _copy_run if len(lengths) < 2 else _copy
        return (partial(copy, data, base, strides, lengths, out),)
    return [partial(np.copyto, *pair) for pair in _copies(data, base, strides, lengths, out)]


def _nothing(context: WorkspaceContext) -> int:
    return 0


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Window", (3, 3), _infer, _kernel,
        attributes=declared(lengths=Attribute("ints", required=True)), domain="stitch",
        gradient=gradient, batching=batching, workspace=WorkspaceRule(_nothing),
        checks=True,
    ),
)  # fmt: skip
