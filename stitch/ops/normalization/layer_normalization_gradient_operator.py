"""`stitch.LayerNormalizationGradient`: operand's, scale's and shift's gradients of a layer.

Operands are the result's gradient, the operand, the mean and inverse deviation of its rows (as
LayerNormalization gives them), and the scale. With c = x - mean and h = dy scale:
dx = (h - mean(h) - c mean(h c) / deviation^2) / deviation. In ONNX's words it is a dozen passes;
here rows are handled chunk by chunk and stay in the caches. Libraries have it as one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.normalization.normalization_batching import layer_gradient
from stitch.ops.reduction import SPREAD_FROM, row_chunks
from stitch.ops.steps import CHUNK_SIZE, fill_step, scalar, workspace
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import Array, ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(5))
    axis = context.axis_of(context.int_of("axis"), context.require_rank(1, 1))
    row = (*x.shape[:axis], *(1,) * (len(x.shape) - axis))
    for index, shape in ((0, x.shape), (2, row), (3, row), (4, x.shape[axis:])):
        context.require_shape(index, shape)
    weights = ValueType(x.shape[axis:], x.data_type)
    return (x, weights, weights)[: context.outputs]


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x, mean, inverse, scale = (arguments.given(i) for i in range(5))
    out, *sums = arguments.outputs
    if x.size == 0:
        return [fill_step(total, 0) for total in sums]
    axis = arguments.int_of("axis") % x.ndim
    shape = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    chunks = _Chunks(shape, scale.reshape(1, -1), [s.reshape(1, -1) for s in sums])
    steps = chunks.before()
    rows = mean.reshape(-1, 1), inverse.reshape(-1, 1)
    for part in chunks.parts:
        operands = gradient.reshape(shape)[part], x.reshape(shape)[part]
        steps += chunks.steps(*operands, rows[0][part], rows[1][part], out.reshape(shape)[part])
    return steps


class _Chunks:
    """What the chunks of rows of one layer share."""

    def __init__(self, shape: tuple[int, int], scale: Array, sums: Sequence[Array]) -> None:
        self.parts = row_chunks(shape)
        self.scale, self.sums, self.first = scale, sums, True
        wide, dtype = (self.parts[0].stop, shape[1]), scale.dtype
        self.centred, self.product = (workspace(wide, dtype) for _ in range(2))
        #: The scale over the length of a row: a product with it is a mean.
        self.share = workspace((shape[1], 1), dtype)
        self.slant, self.mean = (workspace((wide[0], 1), dtype) for _ in range(2))
        self.more, self.ones = workspace((1, shape[1]), dtype), np.ones((1, wide[0]), dtype)
        # One row of numbers multiplies half as fast as a whole chunk of them does.
        self.spread = workspace(wide, dtype) if len(self.parts) >= SPREAD_FROM else None

    def before(self) -> list[Thunk]:
        """Steps ahead of all chunks."""
        width = scalar(self.share.size, self.share)
        steps: list[Thunk] = [partial(np.divide, self.scale.T, width, self.share)]
        return (
            steps if self.spread is None else [*steps, partial(np.copyto, self.spread, self.scale)]
        )

    def steps(
        self, gradient: Array, x: Array, mean: Array, inverse: Array, out: Array
    ) -> list[Thunk]:
        """The steps of one chunk of rows; `mean` and `inverse` are columns."""
        count = len(x)
        c, p = self.centred[:count], self.product[:count]
        slant, average = self.slant[:count], self.mean[:count]
        scale = self.scale if self.spread is None else self.spread[:count]
        steps: list[Thunk] = [
            partial(np.subtract, x, mean, c),
            partial(np.multiply, gradient, c, p),
            *self._summed(inverse.T, p, 0),
            *self._summed(self.ones[:, :count], gradient, 1),
            partial(np.dot, p, self.share, slant),
            partial(np.multiply, slant, inverse, slant),
            partial(np.multiply, slant, inverse, slant),
            partial(np.multiply, c, slant, c),
            partial(np.multiply, gradient, scale, out),
            partial(np.subtract, out, c, out),
            partial(np.dot, gradient, self.share, average),
            partial(np.subtract, out, average, out),
            partial(np.multiply, out, inverse, out),
        ]
        self.first = False
        return steps

    def _summed(self, weights: Array, rows: Array, index: int) -> list[Thunk]:
        """A weighted sum of rows, on top of that of the chunks before."""
        if index >= len(self.sums):
            return []
        total = self.sums[index]
        if self.first:
            return [partial(np.dot, weights, rows, total)]
        return [partial(np.dot, weights, rows, self.more), partial(np.add, total, self.more, total)]


def _workspace(context: WorkspaceContext) -> int:
    """Three chunks of rows, and rows of weights and sums."""
    x, scale = context.operand(1), context.operand(4)
    width = math.prod(scale.shape)
    chunk = min(math.prod(x.shape), max(CHUNK_SIZE, width))
    return few.nbytes(context) + (3 * chunk + 4 * width) * x.data_type.compute_dtype.itemsize


OPERATORS = (
    OpDef(
        "LayerNormalizationGradient", (5, 5), _infer, _kernel, (1, 3), attributes=declared(axis=-1),
        domain="stitch",
        batching=layer_gradient, workspace=WorkspaceRule(_workspace, is_kept=False),
    ),
)  # fmt: skip
