"""BatchNormalization: by stored statistics, or by those of the batch (training mode); LRN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import float_of, int_of
from stitch.ops.batching import in_first_axis
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.normalization import normalization_batching as batching
from stitch.ops.normalization import normalization_gradients as gradients
from stitch.ops.normalization.layer_normalization import EPSILON
from stitch.ops.reduction import SPREAD_FROM, inverse_deviation, row_means
from stitch.ops.steps import CHUNK_SIZE, bound, fill_step, scalar, stretches, workspace
from stitch.ops.workspaces import operands
from stitch.program import Array, ValueType

#: From this many places on, the sum of a channel's squares is a product of its row by itself.
SHORT_ROW = 16


def _infer_batch(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    rank = context.require_rank(0, 1)
    channels = (x.shape[1] if rank > 1 else 1,)
    for index in range(1, 5):
        context.require_type(index, FLOATS)
        context.require_shape(index, channels)
    context.require_same_type((1, 2))
    context.require_same_type((3, 4))
    training = context.int_of("training_mode")
    if context.outputs > 1 and not training:
        raise context.fail(
            "BatchNormalization gives running statistics in training mode only",
            expected="1 output",
            got=context.outputs,
        )
    statistics = ValueType(channels, context.require_type(3, FLOATS).data_type)
    return (x, statistics, statistics)[: context.outputs]


def _batch(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, shift, mean, variance = (arguments.given(i) for i in range(5))
    out, epsilon = arguments.outputs[0], arguments.float_of("epsilon")
    dtype, steps = out.dtype, []
    if out.size == 0:
        # Of nothing there are no statistics.
        return [fill_step(total, math.nan) for total in arguments.outputs[1:]]
    planes = _Planes(x)
    if arguments.int_of("training_mode"):
        old = mean, variance
        mean, variance = np.empty(mean.shape, dtype), np.empty(mean.shape, dtype)
        steps += planes.statistics(mean, variance)
        momentum = arguments.float_of("momentum")
        fresh = zip(arguments.outputs[1:], old, (mean, variance), strict=False)
        for running, before, now in fresh:
            steps += _running_statistics(running, before, now, momentum)
    factor, offset = np.empty(scale.shape, dtype), np.empty(scale.shape, dtype)
    fold: list[Thunk] = [
        partial(np.copyto, factor, variance, "unsafe"),
        *inverse_deviation(factor, epsilon),
        partial(np.multiply, factor, scale, factor, casting="unsafe"),
        partial(np.multiply, mean, factor, offset, casting="unsafe"),
        partial(np.subtract, shift, offset, offset, casting="unsafe"),
    ]
    fixed = not steps and all(arguments.is_constant(i) for i in range(1, 5))
    return [*steps, *bound(fold, fixed), *planes.scale_and_shift(factor, offset, out)]


class _Planes:
    """A batch as (samples, channels, places), cut into dense chunks that stay in the caches.

    A number per channel is spread over a chunk's places once: whole arrays are twice as fast to
    combine as arrays that broadcast. A few chunks only would not make up for it.
    """

    def __init__(self, x: Array) -> None:
        samples, channels = x.shape[0], x.shape[1] if x.ndim > 1 else 1
        self.x = x.reshape(samples, channels, -1)
        places = self.x.shape[2]
        at_once = min(samples, max(1, CHUNK_SIZE // (channels * places)))
        whole = at_once > 1 or channels * places <= CHUNK_SIZE
        wide = channels if whole else max(1, CHUNK_SIZE // places)
        self.chunks = [
            (part, some)
            for some in stretches(channels, wide)
            for part in stretches(samples, at_once)
        ]
        # One channel at a time needs no more than its number.
        self.spreads = samples >= SPREAD_FROM * at_once and wide > 1
        self.wide = (at_once, channels, places if self.spreads else 1)

    def over_places(self, vector: Array) -> tuple[Array, list[Thunk]]:
        """A number per channel for all chunks, and the steps that refresh it."""
        column = vector.reshape(1, -1, 1)
        if not self.spreads:
            return np.broadcast_to(column, self.wide), []
        spread = workspace(self.wide, vector.dtype)
        return spread, [partial(np.copyto, spread, column)]

    def statistics(self, mean: Array, variance: Array) -> list[Thunk]:
        """Mean and variance per channel."""
        samples, channels, places = self.x.shape
        if places < SHORT_ROW:
            return self._over_samples(mean, variance)
        sums = np.empty((samples, channels), mean.dtype)
        steps: list[Thunk] = [
            *row_means(self.x.reshape(-1, places), sums.reshape(-1)),
            partial(np.add.reduce, sums, 0, None, mean),
            partial(np.divide, mean, scalar(samples, mean), mean),
        ]
        before, centered = self._centered(mean)
        steps += before
        for (part, some), (here, center) in zip(self.chunks, centered, strict=True):
            steps += [center, partial(np.vecdot, here, here, sums[part, some])]
        return [
            *steps,
            partial(np.add.reduce, sums, 0, None, variance),
            partial(np.divide, variance, scalar(samples * places, variance), variance),
        ]

    def _over_samples(self, mean: Array, variance: Array) -> list[Thunk]:
        """The same where channels have few places, or one: sums go over a chunk's samples first."""
        samples, channels, places = self.x.shape
        at_once = self.wide[0]
        sums = np.empty((-(-samples // at_once), channels, places), mean.dtype)
        ones, count = np.ones((1, samples), mean.dtype), scalar(samples * places, mean)
        steps: list[Thunk] = [
            partial(np.dot, ones, self.x.reshape(samples, -1), sums[:1].reshape(1, -1)),
            partial(np.add.reduce, sums[0], 1, None, mean),
            partial(np.divide, mean, count, mean),
        ]
        before, centered = self._centered(mean)
        steps += before
        for (part, some), (here, center) in zip(self.chunks, centered, strict=True):
            flat, row = here.reshape(here.shape[0], -1), sums[part.start // at_once, some]
            steps += [
                center,
                partial(np.multiply, here, here, here),
                partial(np.dot, ones[:, : here.shape[0]], flat, row.reshape(1, -1)),
            ]
        return [
            *steps,
            partial(np.add.reduce, sums, (0, 2), None, variance),
            partial(np.divide, variance, count, variance),
        ]

    def _centered(self, mean: Array) -> tuple[list[Thunk], list[tuple[Array, Thunk]]]:
        """Steps before; then per chunk its workspace and the step that subtracts the means."""
        means, before = self.over_places(mean)
        wide = self.chunks[0][1].stop
        work = workspace((self.wide[0], wide, self.x.shape[2]), mean.dtype)
        chunks: list[tuple[Array, Thunk]] = []
        for part, some in self.chunks:
            count = part.stop - part.start
            here = work[:count, : some.stop - some.start]
            step = partial(np.subtract, self.x[part, some], means[:count, some], here)
            chunks.append((here, step))
        return before, chunks

    def scale_and_shift(self, factor: Array, offset: Array, out: Array) -> list[Thunk]:
        """out = factor x + offset, with a number of each per channel."""
        result = out.reshape(self.x.shape)
        (factors, steps), (offsets, more) = map(self.over_places, (factor, offset))
        steps = [*steps, *more]
        for part, some in self.chunks:
            target, count = result[part, some], part.stop - part.start
            steps += [
                partial(np.multiply, self.x[part, some], factors[:count, some], target),
                partial(np.add, target, offsets[:count, some], target),
            ]
        return steps


def _running_statistics(out: Array, before: Array, now: Array, momentum: float) -> list[Thunk]:
    work = np.empty(out.shape, out.dtype)
    return [
        partial(np.multiply, now, scalar(1.0 - momentum, now), work, casting="unsafe"),
        partial(np.multiply, before, scalar(momentum, before), out, casting="unsafe"),
        partial(np.add, out, work, out),
    ]


def _infer_lrn(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_rank(0, 3)
    if context.int_of("size") < 1:
        raise context.fail("size of LRN is at least 1", got=context.attributes["size"])
    return (x,)


def _lrn(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.given(0), arguments.outputs[0], arguments.attributes
    size, channels = int_of(attributes, "size"), x.shape[1]
    squares, total = np.empty_like(x), np.empty_like(x)
    before, after = (size - 1) // 2, size // 2
    steps: list[Thunk] = [partial(np.multiply, x, x, squares), fill_step(total, 0)]
    for shift in range(max(-before, -channels), min(after, channels) + 1):
        here = slice(max(0, -shift), min(channels, channels - shift))
        there = slice(max(0, shift), min(channels, channels + shift))
        target = total[:, here]
        steps.append(partial(np.add, target, squares[:, there], target))
    factor = scalar(float_of(attributes, "alpha") / size, x)
    return [
        *steps,
        partial(np.multiply, total, factor, total),
        partial(np.add, total, scalar(float_of(attributes, "bias"), x), total),
        partial(np.power, total, scalar(float_of(attributes, "beta"), x), total),
        partial(np.divide, x, total, out),
    ]


OPERATORS = (
    OpDef(
        "LRN", (1, 1), _infer_lrn, _lrn,
        attributes=declared(
            alpha=9.999999747378752e-05, beta=0.75, bias=1.0, size=Attribute("int", required=True),
        ),
        gradient=gradients.response, batching=in_first_axis(),
    ),
    OpDef(
        "BatchNormalization", (5, 5), _infer_batch, _batch, outputs=(1, 3),
        attributes=declared(epsilon=EPSILON, momentum=0.8999999761581421, training_mode=0),
        gradient=gradients.batch, batching=batching.batch, workspace=operands(1 / 2, is_kept=False),
    ),
)  # fmt: skip
