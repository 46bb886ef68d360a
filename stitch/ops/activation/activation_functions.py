"""Activations: chains of NumPy steps over cache-sized chunks, the input read before it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.activation import activation_gradients as gradients
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, PRODUCTS, SIGNED_NUMERIC
from stitch.ops.gradient import Slope, of_first
from stitch.ops.inference import InferenceContext, same_as_first
from stitch.ops.steps import Chain, Work, chain_kernel, copy_steps, mask_in, scalar
from stitch.ops.workspaces import few, operands
from stitch.program import Array, DataType, ValueType


def sigmoid_steps(x: Array, out: Array, rate: float = 1.0) -> list[Thunk]:
    """1 / (1 + exp(-rate x)); an overflow of exp gives the right limit, 0. `out` may be `x`."""
    scale = partial(np.multiply, x, scalar(-rate, x), out)
    return [
        partial(np.negative, x, out) if rate == 1.0 else scale,
        partial(np.exp, out, out),
        partial(np.add, out, scalar(1.0, x), out),
        partial(np.reciprocal, out, out),
    ]


def softplus_steps(x: Array, out: Array, work: Array) -> list[Thunk]:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which cannot overflow."""
    return [
        partial(np.absolute, x, work),
        partial(np.negative, work, work),
        partial(np.exp, work, work),
        partial(np.log1p, work, work),
        partial(np.maximum, x, scalar(0.0, x), out=out),
        partial(np.add, out, work, out),
    ]


def _exponential_branch(
    x: Array, out: Array, work: Array, rate: float, scale: float
) -> list[Thunk]:
    """max(x, 0) + scale (exp(min(x, 0) / rate) - 1): the common form of Elu, Selu and Celu."""
    steps: list[Thunk] = [partial(np.minimum, x, scalar(0.0, x), out=work)]
    if rate != 1.0:
        steps.append(partial(np.divide, work, scalar(rate, x), work))
    steps.append(partial(np.expm1, work, work))
    if scale != 1.0:
        steps.append(partial(np.multiply, work, scalar(scale, x), work))
    return [
        *steps,
        partial(np.maximum, x, scalar(0.0, x), out=out),
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
        partial(np.maximum, out, scalar(0.0, x), out=out),
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


def _relu(arguments: KernelArguments) -> Sequence[Thunk]:
    x = arguments.given(0)
    return (partial(np.maximum, x, scalar(0, x), out=arguments.outputs[0]),)


def _activation(name: str, workspaces: int, chain: Chain, slope: Slope, **defaults: float) -> OpDef:
    # ONNX has Celu for float32 only.
    allowed = frozenset({DataType.FLOAT32}) if name == "Celu" else FLOATS
    return OpDef(
        name, (1, 1), same_as_first(allowed), chain_kernel(workspaces, chain),
        attributes=declared(**defaults), elementwise=True, gradient=of_first(slope),
        workspace=few,
    )  # fmt: skip


OPERATORS = (
    OpDef(
        "Relu", (1, 1), same_as_first(SIGNED_NUMERIC), _relu, elementwise=True,
        gradient=of_first(gradients.relu), workspace=few,
    ),
    OpDef(
        "PRelu", (2, 2), _infer_prelu, _prelu, elementwise=True, gradient=gradients.prelu,
        workspace=operands(1),
    ),
    _activation("Sigmoid", 0, lambda x, out, _: sigmoid_steps(x, out), gradients.sigmoid),
    _activation(
        "Softplus", 1, lambda x, out, work: softplus_steps(x, out, work[0]), gradients.softplus,
    ),
    _activation("Softsign", 1, _softsign, gradients.softsign),
    _activation("Mish", 2, _mish, gradients.mish),
    _activation("Swish", 1, _swish, gradients.swish, alpha=1.0),
    _activation("HardSwish", 1, _hard_swish, gradients.hard_swish),
    _activation(
        "HardSigmoid", 0, lambda x, out, _, alpha, beta: _clamped_line(x, out, alpha, beta),
        gradients.hard_sigmoid, alpha=0.20000000298023224, beta=0.5,
    ),
    _activation("LeakyRelu", 2, _leaky_relu, gradients.leaky_relu, alpha=0.009999999776482582),
    _activation("ThresholdedRelu", 1, _thresholded, gradients.thresholded, alpha=1.0),
    _activation(
        "Elu", 1, lambda x, out, work, alpha: _exponential_branch(x, out, work[0], 1.0, alpha),
        gradients.elu, alpha=1.0,
    ),
    _activation(
        "Celu", 1, lambda x, out, work, alpha: _exponential_branch(x, out, work[0], alpha, alpha),
        gradients.celu, alpha=1.0,
    ),
    _activation(
        "Selu", 1, _selu, gradients.selu, alpha=1.6732631921768188, gamma=1.0507010221481323,
    ),
)  # fmt: skip
