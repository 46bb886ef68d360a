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
from stitch.ops.normalization.channel_planes import Planes, by_distance
from stitch.ops.normalization.layer_normalization import EPSILON
from stitch.ops.reduction import inverse_deviation
from stitch.ops.steps import bound, fill_step, scalar
from stitch.ops.workspaces import operands
from stitch.program import Array, ValueType

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
