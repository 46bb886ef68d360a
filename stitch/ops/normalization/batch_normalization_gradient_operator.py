"""`stitch.BatchNormalizationGradient`: operand's, scale's and shift's gradients in training mode.

Operands are the result's gradient, the operand, and the scale; statistics are the batch's own. With
c = x - mean and means over the places of a channel in all samples:
dx = scale (dy - mean(dy) - c mean(dy c) / deviation^2) / deviation. In ONNX's words it is a dozen
passes; here chunks of the batch stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.normalization.channel_planes import ChannelSums, Planes
from stitch.ops.normalization.layer_normalization import EPSILON
from stitch.ops.normalization.normalization_batching import batch_gradient
from stitch.ops.reduction import inverse_deviation
from stitch.ops.steps import CHUNK_SIZE, fill_step, scalar
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(3))
    rank = context.require_rank(1, 1)
    context.require_shape(0, x.shape)
    channels = (x.shape[1] if rank > 1 else 1,)
    context.require_shape(2, channels)
    weights = ValueType(channels, x.data_type)
    return (x, weights, weights)[: context.outputs]


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x, scale = (arguments.given(i) for i in range(3))
    out, *sums = arguments.outputs
    if x.size == 0:
        return [fill_step(total, 0) for total in sums]
    planes, channels = Planes(x), scale.shape
    gradient, result = (a.reshape(planes.x.shape) for a in (gradient, out))
    mean, slope, inverse, slant, along = (np.empty(channels, scale.dtype) for _ in range(5))
    before, chunks = planes.centered(mean)
    squares, products = ChannelSums(planes, mean), ChannelSums(planes, mean)
    steps = [*planes.means(planes.x, mean), *planes.means(gradient, slope), *before]
    for part, some, here, center in chunks:
        steps += [
            center, *squares.steps(part, some, here, here),
            *products.steps(part, some, here, gradient[part, some]),
        ]  # fmt: skip
    steps += [
        *squares.means(inverse),
        *inverse_deviation(inverse, arguments.float_of("epsilon")),
        *products.means(slant),
        partial(np.multiply, slant, inverse, slant),
    ]
    count = scalar(x.size // channels[0], mean)
    steps += [
        partial(np.multiply, value, count, total)
        for value, total in zip((slant, slope), sums, strict=False)
    ]
    # dx = factor dy - along c - offset
    steps += [
        partial(np.multiply, slant, inverse, along),
        partial(np.multiply, inverse, scale, inverse),
        partial(np.multiply, along, inverse, along),
        partial(np.multiply, slope, inverse, slope),
    ]
    (factors, first), (alongs, second), (offsets, third) = map(
        planes.over_places, (inverse, along, slope)
    )
    steps += [*first, *second, *third]
    # What came last is still in the caches.
    for part, some, here, center in reversed(chunks):
        n, place = part.stop - part.start, result[part, some]
        steps += [
            center,
            partial(np.multiply, here, alongs[:n, some], here),
            partial(np.add, here, offsets[:n, some], here),
            partial(np.multiply, gradient[part, some], factors[:n, some], place),
            partial(np.subtract, place, here, place),
        ]
    return steps


def _workspace(context: WorkspaceContext) -> int:
    """Chunks of the batch and of numbers spread over it, and numbers for planes and channels."""
    x = context.operand(1)
    samples, channels = x.shape[0], x.shape[1] if len(x.shape) > 1 else 1
    places = math.prod(x.shape[2:])
    chunk = min(math.prod(x.shape), max(CHUNK_SIZE, places))
    rows = max(samples * channels, channels * places)
    numbers = 8 * chunk + 4 * rows + 8 * channels + 2 * samples
    return few.nbytes(context) + numbers * x.data_type.compute_dtype.itemsize


OPERATORS = (
    OpDef(
        "BatchNormalizationGradient", (3, 3), _infer, _kernel, (1, 3),
        attributes=declared(epsilon=EPSILON), domain="stitch",
        batching=batch_gradient, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
