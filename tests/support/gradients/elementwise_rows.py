"""Gradients' cases: elementwise operators, activations, reductions and softmaxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.support.gradients.running import Case, case

M = "f64[3,4]"


def _extremes(op: str, function: Any) -> list[Case]:
    return [
        case(op, [M, "f64[4]"], function),
        case(op, ["f64[3,1]", "f64[1,4]"], function),
        case(op, [M, "f64[4]", "f64[2,1,1]"], lambda a, b, c: function(function(a, b), c)),
        case(op, [M], lambda a: a),
    ]


def _average(*tensors: Any) -> Any:
    return sum(tensors) / len(tensors)


_BINARY = [
    case(op, specs, function)
    for op, function in {
        "Add": torch.add, "Sub": torch.subtract, "Mul": torch.mul, "Div": torch.div,
    }.items()
    for specs in ([M, M], [M, "f64[4]+"], ["f64[2,1,4]", "f64[3,1]+"], ["f64[]", M])
]  # fmt: skip

ARITHMETIC = [
    *_BINARY,
    case("Mod", [M, "f64[4]+"], torch.fmod, fmod=1),
    *_extremes("Max", torch.maximum),
    *_extremes("Min", torch.minimum),
    case("Sum", [M, "f64[4]", "f64[2,1,1]"], lambda *t: sum(t)),
    case("Mean", [M, "f64[4]", "f64[2,1,1]"], _average),
    case("Pow", ["f64[3,4]+", "f64[4]"], torch.pow),
    case("Pow", ["f64[3,1]+", "f64[1,4]"], torch.pow),
    case("Pow", [M, "i64[4]<4"], torch.pow),
    *(
        case("Pow", ["f64[3,4]+", np.array(e)], lambda x, e=e: torch.pow(x, e))
        for e in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -0.5, 2.7)
    ),
    case("Pow", [M, np.array(3, np.int64)], lambda x: x**3),
    case("Where", ["bool[3,4]", M, "f64[4]"], torch.where),
    case("Where", ["bool[4]", "f64[3,1]", "f64[2,1,1]"], torch.where),
    case("Clip", [M, np.array(-1.0), np.array(1.5)], lambda x: x.clip(-1.0, 1.5)),
    case("Clip", [M, None, np.array(0.5)], lambda x: x.clip(max=0.5)),
    case("Clip", [M], lambda x: x.clone()),
    case("Clip", [M, "f64[]1", "f64[]>"], torch.clip),
    case("Cast", [M], lambda x: x.float(), to=1),
    case("CastLike", [M, np.zeros(1, np.float32)], lambda x: x.float()),
]

_CIRCULAR = {
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh",
    "Tanh": "tanh", "Asinh": "asinh", "Exp": "exp", "Neg": "neg", "Abs": "abs", "Erf": "erf",
    "Reciprocal": "reciprocal",
}  # fmt: skip

ELEMENTARY = [
    *(case(op, [M], getattr(torch, name)) for op, name in _CIRCULAR.items()),
    *(case(op, ["f64[3,4]+"], getattr(torch, op.lower())) for op in ("Sqrt", "Log")),
    *(case(op, ["f64[3,4]1"], getattr(torch, op.lower())) for op in ("Asin", "Acos", "Atanh")),
    case("Acosh", ["f64[3,4]>"], torch.acosh),
]

FLAT = [case(op, [M]) for op in ("Floor", "Ceil", "Round", "Sign", "Hardmax")]


def _selu(x: Any, alpha: float, gamma: float) -> Any:
    return gamma * (x.clip(min=0) + alpha * (x.clip(max=0).exp() - 1))


ACTIVATIONS = [
    case("Relu", [M], torch.relu),
    case("Sigmoid", [M], torch.sigmoid),
    case("Softplus", [M], F.softplus),
    case("Softsign", [M], F.softsign),
    case("Mish", [M], F.mish),
    case("Swish", [M], F.silu),
    case("Swish", [M], lambda x: x * torch.sigmoid(1.7 * x), alpha=1.7),
    case("HardSwish", ["f64[5,6]"], F.hardswish),
    case("HardSigmoid", [M], lambda x: (0.3 * x + 0.4).clip(0, 1), alpha=0.3, beta=0.4),
    case("Gelu", [M], F.gelu),
    case("Gelu", [M], lambda x: F.gelu(x, approximate="tanh"), approximate="tanh"),
    *(
        case("LeakyRelu", [M], lambda x, a=a: F.leaky_relu(x, a), alpha=a)
        for a in (0.25, 0.0, -0.5, 2.0)
    ),
    *(
        case("ThresholdedRelu", [M], lambda x, a=a: F.threshold(x, a, 0.0), alpha=a)
        for a in (1.0, 0.0, -1.0)
    ),
    *(case("Elu", [M], lambda x, a=a: _selu(x, a, 1.0), alpha=a) for a in (1.0, 0.5, 0.0, -0.5)),
    *(
        case("Selu", [M], lambda x, a=a: _selu(x, a, 1.25), alpha=a, gamma=1.25)
        for a in (1.5, -0.5)
    ),
    case("Celu", ["f32[3,4]"], F.celu),
    case("Celu", ["f32[3,4]"], lambda x: F.celu(x, 0.5), alpha=0.5),
    case("PRelu", [M, "f64[4]"], lambda x, s: torch.where(x < 0, s * x, x)),
    case("PRelu", ["f64[2,3,4]", "f64[3,1]"], lambda x, s: torch.where(x < 0, s * x, x)),
]

C = "f64[2,3,4]"
_SUMS: dict[str, Any] = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL1": lambda x, d, keepdim: x.abs().sum(d, keepdim=keepdim),
    "ReduceL2": lambda x, d, keepdim: (x * x).sum(d, keepdim=keepdim).sqrt(),
    "ReduceLogSum": lambda x, d, keepdim: x.sum(d, keepdim=keepdim).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceSumSquare": lambda x, d, keepdim: (x * x).sum(d, keepdim=keepdim),
}


def _reduced(op: str, function: Any) -> list[Case]:
    spec = C + "+" if op == "ReduceLogSum" else C
    return [
        case(op, [spec, [1]], lambda x: function(x, (1,), keepdim=True)),
        case(op, [spec, [-1, 0]], lambda x: function(x, (0, 2), keepdim=False), keepdims=0),
        case(op, [spec], lambda x: function(x, (0, 1, 2), keepdim=False), keepdims=0),
    ]


REDUCTIONS = [
    *(row for op, function in _SUMS.items() for row in _reduced(op, function)),
    case("ReduceSum", [C], lambda x: x.clone(), noop_with_empty_axes=1),
    case("ReduceL2", [C, []], lambda x: x.abs(), noop_with_empty_axes=1),
    case("ReduceProd", [C, [1]], lambda x: x.prod(1, keepdim=True)),
    case("ReduceProd", [C], lambda x: x.prod(), keepdims=0),
    *(
        case("CumSum", [C, np.array(1)], function, exclusive=exclusive, reverse=reverse)
        for exclusive, reverse, function in (
            (0, 0, lambda x: x.cumsum(1)),
            (1, 0, lambda x: x.cumsum(1) - x),
            (0, 1, lambda x: x.flip(1).cumsum(1).flip(1)),
            (1, 1, lambda x: x.flip(1).cumsum(1).flip(1) - x),
        )
    ),
    case("CumProd", [C, np.array(-1)], lambda x: x.cumprod(2)),
    case("CumProd", [C, np.array(1)], exclusive=1, reverse=1),
    *(
        case(op, [C], lambda x, f=f, a=a: f(x, a), axis=a)
        for op, f in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax))
        for a in (-1, 1, 0)
    ),
]

ROWS: list[Case] = [*ARITHMETIC, *ELEMENTARY, *FLAT, *ACTIVATIONS, *REDUCTIONS]
