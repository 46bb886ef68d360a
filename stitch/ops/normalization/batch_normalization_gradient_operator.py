"""`stitch.BatchNormalizationGradient`: operand's, scale's and shift's gradients in training mode.

Operands are the result's gradient, the operand, the scale, and, if the forward pass has kept them,
the batch's own mean and variance, which are taken again otherwise. With c = x - mean and means over
the places of a channel in all samples:
dx = scale (dy - mean(dy) - c mean(dy c) / deviation^2) / deviation. In ONNX's words it is a dozen
passes; here chunks of the batch stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.normalization.channel_planes import ChannelSums, Planes, by_distance
from stitch.ops.normalization.layer_normalization import EPSILON
from stitch.ops.normalization.normalization_batching import batch_gradient
from stitch.ops.reduction import inverse_deviation
from stitch.ops.steps import CHUNK_SIZE, fill_step, scalar
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule, few
from stitch.program import Array, ValueType

#: From images [samples, channels, places] x and gradient, a place like these, and numbers of each
#: channel (along, offset, factor): steps that write x along + offset + gradient factor there.
LastPass = Callable[[Array, Array, Array, Array, Array, Array], Sequence[Thunk]]
#: So many deviations from zero a mean is near: three of 24 bits are lost.
NEAR = 8.0


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(5))
    rank = context.require_rank(1, 1)
    context.require_shape(0, x.shape)
    channels = (x.shape[1] if rank > 1 else 1,)
    # Both statistics, or none.
    for index in range(2, 5 if context.present(3) or context.present(4) else 3):
        context.require_shape(index, channels)
    weights = ValueType(channels, x.data_type)
    return (x, weights, weights)[: context.outputs]


def batch_gradient_steps(
    arguments: KernelArguments, last_pass: LastPass | None = None
) -> Sequence[Thunk]:
    """The operator's steps; `last_pass` comes in NumPy's place where means are near zero."""
    gradient, x, scale = (arguments.given(i) for i in range(3))
    out, *sums = arguments.outputs
    if x.size == 0:
        return [fill_step(total, 0) for total in sums]
    planes, channels = Planes(x), scale.shape
    inverse = np.empty(channels, scale.dtype)
    mean, variance = arguments.optional(3), arguments.optional(4)
    steps: list[Thunk] = []
    if mean is None or variance is None:
        mean, variance = (np.empty(channels, scale.dtype) for _ in "mv")
        steps += planes.statistics(mean, variance)
    steps += [
        partial(np.copyto, inverse, variance),
        *inverse_deviation(inverse, arguments.float_of("epsilon")),
    ]
    pulled = _Pulled(planes, gradient, mean, inverse, scale, last_pass)
    near, far = (pulled.steps(out, sums, is_near=is_near) for is_near in (True, False))
    return [*steps, partial(by_distance, mean, variance, NEAR, near, far)]


class _Pulled:
    """One gradient under construction, by a batch's statistics."""

    def __init__(
        self, planes: Planes, gradient: Array, mean: Array, inverse: Array, scale: Array,
        last_pass: LastPass | None,
    ) -> None:  # fmt: skip
        self.planes, self.gradient = planes, gradient.reshape(planes.x.shape)
        self.mean, self.inverse, self.scale = mean, inverse, scale
        self.last_pass = last_pass
        self.slope, self.slant, self.factor, self.along, self.offset = (
            np.empty(scale.shape, scale.dtype) for _ in range(5)
        )
        self.spread, refreshed = zip(
            *map(planes.over_places, (self.factor, self.along, self.offset)), strict=True
        )
        self.refreshed = [step for steps in refreshed for step in steps]
        self.products, self.slopes = ChannelSums(planes, mean), ChannelSums(planes, mean)
        self.before, self.chunks = planes.centered(mean)

    def steps(self, out: Array, sums: Sequence[Array], *, is_near: bool) -> list[Thunk]:
        """dx = factor dy - (along c + offset), and the sums per channel. Near zero, where little is
        lost so, c is not computed element by element: its mean is taken off what is summed."""
        steps = [] if is_near else [*self.before]
        for part, some, here, center in self.chunks:
            seen, given = self.planes.x[part, some], self.gradient[part, some]
            if not is_near:
                steps.append(center)
                seen = here
            steps += self.products.steps(part, some, seen, given)
            steps += self.slopes.plain(part, some, given)
        steps += [*self.slopes.means(self.slope), *self.products.means(self.slant)]
        return [*steps, *self._numbers(sums, is_near=is_near), *self._whole(out, is_near=is_near)]

    def _numbers(self, sums: Sequence[Array], *, is_near: bool) -> list[Thunk]:
        """Numbers per channel: the sums, and what elements are computed with."""
        slope, slant, factor, along = self.slope, self.slant, self.factor, self.along
        work, offset = np.empty_like(slope), self.offset
        count = scalar(self.planes.x.size // slope.size, slope)
        of_mean: tuple[Thunk, ...] = (
            partial(np.multiply, self.mean, slope, work), partial(np.subtract, slant, work, slant)
        )  # fmt: skip
        in_offset: tuple[Thunk, ...] = (
            partial(np.multiply, self.mean, along, work), partial(np.subtract, offset, work, offset)
        )  # fmt: skip
        return [
            *(of_mean if is_near else ()),
            partial(np.multiply, slant, self.inverse, slant),
            *(
                partial(np.multiply, value, count, total)
                for value, total in zip((slant, slope), sums, strict=False)
            ),
            partial(np.multiply, self.inverse, self.scale, factor),
            partial(np.multiply, slant, self.inverse, along),
            partial(np.multiply, along, factor, along),
            partial(np.multiply, slope, factor, offset),
            *(in_offset if is_near else ()),
        ]

    def _whole(self, out: Array, *, is_near: bool) -> list[Thunk]:
        """The operand's gradient, chunk by chunk."""
        result, (factors, alongs, offsets) = out.reshape(self.planes.x.shape), self.spread
        if is_near and self.last_pass is not None:
            along, offset = self.along, self.offset
            images = self.planes.x, self.gradient, result
            return [
                partial(np.negative, along, along),
                partial(np.negative, offset, offset),
                *self.last_pass(*images, along, offset, self.factor),
            ]
        steps = [*self.refreshed]
        # What came last is still in the caches.
        for part, some, here, center in reversed(self.chunks):
            n, place = part.stop - part.start, result[part, some]
            seen = here
            if is_near:
                seen = self.planes.x[part, some]
            else:
                steps.append(center)
            steps += [
                partial(np.multiply, seen, alongs[:n, some], here),
                partial(np.add, here, offsets[:n, some], here),
                partial(np.multiply, self.gradient[part, some], factors[:n, some], place),
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
    numbers = 12 * chunk + 4 * rows + 24 * channels + 2 * samples
    return few.nbytes(context) + numbers * x.data_type.compute_dtype.itemsize


OPERATORS = (
    OpDef(
        "BatchNormalizationGradient", (3, 5), _infer, batch_gradient_steps, (1, 3),
        attributes=declared(epsilon=EPSILON), domain="stitch",
        batching=batch_gradient, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
