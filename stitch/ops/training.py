"""Optimizer steps of ONNX's preview training domain: Adagrad, Adam, Momentum.

Operands are the learning rate, the step count, then all parameters, all gradients and all states of
each kind, in equal numbers; outputs are the new parameters, then the new states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import INT64
from stitch.ops.inference import Attributes, InferenceContext, float_of, string_of
from stitch.program import Array, DataType, ValueType

DOMAIN = "ai.onnx.preview.training"
_REALS = frozenset({DataType.FLOAT32, DataType.FLOAT64})
#: Returns the new parameter and states from rate, step, parameter, regularized gradient and states.
Step = Callable[[Any, int, Array, Array, Sequence[Array], Attributes], tuple[Array, ...]]


def _adagrad(
    rate: Any, step: int, x: Array, g: Array, states: Sequence[Array], attributes: Attributes
) -> tuple[Array, ...]:
    (h,) = states
    decayed = rate / (1 + step * float_of(attributes, "decay_factor"))
    squares = h + g * g
    return x - decayed * g / (np.sqrt(squares) + float_of(attributes, "epsilon")), squares


def _adam(
    rate: Any, step: int, x: Array, g: Array, states: Sequence[Array], attributes: Attributes
) -> tuple[Array, ...]:
    v, h = states
    alpha, beta = float_of(attributes, "alpha"), float_of(attributes, "beta")
    v = alpha * v + (1 - alpha) * g
    h = beta * h + (1 - beta) * (g * g)
    if step > 0:
        # NumPy's powers overflow to infinity, Python's raise.
        corrections = 1 - np.float64(beta) ** step, 1 - np.float64(alpha) ** step
        rate = rate * np.sqrt(corrections[0]) / corrections[1]
    updated = x - rate * (v / (np.sqrt(h) + float_of(attributes, "epsilon")))
    return (1 - float_of(attributes, "norm_coefficient_post")) * updated, v, h


def _momentum(
    rate: Any, step: int, x: Array, g: Array, states: Sequence[Array], attributes: Attributes
) -> tuple[Array, ...]:
    (v,) = states
    alpha = float_of(attributes, "alpha")
    v = alpha * v + (float_of(attributes, "beta") if step > 0 else 1.0) * g
    nesterov = string_of(attributes, "mode") == "nesterov"
    return x - rate * (g + alpha * v if nesterov else v), v


def _infer(states: int, context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_type(0, _REALS)
    context.require_type(1, INT64)
    for index in (0, 1):
        context.require_scalar(index)
    count, rest = divmod(len(context.inputs) - 2, states + 2)
    context.require(
        not rest and count >= 1 and context.outputs == count * (states + 1),
        f"{context.op} has the wrong number of operands or outputs",
        expected=f"2 + {states + 2} operands and {states + 1} outputs per parameter",
        got=f"{len(context.inputs)} operands, {context.outputs} outputs",
    )
    if "mode" in context.attributes:
        context.require_word("mode", ("standard", "nesterov"))
    kinds = [context.require_type(2 + index, _REALS) for index in range(count)]
    for index in range(count, count * (states + 2)):
        wanted = kinds[index % count]
        context.require_type(2 + index, frozenset({wanted.data_type}))
        context.require_shape(2 + index, wanted.shape)
    return tuple(kinds) * (states + 1)


def _run(
    step: Step, arguments: KernelArguments, operands: Sequence[Array], outputs: Sequence[Array]
) -> None:
    x, gradient, *states = operands
    rate = arguments.operand(0).reshape(())[()]
    steps = int(arguments.operand(1).reshape(()))
    regularized = arguments.float_of("norm_coefficient") * x + gradient
    updated = step(rate, steps, x, regularized, states, arguments.attributes)
    for target, value in zip(outputs, updated, strict=True):
        target[...] = value


def _kernel(states: int, step: Step, arguments: KernelArguments) -> Sequence[Thunk]:
    count = (len(arguments.inputs) - 2) // (states + 2)
    operands = [arguments.operand(index) for index in range(2, len(arguments.inputs))]
    return [
        partial(_run, step, arguments, operands[i::count], arguments.outputs[i::count])
        for i in range(count)
    ]


def _batching(context: BatchingContext) -> Sequence[Any] | None:
    """Update the parameters of all examples at once if they share rate and step number."""
    if context.varies(0, 1):
        return None
    return context.emit(*context.operands[:2], *context.broadcast_all()[2:])


def _operator(name: str, states: int, step: Step, **attributes: Attribute) -> OpDef:
    return OpDef(
        name, (3, -1), partial(_infer, states), partial(_kernel, states, step), outputs=(1, -1),
        attributes=attributes, domain=DOMAIN, batching=_batching,
    )  # fmt: skip


_SMALL = Attribute("float", 9.999999974752427e-07)
_NONE = Attribute("float", 0.0)
_NEEDED = Attribute("float", required=True)

OPERATORS = (
    _operator("Adagrad", 1, _adagrad, decay_factor=_NONE, epsilon=_SMALL, norm_coefficient=_NONE),
    _operator(
        "Adam", 2, _adam,
        alpha=Attribute("float", 0.8999999761581421), beta=Attribute("float", 0.9990000128746033),
        epsilon=_SMALL, norm_coefficient=_NONE, norm_coefficient_post=_NONE,
    ),
    _operator(
        "Momentum", 1, _momentum, alpha=_NEEDED, beta=_NEEDED,
        mode=Attribute("string", required=True), norm_coefficient=_NEEDED,
    ),
)  # fmt: skip
