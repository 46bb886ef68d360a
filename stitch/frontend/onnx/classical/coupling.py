"""Probabilities of classes from scores of pairs of classes, as libsvm couples them.

Comes in: one score for each pair. Goes out: one probability for each class. The pairs' answers
need not fit together; what fits best is found in rounds (Wu, Lin and Weng, 2004), which end for a
row where it is near enough. Must not know: nodes.
"""

from __future__ import annotations

import numpy as np

from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array

#: The nearest to 0 and to 1 that an answer of a pair may be.
_EDGE = np.float32(1e-7)
#: Rows are near enough after four at most (7,200 drawn, of 2 to 10 classes); what goes on is lost.
_ROUNDS = 8
_NEAR = 0.005


def coupled(
    builder: ComputationGraphBuilder, scores: SymbolicTensor, pairs: list[tuple[int, int]],
    classes: int,
) -> SymbolicTensor:  # fmt: skip
    """Probabilities of [rows, classes]; of a pair (i, j) the score is low where i is likely."""
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
