"""Softmax, LogSoftmax and Hardmax along one axis; `stitch.SoftmaxGradient`.

Along the last axis rows are handled chunk by chunk. A Softmax first takes exponentials as they
are: maxima of short rows take as long as all the rest. Where a row's sum shows that this was not
good enough (or an operand is not finite), the row is done again with its maximum subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import along_axis
from stitch.ops.definition import Kernel, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import Gradient, GradientContext, no_gradient
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction import row_chunks
from stitch.ops.steps import CHUNK_SIZE, fill_step, overlaps, workspace
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, computed_nbytes, few
from stitch.program import Array, ValueType

#: Between these bounds a row's sum of exponentials is as good as one without its maximum: what
#: underflows is less than 1e-32 of the row.
LEAST_SUM, MOST_SUM = 1e-6, 1e30
#: What the steps of one chunk of rows take as Python objects.
_CHUNK_NBYTES = 3072


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, FLOATS)
    context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    return (data,)


def _operands(arguments: KernelArguments) -> tuple[Array, Array, int, Array]:
    """Source, output, axis, and a workspace with one element per softmax."""
    source, out = arguments.given(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % source.ndim
    shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
    return source, out, axis, workspace(shape, out.dtype)


def _softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _operands(arguments)
    if axis != out.ndim - 1 or overlaps(out, source):
        return (
            partial(np.maximum.reduce, source, axis, None, row, True),
            partial(np.subtract, source, row, out),
            partial(np.exp, out, out),
            partial(np.add.reduce, out, axis, None, row, True),
            partial(np.divide, out, row, out),
        )
    width = out.shape[-1]
    rows, results, sums = source.reshape(-1, width), out.reshape(-1, width), row.reshape(-1, 1)
    ones = np.ones((width, 1), out.dtype)
    steps: list[Thunk] = []
    for part in row_chunks((len(rows), width)):
        steps += _row_chunk(rows[part], results[part], sums[part], ones)
    return steps


def _row_chunk(source: Array, out: Array, row: Array, ones: Array) -> tuple[Thunk, ...]:
    """Softmax of the rows of one chunk, into another place; `row` gets their sums."""
    flat = row.reshape(-1)
    low, high = (np.array(bound, out.dtype) for bound in (LEAST_SUM, MOST_SUM))

    def check() -> None:
        if low <= np.minimum.reduce(flat) and np.maximum.reduce(flat) <= high:
            return
        # Only those rows: what a row gives must not depend on the others.
        again = np.flatnonzero(~((low <= flat) & (flat <= high)))
        some = source[again]
        some = np.exp(some - np.maximum.reduce(some, 1, keepdims=True))
        out[again], row[again] = some, np.dot(some, ones)

    return (
        partial(np.exp, source, out),
        partial(np.dot, out, ones, row),
        check,
        partial(np.divide, out, row, out),
    )


def _log_softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _operands(arguments)
    work = np.empty_like(out)
    return (
        partial(np.maximum.reduce, source, axis, None, row, True),
        partial(np.subtract, source, row, out),
        partial(np.exp, out, work),
        partial(np.add.reduce, work, axis, None, row, True),
        partial(np.log, row, row),
        partial(np.subtract, out, row, out),
    )


def _hardmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _operands(arguments)
    best = np.empty(row.shape, np.intp)
    return (
        partial(np.argmax, source, axis, best, keepdims=True),
        fill_step(out, 0),
        partial(np.put_along_axis, out, best, 1, axis),
    )


def softmax_gradient(context: GradientContext) -> Sequence[Any]:
    """By the result alone."""
    axis = context.int_of("axis")
    operands = context.gradient, context.output()
    return (context.apply("SoftmaxGradient", *operands, domain="stitch", axis=axis),)


def log_softmax_gradient(context: GradientContext) -> Sequence[Any]:
    """dx = dy - exp(y) sum(dy)."""
    total = context.apply("ReduceSum", context.gradient, [context.int_of("axis")], keepdims=1)
    return (context.gradient - context.apply("Exp", context.output()) * total,)


def _infer_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    y = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, y.shape)
    context.axis_of(context.int_of("axis"), context.require_rank(1, 1))
    return (y,)


def _softmax_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    """dx = y (dy - sum(dy y)) by the result's gradient and the result."""
    gradient, y, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    axis = arguments.int_of("axis") % y.ndim
    if axis != y.ndim - 1:
        total = workspace((*y.shape[:axis], 1, *y.shape[axis + 1 :]), out.dtype)
        return (
            partial(np.multiply, gradient, y, out),
            partial(np.add.reduce, out, axis, None, total, True),
            partial(np.subtract, gradient, total, out),
            partial(np.multiply, out, y, out),
        )
    shape = (y.size // y.shape[-1], y.shape[-1])
    parts = row_chunks(shape)
    total = workspace(parts[0].stop, out.dtype)
    steps: list[Thunk] = []
    for part in parts:
        dy, result, dx = (array.reshape(shape)[part] for array in (gradient, y, out))
        sums = total[: part.stop - part.start]
        steps += [
            partial(np.vecdot, dy, result, sums),
            partial(np.subtract, dy, sums[:, None], dx),
            partial(np.multiply, dx, result, dx),
        ]
    return steps


def _gradient_nbytes(context: WorkspaceContext) -> int:
    """A number for each softmax, or for each of a chunk of rows."""
    result = context.outputs[0]
    length = result.shape[context.int_of("axis") % len(result.shape)]
    return few.nbytes(context) + computed_nbytes(result) // max(length, 1)


def _rows(context: WorkspaceContext) -> tuple[int, int]:
    """How many softmaxes there are, and of how many elements each."""
    shape = context.outputs[0].shape
    width = max(1, shape[context.int_of("axis") % len(shape)])
    return math.prod(shape) // width, width


def _softmax_nbytes(context: WorkspaceContext) -> int:
    """A number for each softmax, a chunk of rows, and the steps of each chunk."""
    rows, width = _rows(context)
    at_once = min(rows, max(1, CHUNK_SIZE // width))
    itemsize = context.outputs[0].data_type.compute_dtype.itemsize
    # Rows that are done again are gathered first.
    return (rows + 4 * at_once * width) * itemsize + -(-rows // max(1, at_once)) * _CHUNK_NBYTES


def _log_softmax_nbytes(context: WorkspaceContext) -> int:
    rows, _ = _rows(context)
    result = context.outputs[0]
    return rows * result.data_type.compute_dtype.itemsize + computed_nbytes(result)


def _hardmax_nbytes(context: WorkspaceContext) -> int:
    """A number and a place for each softmax. NumPy looks for places along the last axis: what lies
    otherwise is copied."""
    rows, _ = _rows(context)
    result = context.outputs[0]
    is_last = context.int_of("axis") in (-1, len(result.shape) - 1)
    turned = 0 if is_last else computed_nbytes(result)
    return turned + rows * (result.data_type.compute_dtype.itemsize + np.intp(0).itemsize)


def _operator(
    name: str, kernel: Kernel, gradient: Gradient, nbytes: Callable[[WorkspaceContext], int]
) -> OpDef:
    return OpDef(
        name, (1, 1), _infer, kernel, attributes=declared(axis=-1), gradient=gradient,
        batching=along_axis, workspace=WorkspaceRule(nbytes),
    )  # fmt: skip


OPERATORS = (
    _operator("Softmax", _softmax, softmax_gradient, _softmax_nbytes),
    _operator("LogSoftmax", _log_softmax, log_softmax_gradient, _log_softmax_nbytes),
    _operator("Hardmax", _hardmax, no_gradient, _hardmax_nbytes),
    OpDef(
        "SoftmaxGradient", (2, 2), _infer_gradient, _softmax_gradient,
        attributes=declared(axis=-1), domain="stitch",
        batching=along_axis, workspace=WorkspaceRule(_gradient_nbytes, is_kept=False),
    ),
)  # fmt: skip
