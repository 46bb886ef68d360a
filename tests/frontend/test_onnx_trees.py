"""TreeEnsemble against a walk down each tree, in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from tests.support.onnx.models import info, model, ours

ML = "ai.onnx.ml"
COMPARE = [np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal]


def drawn_trees(seed: int, trees: int, inner: int) -> dict[str, Any]:
    """Chains of nodes with a leaf on one side, on either side; the last has two leaves."""
    random = np.random.default_rng(seed)
    count, leaves = trees * inner, trees * (inner + 1)
    ids: dict[str, list[int]] = {k: [] for k in ("true", "false", "trueleaf", "falseleaf")}
    leaf = 0
    for node in range(count):
        last = node % inner == inner - 1
        deeper = "true" if random.random() < 0.5 else "false"
        for side in ("true", "false"):
            is_leaf = last or side != deeper
            ids[side].append(leaf if is_leaf else node + 1)
            ids[f"{side}leaf"].append(int(is_leaf))
            leaf += is_leaf
    assert leaf == leaves
    modes = random.integers(0, 7, count).astype(np.uint8)
    sets = [random.integers(-3, 4, random.integers(0, 4)) for mode in modes if mode == 6]
    members = [x for s in sets for x in (*s.astype(np.float32), np.nan)]
    return {
        "tree_roots": [tree * inner for tree in range(trees)],
        "n_targets": 3,
        "nodes_featureids": random.integers(0, 4, count).tolist(),
        "nodes_modes": numpy_helper.from_array(modes),
        "nodes_splits": numpy_helper.from_array(random.integers(-3, 4, count).astype(np.float32)),
        "nodes_missing_value_tracks_true": random.integers(0, 2, count).tolist(),
        "nodes_truenodeids": ids["true"], "nodes_trueleafs": ids["trueleaf"],
        "nodes_falsenodeids": ids["false"], "nodes_falseleafs": ids["falseleaf"],
        "leaf_targetids": random.integers(0, 3, leaves).tolist(),
        "leaf_weights": numpy_helper.from_array(random.standard_normal(leaves).astype(np.float32)),
        "membership_values": numpy_helper.from_array(np.array(members or [np.nan], np.float32)),
    }  # fmt: skip


def walked(trees: dict[str, Any], x: NDArray[Any]) -> NDArray[Any]:
    modes, splits, weights, values = (
        numpy_helper.to_array(trees[name])
        for name in ("nodes_modes", "nodes_splits", "leaf_weights", "membership_values")
    )
    sets = iter(np.split(values, np.flatnonzero(np.isnan(values)) + 1))
    members = [next(sets) if mode == 6 else None for mode in modes]
    made = np.zeros((len(x), 3))
    for row, numbers in enumerate(x):
        for root in trees["tree_roots"]:
            node, is_leaf = root, False
            while not is_leaf:
                value, mode = numbers[trees["nodes_featureids"][node]], modes[node]
                inside = members[node]
                holds = (
                    value in inside if inside is not None else COMPARE[mode](value, splits[node])
                )
                tracks = trees["nodes_missing_value_tracks_true"][node] and np.isnan(value)
                side = "true" if holds or tracks else "false"
                is_leaf = bool(trees[f"nodes_{side}leafs"][node])
                node = trees[f"nodes_{side}nodeids"][node]
            made[row, trees["leaf_targetids"][node]] += weights[node]
    return made


def model_of(trees: dict[str, Any]) -> Any:
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], domain=ML, **trees)
    return model([node], [info("x", [40, 4])], ["y"], domains={ML: 5})


@pytest.mark.parametrize("aggregate", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_rows_reach_the_leaves_that_a_walk_reaches(seed: int, aggregate: int) -> None:
    trees = drawn_trees(seed, 3, 6)
    random = np.random.default_rng(seed)
    x = random.integers(-4, 5, (40, 4)).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    (found,) = ours(model_of(trees | {"aggregate_function": aggregate}), [x])
    wanted = walked(trees, x) / (1 if aggregate else 3)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_scores_of_trees_pass_through_a_transform() -> None:
    trees = drawn_trees(2, 3, 6)
    x = np.random.default_rng(2).integers(-4, 5, (40, 4)).astype(np.float32)
    (found,) = ours(model_of(trees | {"post_transform": 2}), [x])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-walked(trees, x))), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"aggregate_function": 2}, "not supported with aggregate_function MIN"),
        ({"aggregate_function": 4}, "aggregate_function"),
        ({"post_transform": 5}, "aggregate_function"),
        ({"tree_roots": [0, 0]}, "in two trees"),
        ({"tree_roots": [99]}, "is no node"),
        ({"n_targets": 1}, "n_targets"),
        ({"nodes_featureids": [4] * 6}, "a feature that is not there"),
        ({"nodes_truenodeids": [0] * 6, "nodes_trueleafs": [0] * 6}, "in two trees"),
        ({"leaf_targetids": [0, 1]}, "leaf_weights"),
        ({"nodes_trueleafs": [1]}, "nodes_trueleafs"),
    ],
)
def test_trees_that_are_not_sound_or_not_sums_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(model_of(drawn_trees(1, 1, 6) | change))
