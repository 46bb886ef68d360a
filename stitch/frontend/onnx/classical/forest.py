"""Ensembles of decision trees in plain operations: all trees are walked down, a level at a time.

Comes in: nodes of trees, what their leaves count for each target, rows. Goes out: what rows collect
in each tree. The work is rows times trees times levels, whatever the size of the trees. Must not
know: how a file spells trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

_COMPARISONS = ("LessOrEqual", "Less", "GreaterOrEqual", "Greater", "Equal", "Equal")
NOT_EQUAL, MEMBER, LEAF = 5, 6, 7
#: Levels of the deepest tree: each is a handful of operations.
MAX_LEVELS = 512


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes of all trees, leaves among them (mode `LEAF`); `roots` are where rows begin.

    `children` are the nodes where a condition fails and where it holds. `weights` and `counts` are
    of [nodes, targets]: what a leaf adds to a target, and whether it does.
    """

    features: Array
    modes: Array
    splits: Array
    missing: Array
    children: Array
    sets: dict[int, Array]
    roots: Array
    weights: Array
    counts: Array


@dataclass(frozen=True, slots=True)
class ForestShape:
    """How many levels trees have, and for each tree the leaves that end it."""

    depth: int
    leaves: list[Array]

    def always(self, counts: Array) -> Array:
        """For each target: whether some tree has it in each of its leaves."""
        return np.asarray(np.stack([counts[end].all(0) for end in self.leaves]).any(0))

    def ever(self, counts: Array) -> Array:
        """For each target: whether any leaf has it."""
        return np.asarray(np.stack([counts[end].any(0) for end in self.leaves]).any(0))


def shape_of(forest: Forest, call: NodeCall) -> ForestShape:
    """The shape of trees; raises where nodes are no trees, or too deep."""
    seen = np.zeros(len(forest.modes), np.bool_)
    level, tree, depth = forest.roots, np.arange(len(forest.roots)), 0
    ends: list[tuple[Array, Array]] = []
    while level.size:
        if ((level < 0) | (level >= len(seen))).any():
            raise call.malformed(f"a node of {call.op} is no node, or leads to none")
        inner = forest.modes[level] != LEAF
        ends.append((level[~inner], tree[~inner]))
        level, tree = level[inner], tree[inner]
        if len(np.unique(level)) != len(level) or seen[level].any():
            raise call.malformed(f"a node of {call.op} is in two trees, or twice in one")
        seen[level] = True
        level, tree = forest.children[level].reshape(-1), np.repeat(tree, 2)
        depth += bool(level.size)
        if depth > MAX_LEVELS:
            raise call.refused(
                f"operator ai.onnx.ml.{call.op} is not supported with trees so deep",
                expected=f"at most {MAX_LEVELS} levels",
            )  # fmt: skip
    leaves, owners = (np.concatenate(parts) for parts in zip(*ends, strict=True))
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, len(forest.roots)))
    return ForestShape(depth, np.split(leaves[order], bounds))


def reached(
    builder: ComputationGraphBuilder, call: NodeCall, forest: Forest, data: SymbolicTensor,
    depth: int,
) -> SymbolicTensor:  # fmt: skip
    """The leaf of each row in each tree, [rows, trees]."""
    inner = forest.modes != LEAF
    asked = int(forest.features[inner].max(initial=0))
    if asked >= data.shape[1] or forest.features[inner].min(initial=0) < 0:
        raise call.malformed(
            f"{call.op} asks for a feature that is not there", expected=f"below {data.shape[1]}",
            got=str(asked),
        )  # fmt: skip
    rows, here = data.shape[0], np.arange(len(inner))
    # A leaf leads to itself, so that rows wait there until the deepest are down.
    children = np.where(inner[:, None], forest.children, here[:, None]).reshape(-1)
    node = builder.op("Expand", builder.constant(forest.roots), [rows, len(forest.roots)])
    for _ in range(depth):
        holds = _holds(builder, forest, data, node)
        side = builder.op("Cast", holds, to=ops.onnx_code(DataType.INT64))
        node = builder.op("Gather", builder.constant(children), node * 2 + side)
    return node


def _holds(
    builder: ComputationGraphBuilder, forest: Forest, data: SymbolicTensor, node: SymbolicTensor
) -> SymbolicTensor:
    """Whether the conditions of nodes hold, [rows, trees]."""

    def of_nodes(array: Array) -> SymbolicTensor:
        return builder.op("Gather", builder.constant(array), node)

    inner = forest.modes != LEAF
    value = builder.op("GatherElements", data, of_nodes(np.where(inner, forest.features, 0)),
                       axis=1)  # fmt: skip
    split = of_nodes(forest.splits.astype(data.dtype))
    met: SymbolicTensor | None = None
    for mode in np.unique(forest.modes[inner]).tolist():
        if mode == MEMBER:
            held = _held(builder, value, of_nodes(_stacked(forest, data.dtype)))
        else:
            held = builder.op(_COMPARISONS[mode], value, split)
            held = builder.op("Not", held) if mode == NOT_EQUAL else held
        chosen = None if met is None else of_nodes(forest.modes == mode)
        met = held if met is None or chosen is None else builder.op("Where", chosen, held, met)
    assert met is not None  # levels exist only where a node asks
    if forest.missing[inner].any() and data.data_type.is_floating:
        lacking = builder.op("And", builder.op("IsNaN", value), of_nodes(forest.missing))
        met = builder.op("Or", met, lacking)
    return met


def _stacked(forest: Forest, dtype: np.dtype[np.generic]) -> Array:
    """The sets of all nodes, [nodes, members]; those that end early repeat a member."""
    longest = max(1, *(len(members) for members in forest.sets.values()))
    # NaN equals nothing, so it fills an empty set.
    stacked = np.full((len(forest.modes), longest), np.nan, dtype)
    for node, members in forest.sets.items():
        stacked[node] = np.resize(members, longest) if members.size else np.nan
    return stacked


def _held(
    builder: ComputationGraphBuilder, value: SymbolicTensor, sets: SymbolicTensor
) -> SymbolicTensor:
    equal = builder.op("Equal", builder.op("Unsqueeze", value, [2]), sets)
    ones = builder.op("Cast", equal, to=ops.onnx_code(DataType.INT32))
    most = builder.op("ReduceMax", ones, [2], keepdims=0)
    return builder.op("Cast", most, to=ops.onnx_code(DataType.BOOL))


def collected(
    builder: ComputationGraphBuilder, leaf: SymbolicTensor, weights: Array, reduction: str
) -> SymbolicTensor:
    """What rows collect from their leaves, [rows, targets], by a reduction over the trees."""
    each = builder.op("Gather", builder.constant(weights), leaf)
    return builder.op(reduction, each, [1], keepdims=0)
