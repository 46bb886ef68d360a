"""Activations: chains of NumPy steps over cache-sized chunks, the input read before it is lost.

Gradients are said by results where these tell the slope, else by operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, broadcasting
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, PRODUCTS, SIGNED_NUMERIC
from stitch.ops.gradient import GradientContext, Slope, of_first
from stitch.ops.inference import InferenceContext, same_as_first
from stitch.ops.steps import (
    Chain,
    Work,
    chain_kernel,
    copy_steps,
    mask_in,
    reciprocal_step,
    scalar,
    zero,
)
from stitch.ops.workspaces import few, operands
from stitch.program import Array, DataType, ValueType


def sigmoid_steps(x: Array, out: Array, rate: float = 1.0) -> list[Thunk]:
    """1 / (1 + exp(-rate x)); an overflow of exp gives the right limit, 0. `out` may be `x`."""
    scale = partial(np.multiply, x, scalar(-rate, x), out)
    return [
        partial(np.negative, x, out) if rate == 1.0 else scale,
        partial(np.exp, out, out),
        partial(np.add, out, scalar(1.0, x), out),
        reciprocal_step(out, out),
    ]


def softplus_steps(x: Array, out: Array, work: Array) -> list[Thunk]:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which cannot overflow."""
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
    """max(x, 0) + scale (exp(min(x, 0) / rate) - 1): the common form of Elu, Selu and Celu.

    Of 0 and -0 NumPy's minimum and maximum give the second on x86, so that -0 stays -0.
    """
    steps: list[Thunk] = [partial(np.minimum, zero(x), x, out=work)]
    if rate != 1.0:
        steps.append(partial(np.divide, work, scalar(rate, x), work))
    steps.append(partial(np.expm1, work, work))
    if scale != 1.0:
        steps.append(partial(np.multiply, work, scalar(scale, x), work))
    if 0.0 < scale <= rate:
        # The exponential lies above its tangent, x.
        return [*steps, partial(np.maximum, x, work, out=out)]
    return [
        *steps,
        partial(np.maximum, zero(x), x, out=out),
        partial(np.add, out, work, out),
    ]


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
    """slope x + offset, from 0 to 1."""
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
    x, slope, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    product, mask = np.empty_like(out), np.empty(out.shape, np.bool_)
    return (
        partial(np.less, x, scalar(0, x), mask),
        partial(np.multiply, x, slope, product),
        *copy_steps(x, out),
        partial(np.copyto, out, product, where=mask),
    )


def _prelu_lanes(context: BatchingContext) -> Sequence[Any]:
    """The slope must broadcast to the operand, so that one has all lanes."""
    return context.again(context.broadcast(0), context.aligned(1, context.rank()))


def _relu(arguments: KernelArguments) -> Sequence[Thunk]:
    x = arguments.given(0)
    return (partial(np.maximum, x, zero(x), out=arguments.outputs[0]),)


def _relu_slope(c: GradientContext) -> Any:
    return c.kept(c.apply("Greater", c.output(), 0.0), c.gradient)


def _sign_teller(c: GradientContext, slope_below: float) -> Any:
    """A value that is positive where the operand is: the result, if its slope keeps signs."""
    return c.output() if slope_below >= 0.0 else c.input(0)


def _leaky_relu_slope(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    up = c.apply("Greater", _sign_teller(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * alpha)


def _thresholded_slope(c: GradientContext) -> Any:
    alpha = c.float_of("alpha")
    return c.kept(c.apply("Greater", _sign_teller(c, alpha), alpha), c.gradient)


def _elu_slope(c: GradientContext) -> Any:
    """Below zero y = alpha (exp(x) - 1), so its slope is y + alpha."""
    alpha, y = c.float_of("alpha"), c.output()
    if alpha == 1.0:
        return c.gradient * (c.apply("Min", y, 0.0) + 1.0)
    up = c.apply("Greater", _sign_teller(c, alpha), 0.0)
    return c.apply("Where", up, c.gradient, c.gradient * (y + alpha))


def _celu_slope(c: GradientContext) -> Any:
    below = c.apply("Min", c.output(), 0.0)
    return c.gradient * (below * (1.0 / c.float_of("alpha")) + 1.0)


def _selu_slope(c: GradientContext) -> Any:
    alpha, gamma, y = c.float_of("alpha"), c.float_of("gamma"), c.output()
    up = c.apply("Greater", _sign_teller(c, alpha * gamma), 0.0)
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
    return c.kept(inside, c.gradient * c.float_of("alpha"))


def _hard_swish_slope(c: GradientContext) -> Any:
    x = c.input(0)
    inner = c.gradient * (x * (1.0 / 3.0) + 0.5)
    inner = c.apply("Where", c.apply("Greater", x, 3.0), c.gradient, inner)
    return c.kept(c.apply("Greater", x, -3.0), inner)


def _mish_slope(c: GradientContext) -> Any:
    """y = x t with t = tanh(softplus(x))."""
    x = c.input(0)
    t = c.apply("Tanh", c.apply("Softplus", x))
    return c.gradient * (t + x * c.apply("Sigmoid", x) * (1.0 - t * t))


def _swish_slope(c: GradientContext) -> Any:
    """y = x s with s = sigmoid(rate x): the slope is s + rate (y - y s)."""
    x, rate = c.input(0), c.float_of("alpha")
    s = c.apply("Sigmoid", x if rate == 1.0 else x * rate)
    y = x * s
    rest = y - y * s
    return c.gradient * (s + (rest if rate == 1.0 else rest * rate))


def _prelu_gradient(context: GradientContext) -> Sequence[Any]:
    """Below zero y = slope x."""
    x, gradient = context.input(0), context.gradient

    def below() -> Any:
        less = context.apply("Less", x, 0.0)
        return context.apply("Where", less, gradient * context.input(1), gradient)

    return context.of_operands(below, lambda: gradient * context.apply("Min", x, 0.0))


def _activation(name: str, workspaces: int, chain: Chain, slope: Slope, **defaults: float) -> OpDef:
    # ONNX has Celu for float32 only.
    allowed = frozenset({DataType.FLOAT32}) if name == "Celu" else FLOATS
    return OpDef(
        name, (1, 1), same_as_first(allowed), chain_kernel(workspaces, chain),
        attributes=declared(**defaults), elementwise=True,
        batching=broadcasting, gradient=of_first(slope), workspace=few,
    )  # fmt: skip


OPERATORS = (
    OpDef(
        "Relu", (1, 1), same_as_first(SIGNED_NUMERIC), _relu, elementwise=True,
        batching=broadcasting,
        gradient=of_first(_relu_slope), workspace=few,
    ),
    OpDef(
        "PRelu", (2, 2), _infer_prelu, _prelu, elementwise=True,
        batching=_prelu_lanes, gradient=_prelu_gradient, workspace=operands(1),
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
    _activation(
        "Selu", 1, _selu, _selu_slope, alpha=1.6732631921768188, gamma=1.0507010221481323,
    ),
)  # fmt: skip
