"""Linear models and support vector machines of `ai.onnx.ml` as products of matrices.

Comes in: a node. Goes out: what plain operations make of its operands; probabilities of classes are
coupled from scores of pairs of them, as libsvm does it. Must not know: scopes, files, trees.
"""

from __future__ import annotations

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.classical.scores import (
    both_classes,
    chosen,
    labels,
    named_transform,
    one_of_two,
    passed_over,
    rows,
    transformed,
)  # fmt: skip
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

#: Classes that vote in pairs: of 128 there are 8,128.
MAX_CLASSES = 128
_KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def regressor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """LinearRegressor: one sum for each target."""
    x, targets = rows(builder, call), call.whole("targets", 1)
    if targets < 1:
        raise call.unfit("targets", "at least one", targets)
    factors = call.reals("coefficients", targets * x.shape[1]).reshape(targets, x.shape[1])
    intercepts = call.reals("intercepts")
    if intercepts.size not in (0, targets):
        raise call.unfit("intercepts", f"{targets} numbers, or none", intercepts.size)
    scores = builder.op("MatMul", x, factors.T.copy())
    scores = scores + intercepts if intercepts.size else scores
    return transformed(builder, call, scores, named_transform(call))


def classifier(builder: ComputationGraphBuilder, call: NodeCall) -> list[SymbolicTensor]:
    """LinearClassifier: labels, and the scores of classes."""
    x, intercepts = rows(builder, call), call.reals("intercepts")
    names, transform = (
        labels(call, "classlabels_ints", "classlabels_strings"),
        named_transform(call),
    )
    if intercepts.size == 0 or names.size != max(2, intercepts.size):
        raise call.unfit("intercepts", f"{names.size} numbers, or one", intercepts.size)
    factors = call.reals("coefficients", intercepts.size * x.shape[1])
    scores = builder.op(
        "Gemm", x, factors.reshape(intercepts.size, x.shape[1]), intercepts, transB=1
    )
    if intercepts.size > 1:
        return [chosen(builder, scores, names), transformed(builder, call, scores, transform)]
    if transform != "NONE":
        raise passed_over(call, transform)
    flags = builder.op("Greater", builder.op("Reshape", scores, [-1]), 0.0)
    label = one_of_two(builder, flags, int(names[1]), int(names[0]))
    return [label, both_classes(builder, call, scores, transform, signed=False)]


def vector_regressor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """SVMRegressor: one number a row; with `one_class` 1 or -1."""
    count, transform = call.whole("n_supports"), named_transform(call)
    if transform != "NONE":
        raise passed_over(call, transform)
    x = rows(builder, call, DataType.FLOAT64)
    rho = call.reals("rho", 1).astype(np.float64)
    if count > 0:
        x = _kernel(builder, call, x, count)
    factors = call.reals("coefficients", x.shape[1]).astype(np.float64)
    scores = _float32(builder, builder.op("MatMul", x, factors.reshape(-1, 1)) + rho)
    if not call.whole("one_class"):
        return scores
    above = builder.op("Greater", scores, 0.0)
    return builder.op("Where", above, np.array(1, np.float32), np.array(-1, np.float32))


def vector_classifier(builder: ComputationGraphBuilder, call: NodeCall) -> list[SymbolicTensor]:
    """SVMClassifier: labels, and scores: of classes, or of pairs of classes."""
    names = labels(call, "classlabels_ints", "classlabels_strings")
    if names.size < 2:
        raise call.unfit("classlabels_ints", "two labels or more", names.size)
    counts = call.wholes("vectors_per_class")
    return (_by_vectors if sum(counts) > 0 else _by_planes)(builder, call, names)


def _by_planes(
    builder: ComputationGraphBuilder, call: NodeCall, names: Array
) -> list[SymbolicTensor]:
    """Without support vectors: a linear classifier with one intercept."""
    x, transform, rho = rows(builder, call), named_transform(call), call.reals("rho")
    if rho.size == 0:
        raise call.unfit("rho", "at least one number", rho.size)
    factors = call.reals("coefficients", names.size * x.shape[1]).reshape(names.size, x.shape[1])
    scores = builder.op("MatMul", x, factors.T.copy()) + rho[:1]
    label = chosen(builder, scores, names)
    if names.size == 2 and not call.reals("prob_a").size:
        # ONNX Runtime takes the second class wherever the larger score is large.
        most = builder.op("ReduceMax", scores, [1], keepdims=0)
        positive = bool((factors >= 0).all())
        large = builder.op("GreaterOrEqual", most, 0.5) if positive else most > 0
        label = builder.op("Where", large, np.array(names[1]), label)
    return [label, transformed(builder, call, scores, transform)]


def _by_vectors(
    builder: ComputationGraphBuilder, call: NodeCall, names: Array
) -> list[SymbolicTensor]:
    """Each pair of classes has a vote; Platt's sigmoids make probabilities of their scores."""
    counts = call.wholes("vectors_per_class", names.size)
    if min(counts) < 0:
        raise call.unfit("vectors_per_class", "numbers of vectors", counts)
    factors = call.reals("coefficients", (names.size - 1) * sum(counts))
    rho = call.reals("rho", names.size * (names.size - 1) // 2).astype(np.float64)
    if names.size > MAX_CLASSES:
        raise call.refused(
            "operator ai.onnx.ml.SVMClassifier is not supported with so many classes, each of "
            "which votes with each",
            expected=f"at most {MAX_CLASSES}", got=str(names.size),
        )  # fmt: skip
    pairs = [(i, j) for i in range(names.size) for j in range(i + 1, names.size)]
    kernel = _kernel(builder, call, rows(builder, call, DataType.FLOAT64), sum(counts))
    weights = _of_pairs(factors.reshape(names.size - 1, sum(counts)), counts, pairs)
    scores = builder.op("MatMul", kernel, weights) + rho
    label = builder.op("Gather", builder.constant(names), _elected(builder, scores, pairs))
    scores, transform = _float32(builder, scores), named_transform(call)
    slopes = call.reals("prob_a")
    if slopes.size:
        slopes, shifts = call.reals("prob_a", len(pairs)), call.reals("prob_b", len(pairs))
        chances = coupled(builder, scores * slopes + shifts, pairs, names.size)
        return [label, transformed(builder, call, chances, transform)]
    if len(pairs) > 1:
        return [label, transformed(builder, call, scores, transform)]
    if transform != "NONE":
        raise passed_over(call, transform)
    return [label, both_classes(builder, call, scores, transform, signed=True)]


def _of_pairs(factors: Array, counts: tuple[int, ...], pairs: list[tuple[int, int]]) -> Array:
    """What each vector counts in each pair of classes: those of either class, by the other."""
    ends = np.cumsum(counts)
    factors_of_pairs = np.zeros((ends[-1], len(pairs)), np.float64)
    for column, (i, j) in enumerate(pairs):
        for own, row in ((i, j - 1), (j, i)):
            vectors = slice(ends[own] - counts[own], ends[own])
            factors_of_pairs[vectors, column] = factors[row, vectors]
    return factors_of_pairs


def _elected(
    builder: ComputationGraphBuilder, scores: SymbolicTensor, pairs: list[tuple[int, int]]
) -> SymbolicTensor:
    """The class with most votes, the first of several."""
    classes = np.arange(pairs[-1][1] + 1)
    first, second = (np.array(side)[:, None] == classes for side in zip(*pairs, strict=True))
    won = builder.op("Cast", builder.op("Greater", scores, 0.0), to=ops.onnx_code(DataType.FLOAT32))
    votes = builder.op("MatMul", won, (first * 1.0 - second).astype(np.float32))
    votes = votes + second.sum(0).astype(np.float32)
    return builder.op("ArgMax", votes, axis=1, keepdims=0)


def _kernel(
    builder: ComputationGraphBuilder, call: NodeCall, x: SymbolicTensor, count: int
) -> SymbolicTensor:
    """Each row with each support vector, in float64: distances are differences of large numbers."""
    vectors = call.reals("support_vectors", count * x.shape[1]).astype(np.float64)
    vectors = vectors.reshape(count, x.shape[1])
    kind, numbers = call.word("kernel_type", "LINEAR", _KERNELS), call.reals("kernel_params")
    if numbers.size not in (0, 3):
        raise call.unfit("kernel_params", "three numbers", numbers.size)
    gamma, shift, degree = map(float, numbers) if numbers.size else (0.0, 0.0, 0.0)
    products = builder.op("MatMul", x, vectors.T.copy())
    if kind == "LINEAR":
        return products
    if kind == "RBF":
        squares = builder.op("ReduceSumSquare", x, [1], keepdims=1)
        apart = squares + (vectors**2).sum(1) - 2 * products
        return builder.op("Exp", -gamma * builder.op("Relu", apart))
    scaled = products * gamma + shift
    return builder.op("Tanh", scaled) if kind == "SIGMOID" else builder.op("Pow", scaled, degree)


def _float32(builder: ComputationGraphBuilder, x: SymbolicTensor) -> SymbolicTensor:
    return builder.op("Cast", x, to=ops.onnx_code(DataType.FLOAT32))


#: The nearest to 0 and to 1 that an answer of a pair may be.
_EDGE = np.float32(1e-7)
#: Rows are near enough after four at most (7,200 drawn, of 2 to 10 classes); what goes on is lost.
_ROUNDS = 8
_NEAR = 0.005


def coupled(
    builder: ComputationGraphBuilder, scores: SymbolicTensor, pairs: list[tuple[int, int]],
    classes: int,
) -> SymbolicTensor:  # fmt: skip
    """Probabilities of [rows, classes]; of a pair (i, j) the score is low where i is likely.

    The pairs' answers need not fit together; what fits best is found in rounds (Wu, Lin and Weng,
    2004), which end for a row where it is near enough.
    """
    answers = builder.op("Clip", 1 - builder.op("Sigmoid", scores), _EDGE, 1 - _EDGE)
    matrix, diagonal = _quadratic(builder, answers, pairs, classes)
    rows = [
        builder.op("Squeeze", row, [1])
        for row in builder.apply("Split", [matrix], classes, {"axis": 1, "num_outputs": classes})
    ]
    own = builder.apply("Split", [diagonal], classes, {"axis": 1, "num_outputs": classes})
    shape = [answers.shape[0], classes]
    start: Array = np.full(shape, np.float32(1) / np.float32(classes), np.float32)
    shares = builder.constant(start)
    for _ in range(_ROUNDS):
        shares = _round(builder, shares, matrix, rows, own)
    return shares


def _quadratic(
    builder: ComputationGraphBuilder, answers: SymbolicTensor, pairs: list[tuple[int, int]],
    classes: int,
) -> tuple[SymbolicTensor, SymbolicTensor]:  # fmt: skip
    """The form whose least is sought, [rows, classes, classes], and its diagonal."""
    places = np.zeros((classes, classes), np.int64)
    for index, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = index, index + len(pairs)
    both = builder.op("Concat", answers, 1 - answers, axis=1)
    wins = builder.op("Gather", both, places, axis=1)
    losses = builder.op("Gather", both, places.T.copy(), axis=1)
    others = 1 - np.eye(classes, dtype=np.float32)
    diagonal = builder.op("ReduceSum", losses * losses * others, [2], keepdims=0)
    across = builder.op("Unsqueeze", diagonal, [2]) * np.eye(classes, dtype=np.float32)
    return across - wins * losses * others, diagonal


def _round(
    builder: ComputationGraphBuilder, shares: SymbolicTensor, matrix: SymbolicTensor,
    rows: list[SymbolicTensor], own: tuple[SymbolicTensor, ...],
) -> SymbolicTensor:  # fmt: skip
    """Each class in turn set to its best; rows that are near enough stay as they are."""
    classes = len(rows)
    slopes = builder.op("MatMul", matrix, builder.op("Unsqueeze", shares, [2]))
    slopes = builder.op("Squeeze", slopes, [2])
    value = builder.op("ReduceSum", shares * slopes, [1], keepdims=1)
    apart = builder.op("ReduceMax", builder.op("Abs", slopes - value), [1], keepdims=1)
    better = shares
    for index in range(classes):
        unit = np.eye(classes, dtype=np.float32)[index : index + 1]
        slope = builder.op("Slice", slopes, [index], [index + 1], [1])
        step = (value - slope) / own[index]
        whole = 1 + step
        better = (better + step * unit) / whole
        value = (value + step * (step * own[index] + 2 * slope)) / whole / whole
        slopes = (slopes + step * rows[index]) / whole
    return builder.op("Where", builder.op("Less", apart, _NEAR / classes), shares, better)
