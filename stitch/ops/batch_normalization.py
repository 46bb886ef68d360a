"""BatchNormalization: by stored statistics, or by those of the batch (training mode); LRN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import float_of, int_of
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import require_rank, require_same_type, require_shape, require_type
from stitch.ops.normalization import EPSILON, inverse_deviation, per_channel
from stitch.ops.normalization_gradients import batch_gradient, response_gradient
from stitch.ops.steps import fill_step, given, is_constant, scalar
from stitch.program import Array, ValueType


def _infer_batch(context: InferenceContext) -> tuple[ValueType, ...]:
    x = require_type(context, 0, FLOATS)
    rank = require_rank(context, 0, 1)
    channels = (x.shape[1] if rank > 1 else 1,)
    for index in range(1, 5):
        require_type(context, index, FLOATS)
        require_shape(context, index, channels)
    require_same_type(context, (1, 2))
    require_same_type(context, (3, 4))
    training = int_of(context.attributes, "training_mode")
    if context.outputs > 1 and not training:
        raise context.fail(
            "BatchNormalization gives running statistics in training mode only",
            expected="1 output",
            got=str(context.outputs),
        )
    statistics = ValueType(channels, require_type(context, 3, FLOATS).data_type)
    return (x, statistics, statistics)[: context.outputs]


def _batch(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, shift, mean, variance = (given(arguments, i) for i in range(5))
    out, epsilon = arguments.outputs[0], float_of(arguments.attributes, "epsilon")
    dtype, steps = out.dtype, []
    if int_of(arguments.attributes, "training_mode"):
        old = mean, variance
        mean, variance = np.empty(mean.shape, dtype), np.empty(mean.shape, dtype)
        steps += _batch_statistics(x, mean, variance)
        momentum = float_of(arguments.attributes, "momentum")
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
    if not steps and all(is_constant(arguments, i) for i in range(1, 5)):
        for step in fold:
            step()
        fold = []
    rank = max(x.ndim, 2)
    factors, offsets = per_channel(factor, rank), per_channel(offset, rank)
    return [
        *steps,
        *fold,
        partial(np.multiply, x, factors, out),
        partial(np.add, out, offsets, out),
    ]


def _batch_statistics(x: Array, mean: Array, variance: Array) -> list[Thunk]:
    axes = tuple(i for i in range(x.ndim) if i != 1)
    count = scalar(math.prod(x.shape[i] for i in axes), mean)
    work = np.empty_like(x)
    row = mean if x.ndim > 1 else mean.reshape(())
    spread = variance if x.ndim > 1 else variance.reshape(())
    return [
        partial(np.add.reduce, x, axes, None, row),
        partial(np.divide, mean, count, mean),
        partial(np.subtract, x, per_channel(mean, max(x.ndim, 2)), work),
        partial(np.multiply, work, work, work),
        partial(np.add.reduce, work, axes, None, spread),
        partial(np.divide, variance, count, variance),
    ]


def _running_statistics(out: Array, before: Array, now: Array, momentum: float) -> list[Thunk]:
    work = np.empty(out.shape, out.dtype)
    return [
        partial(np.multiply, now, scalar(1.0 - momentum, now), work, casting="unsafe"),
        partial(np.multiply, before, scalar(momentum, before), out, casting="unsafe"),
        partial(np.add, out, work, out),
    ]


def _infer_lrn(context: InferenceContext) -> tuple[ValueType, ...]:
    x = require_type(context, 0, FLOATS)
    require_rank(context, 0, 3)
    if int_of(context.attributes, "size") < 1:
        raise context.fail("size of LRN is at least 1", got=str(context.attributes["size"]))
    return (x,)


def _lrn(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = given(arguments, 0), arguments.outputs[0], arguments.attributes
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
        "LRN",
        (1, 1),
        _infer_lrn,
        _lrn,
        attributes={
            "alpha": Attribute("float", 9.999999747378752e-05),
            "beta": Attribute("float", 0.75),
            "bias": Attribute("float", 1.0),
            "size": Attribute("int", required=True),
        },
        gradient=response_gradient,
    ),
    OpDef(
        "BatchNormalization",
        (5, 5),
        _infer_batch,
        _batch,
        outputs=(1, 3),
        attributes={
            "epsilon": Attribute("float", EPSILON),
            "momentum": Attribute("float", 0.8999999761581421),
            "training_mode": Attribute("int", 0),
        },
        gradient=batch_gradient,
    ),
)
