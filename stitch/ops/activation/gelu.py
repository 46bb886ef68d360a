"""Gelu, exact or by a hyperbolic tangent, and `stitch.GeluGradient`, its operand's gradient.

The gradient's operands are the result's gradient and the operand. In ONNX's words it is a dozen
elementwise operations; here a chain over chunks that stay in the caches, so that memory is read and
written once. Libraries have it as one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.arithmetic import ERF_WORKSPACES, erf_steps
from stitch.ops.batching import broadcasting, of_equal_shapes
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext, of_first
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import Work, chain_kernel, chunks, scalar
from stitch.ops.workspaces import few
from stitch.program import Array, ValueType

#: tanh(RATE (x + CUBE x^3)) stands for the error function in the approximate form.
GELU_RATE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715
#: The height of the normal distribution's density.
GELU_HEIGHT = 1.0 / math.sqrt(2.0 * math.pi)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_word("approximate", ("none", "tanh"), "Gelu has no such approximation")
    return (context.require_type(0, FLOATS),)


def _infer_gradient(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, x.shape)
    context.require_word("approximate", ("none", "tanh"), "Gelu has no such approximation")
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


def _slope(context: GradientContext) -> Any:
    approximate = context.string_of("approximate")
    operands = context.gradient, context.input(0)
    return context.apply("GeluGradient", *operands, domain="stitch", approximate=approximate)


def _gradient_kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x = (arguments.given(index).reshape(-1) for index in (0, 1))
    out = arguments.outputs[0].reshape(-1)
    slope_steps = _exact if arguments.string_of("approximate") == "none" else _by_tanh
    steps: list[Thunk] = []
    for part, (slope, *others) in chunks(out.size, ERF_WORKSPACES + 1, out.dtype):
        steps += slope_steps(x[part], slope, tuple(others))
        steps.append(partial(np.multiply, gradient[part], slope, out[part]))
    return steps


def _exact(x: Array, slope: Array, work: Work) -> list[Thunk]:
    """(1 + erf(x / sqrt 2)) / 2 + x density(x)."""
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


def _by_tanh(x: Array, slope: Array, work: Work) -> list[Thunk]:
    """(1 + t) / 2 + x (1 - t^2) RATE (1 + 3 CUBE x^2) / 2 with t the hyperbolic tangent."""
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


OPERATORS = (
    OpDef(
        "Gelu", (1, 1), _infer, chain_kernel(ERF_WORKSPACES + 1, _gelu),
        attributes=declared(approximate="none"), elementwise=True,
        batching=broadcasting, gradient=of_first(_slope), workspace=few,
    ),
    OpDef(
        "GeluGradient", (2, 2), _infer_gradient, _gradient_kernel,
        attributes=declared(approximate="none"), domain="stitch",
        batching=of_equal_shapes, workspace=few,
    ),
)  # fmt: skip
