"""`stitch.GeluGradient`: the operand's gradient of a Gelu.

Operands are the result's gradient and the operand. In ONNX's words it is a dozen elementwise
operations; here a chain over chunks that stay in the caches, so that memory is read and written
once. Libraries have it as one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.arithmetic import ERF_WORKSPACES, erf_steps
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import CHUNK_SIZE, scalar, workspace
from stitch.ops.workspaces import few
from stitch.program import Array, ValueType

#: tanh(RATE (x + CUBE x^3)) stands for the error function in the approximate form.
GELU_RATE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715
#: The height of the normal distribution's density.
GELU_HEIGHT = 1.0 / math.sqrt(2.0 * math.pi)


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_shape(0, x.shape)
    approximation = context.string_of("approximate")
    if approximation not in ("none", "tanh"):
        raise context.fail(
            "Gelu has no such approximation", expected="none, tanh", got=approximation
        )
    return (x,)


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    gradient, x = (arguments.given(index).reshape(-1) for index in (0, 1))
    out = arguments.outputs[0].reshape(-1)
    slope_steps = _exact if arguments.string_of("approximate") == "none" else _by_tanh
    size = min(out.size, CHUNK_SIZE)
    work = tuple(workspace(size, out.dtype) for _ in range(ERF_WORKSPACES + 1))
    steps: list[Thunk] = []
    for start in range(0, out.size, CHUNK_SIZE):
        part = slice(start, min(start + CHUNK_SIZE, out.size))
        slope, *others = (w[: part.stop - part.start] for w in work)
        steps += slope_steps(x[part], slope, tuple(others))
        steps.append(partial(np.multiply, gradient[part], slope, out[part]))
    return steps


def _exact(x: Array, slope: Array, work: tuple[Array, ...]) -> list[Thunk]:
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


def _by_tanh(x: Array, slope: Array, work: tuple[Array, ...]) -> list[Thunk]:
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
        "GeluGradient", (2, 2), _infer, _kernel,
        attributes={"approximate": Attribute("string", "none")}, domain="stitch", workspace=few,
    ),
)  # fmt: skip
