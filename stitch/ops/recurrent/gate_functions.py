"""The activation functions that RNN, LSTM and GRU name in their attributes.

Source: the section on activation functions of ONNX's RNN. Values of `activation_alpha` and
`activation_beta` are consumed in order, by those functions that have such a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.ops.attributes import Attributes
from stitch.ops.inference import InferenceContext
from stitch.program import Array

#: Takes values and gives new ones of the same shape.
Gate = Callable[[Array], Array]
#: The name of a function in lower case, its alpha and its beta.
Activation = tuple[str, float, float]


def sigmoid(x: Array) -> Array:
    """The logistic function, without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small).astype(x.dtype) / (1 + small))


@dataclass(frozen=True, slots=True)
class _Function:
    call: Callable[[Array, Any, Any], Array]
    alpha: float | None = None
    beta: float | None = None


_FUNCTIONS = {
    "relu": _Function(lambda x, a, b: np.maximum(x, 0)),
    "tanh": _Function(lambda x, a, b: np.tanh(x)),
    "sigmoid": _Function(lambda x, a, b: sigmoid(x)),
    "softsign": _Function(lambda x, a, b: x / (1 + np.abs(x))),
    "softplus": _Function(lambda x, a, b: np.logaddexp(x, x.dtype.type(0))),
    "affine": _Function(lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": _Function(lambda x, a, b: np.where(x >= 0, x, a * x), 0.01),
    "thresholdedrelu": _Function(lambda x, a, b: np.where(x > a, x, 0 * x), 1.0),
    "scaledtanh": _Function(lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": _Function(lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": _Function(lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1.0),
}


def names_of(attributes: Attributes, defaults: tuple[str, ...], directions: int) -> tuple[str, ...]:
    """The names of the activations of all directions, in lower case."""
    given = attributes.get("activations")
    names = tuple(str(name) for name in given) if isinstance(given, tuple) else ()
    wanted = defaults * directions
    # The schema of RNN gives two names by default, also for one direction.
    return tuple(name.lower() for name in (names[: len(wanted)] if names else wanted))


def check_names(context: InferenceContext, names: tuple[str, ...], count: int) -> None:
    """There must be `count` activations, all of them known."""
    unknown = [name for name in names if name not in _FUNCTIONS]
    if unknown or len(names) != count:
        raise context.fail(
            f"the activations of {context.op} do not fit",
            expected=f"{count} of {', '.join(_FUNCTIONS)}",
            got=", ".join(names),
        )


def activations_of(attributes: Attributes, names: tuple[str, ...]) -> list[Activation]:
    """Each function's name and parameters, 0 for those that it does not have."""
    alphas = _numbers(attributes, "activation_alpha")
    betas = _numbers(attributes, "activation_beta")
    found = []
    for name in names:
        function = _FUNCTIONS[name]
        alpha = function.alpha if function.alpha is None or not alphas else alphas.pop(0)
        beta = function.beta if function.beta is None or not betas else betas.pop(0)
        found.append((name, alpha or 0.0, beta or 0.0))
    return found


def gates_of(attributes: Attributes, names: tuple[str, ...], dtype: np.dtype[Any]) -> list[Gate]:
    """The functions, with their parameters and the clip of what they are given."""
    clip = attributes.get("clip")
    limit = dtype.type(clip) if isinstance(clip, float) and clip > 0 else None
    return [
        _gate(_FUNCTIONS[name], dtype.type(alpha), dtype.type(beta), limit)
        for name, alpha, beta in activations_of(attributes, names)
    ]


def _gate(function: _Function, alpha: Any, beta: Any, limit: Any) -> Gate:
    def call(x: Array) -> Array:
        inside = x if limit is None else np.clip(x, -limit, limit)
        return function.call(inside, alpha, beta)

    return call


def _numbers(attributes: Attributes, name: str) -> list[float]:
    given = attributes.get(name)
    return [float(value) for value in given] if isinstance(given, tuple) else []
