"""`stitch.Window`: rows at equal distances, along each of several axes: slides, dilations, repeats.

Comes in: rows, which of them is the first, how many rows on the next one is along each axis. Goes
out: the rows; at run time `TaskError` where one of them is out of range. The first row and the
distances are operands: they may change from run to run. Must not know: gradients, lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.errors import TaskError
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, INT64
from stitch.ops.indexing import window_rules as rules
from stitch.ops.indexing.row_strides import reached_rows, windowed
from stitch.ops.inference import InferenceContext
from stitch.ops.row_copies import row_copies
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule
from stitch.program import Array, ValueType


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


OPERATORS = (
    OpDef(
        "Window", (3, 3), _infer, _kernel,
        attributes=declared(lengths=Attribute("ints", required=True)), domain="stitch",
        gradient=rules.gradient, batching=rules.batching, workspace=WorkspaceRule(_nothing),
        checks=True,
    ),
)  # fmt: skip
