"""ONNX's TreeEnsemble as products of matrices.

Comes in: a node of `ai.onnx.ml` (version 5). Goes out: plain operations. All conditions of all
nodes are asked at once; a leaf is reached where as many of its path's conditions hold as there are.
Must not know: scopes, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from stitch import ops
from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx_tensors import tensor_array
from stitch.frontend.onnx_upgrades import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

_COMPARISONS = ("LessOrEqual", "Less", "GreaterOrEqual", "Greater", "Equal", "Equal")
_NOT_EQUAL, _MEMBER = 5, 6
_AVERAGE, _SUM = 0, 1
#: What a node may say of itself, hit rates among it, which mean nothing for the result.
ATTRIBUTES = (
    "aggregate_function leaf_targetids leaf_weights membership_values n_targets nodes_falseleafs "
    "nodes_falsenodeids nodes_featureids nodes_hitrates nodes_missing_value_tracks_true "
    "nodes_modes nodes_splits nodes_trueleafs nodes_truenodeids post_transform tree_roots"
)
#: Elements of the matrix of nodes and leaves: 256 MB.
MAX_SIGNS = 1 << 26


@dataclass(frozen=True, slots=True)
class _Path:
    """The way to one leaf: the nodes whose condition must hold, and those whose must not."""

    leaf: int
    holds: tuple[int, ...]
    fails: tuple[int, ...]


def lower_trees(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The scores of each row; raises `CompileError` for what is not sums or means of leaves."""
    data = call.operand(0)
    if data is None or len(data.shape) != 2 or not data.data_type.is_floating:
        raise FormatError("operand 0 of TreeEnsemble has rows of real numbers", where=call.where)
    aggregate = call.attributes.get("aggregate_function", _SUM)
    if aggregate not in (_AVERAGE, _SUM) or call.attributes.get("post_transform", 0) != 0:
        raise CompileError(
            "operator TreeEnsemble is not supported with this aggregate_function or post_transform",
            where=call.where, expected="AVERAGE or SUM, and NONE",
        )  # fmt: skip
    roots = _integers(call, "tree_roots")
    paths = _paths(call, roots)
    weights = _weights(call, paths, data.data_type)
    if aggregate == _AVERAGE:
        weights = weights / len(roots)
    answers, order = _answers(builder, call, data)
    if len(order) * len(paths) > MAX_SIGNS:
        raise CompileError(
            "operator TreeEnsemble is not supported with so many nodes: each leaf asks all of them",
            where=call.where, expected=f"at most {MAX_SIGNS} nodes times leaves",
            got=f"{len(order)} times {len(paths)}",
        )  # fmt: skip
    place = {node: row for row, node in enumerate(order)}
    signs = np.zeros((len(order), len(paths)), np.float32)
    for column, path in enumerate(paths):
        signs[[place[node] for node in path.holds], column] = 1
        signs[[place[node] for node in path.fails], column] = -1
    matched = builder.op("MatMul", answers, signs)
    wanted = np.array([len(path.holds) for path in paths], np.float32)
    reached = builder.op("Cast", builder.op("Equal", matched, wanted),
                         to=ops.onnx_code(data.data_type))  # fmt: skip
    return builder.op("MatMul", reached, weights.astype(data.data_type.dtype))


def _integers(call: NodeCall, name: str, count: int | None = None) -> tuple[int, ...]:
    found = call.attributes.get(name, ())
    if (
        not isinstance(found, tuple)
        or not all(isinstance(v, int) and v >= 0 for v in found)
        or (count is not None and len(found) != count)
    ):
        raise FormatError(
            f"attribute {name!r} of TreeEnsemble does not fit", where=call.where,
            expected="a list of whole numbers" if count is None else f"{count} whole numbers",
        )  # fmt: skip
    return found


def _tensor(call: NodeCall, name: str, count: int | None = None) -> Array:
    found = call.attributes.get(name)
    if not isinstance(found, TensorProto):
        raise FormatError(f"TreeEnsemble lacks {name!r}", where=call.where)
    array = tensor_array(found, None, f"{call.where}, attribute {name!r}").reshape(-1)
    if count is not None and array.size != count:
        raise FormatError(
            f"attribute {name!r} of TreeEnsemble does not fit", where=call.where,
            expected=f"{count} elements", got=str(array.size),
        )  # fmt: skip
    return array


def _paths(call: NodeCall, roots: Sequence[int]) -> list[_Path]:
    """The ways to all leaves of all trees."""
    count = len(_integers(call, "nodes_featureids"))
    sides = [
        tuple(_integers(call, f"nodes_{side}{what}", count) for what in ("nodeids", "leafs"))
        for side in ("true", "false")
    ]
    found: list[_Path] = []
    seen: set[int] = set()
    ways: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(r, (), ()) for r in roots]
    while ways:
        node, holds, fails = ways.pop()
        if node >= count or node in seen:
            raise FormatError(f"node {node} of TreeEnsemble is no node, or in two trees",
                              where=call.where)  # fmt: skip
        seen.add(node)
        for (ids, leaves), so in zip(sides, (True, False), strict=True):
            now = (holds + (node,) * so, fails + (node,) * (not so))
            if leaves[node]:
                found.append(_Path(ids[node], *now))
            else:
                ways.append((ids[node], *now))
    return found


def _weights(call: NodeCall, paths: Sequence[_Path], kind: DataType) -> Array:
    """What each path adds to each target."""
    targets = _integers(call, "leaf_targetids")
    weights = _tensor(call, "leaf_weights", len(targets))
    count = call.attributes.get("n_targets", 0)
    if not isinstance(count, int) or not max(targets, default=0) < count <= 1 << 20:
        raise FormatError("n_targets of TreeEnsemble does not fit", where=call.where)
    if any(path.leaf >= len(targets) for path in paths):
        raise FormatError("a node of TreeEnsemble names a leaf that is not there", where=call.where)
    if not np.isfinite(weights.astype(np.float64)).all():
        raise CompileError("operator TreeEnsemble is not supported with infinite weights",
                           where=call.where, got=kind.value)  # fmt: skip
    made = np.zeros((len(paths), count), np.float64)
    for row, path in enumerate(paths):
        made[row, targets[path.leaf]] = weights[path.leaf]
    return made


def _answers(
    builder: ComputationGraphBuilder, call: NodeCall, data: SymbolicTensor
) -> tuple[SymbolicTensor, list[int]]:
    """Whether each node's condition holds, 1 or 0, row by row; and the nodes in their order."""
    features = _integers(call, "nodes_featureids")
    if max(features, default=0) >= data.shape[1]:
        raise FormatError("TreeEnsemble asks for a feature that is not there", where=call.where,
                          expected=f"below {data.shape[1]}", got=str(max(features)))  # fmt: skip
    modes = _tensor(call, "nodes_modes", len(features)).astype(np.int64).tolist()
    splits = _tensor(call, "nodes_splits", len(features)).astype(data.dtype)
    missing = np.array(
        call.attributes.get("nodes_missing_value_tracks_true", (0,) * len(features)), np.bool_
    )
    if missing.shape != (len(features),) or not set(modes) <= set(range(_MEMBER + 1)):
        raise FormatError("the nodes of TreeEnsemble do not fit", where=call.where)
    sets = _members(call, modes)
    parts: list[SymbolicTensor] = []
    order: list[int] = []
    for mode in sorted(set(modes)):
        nodes = [i for i, found in enumerate(modes) if found == mode]
        columns = builder.op("Gather", data, np.array([features[i] for i in nodes]), axis=1)
        if mode == _MEMBER:
            held = _held(builder, columns, [sets[i].astype(data.dtype) for i in nodes])
        else:
            held = builder.op(_COMPARISONS[mode], columns, splits[nodes])
            held = builder.op("Not", held) if mode == _NOT_EQUAL else held
        if missing[nodes].any():
            lacking = builder.op("And", builder.op("IsNaN", columns), missing[nodes])
            held = builder.op("Or", held, lacking)
        parts.append(builder.op("Cast", held, to=ops.onnx_code(DataType.FLOAT32)))
        order += nodes
    return builder.op("Concat", *parts, axis=1), order


def _held(
    builder: ComputationGraphBuilder, columns: SymbolicTensor, sets: Sequence[Array]
) -> SymbolicTensor:
    """Whether numbers are members of their columns' sets; unequal sets repeat a member."""
    longest = max(1, *map(len, sets))
    # NaN equals nothing, so it fills an empty set.
    rows = [np.resize(s if s.size else np.array([np.nan], columns.dtype), longest) for s in sets]
    equal = builder.op("Equal", builder.op("Unsqueeze", columns, [2]), np.stack(rows))
    ones = builder.op("Cast", equal, to=ops.onnx_code(DataType.INT32))
    most = builder.op("ReduceMax", ones, [2], keepdims=0)
    return builder.op("Cast", most, to=ops.onnx_code(DataType.BOOL))


def _members(call: NodeCall, modes: Sequence[int]) -> dict[int, Array]:
    """The set of each node that asks for membership; NaN ends a set."""
    asking = [i for i, mode in enumerate(modes) if mode == _MEMBER]
    if not asking:
        return {}
    values = _tensor(call, "membership_values")
    ends = np.flatnonzero(np.isnan(values.astype(np.float64)))
    sets = [part[~np.isnan(part.astype(np.float64))] for part in np.split(values, ends + 1)]
    if len(sets) < len(asking):
        raise FormatError("TreeEnsemble has fewer sets than nodes that ask for them",
                          where=call.where, expected=str(len(asking)),
                          got=str(len(sets)))  # fmt: skip
    return dict(zip(asking, sets, strict=False))
