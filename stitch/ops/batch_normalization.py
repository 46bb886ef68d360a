"""BatchNormalization, with stored statistics or those of the batch (training mode), and LRN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, float_of, int_of
from stitch.ops.layer_normalization import EPSILON, root_reciprocal
from stitch.ops.reduction import SPREAD_FROM, inverse_deviation
from stitch.ops.steps import CHUNK_SIZE, bound, fill_step, scalar, slice_range
from stitch.ops.workspaces import workspace
from stitch.program import Array, ValueType


def lrn_gradient(context: GradientContext) -> Sequence[Any]:
    """y = x s^-beta, where s sums squares over a window of channels."""
    x, y, gradient = context.input(0), context.output(), context.gradient
    size, channels = context.int_of("size"), x.shape[1]
    factor = context.float_of("alpha") / size
    beta = context.float_of("beta")
    distance = np.arange(channels)[:, None] - np.arange(channels)
    # [read, reader]: a channel reads (size - 1) // 2 channels before itself and size // 2 after.
    reads = (distance >= -((size - 1) // 2)) & (distance <= size // 2)
    total = context.multiply_axis(x * x, 1, reads) * factor + context.float_of("bias")
    own = gradient * context.apply("Pow", total, -beta)
    others = context.multiply_axis(gradient * y / total, 1, reads.T)
    return (own - x * others * (2.0 * factor * beta),)


# Gradient of BatchNormalization -------------------------------------------------------------------


def batch_normalization_gradient(context: GradientContext) -> Sequence[Any]:
    if context.gradient is None or any(g is not None for g in context.gradients[1:]):
        raise context.fail(
            "only output 0 is differentiable, running statistics are not",
            "do not use the running statistics on the way to the loss",
        )
    if context.int_of("training_mode"):
        return _training_gradient(context)
    return _inference_gradient(context)


def _channel_vector(context: GradientContext, vector: Any) -> Any:
    """Return a vector per channel in the operand's type, shaped to broadcast."""
    x = context.type_of(0)
    vector = context.cast(vector, x.data_type)
    return context.reshape(vector, (-1, *(1,) * (len(x.shape) - 2))) if len(x.shape) > 2 else vector


def _channel_sums(context: GradientContext, value: Any, index: int) -> Any:
    """Sum over all axes but the channels, in the type of operand `index`."""
    axes = [axis for axis in range(len(value.shape)) if axis != 1]
    return _as_vector(context, context.apply("ReduceSum", value, axes, keepdims=0), index)


def _training_gradient(context: GradientContext) -> Sequence[Any]:
    gradient = context.gradient
    if not (context.wants(0) or context.wants(1)):
        third = _channel_sums(context, gradient, 2) if context.wants(2) else None
        return None, None, third, None, None
    kind = context.type_of(0).data_type
    operands = [gradient, context.input(0), context.cast(context.input(1), kind)]
    is_exact = kind.dtype == kind.compute_dtype and context.type_of(3).data_type is kind
    if is_exact and context.float_of("momentum") == 0:
        # The running statistics are then the batch's own mean and variance.
        operands += [context.output(1), context.output(2)]
    first, *sums = context.apply_many(
        "BatchNormalizationGradient", 3, *operands, domain="stitch",
        epsilon=context.float_of("epsilon"),
    )  # fmt: skip
    second, third = (_as_vector(context, total, 1 + i) for i, total in enumerate(sums))
    return first, second, third, None, None


def _as_vector(context: GradientContext, value: Any, index: int) -> Any:
    """Return a number per channel in the shape and type of operand `index`."""
    kind = context.type_of(index)
    return context.cast(context.reshape(value, kind.shape), kind.data_type)


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


def batch_batch_normalization(c: BatchingContext) -> Sequence[Any] | None:
    """Fold the batch into channels, whose statistics are separate; into samples if scale, shift and
    statistics are shared. No rule for a vector, which has one channel without an axis."""
    if not c.varies(1, 2, 3, 4) and not c.int_of("training_mode"):
        return (c.split(c.with_first(c.fold(0))[0]),)
    if c.rank() < 2:
        return None
    result, *statistics = c.emit(c.fold(0, 1), *(c.fold(i) for i in range(1, 5)))
    return c.split(result, 1), *(c.split(s) for s in statistics)


def batch_batch_normalization_gradient(c: BatchingContext) -> Sequence[Any] | None:
    """Fold the batch into channels: statistics and sums are per channel and example."""
    if c.rank(1) < 2:
        return None
    figures = [c.fold(i) for i in range(2, 5) if c.has(i)]
    result, *sums = c.emit(c.fold(0, 1), c.fold(1, 1), *figures)
    return c.split(result, 1), *(c.split(s) for s in sums)


# Planes (one per sample and channel) --------------------------------------------------------------

#: From this plane size on, a sum of products over a plane is a dot product.
SHORT_ROW = 16


class Planes:
    """A batch as [samples, channels, positions], cut into dense chunks that stay in the caches.

    With enough chunks, vectors per channel are expanded to a chunk's shape once: arrays of equal
    shape combine twice as fast as arrays that broadcast.
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
            for some in slice_range(channels, wide)
            for part in slice_range(samples, at_once)
        ]
        # A chunk of one channel broadcasts one number.
        self.spreads = samples >= SPREAD_FROM * at_once and wide > 1
        self.wide = (at_once, channels, places if self.spreads else 1)

    def over_places(self, vector: Array) -> tuple[Array, list[Thunk]]:
        """Return a vector per channel, broadcast or expanded to a chunk, and its refresh steps."""
        column = vector.reshape(1, -1, 1)
        if not self.spreads:
            return np.broadcast_to(column, self.wide), []
        spread = workspace(self.wide, vector.dtype)
        return spread, [partial(np.copyto, spread, column)]

    def statistics(self, mean: Array, variance: Array) -> list[Thunk]:
        """Return steps that compute mean and variance per channel in one pass.

        Values are shifted by the mean of the first chunk, which is near the mean of all, so that
        little is lost when squares are subtracted.
        """
        first, wild = self.x[: self.wide[0]], np.empty(mean.shape, np.bool_)
        head = ChannelSums(first.shape, len(first), mean)
        steps: list[Thunk] = [
            *head.plain(slice(0, len(first)), slice(0, first.shape[1]), first),
            *head.means(mean),
            # Do not shift by infinity or NaN.
            partial(np.isfinite, mean, wild),
            partial(np.logical_not, wild, wild),
            partial(np.copyto, mean, scalar(0, mean), where=wild),
        ]
        before, chunks = self.centered(mean)
        squares, rests = self.sums(mean), self.sums(mean)
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

    def sums(self, like: Array) -> ChannelSums:
        """Return sums over the chunks in the type of an array."""
        return ChannelSums(self.x.shape, self.wide[0], like, self.chunks[0][1].stop)

    def centered(self, mean: Array) -> tuple[list[Thunk], list[tuple[slice, slice, Array, Thunk]]]:
        """Return steps to run first; and for each chunk its samples, its channels, a workspace, and
        the step that writes the chunk minus the means there."""
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
        """Return steps that apply functions of x and a vector per channel, one after the other."""
        result, steps = out.reshape(self.x.shape), list[Thunk]()
        spread = []
        for function, vector in by:
            numbers, before = self.over_places(vector)
            spread.append((function, numbers))
            steps += before
        # In reverse: the last chunk is still in the caches.
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
    """Run the steps `near` if all means are within `most` deviations of zero, else `far`.

    Far from zero products cancel, so values are centred first, which takes one more pass.
    """
    is_far = np.any(np.abs(mean) > most * np.sqrt(variance))
    for step in far if is_far else near:
        step()


class ChannelSums:
    """Sums of products over each channel, accumulated chunk by chunk.

    Chunks have up to `at_once` samples and `wide` channels; None: only `plain` sums of whole
    samples are used.
    """

    def __init__(
        self, shape: tuple[int, ...], at_once: int, like: Array, wide: int | None = None
    ) -> None:
        samples, channels, places = shape
        self.at_once, self.count = at_once, scalar(samples * places, like)
        self.is_short = places < SHORT_ROW
        self.ones = np.ones((1, self.at_once if self.is_short else places), like.dtype)
        if self.is_short:
            pieces = -(-samples // self.at_once)
            self.rows = np.empty((pieces, channels, places), like.dtype)
            if wide is not None:
                self.product = workspace((at_once, wide, places), like.dtype)
        else:
            self.rows = np.empty((samples, channels), like.dtype)

    def steps(self, part: slice, some: slice, a: Array, b: Array) -> list[Thunk]:
        """Return steps that sum the products of one chunk of both factors."""
        if not self.is_short:
            return [partial(np.vecdot, a, b, self.rows[part, some])]
        product = self.product[: a.shape[0], : a.shape[1]]
        return [partial(np.multiply, a, b, product), *self.plain(part, some, product)]

    def plain(self, part: slice, some: slice, a: Array) -> list[Thunk]:
        """Return steps that sum one chunk."""
        if not self.is_short:
            return [partial(np.vecdot, a, self.ones, self.rows[part, some])]
        flat, row = a.reshape(a.shape[0], -1), self.rows[part.start // self.at_once, some]
        return [partial(np.dot, self.ones[:, : a.shape[0]], flat, row.reshape(1, -1))]

    def means(self, out: Array) -> list[Thunk]:
        """Return steps that, after all chunks, divide the sums by the elements of a channel."""
        axes = (0, 2) if self.is_short else 0
        return [
            partial(np.add.reduce, self.rows, axes, None, out),
            partial(np.divide, out, self.count, out),
        ]


#: From this many deviations from zero on a mean is far: folding would lose 8 of 24 bits.
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
    context.require(
        context.outputs <= 1 or training, "BatchNormalization without training_mode has 1 output",
        expected="1 output", got=context.outputs,
    )  # fmt: skip
    statistics = ValueType(channels, context.require_type(3, FLOATS).data_type)
    return (x, statistics, statistics)[: context.outputs]


def _batch(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, shift, mean, variance = (arguments.operand(i) for i in range(5))
    out, epsilon = arguments.outputs[0], arguments.float_of("epsilon")
    dtype = out.dtype
    if out.size == 0:
        # Statistics of an empty batch are NaN.
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
        # Ignore the old statistics, even if they are infinite.
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
        size = context.int_of("size")
        raise context.fail(f"size={size} of LRN is out of range", expected="at least 1", got=size)
    return (x,)


def _lrn(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.operand(0), arguments.outputs[0], arguments.attributes
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

#: Returns steps that write x * along + offset + gradient * factor. Arguments: x, gradient and
#: target, [samples, channels, positions] each; along, offset and factor, [channels] each.
LastPass = Callable[[Array, Array, Array, Array, Array, Array], Sequence[Thunk]]
#: Up to this many deviations from zero a mean is near: 3 of 24 bits are lost.
NEAR = 8.0


def _infer_batch_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type(range(5))
    rank = context.require_rank(1, 1)
    context.require_shape(0, x.shape)
    channels = (x.shape[1] if rank > 1 else 1,)
    # Both statistics are present or none.
    for index in range(2, 5 if context.present(3) or context.present(4) else 3):
        context.require_shape(index, channels)
    weights = ValueType(channels, x.data_type)
    return (x, weights, weights)[: context.outputs]


def batch_gradient_steps(
    arguments: KernelArguments, last_pass: LastPass | None = None
) -> Sequence[Thunk]:
    """Return the steps of BatchNormalizationGradient; `last_pass` replaces NumPy's last pass if
    means are near zero."""
    gradient, x, scale = (arguments.operand(i) for i in range(3))
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
    passes = _GradientPasses(planes, gradient, mean, inverse, scale, last_pass)
    near, far = (passes.steps(out, sums, is_near=is_near) for is_near in (True, False))
    return [*steps, partial(by_distance, mean, variance, NEAR, near, far)]


class _GradientPasses:
    """The passes over a batch that compute its gradient from its statistics."""

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
        self.products, self.slopes = planes.sums(mean), planes.sums(mean)
        self.before, self.chunks = planes.centered(mean)

    def steps(self, out: Array, sums: Sequence[Array], *, is_near: bool) -> list[Thunk]:
        """dx = factor dy - (along c + offset) with c = x - mean, and the sums per channel.

        With means near zero, c is not computed element by element: the sums are corrected instead.
        """
        steps = [] if is_near else [*self.before]
        for part, some, here, center in self.chunks:
            seen, dy = self.planes.x[part, some], self.gradient[part, some]
            if not is_near:
                steps.append(center)
                seen = here
            steps += self.products.steps(part, some, seen, dy)
            steps += self.slopes.plain(part, some, dy)
        steps += [*self.slopes.means(self.slope), *self.products.means(self.slant)]
        return [*steps, *self._numbers(sums, is_near=is_near), *self._whole(out, is_near=is_near)]

    def _numbers(self, sums: Sequence[Array], *, is_near: bool) -> list[Thunk]:
        """Return steps for the vectors per channel: the sums and the factors of the last pass."""
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
        """Return steps for the operand's gradient, chunk by chunk."""
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
        # In reverse: the last chunk is still in the caches.
        for part, some, here, center in reversed(self.chunks):
            n, target = part.stop - part.start, result[part, some]
            seen = here
            if is_near:
                seen = self.planes.x[part, some]
            else:
                steps.append(center)
            steps += [
                partial(np.multiply, seen, alongs[:n, some], here),
                partial(np.add, here, offsets[:n, some], here),
                partial(np.multiply, self.gradient[part, some], factors[:n, some], target),
                partial(np.subtract, target, here, target),
            ]
        return steps


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "LRN", (1, 1), _infer_lrn, _lrn,
        attributes=declared(
            alpha=9.999999747378752e-05, beta=0.75, bias=1.0, size=Attribute("int", required=True),
        ),
        gradient=lrn_gradient, batching=in_first_axis(),
    ),
    OpDef(
        "BatchNormalization", (5, 5), _infer_batch, _batch, outputs=(1, 3),
        attributes=declared(epsilon=EPSILON, momentum=0.8999999761581421, training_mode=0),
        gradient=batch_normalization_gradient, batching=batch_batch_normalization,
    ),
    OpDef(
        "BatchNormalizationGradient", (3, 5), _infer_batch_gradient, batch_gradient_steps, (1, 3),
        attributes=declared(epsilon=EPSILON), domain="stitch",
        batching=batch_batch_normalization_gradient,
    ),
)  # fmt: skip
