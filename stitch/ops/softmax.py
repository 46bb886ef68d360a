"""Softmax, LogSoftmax and Hardmax along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.arithmetic_gradients import no_gradient
from stitch.ops.attributes import int_of
from stitch.ops.definition import Attribute, InferenceContext, Kernel, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import Gradient
from stitch.ops.inference import axis_of, require_rank, require_type
from stitch.ops.reduction_gradients import log_softmax_gradient, softmax_gradient
from stitch.ops.steps import fill_step, given
from stitch.program import Array, ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, FLOATS)
    axis_of(context, int_of(context.attributes, "axis"), require_rank(context, 0, 1))
    return (data,)


def _operands(arguments: KernelArguments) -> tuple[Array, Array, int, Array]:
    """Source, output, axis, and a workspace with one element per softmax."""
    source, out = given(arguments, 0), arguments.outputs[0]
    axis = int_of(arguments.attributes, "axis") % source.ndim
    shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
    return source, out, axis, np.empty(shape, out.dtype)


def _softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _operands(arguments)
    if out.size == 0:
        return ()
    return (
        partial(np.maximum.reduce, source, axis, None, row, True),
        partial(np.subtract, source, row, out),
        partial(np.exp, out, out),
        partial(np.add.reduce, out, axis, None, row, True),
        partial(np.divide, out, row, out),
    )


def _log_softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _operands(arguments)
    if out.size == 0:
        return ()
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
    if out.size == 0:
        return ()
    best = np.empty(row.shape, np.intp)
    return (
        partial(np.argmax, source, axis, best, keepdims=True),
        fill_step(out, 0),
        partial(np.put_along_axis, out, best, 1, axis),
    )


def _operator(name: str, kernel: Kernel, gradient: Gradient) -> OpDef:
    axis = {"axis": Attribute("int", -1)}
    return OpDef(name, (1, 1), _infer, kernel, attributes=axis, gradient=gradient)


OPERATORS = (
    _operator("Softmax", _softmax, softmax_gradient),
    _operator("LogSoftmax", _log_softmax, log_softmax_gradient),
    _operator("Hardmax", _hardmax, no_gradient),
)
