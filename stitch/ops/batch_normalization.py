"""BatchNormalization: by stored statistics, or by those of the batch (training mode); LRN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
    few,
    operands,
)
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, float_of, int_of
from stitch.ops.layer_normalization import EPSILON, response_gradient, root_reciprocal
from stitch.ops.reduction import SPREAD_FROM, inverse_deviation, row_means
from stitch.ops.steps import CHUNK_SIZE, bound, fill_step, scalar, stretches, workspace
from stitch.program import Array, ValueType

# Gradient of BatchNormalization -------------------------------------------------------------------


def batch_normalization_gradient(context: GradientContext) -> Sequence[Any]:
    """By stored statistics an affine map per channel; in training mode through the batch's own."""
    if context.gradient is None or any(g is not None for g in context.gradients[1:]):
        raise context.fail(
            "running statistics have none", "name the outputs whose gradients come in"
        )
    if context.int_of("training_mode"):
        return _training_gradient(context)
    return _inference_gradient(context)


def _channel_vector(context: GradientContext, vector: Any) -> Any:
    """A vector per channel, in the operand's type, ready to broadcast."""
    x = context.type_of(0)
    vector = context.in_type(vector, x.data_type)
    return context.shaped(vector, (-1, *(1,) * (len(x.shape) - 2))) if len(x.shape) > 2 else vector


def _channel_sums(context: GradientContext, value: Any, index: int) -> Any:
    """Sums per channel, in the type of operand `index`."""
    axes = [axis for axis in range(len(value.shape)) if axis != 1]
    return _as_vector(context, context.apply("ReduceSum", value, axes, keepdims=0), index)


def _training_gradient(context: GradientContext) -> Sequence[Any]:
    """By an operator; of the shift alone it is a sum."""
    gradient = context.gradient
    if not (context.wants(0) or context.wants(1)):
        third = _channel_sums(context, gradient, 2) if context.wants(2) else None
        return None, None, third, None, None
    kind = context.type_of(0).data_type
    operands = [gradient, context.input(0), context.in_type(context.input(1), kind)]
    is_exact = kind.dtype == kind.compute_dtype and context.type_of(3).data_type is kind
    if is_exact and context.float_of("momentum") == 0:
        # What runs is then this batch's own mean and variance; rounded, they are taken again.
        operands += [context.output(1), context.output(2)]
    first, *sums = context.apply_many(
        "BatchNormalizationGradient", 3, *operands, domain="stitch",
        epsilon=context.float_of("epsilon"),
    )  # fmt: skip
    second, third = (_as_vector(context, total, 1 + i) for i, total in enumerate(sums))
    return first, second, third, None, None


def _as_vector(context: GradientContext, value: Any, index: int) -> Any:
    """A number per channel in the shape and type of operand `index`."""
    kind = context.type_of(index)
    return context.in_type(context.shaped(value, kind.shape), kind.data_type)


def _inference_gradient(context: GradientContext) -> Sequence[Any]:
    gradient, epsilon = context.gradient, context.float_of("epsilon")
    gradients: list[Any] = [None] * 5
    if any(context.wants(i) for i in (0, 1, 3, 4)):
        inverse = root_reciprocal(context, _channel_vector(context, context.input(4)), epsilon)
    if context.wants(0) or context.wants(3) or context.wants(4):
        factor = inverse * _channel_vector(context, context.input(1))
    if context.wants(0):
        gradients[0] = gradient * factor
    if context.wants(2):
        gradients[2] = _channel_sums(context, gradient, 2)
    if context.wants(3):
        gradients[3] = -_channel_sums(context, gradient * factor, 3)
    if context.wants(1) or context.wants(4):
        centred = gradient * (context.input(0) - _channel_vector(context, context.input(3)))
        if context.wants(1):
            gradients[1] = _channel_sums(context, centred * inverse, 1)
        if context.wants(4):
            gradients[4] = _channel_sums(context, centred * (factor * inverse * inverse * -0.5), 4)
    return gradients


# Batching -----------------------------------------------------------------------------------------


def batch_batch_normalization(c: BatchingContext) -> Sequence[Any]:
    """Fold the batch into channels, whose statistics are separate; into samples if scale, shift and
    statistics are shared."""
    samples = not c.varies(1, 2, 3, 4) and not c.int_of("training_mode")
    if samples:
        return (c.split(c.with_first(c.folded(0))[0]),)
    if c.rank() > 1:
        result, *statistics = c.again(c.folded(0, 1), *(c.folded(i) for i in range(1, 5)))
        return c.split(result, 1), *(c.split(s) for s in statistics)
    # A vector is samples of one channel.
    x = c.apply("Transpose", c.broadcast(0), perm=[1, 0])
    result, *statistics = c.again(x, *(c.folded(i) for i in range(1, 5)))
    return c.in_front(result, 1), *(c.split(s) for s in statistics)


def batch_batch_normalization_gradient(c: BatchingContext) -> Sequence[Any]:
    """Fold the batch into channels: statistics and sums are per channel and example."""
    figures = [c.folded(i) for i in range(2, 5) if c.has(i)]
    if c.rank(1) > 1:
        result, *sums = c.again(c.folded(0, 1), c.folded(1, 1), *figures)
        return c.split(result, 1), *(c.split(s) for s in sums)
    gradient, x = (c.apply("Transpose", c.broadcast(i), perm=[1, 0]) for i in range(2))
    result, *sums = c.again(gradient, x, *figures)
    return c.in_front(result, 1), *(c.split(s) for s in sums)


# Planes (one per sample and channel) --------------------------------------------------------------

#: From this many places on, the sum of a channel's products is a product of its row by another.
SHORT_ROW = 16


class Planes:
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
        """Mean and variance per channel, in one pass.

        All is counted from what the first chunk's mean is: near the whole's, so that little is lost
        where squares are subtracted, and its own last digits, which are worth much where numbers
        are far from zero and near each other, do not count.
        """
        first, wild = self.x[: self.wide[0]], np.empty(mean.shape, np.bool_)
        steps: list[Thunk] = [
            *Planes(first).means(first, mean),
            # From infinity nothing can be counted.
            partial(np.isfinite, mean, wild),
            partial(np.logical_not, wild, wild),
            partial(np.copyto, mean, scalar(0, mean), where=wild),
        ]
        before, chunks = self.centered(mean)
        squares, rests = ChannelSums(self, mean), ChannelSums(self, mean)
        rest, square = np.empty_like(mean), np.empty_like(mean)
        for part, some, here, center in chunks:
            before += [
                center, *squares.steps(part, some, here, here), *rests.plain(part, some, here)
            ]  # fmt: skip
        return [
            *steps, *before, *squares.means(variance), *rests.means(rest),
            partial(np.add, mean, rest, mean),
            partial(np.multiply, rest, rest, square),
            partial(np.subtract, variance, square, variance),
            partial(np.maximum, variance, scalar(0, variance), out=variance),
        ]  # fmt: skip

    def means(self, x: Array, mean: Array) -> list[Thunk]:
        """Means per channel of an array of the same shape."""
        samples, channels, places = self.x.shape
        if places >= SHORT_ROW:
            sums = np.empty((samples, channels), mean.dtype)
            return [
                *row_means(x.reshape(-1, places), sums.reshape(-1)),
                partial(np.add.reduce, sums, 0, None, mean),
                partial(np.divide, mean, scalar(samples, mean), mean),
            ]
        # Channels have few places, or one: sums go over samples first.
        sums = np.empty((channels, places), mean.dtype)
        ones, flat = np.ones((1, samples), mean.dtype), x.reshape(samples, -1)
        return [
            partial(np.dot, ones, flat, sums.reshape(1, -1)),
            partial(np.add.reduce, sums, 1, None, mean),
            partial(np.divide, mean, scalar(samples * places, mean), mean),
        ]

    def centered(self, mean: Array) -> tuple[list[Thunk], list[tuple[slice, slice, Array, Thunk]]]:
        """Steps before; then per chunk where it is, a workspace, and the step that writes into that
        by how much the chunk is above the means."""
        means, before = self.over_places(mean)
        wide = self.chunks[0][1].stop
        work = workspace((self.wide[0], wide, self.x.shape[2]), mean.dtype)
        chunks: list[tuple[slice, slice, Array, Thunk]] = []
        for part, some in self.chunks:
            count = part.stop - part.start
            here = work[:count, : some.stop - some.start]
            step = partial(np.subtract, self.x[part, some], means[:count, some], here)
            chunks.append((part, some, here, step))
        return before, chunks

    def in_chunks(self, out: Array, *by: tuple[np.ufunc, Array]) -> list[Thunk]:
        """out = x, each function of that and a number per channel applied after the other."""
        result, steps = out.reshape(self.x.shape), list[Thunk]()
        spread = []
        for function, vector in by:
            numbers, before = self.over_places(vector)
            spread.append((function, numbers))
            steps += before
        # What came last is still in the caches.
        for part, some in reversed(self.chunks):
            target, count = result[part, some], part.stop - part.start
            seen = self.x[part, some]
            for function, numbers in spread:
                steps.append(partial(function, seen, numbers[:count, some], target))
                seen = target
        return steps


def by_distance(
    mean: Array, variance: Array, most: float, near: Sequence[Thunk], far: Sequence[Thunk]
) -> None:
    """The steps for numbers whose means are up to so many deviations from zero, or for others: a
    product with all of those would leave nothing of their differences, so they are centred first,
    which takes a pass more."""
    is_far = np.any(np.abs(mean) > most * np.sqrt(variance))
    for step in far if is_far else near:
        step()


class ChannelSums:
    """Sums of products over the places of a channel, gathered chunk by chunk."""

    def __init__(self, planes: Planes, like: Array) -> None:
        samples, channels, places = planes.x.shape
        self.at_once, self.count = planes.wide[0], scalar(samples * places, like)
        self.is_short = places < SHORT_ROW
        self.ones = np.ones((1, self.at_once if self.is_short else places), like.dtype)
        if self.is_short:
            pieces = -(-samples // self.at_once)
            self.rows = np.empty((pieces, channels, places), like.dtype)
            wide = planes.chunks[0][1].stop
            self.product = workspace((self.at_once, wide, places), like.dtype)
        else:
            self.rows = np.empty((samples, channels), like.dtype)

    def steps(self, part: slice, some: slice, a: Array, b: Array) -> list[Thunk]:
        """Steps that take one chunk of both factors."""
        if not self.is_short:
            return [partial(np.vecdot, a, b, self.rows[part, some])]
        product = self.product[: a.shape[0], : a.shape[1]]
        return [partial(np.multiply, a, b, product), *self.plain(part, some, product)]

    def plain(self, part: slice, some: slice, a: Array) -> list[Thunk]:
        """Steps that take one chunk of the first, where the other is one everywhere."""
        if not self.is_short:
            return [partial(np.vecdot, a, self.ones, self.rows[part, some])]
        flat, row = a.reshape(a.shape[0], -1), self.rows[part.start // self.at_once, some]
        return [partial(np.dot, self.ones[:, : a.shape[0]], flat, row.reshape(1, -1))]

    def means(self, out: Array) -> list[Thunk]:
        """Steps that give, after all chunks, the sums over how many places a channel has."""
        axes = (0, 2) if self.is_short else 0
        return [
            partial(np.add.reduce, self.rows, axes, None, out),
            partial(np.divide, out, self.count, out),
        ]


#: So many deviations from zero a mean is far: what is folded loses eight of 24 bits.
FAR = 256.0


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
    dtype = out.dtype
    if out.size == 0:
        # Of nothing there are no statistics.
        return [fill_step(total, math.nan) for total in arguments.outputs[1:]]
    planes, steps = Planes(x), list[Thunk]()
    is_training = bool(arguments.int_of("training_mode"))
    if is_training:
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
    folded = planes.in_chunks(out, (np.multiply, factor), (np.add, offset))
    if not is_training:
        return [*bound(fold, fixed), *folded]
    shifts = np.empty(shift.shape, dtype)
    centred: list[Thunk] = [
        partial(np.copyto, shifts, shift, "unsafe"),
        *planes.in_chunks(out, (np.subtract, mean), (np.multiply, factor), (np.add, shifts)),
    ]
    return [*steps, *fold, partial(by_distance, mean, variance, FAR, folded, centred)]


def _running_statistics(out: Array, before: Array, now: Array, momentum: float) -> list[Thunk]:
    if momentum == 0:
        # Nothing of what ran before, were it infinite.
        return [partial(np.copyto, out, now, "unsafe")]
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


# stitch.BatchNormalizationGradient ----------------------------------------------------------------

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


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "LRN", (1, 1), _infer_lrn, _lrn,
        attributes=declared(
            alpha=9.999999747378752e-05, beta=0.75, bias=1.0, size=Attribute("int", required=True),
        ),
        gradient=response_gradient, batching=in_first_axis(),
    ),
    OpDef(
        "BatchNormalization", (5, 5), _infer_batch, _batch, outputs=(1, 3),
        attributes=declared(epsilon=EPSILON, momentum=0.8999999761581421, training_mode=0),
        gradient=batch_normalization_gradient, batching=batch_batch_normalization,
        workspace=operands(1 / 2, is_kept=False),
    ),
    OpDef(
        "BatchNormalizationGradient", (3, 5), _infer, batch_gradient_steps, (1, 3),
        attributes=declared(epsilon=EPSILON), domain="stitch",
        batching=batch_batch_normalization_gradient, workspace=WorkspaceRule(_workspace),
    ),
)  # fmt: skip
