"""What models of classical machine learning (`ai.onnx.ml`) make of scores: probabilities, labels.

Comes in: scores of rows. Goes out: scores after a transform, the labels of rows. ONNX Runtime
passes over some transforms of single scores; those are refused here. Must not know: models.
"""

from __future__ import annotations

import math

import numpy as np

from stitch import ops
from stitch.errors import CompileError
from stitch.frontend.onnx.calls import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
#: Scores this near to 0 stay out of the sum of SOFTMAX_ZERO.
_ZERO = 1e-7
#: The constant of Winitzki's approximation of the inverse of erf.
_WINITZKI = 0.147


def rows(
    builder: ComputationGraphBuilder, call: NodeCall, kind: DataType = DataType.FLOAT32
) -> SymbolicTensor:
    """Operand 0 as rows of numbers of a type; a vector is one row."""
    x = call.required(0)
    if x.ndim not in (1, 2):
        raise call.refused(
            f"operator ai.onnx.ml.{call.op} is not supported on this shape",
            expected="rows, or one vector", got=str(list(x.shape)),
        )  # fmt: skip
    x = builder.op("Reshape", x, [1, x.shape[0]]) if x.ndim == 1 else x
    return x if x.data_type is kind else builder.op("Cast", x, to=ops.onnx_code(kind))


def named_transform(call: NodeCall) -> str:
    """The attribute `post_transform`."""
    return call.word("post_transform", "NONE", TRANSFORMS)


def labels(call: NodeCall, numbers: str, names: str) -> Array:
    """The labels of classes; raises `CompileError` where they are words."""
    values = call.wholes(numbers)
    if call.words(names):
        raise call.refused(
            f"operator ai.onnx.ml.{call.op} is not supported with words as labels (only numbers "
            "are supported, not strings)",
            expected=numbers, got=names,
            remedy="fit the model with whole numbers as classes (sklearn's LabelEncoder)",
        )  # fmt: skip
    if not values:
        raise call.unfit(numbers, "the labels of the classes", values)
    return np.array(values, np.int64)


def chosen(
    builder: ComputationGraphBuilder, scores: SymbolicTensor, names: Array
) -> SymbolicTensor:
    """The label of the largest score of each row, the first of several."""
    best = builder.op("ArgMax", scores, axis=1, keepdims=0)
    return builder.op("Gather", builder.constant(names), best)


def one_of_two(
    builder: ComputationGraphBuilder, holds: SymbolicTensor, yes: int, no: int
) -> SymbolicTensor:
    """One label where a flag holds, else the other."""
    return builder.op("Where", holds, np.array(yes, np.int64), np.array(no, np.int64))


def transformed(
    builder: ComputationGraphBuilder, call: NodeCall, scores: SymbolicTensor, transform: str
) -> SymbolicTensor:
    """Rows of scores after a transform."""
    if transform == "NONE":
        return scores
    if transform == "PROBIT":
        return _probit(builder, scores)
    if scores.shape[1] == 1:
        raise passed_over(call, transform)
    if transform == "LOGISTIC":
        return builder.op("Sigmoid", scores)
    if transform == "SOFTMAX":
        return builder.op("Softmax", scores, axis=-1)
    most = builder.op("ReduceMax", scores, [1], keepdims=1)
    powers = builder.op("Exp", scores - most)
    is_zero = builder.op("LessOrEqual", builder.op("Abs", scores), _ZERO)
    nothing = np.zeros((), scores.dtype)
    summed = builder.op("ReduceSum", builder.op("Where", is_zero, nothing, powers), [1], keepdims=1)
    small = scores * builder.op("Exp", -most)
    return builder.op("Where", is_zero, small, powers) / summed


def both_classes(
    builder: ComputationGraphBuilder, call: NodeCall, score: SymbolicTensor, transform: str,
    *, signed: bool,
) -> SymbolicTensor:  # fmt: skip
    """The scores of two classes from that of the second: 1 - s and s; or -s and s, if signed."""
    if transform == "LOGISTIC" and signed:
        return builder.op("Sigmoid", builder.op("Concat", -score, score, axis=1))
    if transform != "NONE":
        raise passed_over(call, transform)
    return builder.op("Concat", -score if signed else 1 - score, score, axis=1)


def passed_over(call: NodeCall, transform: str) -> CompileError:
    """What is said about a transform that ONNX Runtime does not apply to a single score."""
    return call.refused(
        f"operator ai.onnx.ml.{call.op} is not supported with post_transform {transform} of one "
        "score, which ONNX Runtime passes over",
        remedy="export with post_transform NONE, and a Sigmoid after it where that is meant",
    )  # fmt: skip


def _probit(builder: ComputationGraphBuilder, p: SymbolicTensor) -> SymbolicTensor:
    """The quantile of the normal distribution, by the approximation that ONNX Runtime takes."""
    x = 2 * p - 1
    log = builder.op("Log", (1 - x) * (1 + x))
    half = 2 / (3.14159 * _WINITZKI) + 0.5 * log
    root = builder.op("Sqrt", half * half - log / _WINITZKI)
    size = math.sqrt(2) * builder.op("Sqrt", root - half)
    return builder.op("Where", builder.op("Less", x, 0.0), -size, size)
