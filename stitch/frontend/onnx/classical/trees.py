"""ONNX's tree ensembles (`ai.onnx.ml`): the newest form, and the two older ones.

Comes in: a node. Goes out: scores, and labels for a classifier as ONNX Runtime does it (two classes
may have one score only, which is then that of the second), in plain operations. Must not know:
scopes, files, how trees are walked.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.classical.forest import (
    LEAF,
    MEMBER,
    Forest,
    ForestShape,
    collected,
    reached,
    shape_of,
)
from stitch.frontend.onnx.classical.scores import (
    TRANSFORMS,
    both_classes,
    chosen,
    labels,
    named_transform,
    one_of_two,
    rows,
    transformed,
)  # fmt: skip
from stitch.frontend.onnx.protos import tensor_array
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

#: What a node may say of itself, hit rates among it, which mean nothing for the result.
ATTRIBUTES = (
    "aggregate_function leaf_targetids leaf_weights membership_values n_targets nodes_falseleafs "
    "nodes_falsenodeids nodes_featureids nodes_hitrates nodes_missing_value_tracks_true "
    "nodes_modes nodes_splits nodes_trueleafs nodes_truenodeids post_transform tree_roots"
)
OLDER_ATTRIBUTES = (
    "base_values base_values_as_tensor nodes_falsenodeids nodes_featureids nodes_hitrates "
    "nodes_hitrates_as_tensor nodes_missing_value_tracks_true nodes_modes nodes_nodeids "
    "nodes_treeids nodes_truenodeids nodes_values nodes_values_as_tensor post_transform"
)
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "LEAF")
_REDUCTIONS = {"AVERAGE": "ReduceSum", "SUM": "ReduceSum", "MIN": "ReduceMin", "MAX": "ReduceMax"}
MAX_TARGETS = 1 << 20
#: Nodes times targets: what is known of each leaf.
MAX_WEIGHTS = 1 << 26


def lower_trees(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """TreeEnsemble: the scores of each row."""
    data = call.required(0)
    if data.ndim != 2 or not data.data_type.is_floating:
        raise call.malformed("operand 0 of TreeEnsemble has rows of real numbers")
    aggregate, transform = call.whole("aggregate_function", 1), call.whole("post_transform")
    if not 0 <= aggregate < len(_AGGREGATES) or not 0 <= transform < len(TRANSFORMS):
        raise call.unfit("aggregate_function", "codes of ONNX", (aggregate, transform))
    return _scores(builder, call, _newest(call), data, np.zeros(0), _AGGREGATES[aggregate],
                   TRANSFORMS[transform])  # fmt: skip


def lower_regressor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """TreeEnsembleRegressor: the scores of each row, in float32."""
    data, forest = older_forest(builder, call, "target", _targets(call))
    aggregate = call.word("aggregate_function", "SUM", _AGGREGATES)
    base = numbers(call, "base_values")
    scores = _scores(builder, call, forest, data, base, aggregate, named_transform(call))
    return scores.cast(DataType.FLOAT32)


def _scores(
    builder: ComputationGraphBuilder, call: NodeCall, forest: Forest, data: SymbolicTensor,
    base: Array, aggregate: str, transform: str,
) -> SymbolicTensor:  # fmt: skip
    shape, dtype = shape_of(forest, call), data.dtype
    targets = forest.weights.shape[1]
    if aggregate in ("MIN", "MAX") and not all(forest.counts[end].all() for end in shape.leaves):
        raise call.refused(
            f"operator ai.onnx.ml.{call.op} is not supported with aggregate_function {aggregate} "
            "where a leaf is without a weight for some target",
        )  # fmt: skip
    leaf = reached(builder, call, forest, data, shape.depth)
    sums = collected(builder, leaf, forest.weights.astype(dtype), _REDUCTIONS[aggregate])
    sums = sums / float(len(forest.roots)) if aggregate == "AVERAGE" else sums
    if base.size:
        if base.size != targets:
            raise call.unfit("base_values", f"{targets} numbers, or none", base.size)
        sums = sums + base.astype(dtype)
    return transformed(builder, call, sums, transform)


def _targets(call: NodeCall) -> int:
    count = call.whole("n_targets")
    if not 0 < count <= MAX_TARGETS:
        raise call.unfit("n_targets", f"1 to {MAX_TARGETS}", count)
    return count


def numbers(call: NodeCall, name: str) -> Array:
    """Numbers that are spelt as a list or, in full precision, as a tensor; perhaps none."""
    spelt = f"{name}_as_tensor"
    if spelt in call.attributes:
        return _tensor(call, spelt).astype(np.float64)
    return call.reals(name).astype(np.float64)


def older_forest(
    builder: ComputationGraphBuilder, call: NodeCall, side: str, targets: int
) -> tuple[SymbolicTensor, Forest]:
    """The rows, and the trees of an older form, whose leaves count for a `target` or a `class`."""
    double = call.required(0).data_type is DataType.FLOAT64
    data = rows(builder, call, DataType.FLOAT64 if double else DataType.FLOAT32)
    names = call.words("nodes_modes")
    count = len(names)
    if not count or not set(names) <= set(_MODES):
        raise call.unfit("nodes_modes", f"words of {', '.join(_MODES)}", names[:5])
    modes = np.array([LEAF if name == "LEAF" else _MODES.index(name) for name in names])
    ids, trees = (np.array(call.wholes(f"nodes_{what}ids", count)) for what in ("node", "tree"))
    place = {key: index for index, key in enumerate(zip(trees, ids, strict=True))}
    if len(place) != count:
        raise call.malformed(f"two nodes of {call.op} have one name")
    children = np.stack(
        [
            [place.get(key, -1) for key in zip(trees, call.wholes(name, count), strict=True)]
            for name in ("nodes_falsenodeids", "nodes_truenodeids")
        ],
        axis=1,
    )
    splits = numbers(call, "nodes_values")
    if splits.size != count:
        raise call.unfit("nodes_values", f"{count} numbers", splits.size)
    weights, counts = _weights(call, side, place, targets)
    return data, Forest(
        features=np.array(call.wholes("nodes_featureids", count)), modes=modes, splits=splits,
        missing=_missing(call, count), children=children, sets={},
        roots=np.sort(np.unique(trees, return_index=True)[1]), weights=weights, counts=counts,
    )  # fmt: skip


def _weights(
    call: NodeCall, side: str, place: dict[tuple[int, int], int], targets: int
) -> tuple[Array, Array]:
    """What nodes add to targets, and whether they do."""
    given = numbers(call, f"{side}_weights")
    ids, nodes, trees = (
        np.array(call.wholes(f"{side}_{what}", given.size), np.int64)
        for what in ("ids", "nodeids", "treeids")
    )
    where = np.array([place.get(key, -1) for key in zip(trees, nodes, strict=True)], np.int64)
    if not given.size or where.min() < 0 or ids.min() < 0 or ids.max() >= targets:
        raise call.malformed(f"the weights of {call.op} are of no node, or of no {side}")
    _check_size(call, len(place), targets)
    weights, counts = np.zeros((len(place), targets)), np.zeros((len(place), targets), np.bool_)
    np.add.at(weights, (where, ids), given)
    counts[where, ids] = True
    if counts.sum() != given.size:
        raise call.refused(
            f"operator ai.onnx.ml.{call.op} is not supported where a leaf has two weights for one "
            f"{side}",
        )  # fmt: skip
    return weights, counts


def _check_size(call: NodeCall, nodes: int, targets: int) -> None:
    """Raises `CompileError` where a few bytes would become a large matrix."""
    if nodes * targets > MAX_WEIGHTS:
        raise call.refused(
            f"operator ai.onnx.ml.{call.op} is not supported with so many nodes and targets",
            expected=f"at most {MAX_WEIGHTS} nodes times targets", got=f"{nodes} times {targets}",
        )  # fmt: skip


def _missing(call: NodeCall, count: int) -> Array:
    """Whether NaN counts as a condition that holds."""
    flags = call.wholes("nodes_missing_value_tracks_true")
    if len(flags) not in (0, count):
        raise call.unfit("nodes_missing_value_tracks_true", f"{count} flags, or none", len(flags))
    return np.array(flags or (0,) * count, np.bool_)


def _tensor(call: NodeCall, name: str, count: int | None = None) -> Array:
    proto = call.attributes.get(name)
    if not isinstance(proto, TensorProto):
        raise call.malformed(f"{call.op} lacks {name!r}")
    array = tensor_array(proto, None, f"{call.where}, attribute {name!r}").reshape(-1)
    if count is not None and array.size != count:
        raise call.unfit(name, f"{count} elements", array.size)
    return array


def _newest(call: NodeCall) -> Forest:
    """The trees of TreeEnsemble; its leaves become nodes behind the others."""
    features = np.array(call.wholes("nodes_featureids"), np.int64)
    count = len(features)
    modes = _tensor(call, "nodes_modes", count).astype(np.int64)
    targets = call.wholes("leaf_targetids")
    given = _tensor(call, "leaf_weights", len(targets)).astype(np.float64)
    wanted, leaves = _targets(call), len(targets)
    if not leaves or not 0 <= min(targets) <= max(targets) < wanted:
        raise call.unfit("n_targets", f"above {max(targets, default=0)}", wanted)
    if not set(modes.tolist()) <= set(range(MEMBER + 1)):
        raise call.unfit("nodes_modes", f"0 to {MEMBER}", sorted(set(modes.tolist())))
    roots = np.array(call.wholes("tree_roots"), np.int64)
    if not roots.size or not ((roots >= 0) & (roots < count)).all():
        raise call.malformed(f"a root of {call.op} is no node")
    _check_size(call, count + leaves, wanted)
    counts = np.zeros((count + leaves, wanted), np.bool_)
    counts[count + np.arange(leaves), targets] = True
    weights = np.zeros(counts.shape)
    weights[counts] = given
    nothing = np.zeros(leaves, np.int64)
    return Forest(
        features=np.concatenate([features, nothing]),
        modes=np.concatenate([modes, nothing + LEAF]),
        splits=np.concatenate([_tensor(call, "nodes_splits", count), nothing]),
        missing=np.concatenate([_missing(call, count), nothing != 0]),
        children=np.concatenate([_sides(call, count, leaves), np.zeros((leaves, 2), np.int64)]),
        sets=_members(call, modes), roots=roots, weights=weights, counts=counts,
    )  # fmt: skip


def _sides(call: NodeCall, count: int, leaves: int) -> Array:
    """The nodes where conditions fail and where they hold."""
    sides = []
    for side in ("false", "true"):
        ids = np.array(call.wholes(f"nodes_{side}nodeids", count), np.int64)
        ends = np.array(call.wholes(f"nodes_{side}leafs", count), np.bool_)
        if not ((ids >= 0) & (ids < np.where(ends, leaves, count))).all():
            raise call.malformed(f"a node of {call.op} leads to no node, or is no node")
        sides.append(ids + ends * count)
    return np.stack(sides, axis=1)


def _members(call: NodeCall, modes: Array) -> dict[int, Array]:
    """The set of each node that asks for membership; NaN ends a set."""
    asking = np.flatnonzero(modes == MEMBER).tolist()
    if not asking:
        return {}
    values = _tensor(call, "membership_values").astype(np.float64)
    ends = np.flatnonzero(np.isnan(values))
    sets = [part[~np.isnan(part)] for part in np.split(values, ends + 1)]
    if len(sets) < len(asking):
        raise call.malformed(
            "TreeEnsemble has fewer sets than nodes that ask for them", expected=str(len(asking)),
            got=str(len(sets)),
        )  # fmt: skip
    return dict(zip(asking, sets, strict=False))


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
