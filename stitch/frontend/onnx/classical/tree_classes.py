"""Classification by trees (TreeEnsembleClassifier of `ai.onnx.ml`), as ONNX Runtime does it.

Comes in: a node. Goes out: labels and scores of classes. Two classes may have one score only, which
is then that of the second. Must not know: scopes, files, how trees are walked.
"""

from __future__ import annotations

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.classical.forest import Forest, ForestShape, collected, reached, shape_of
from stitch.frontend.onnx.classical.scores import (
    both_classes,
    chosen,
    labels,
    named_transform,
    one_of_two,
    transformed,
)  # fmt: skip
from stitch.frontend.onnx.classical.trees import numbers, older_forest
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType


def lower_classifier(builder: ComputationGraphBuilder, call: NodeCall) -> list[SymbolicTensor]:
    """The label of each row, and its scores in float32."""
    names = labels(call, "classlabels_int64s", "classlabels_strings")
    if names.size < 2:
        raise call.unfit("classlabels_int64s", "two labels or more", names.size)
    data, forest = older_forest(builder, call, "class", names.size)
    shape, base = shape_of(forest, call), numbers(call, "base_values")
    leaf = reached(builder, call, forest, data, shape.depth)
    scores = collected(builder, leaf, forest.weights.astype(data.dtype), "ReduceSum")
    if names.size == 2:
        label, values = _of_two(builder, call, forest, shape, scores, base, names)
    else:
        label, values = _of_many(builder, call, forest, shape, scores, base, names, leaf)
    return [label, builder.op("Cast", values, to=ops.onnx_code(DataType.FLOAT32))]


def _of_many(
    builder: ComputationGraphBuilder, call: NodeCall, forest: Forest, shape: ForestShape,
    scores: SymbolicTensor, base: Array, names: Array, leaf: SymbolicTensor,
) -> tuple[SymbolicTensor, SymbolicTensor]:  # fmt: skip
    """Classes that no leaf on the way names have no chance, whatever their score of 0 is."""
    if base.size not in (0, names.size):
        raise call.unfit("base_values", f"{names.size} numbers, or none", base.size)
    scores = scores + base.astype(scores.dtype) if base.size else scores
    ranked = scores
    if not base.size and not shape.always(forest.counts).all():
        counts = forest.counts.astype(np.int32)
        named = builder.op("Greater", collected(builder, leaf, counts, "ReduceMax"), 0)
        ranked = builder.op("Where", named, scores, np.array(-np.inf, scores.dtype))
    values = transformed(builder, call, scores, named_transform(call))
    return chosen(builder, ranked, names), values


def _of_two(
    builder: ComputationGraphBuilder, call: NodeCall, forest: Forest, shape: ForestShape,
    scores: SymbolicTensor, base: Array, names: Array,
) -> tuple[SymbolicTensor, SymbolicTensor]:  # fmt: skip
    """Leaves name the first class only, or the second, or both: each is another rule."""
    always, ever = shape.always(forest.counts), shape.ever(forest.counts)
    if (ever != always).any():
        raise call.refused(
            "operator ai.onnx.ml.TreeEnsembleClassifier is not supported on two classes where "
            "some leaves name a class that others do not",
        )  # fmt: skip
    if base.size > 1 or (base.size and not always[0]):
        raise call.refused(
            "operator ai.onnx.ml.TreeEnsembleClassifier is not supported with these base_values "
            "of two classes: ONNX Runtime passes over them, or over the trees",
            expected="none, or one and leaves that name the first class", got=str(base.tolist()),
        )  # fmt: skip
    single = len(set(call.wholes("class_ids"))) == 1
    positive = bool((numbers(call, "class_weights") >= 0).all())
    first, second = builder.apply("Split", [scores, [1, 1]], 2, {"axis": 1})
    transform = named_transform(call)
    first = first + float(base[0]) if base.size else first
    decisive = second if always[1] else first
    threshold = 0.5 if single and positive else 0.0
    yes, no = (int(names[1]), int(names[0])) if single else (1, 0)
    above = builder.op("Greater", builder.op("Reshape", decisive, [-1]), threshold)
    label = one_of_two(builder, above, yes, no)
    if always[1]:
        both = builder.op("Concat", first, second, axis=1)
        return label, transformed(builder, call, both, transform)
    signed = not (single and positive)
    return label, both_classes(builder, call, first, transform, signed=signed)
