"""Activation functions: Relu and its variants, Gelu, Softmax.

Kernels are chains of NumPy steps over cache-sized chunks. A gradient reads the result if the slope
follows from it, else the operand. `stitch.GeluGradient` is one fused operator: in ONNX operators it
would be a dozen passes over memory.

Softmax along the last axis first takes exponentials without subtracting the maximum, since the
maxima of short rows cost as much as the rest. Rows whose sum is out of range or not finite are
computed again with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.arithmetic import ERF_WORKSPACES, erf_steps
from stitch.ops.batching import BatchingContext, along_axis, of_equal_shapes
from stitch.ops.definition import Kernel, KernelArguments, OpDef, Thunk, declared, elementwise
from stitch.ops.element_types import FLOATS, PRODUCTS, SIGNED_NUMERIC
from stitch.ops.gradient import Gradient, GradientContext, Slope, no_gradient, of_first
from stitch.ops.inference import InferenceContext, same_as_first
from stitch.ops.reduction import row_chunks
from stitch.ops.steps import (
    Chain,
    Work,
    chain_kernel,
    chunks,
    copy_steps,
    fill_step,
    mask_in,
    overlaps,
    reciprocal_step,
    scalar,
    zero,
)
from stitch.ops.workspaces import workspace
from stitch.program import Array, DataType, ValueType


def sigmoid_steps(x: Array, out: Array, rate: float = 1.0) -> list[Thunk]:
    """out = 1 / (1 + exp(-rate x)); if exp overflows, the limit 0. `out` may be `x`."""
    scale = partial(np.multiply, x, scalar(-rate, x), out)
    return [
        partial(np.negative, x, out) if rate == 1.0 else scale,
        partial(np.exp, out, out),
        partial(np.add, out, scalar(1.0, x), out),
        reciprocal_step(out, out),
    ]


def softplus_steps(x: Array, out: Array, work: Array) -> list[Thunk]:
    """out = log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which cannot overflow."""
    return [
        partial(np.absolute, x, work),
        partial(np.negative, work, work),
        partial(np.exp, work, work),
        partial(np.log1p, work, work),
        partial(np.maximum, x, zero(x), out=out),
        partial(np.add, out, work, out),
    ]


def _exponential_branch(
    x: Array, out: Array, work: Array, rate: float, scale: float
) -> list[Thunk]:
    """out = max(x, 0) + scale (exp(min(x, 0) / rate) - 1), for Elu, Selu and Celu.

    The order of operands matters: of 0 and -0 NumPy's extremes return the second, so -0 stays -0.
    """
    steps: list[Thunk] = [partial(np.minimum, zero(x), x, out=work)]
    if rate != 1.0:
        steps.append(partial(np.divide, work, scalar(rate, x), work))
    steps.append(partial(np.expm1, work, work))
    if scale != 1.0:
        steps.append(partial(np.multiply, work, scalar(scale, x), work))
    if 0.0 < scale <= rate:
        # The exponential is never below its tangent, x.
        return [*steps, partial(np.maximum, x, work, out=out)]
    return [*steps, partial(np.maximum, zero(x), x, out=out), partial(np.add, out, work, out)]


def _selu(x: Array, out: Array, work: Work, alpha: float, gamma: float) -> Sequence[Thunk]:
    steps = _exponential_branch(x, out, work[0], 1.0, alpha)
    return [*steps, partial(np.multiply, out, scalar(gamma, x), out)]


def _leaky_relu(x: Array, out: Array, work: Work, alpha: float) -> Sequence[Thunk]:
    product, slope = work[0], scalar(alpha, x)
    if 0.0 < alpha <= 1.0:
        return [partial(np.multiply, x, slope, product), partial(np.maximum, x, product, out=out)]
    mask = mask_in(work[1])
    return [
        partial(np.less, x, scalar(0.0, x), mask),
        partial(np.multiply, x, slope, product),
        *copy_steps(x, out),
        partial(np.copyto, out, product, where=mask),
    ]


def _thresholded(x: Array, out: Array, work: Work, alpha: float) -> Sequence[Thunk]:
    mask = mask_in(work[0])
    return [
        partial(np.greater, x, scalar(alpha, x), mask),
        partial(np.logical_not, mask, mask),
        *copy_steps(x, out),
        partial(np.copyto, out, scalar(0.0, x), where=mask),
    ]


def _softsign(x: Array, out: Array, work: Work) -> Sequence[Thunk]:
    return [
        partial(np.absolute, x, work[0]),
        partial(np.add, work[0], scalar(1.0, x), work[0]),
        partial(np.divide, x, work[0], out),
    ]


def _clamped_line(x: Array, out: Array, slope: float, offset: float) -> list[Thunk]:
    """out = slope x + offset, clipped to [0, 1]."""
    return [
        partial(np.multiply, x, scalar(slope, x), out),
        partial(np.add, out, scalar(offset, x), out),
        partial(np.maximum, out, zero(out), out=out),
        partial(np.minimum, out, scalar(1.0, x), out=out),
    ]


def _hard_swish(x: Array, out: Array, work: Work) -> Sequence[Thunk]:
    return [*_clamped_line(x, work[0], 1.0 / 6.0, 0.5), partial(np.multiply, x, work[0], out)]


def _mish(x: Array, out: Array, work: Work) -> Sequence[Thunk]:
    return [
        *softplus_steps(x, work[0], work[1]),
        partial(np.tanh, work[0], work[0]),
        partial(np.multiply, x, work[0], out),
    ]


def _swish(x: Array, out: Array, work: Work, alpha: float) -> Sequence[Thunk]:
    return [*sigmoid_steps(x, work[0], alpha), partial(np.multiply, x, work[0], out)]


def _infer_prelu(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, PRODUCTS)
    context.require_same_type((0, 1))
    context.require_broadcast_to(1, data.shape)
    return (data,)


def _prelu(arguments: KernelArguments) -> Sequence[Thunk]:
    x, slope, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    product, mask = np.empty_like(out), np.empty(out.shape, np.bool_)
    return (
        partial(np.less, x, scalar(0, x), mask),
        partial(np.multiply, x, slope, product),
        *copy_steps(x, out),
        partial(np.copyto, out, product, where=mask),
    )


def _batch_prelu(context: BatchingContext) -> Sequence[Any]:
    """Repeat the operand over the batch: the slope must broadcast to it."""
    return context.emit(context.broadcast(0), context.align(1, context.rank()))


def _relu(arguments: KernelArguments) -> Sequence[Thunk]:
    x = arguments.operand(0)
    return (partial(np.maximum, x, zero(x), out=arguments.outputs[0]),)


def _relu_slope(c: GradientContext) -> Any:
    return c.where(c.apply("Greater", c.output(), 0.0), c.gradient)


def _same_sign(c: GradientContext, slope_below: float) -> Any:
    """Return a value that is positive where the operand is: the result, unless signs change."""
    return c.output() if slope_below >= 0.0 else c.input(0)


def _leaky_relu_slope(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    up = c.apply("Greater", _same_sign(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * alpha)


def _thresholded_slope(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    return c.where(c.apply("Greater", _same_sign(c, alpha), alpha), c.gradient)


def _elu_slope(c: GradientContext) -> Any:
    """Below zero y = alpha (exp(x) - 1), so its slope is y + alpha."""
    alpha, y = c.float_of("alpha"), c.output()
    if alpha == 1.0:
        return c.gradient * (c.apply("Min", y, 0.0) + 1.0)
    up = c.apply("Greater", _same_sign(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * (y + alpha))


def _celu_slope(c: GradientContext) -> Any:
    below = c.apply("Min", c.output(), 0.0)
    return c.gradient * (below * (1.0 / c.float_of("alpha")) + 1.0)


def _selu_slope(c: GradientContext) -> Any:
    alpha, gamma, y = c.float_of("alpha"), c.float_of("gamma"), c.output()
    up = c.apply("Greater", _same_sign(c, alpha * gamma), 0.0)
    slope = c.constant(np.array(gamma, c.type_of(0).data_type.dtype))
    return c.gradient * c.apply("Where", up, slope, y + alpha * gamma)


def _sigmoid_slope(c: GradientContext) -> Any:
    y = c.output()
    return c.gradient * (y - y * y)


def _softplus_slope(c: GradientContext) -> Any:
    return c.gradient * c.apply("Sigmoid", c.input(0))


def _softsign_slope(c: GradientContext) -> Any:
    size = c.apply("Abs", c.input(0)) + 1.0
    return c.gradient / (size * size)


def _hard_sigmoid_slope(c: GradientContext) -> Any:
    y = c.output()
    inside = c.apply("And", c.apply("Greater", y, 0.0), c.apply("Less", y, 1.0))
    return c.where(inside, c.gradient * c.float_of("alpha"))


def _hard_swish_slope(c: GradientContext) -> Any:
    x = c.input(0)
    inner = c.gradient * (x * (1.0 / 3.0) + 0.5)
    inner = c.apply("Where", c.apply("Greater", x, 3.0), c.gradient, inner)
    return c.where(c.apply("Greater", x, -3.0), inner)


def _mish_slope(c: GradientContext) -> Any:
    """y = x t with t = tanh(softplus(x))."""
    x = c.input(0)
    t = c.apply("Tanh", c.apply("Softplus", x))
    return c.gradient * (t + x * c.apply("Sigmoid", x) * (1.0 - t * t))


def _swish_slope(c: GradientContext) -> Any:
    """y = x s with s = sigmoid(rate x); dy/dx = s + rate (y - y s)."""
    x, rate = c.input(0), c.float_of("alpha")
    s = c.apply("Sigmoid", x if rate == 1.0 else x * rate)
    y = x * s
    rest = y - y * s
    return c.gradient * (s + (rest if rate == 1.0 else rest * rate))


def _prelu_gradient(context: GradientContext) -> Sequence[Any]:
    x, gradient = context.input(0), context.gradient

    def below() -> Any:
        less = context.apply("Less", x, 0.0)
        return context.apply("Where", less, gradient * context.input(1), gradient)

    return context.by_operand(below, lambda: gradient * context.apply("Min", x, 0.0))


def _activation(name: str, workspaces: int, chain: Chain, slope: Slope, **defaults: float) -> OpDef:
    # ONNX defines Celu for float32 only.
    allowed = frozenset({DataType.FLOAT32}) if name == "Celu" else FLOATS
    kernel, gradient = chain_kernel(workspaces, chain), of_first(slope)
    return elementwise(name, (1, 1), same_as_first(allowed), kernel, gradient, **defaults)


# Gelu ---------------------------------------------------------------------------------------------

#: approximate="tanh" replaces the error function by tanh(RATE (x + CUBE x^3)).
GELU_RATE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715
#: The maximum of the normal distribution's density.
GELU_HEIGHT = 1.0 / math.sqrt(2.0 * math.pi)


def _infer_gelu(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_word("approximate", ("none", "tanh"))
    return (context.require_type(0, FLOATS),)


def _infer_gelu_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, x.shape)
    context.require_word("approximate", ("none", "tanh"))
    return (x,)


def _gelu(x: Array, out: Array, work: Work, approximate: str) -> Sequence[Thunk]:
    gate = work[ERF_WORKSPACES]
    if approximate == "tanh":
        inner: list[Thunk] = [
            partial(np.multiply, x, x, gate),
            partial(np.multiply, gate, scalar(GELU_CUBE, x), gate),
            partial(np.add, gate, scalar(1.0, x), gate),
            partial(np.multiply, gate, x, gate),
            partial(np.multiply, gate, scalar(GELU_RATE, x), gate),
            partial(np.tanh, gate, gate),
        ]
    else:
        inner = erf_steps(x, gate, work, math.sqrt(0.5))
    return [
        *inner,
        partial(np.add, gate, scalar(1.0, x), gate),
        partial(np.multiply, gate, scalar(0.5, x), gate),
        partial(np.multiply, x, gate, out),
    ]


def _gelu_slope(context: GradientContext) -> Any:
    approximate = context.string_of("approximate")
    operands = context.gradient, context.input(0)
    return context.apply("GeluGradient", *operands, domain="stitch", approximate=approximate)


def _gelu_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x = (arguments.operand(index).reshape(-1) for index in (0, 1))
    out = arguments.outputs[0].reshape(-1)
    is_exact = arguments.string_of("approximate") == "none"
    slope_steps = _exact_gelu_slope if is_exact else _tanh_gelu_slope
    steps: list[Thunk] = []
    for part, (slope, *others) in chunks(out.size, ERF_WORKSPACES + 1, out.dtype):
        steps += slope_steps(x[part], slope, tuple(others))
        steps.append(partial(np.multiply, gradient[part], slope, out[part]))
    return steps


def _exact_gelu_slope(x: Array, slope: Array, work: Work) -> list[Thunk]:
    """slope = (1 + erf(x / sqrt 2)) / 2 + x density(x)."""
    density = work[0]
    square = [partial(np.multiply, x, x, density)] if x.dtype == np.float64 else []
    return [
        *erf_steps(x, slope, work, math.sqrt(0.5)),
        partial(np.multiply, slope, scalar(0.5, x), slope),
        partial(np.add, slope, scalar(0.5, x), slope),
        *square,
        partial(np.multiply, density, scalar(-0.5, x), density),
        partial(np.exp, density, density),
        partial(np.multiply, density, scalar(GELU_HEIGHT, x), density),
        partial(np.multiply, density, x, density),
        partial(np.add, slope, density, slope),
    ]


def _tanh_gelu_slope(x: Array, slope: Array, work: Work) -> list[Thunk]:
    """slope = (1 + t) / 2 + x (1 - t^2) RATE (1 + 3 CUBE x^2) / 2 with the hyperbolic tangent t."""
    square, tangent = work[:2]
    return [
        partial(np.multiply, x, x, square),
        partial(np.multiply, square, scalar(GELU_CUBE * GELU_RATE, x), tangent),
        partial(np.add, tangent, scalar(GELU_RATE, x), tangent),
        partial(np.multiply, tangent, x, tangent),
        partial(np.tanh, tangent, tangent),
        partial(np.multiply, square, scalar(1.5 * GELU_CUBE * GELU_RATE, x), square),
        partial(np.add, square, scalar(0.5 * GELU_RATE, x), square),
        partial(np.multiply, square, x, square),
        partial(np.multiply, tangent, tangent, slope),
        partial(np.subtract, scalar(1.0, x), slope, slope),
        partial(np.multiply, slope, square, slope),
        partial(np.multiply, tangent, scalar(0.5, x), tangent),
        partial(np.add, slope, tangent, slope),
        partial(np.add, slope, scalar(0.5, x), slope),
    ]


# Softmax, LogSoftmax, Hardmax ---------------------------------------------------------------------

#: Between these bounds a row's sum of exponentials needs no maximum subtracted: terms that
#: underflow are less than 1e-32 of the sum.
LEAST_SUM, MOST_SUM = 1e-6, 1e30


def _infer_softmax(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, FLOATS)
    context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    return (data,)


def _softmax_operands(arguments: KernelArguments) -> tuple[Array, Array, int, Array]:
    """Return source, output, axis, and a workspace with one element per softmax."""
    source, out = arguments.operand(0), arguments.outputs[0]
    axis = arguments.int_of("axis") % source.ndim
    shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
    return source, out, axis, workspace(shape, out.dtype)


def _softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _softmax_operands(arguments)
    if axis != out.ndim - 1 or overlaps(out, source):
        return (
            partial(np.maximum.reduce, source, axis, None, row, True),
            partial(np.subtract, source, row, out),
            partial(np.exp, out, out),
            partial(np.add.reduce, out, axis, None, row, True),
            partial(np.divide, out, row, out),
        )
    width = out.shape[-1]
    rows, results, sums = source.reshape(-1, width), out.reshape(-1, width), row.reshape(-1, 1)
    ones = np.ones((width, 1), out.dtype)
    steps: list[Thunk] = []
    for part in row_chunks((len(rows), width)):
        steps += _row_chunk(rows[part], results[part], sums[part], ones)
    return steps


def _row_chunk(source: Array, out: Array, row: Array, ones: Array) -> tuple[Thunk, ...]:
    """Softmax of the rows of one chunk; `out` must not overlap `source`. `row` gets their sums."""
    flat = row.reshape(-1)
    low, high = (np.array(bound, out.dtype) for bound in (LEAST_SUM, MOST_SUM))

    def check() -> None:
        if low <= np.minimum.reduce(flat) and np.maximum.reduce(flat) <= high:
            return
        # Only these rows: a row's result must not depend on the other rows.
        wrong = np.flatnonzero(~((low <= flat) & (flat <= high)))
        some = source[wrong]
        some = np.exp(some - np.maximum.reduce(some, 1, keepdims=True))
        out[wrong], row[wrong] = some, np.dot(some, ones)

    return (
        partial(np.exp, source, out),
        partial(np.dot, out, ones, row),
        check,
        partial(np.divide, out, row, out),
    )


def _log_softmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _softmax_operands(arguments)
    work = np.empty_like(out)
    return (
        partial(np.maximum.reduce, source, axis, None, row, True),
        partial(np.subtract, source, row, out),
        partial(np.exp, out, work),
        partial(np.add.reduce, work, axis, None, row, True),
        partial(np.log, row, row),
        partial(np.subtract, out, row, out),
    )


def _hardmax(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out, axis, row = _softmax_operands(arguments)
    best = np.empty(row.shape, np.intp)
    return (
        partial(np.argmax, source, axis, best, keepdims=True),
        fill_step(out, 0),
        partial(np.put_along_axis, out, best, 1, axis),
    )


def softmax_gradient(context: GradientContext) -> Sequence[Any]:
    axis = context.int_of("axis")
    operands = context.gradient, context.output()
    return (context.apply("SoftmaxGradient", *operands, domain="stitch", axis=axis),)


def log_softmax_gradient(context: GradientContext) -> Sequence[Any]:
    """dx = dy - exp(y) sum(dy)."""
    total = context.apply("ReduceSum", context.gradient, [context.int_of("axis")], keepdims=1)
    return (context.gradient - context.apply("Exp", context.output()) * total,)


def _infer_softmax_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    y = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, y.shape)
    context.axis_of(context.int_of("axis"), context.require_rank(1, 1))
    return (y,)


def _softmax_gradient(arguments: KernelArguments) -> Sequence[Thunk]:
    """dx = y (dy - sum(dy y)), from dy and y."""
    gradient, y, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
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


def _softmax_operator(name: str, kernel: Kernel, gradient: Gradient) -> OpDef:
    return OpDef(
        name, (1, 1), _infer_softmax, kernel, attributes=declared(axis=-1), gradient=gradient,
        batching=along_axis,
    )  # fmt: skip


OPERATORS: tuple[OpDef, ...] = (
    elementwise("Relu", (1, 1), same_as_first(SIGNED_NUMERIC), _relu, of_first(_relu_slope)),
    OpDef(
        "PRelu", (2, 2), _infer_prelu, _prelu, elementwise=True,
        batching=_batch_prelu, gradient=_prelu_gradient,
    ),
    _activation("Sigmoid", 0, lambda x, out, _: sigmoid_steps(x, out), _sigmoid_slope),
    _activation(
        "Softplus", 1, lambda x, out, work: softplus_steps(x, out, work[0]), _softplus_slope,
    ),
    _activation("Softsign", 1, _softsign, _softsign_slope),
    _activation("Mish", 2, _mish, _mish_slope),
    _activation("Swish", 1, _swish, _swish_slope, alpha=1.0),
    _activation("HardSwish", 1, _hard_swish, _hard_swish_slope),
    _activation(
        "HardSigmoid", 0, lambda x, out, _, alpha, beta: _clamped_line(x, out, alpha, beta),
        _hard_sigmoid_slope, alpha=0.20000000298023224, beta=0.5,
    ),
    _activation("LeakyRelu", 2, _leaky_relu, _leaky_relu_slope, alpha=0.009999999776482582),
    _activation("ThresholdedRelu", 1, _thresholded, _thresholded_slope, alpha=1.0),
    _activation(
        "Elu", 1, lambda x, out, work, alpha: _exponential_branch(x, out, work[0], 1.0, alpha),
        _elu_slope, alpha=1.0,
    ),
    _activation(
        "Celu", 1, lambda x, out, work, alpha: _exponential_branch(x, out, work[0], alpha, alpha),
        _celu_slope, alpha=1.0,
    ),
    _activation("Selu", 1, _selu, _selu_slope, alpha=1.6732631921768188, gamma=1.0507010221481323),
    elementwise(
        "Gelu", (1, 1), _infer_gelu, chain_kernel(ERF_WORKSPACES + 1, _gelu),
        of_first(_gelu_slope), approximate="none",
    ),
    OpDef(
        "GeluGradient", (2, 2), _infer_gelu_gradient, _gelu_gradient,
        attributes=declared(approximate="none"), domain="stitch", batching=of_equal_shapes,
    ),
    _softmax_operator("Softmax", _softmax, softmax_gradient),
    _softmax_operator("LogSoftmax", _log_softmax, log_softmax_gradient),
    _softmax_operator("Hardmax", _hardmax, no_gradient),
    OpDef(
        "SoftmaxGradient", (2, 2), _infer_softmax_gradient, _softmax_gradient,
        attributes=declared(axis=-1), domain="stitch", batching=along_axis,
    ),
)  # fmt: skip
