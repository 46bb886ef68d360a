"""`stitch.SoftmaxGradient`: the operand's gradient of a Softmax, dx = y (dy - sum(dy y)).

Operands are the result's gradient and the result. Along the last axis rows are handled chunk by
chunk and stay in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction import row_chunks
from stitch.ops.steps import workspace
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, computed_nbytes, few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    y = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, y.shape)
    context.axis_of(context.int_of("axis"), context.require_rank(1, 1))
    return (y,)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, y, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    if out.size == 0:
        return ()
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


def _workspace(context: WorkspaceContext) -> int:
    """A number for each softmax, or for each of a chunk of rows."""
    result = context.outputs[0]
    length = result.shape[context.int_of("axis") % len(result.shape)]
    return few.nbytes(context) + computed_nbytes(result) // max(length, 1)


OPERATORS = (
    OpDef(
        "SoftmaxGradient", (2, 2), _infer, _kernel,
        attributes={"axis": Attribute("int", -1)}, domain="stitch",
        workspace=WorkspaceRule(_workspace, is_kept=False),
    ),
)  # fmt: skip
