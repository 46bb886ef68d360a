"""Gradients' cases: elementwise operators, activations, reductions and softmaxes."""

from __future__ import annotations

import numpy as np

from tests.support.gradients.running import Case, case

M = "f64[3,4]"


def _extremes(op: str) -> list[Case]:
    return [
        case(op, [M, "f64[4]"]),
        case(op, ["f64[3,1]", "f64[1,4]"]),
        case(op, [M, "f64[4]", "f64[2,1,1]"]),
        case(op, [M]),
    ]


_BINARY = [
    case(op, specs)
    for op in ("Add", "Sub", "Mul", "Div")
    for specs in ([M, M], [M, "f64[4]+"], ["f64[2,1,4]", "f64[3,1]+"], ["f64[]", M])
]  # fmt: skip

ARITHMETIC = [
    *_BINARY,
    case("Mod", [M, "f64[4]+"], fmod=1),
    *_extremes("Max"),
    *_extremes("Min"),
    case("Sum", [M, "f64[4]", "f64[2,1,1]"]),
    case("Mean", [M, "f64[4]", "f64[2,1,1]"]),
    case("Pow", ["f64[3,4]+", "f64[4]"]),
    case("Pow", ["f64[3,1]+", "f64[1,4]"]),
    case("Pow", [M, "i64[4]<4"]),
    *(case("Pow", ["f64[3,4]+", np.array(e)]) for e in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -0.5, 2.7)),
    case("Pow", [M, np.array(3, np.int64)]),
    case("Where", ["bool[3,4]", M, "f64[4]"]),
    case("Where", ["bool[4]", "f64[3,1]", "f64[2,1,1]"]),
    case("Clip", [M, np.array(-1.0), np.array(1.5)]),
    case("Clip", [M, None, np.array(0.5)]),
    case("Clip", [M]),
    case("Clip", [M, "f64[]1", "f64[]>"]),
    case("Cast", [M], to=1),
]

_ANYWHERE = "Sin Cos Tan Atan Sinh Cosh Tanh Asinh Exp Neg Abs Erf Reciprocal"

ELEMENTARY = [
    *(case(op, [M]) for op in _ANYWHERE.split()),
    *(case(op, ["f64[3,4]+"]) for op in ("Sqrt", "Log")),
    *(case(op, ["f64[3,4]1"]) for op in ("Asin", "Acos", "Atanh")),
    case("Acosh", ["f64[3,4]>"]),
]

FLAT = [case(op, [M]) for op in ("Floor", "Ceil", "Round", "Sign", "Hardmax")]


ACTIVATIONS = [
    case("Relu", [M]),
    case("Sigmoid", [M]),
    case("Softplus", [M]),
    case("Softsign", [M]),
    case("Mish", [M]),
    case("Swish", [M]),
    case("Swish", [M], alpha=1.7),
    case("HardSwish", ["f64[5,6]"]),
    case("HardSigmoid", [M], alpha=0.3, beta=0.4),
    case("Gelu", [M]),
    case("Gelu", [M], approximate="tanh"),
    *(case("LeakyRelu", [M], alpha=a) for a in (0.25, 0.0, -0.5, 2.0)),
    *(case("ThresholdedRelu", [M], alpha=a) for a in (1.0, 0.0, -1.0)),
    *(case("Elu", [M], alpha=a) for a in (1.0, 0.5, 0.0, -0.5)),
    *(case("Selu", [M], alpha=a, gamma=1.25) for a in (1.5, -0.5)),
    case("Celu", ["f32[3,4]"]),
    case("Celu", ["f32[3,4]"], alpha=0.5),
    case("PRelu", [M, "f64[4]"]),
    case("PRelu", ["f64[2,3,4]", "f64[3,1]"]),
]

C = "f64[2,3,4]"
_SUMS = "Sum Mean Max Min L1 L2 LogSum LogSumExp SumSquare"


def _reduced(op: str) -> list[Case]:
    spec = C + "+" if op == "ReduceLogSum" else C
    return [
        case(op, [spec, [1]]),
        case(op, [spec, [-1, 0]], keepdims=0),
        case(op, [spec], keepdims=0),
    ]


REDUCTIONS = [
    *(row for name in _SUMS.split() for row in _reduced(f"Reduce{name}")),
    case("ReduceSum", [C], noop_with_empty_axes=1),
    case("ReduceL2", [C, []], noop_with_empty_axes=1),
    case("ReduceProd", [C, [1]]),
    case("ReduceProd", [C], keepdims=0),
    *(
        case("CumSum", [C, np.array(1)], exclusive=exclusive, reverse=reverse)
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    case("CumProd", [C, np.array(-1)]),
    case("CumProd", [C, np.array(1)], exclusive=1, reverse=1),
    *(case(op, [C], axis=a) for op in ("Softmax", "LogSoftmax") for a in (-1, 1, 0)),
]

ROWS: list[Case] = [*ARITHMETIC, *ELEMENTARY, *FLAT, *ACTIVATIONS, *REDUCTIONS]
