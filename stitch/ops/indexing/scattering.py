"""Writing by index: ScatterElements, ScatterND, with or without a reduction; OneHot."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import int_of, string_of
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import EVERY, NUMERIC
from stitch.ops.indexing.gathering import (
    check_element_indices,
    check_row_indices,
    element_index_nbytes,
    flat_element_steps,
    flat_row_steps,
    row_index_nbytes,
)
from stitch.ops.indexing.indexing_gradients import (
    one_hot_gradient,
    scatter_elements_gradient,
    scatter_nd_gradient,
)
from stitch.ops.inference import (
    axis_of,
    known_scalar,
    operand,
    require_same_type,
    require_shape,
    require_type,
)
from stitch.ops.steps import copy_steps, given, ints_at, is_constant
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, operands
from stitch.program import Array, ValueType

REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _check_reduction(context: InferenceContext) -> None:
    reduction = string_of(context.attributes, "reduction")
    if reduction not in ("none", *REDUCTIONS):
        listed = ", ".join(("none", *REDUCTIONS))
        raise context.fail(f"{context.op} has no such reduction", expected=listed, got=reduction)
    if reduction != "none":
        require_type(context, 0, NUMERIC)


def _infer_elements(context: InferenceContext) -> tuple[ValueType, ...]:
    check_element_indices(context)
    _check_reduction(context)
    require_same_type(context, (0, 2))
    require_shape(context, 2, operand(context, 1).shape)
    return (operand(context, 0),)


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
    data, indices, updates = (given(arguments, i) for i in range(3))
    out = arguments.outputs[0]
    axis = int_of(arguments.attributes, "axis") % data.ndim
    flat, steps = flat_element_steps(
        "ScatterElements", data.shape, indices, axis, is_constant(arguments, 1)
    )
    copies = copy_steps(data, out)
    if updates.size == 0:
        return copies
    reduction = string_of(arguments.attributes, "reduction")
    write = _write(reduction, out.reshape(-1), flat.reshape(-1), updates.reshape(-1))
    return (*copies, *steps, write)


def _infer_nd(context: InferenceContext) -> tuple[ValueType, ...]:
    depth = check_row_indices(context, 0)
    _check_reduction(context)
    require_same_type(context, (0, 2))
    data, indices = operand(context, 0), operand(context, 1)
    require_shape(context, 2, (*indices.shape[:-1], *data.shape[depth:]))
    return (data,)


def _nd(arguments: KernelArguments) -> Sequence[Thunk]:
    data, indices, updates = (given(arguments, i) for i in range(3))
    out = arguments.outputs[0]
    rows, steps = flat_row_steps("ScatterND", data.shape, indices, 0, is_constant(arguments, 1))
    copies = copy_steps(data, out)
    if updates.size == 0:
        return copies
    depth = indices.shape[-1]
    table = out.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    reduction = string_of(arguments.attributes, "reduction")
    fresh = updates.reshape(rows.size, table.shape[1])
    return (*copies, *steps, _write_rows(reduction, table, rows.reshape(-1), fresh))


def _nd_workspace(context: WorkspaceContext) -> int:
    """Rows; where these are reduced one by one, an object for each and its place."""
    indices = context.inputs[1]
    assert indices is not None
    by_rows = string_of(context.attributes, "reduction") != "none"
    objects = 256 * math.prod(indices.shape[:-1]) if by_rows else 0
    return row_index_nbytes(context) + objects


def _infer_one_hot(context: InferenceContext) -> tuple[ValueType, ...]:
    indices = require_type(context, 0, NUMERIC)
    values = require_type(context, 2, EVERY)
    require_shape(context, 2, (2,))
    depth = known_scalar(context, 1, "depth")
    if depth < 0:
        raise context.fail("the depth of a OneHot is at least 0", got=str(depth))
    rank = len(indices.shape) + 1
    axis = axis_of(context, int_of(context.attributes, "axis"), rank)
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
    indices, values, out = given(arguments, 0), given(arguments, 2), arguments.outputs[0]
    depth = ints_at(arguments, 1)[0]
    axis = int_of(arguments.attributes, "axis") % out.ndim
    classes = np.arange(depth).reshape(-1, *(1,) * (out.ndim - 1 - axis))
    hit = np.empty(out.shape, np.bool_)
    off, on = values[0:1].reshape(()), values[1:2].reshape(())
    return (
        partial(_one_hot_into, np.expand_dims(indices, axis), classes, hit),
        partial(np.copyto, out, off),
        partial(np.copyto, out, on, where=hit),
    )


OPERATORS = (
    OpDef(
        "ScatterElements", (3, 3), _infer_elements, _elements,
        attributes={"axis": Attribute("int", 0), "reduction": Attribute("string", "none")},
        gradient=scatter_elements_gradient, workspace=WorkspaceRule(element_index_nbytes),
    ),
    OpDef(
        "ScatterND", (3, 3), _infer_nd, _nd,
        attributes={"reduction": Attribute("string", "none")}, gradient=scatter_nd_gradient,
        workspace=WorkspaceRule(_nd_workspace),
    ),
    OpDef(
        "OneHot", (3, 3), _infer_one_hot, _one_hot,
        attributes={"axis": Attribute("int", -1)}, gradient=one_hot_gradient, workspace=operands(1),
    ),
)  # fmt: skip
