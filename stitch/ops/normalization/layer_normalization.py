"""Normalizations over a layer, an instance, a group, or by a norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.batching import along_axis
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, data_type_of_code
from stitch.ops.inference import InferenceContext
from stitch.ops.normalization import normalization_batching as batching
from stitch.ops.normalization import normalization_gradients as gradients
from stitch.ops.reduction import SPREAD_FROM, inverse_deviation, row_chunks, standardize
from stitch.ops.steps import along, copy_steps, scalar, workspace
from stitch.ops.workspaces import operands
from stitch.program import Array, ValueType

EPSILON = 9.999999747378752e-06  # 1e-5 as the float32 that ONNX's schema holds


def _scale_and_shift(out: Array, scale: Array, shift: Array | None) -> list[Thunk]:
    steps: list[Thunk] = [partial(np.multiply, out, scale, out)]
    return steps if shift is None else [*steps, partial(np.add, out, shift, out)]


def _infer_layer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_same_type(range(len(context.inputs)))
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    context.require_broadcast_to(1, x.shape)
    if context.present(2) is not None:
        context.require_broadcast_to(2, x.shape)
    where = f"stash_type of {context.op}"
    stash = data_type_of_code(context.int_of("stash_type"), where)
    if stash not in FLOATS:
        raise context.fail("stash_type must be a float", got=stash.value)
    row = ValueType((*x.shape[:axis], *(1,) * (len(x.shape) - axis)), stash)
    return (x, row, row)[: context.outputs]


def _rows(x: Array, axis: int) -> tuple[int, int]:
    return math.prod(x.shape[:axis]), math.prod(x.shape[axis:])


def _layer(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % x.ndim
    shape = _rows(x, axis)
    if x.size == 0:
        return [partial(np.copyto, row, np.nan) for row in arguments.outputs[1:]]
    mean, inverse = np.empty(shape[0], out.dtype), np.empty(shape[0], out.dtype)
    epsilon = arguments.float_of("epsilon")
    rows, results, chunks = x.reshape(shape), out.reshape(shape), row_chunks(shape)
    steps, operands, after = _spread_operands(arguments, shape, chunks)
    for part in chunks:
        steps += standardize(rows[part], results[part], mean[part], inverse[part], epsilon)
        for function, operand in operands:
            chunk = results[part]
            steps.append(partial(function, chunk, operand[: chunk.shape[0]], chunk))
    for row, statistic in zip(arguments.outputs[1:], (mean, inverse), strict=False):
        steps += copy_steps(statistic.reshape(row.shape), row)
    return [*steps, *after]


def _spread_operands(
    arguments: KernelArguments, shape: tuple[int, int], chunks: Sequence[slice]
) -> tuple[list[Thunk], list[tuple[np.ufunc, Array]], list[Thunk]]:
    """Scale and shift of a layer: steps before, what to apply to each chunk, steps at the end.

    One row of numbers is spread over as many rows as a chunk has: whole arrays multiply twice as
    fast as rows do. A few chunks only would not make up for it.
    """
    before: list[Thunk] = []
    operands: list[tuple[np.ufunc, Array]] = []
    after: list[Thunk] = []
    out = arguments.outputs[0]
    for index, function in ((1, np.multiply), (2, np.add)):
        operand = arguments.optional(index)
        if operand is None:
            continue
        if operand.size != shape[1] or after:
            after.append(partial(function, out, operand, out))
            continue
        row, fixed = operand.reshape(1, -1), arguments.is_constant(index)
        if fixed or len(chunks) >= SPREAD_FROM:
            spread = workspace((chunks[0].stop, shape[1]), out.dtype)
            fill = partial(np.copyto, spread, row)
            before.append(fill)
            row = spread
        operands.append((function, row))
    return before, operands, after


def _rms(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    shape = _rows(x, arguments.int_of("axis") % x.ndim)
    row = np.empty(shape[0], out.dtype)
    source, result = x.reshape(shape), out.reshape(shape)
    return [
        partial(np.vecdot, source, source, row),
        partial(np.divide, row, scalar(shape[1], row), row),
        *inverse_deviation(row, arguments.float_of("epsilon")),
        partial(np.multiply, source, row[:, None], result),
        *_scale_and_shift(out, scale, None),
    ]


def _infer_channels(least_rank: int, context: InferenceContext) -> tuple[ValueType, ...]:
    """The operand, with a scale and a shift for each channel."""
    x = context.require_type(0, FLOATS)
    context.require_same_type((0, 1, 2))
    context.require_rank(0, least_rank)
    for index in (1, 2):
        context.require_shape(index, x.shape[1:2])
    return (x,)


def _infer_group(context: InferenceContext) -> tuple[ValueType, ...]:
    (x,) = _infer_channels(2, context)
    groups = context.int_of("num_groups")
    if groups < 1 or x.shape[1] % groups:
        raise context.fail(
            "num_groups must divide the channels", expected=f"a divisor of {x.shape[1]}",
            got=groups,
        )  # fmt: skip
    return (x,)


def _by_groups(arguments: KernelArguments) -> Sequence[Thunk]:
    """An instance has a group per channel."""
    x, out = arguments.given(0), arguments.outputs[0]
    grouped = "num_groups" in arguments.attributes
    groups = arguments.int_of("num_groups") if grouped else x.shape[1]
    shape = (x.shape[0] * groups, x.size // (x.shape[0] * groups))
    mean, inverse = np.empty(shape[0], out.dtype), np.empty(shape[0], out.dtype)
    epsilon = arguments.float_of("epsilon")
    scale, shift = (along(arguments.given(i), 1, x.ndim) for i in (1, 2))
    rows, results = x.reshape(shape), out.reshape(shape)
    steps: list[Thunk] = []
    for part in row_chunks(shape):
        steps += standardize(rows[part], results[part], mean[part], inverse[part], epsilon)
    return [*steps, *_scale_and_shift(out, scale, shift)]


def _infer_norm(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, FLOATS)
    context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    if context.int_of("p") not in (1, 2):
        raise context.fail("LpNormalization has p = 1 and p = 2", got=context.attributes["p"])
    return (data,)


def _norm(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % x.ndim
    row = np.empty((*x.shape[:axis], 1, *x.shape[axis + 1 :]), out.dtype)
    zero = np.empty(row.shape, np.bool_)
    if arguments.int_of("p") == 1:
        steps: list[Thunk] = [partial(np.absolute, x, out)]
        root: list[Thunk] = []
    else:
        steps = [partial(np.multiply, x, x, out)]
        root = [partial(np.sqrt, row, row)]
    return [
        *steps,
        partial(np.add.reduce, out, axis, None, row, True),
        *root,
        partial(np.equal, row, scalar(0, row), zero),
        partial(np.copyto, row, scalar(1, row), where=zero),  # 0 / 1: the result is defined as 0
        partial(np.divide, x, row, out),
    ]


def _infer_mean_variance(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, FLOATS)
    context.axes_of(context.ints_of("axes") or (), len(data.shape))
    return (data,)


def _mean_variance(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
    axes = tuple(a % x.ndim for a in arguments.ints_of("axes") or ())
    shape = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    row, square = np.empty(shape, out.dtype), np.empty_like(out)
    count = scalar(math.prod(x.shape[i] for i in axes), row)
    return [
        partial(np.add.reduce, x, axes, None, row, True),
        partial(np.divide, row, count, row),
        partial(np.subtract, x, row, out),
        partial(np.multiply, out, out, square),
        partial(np.add.reduce, square, axes, None, row, True),
        partial(np.divide, row, count, row),
        partial(np.sqrt, row, row),
        partial(np.add, row, scalar(1e-9, row), row),  # the epsilon of ONNX's function body
        partial(np.divide, out, row, out),
    ]


_LAYER = declared(axis=-1, epsilon=EPSILON, stash_type=1)

OPERATORS = (
    OpDef(
        "MeanVarianceNormalization", (1, 1), _infer_mean_variance, _mean_variance,
        attributes=declared(axes=(0, 2, 3)), gradient=gradients.mean_variance,
        batching=batching.mean_variance,
    ),
    OpDef(
        "LayerNormalization", (2, 3), _infer_layer, _layer, (1, 3), _LAYER,
        gradient=gradients.layer, batching=batching.layer, workspace=operands(1 / 2, is_kept=False),
    ),
    OpDef(
        "RMSNormalization", (2, 2), _infer_layer, _rms, attributes=_LAYER, gradient=gradients.rms,
        batching=batching.layer, workspace=operands(1 / 2, is_kept=False),
    ),
    OpDef(
        "InstanceNormalization", (3, 3), partial(_infer_channels, 3), _by_groups,
        attributes=declared(epsilon=EPSILON), gradient=gradients.group,
        batching=batching.by_channel, workspace=operands(1 / 2, is_kept=False),
    ),
    OpDef(
        "GroupNormalization", (3, 3), _infer_group, _by_groups,
        attributes=declared(
            epsilon=EPSILON, num_groups=Attribute("int", required=True), stash_type=1
        ),
        gradient=gradients.group,
        batching=batching.by_channel, workspace=operands(1 / 2, is_kept=False),
    ),
    OpDef(
        "LpNormalization", (1, 1), _infer_norm, _norm, attributes=declared(axis=-1, p=2),
        gradient=gradients.norm, batching=along_axis, workspace=operands(1 / 2, is_kept=False),
    ),
)  # fmt: skip
