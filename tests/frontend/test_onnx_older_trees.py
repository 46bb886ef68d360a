"""TreeEnsembleClassifier and -Regressor, as scikit-learn exports them, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import Drawn, assert_as_runtime, one_node, ours

ML = "ai.onnx.ml"
FEATURES = 4
REGRESSOR, CLASSIFIER = "TreeEnsembleRegressor", "TreeEnsembleClassifier"
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


class Trees:
    """Trees that grow at random; `named` are the targets or classes that every leaf names."""

    def __init__(self, random: np.random.Generator, side: str, named: list[int]) -> None:
        self.random, self.side, self.named = random, side, named
        self.mixed, self.positive = random.random() < 0.3, random.random() < 0.5
        self.nodes: list[tuple[int, int, int, str, float, int, int, int]] = []
        self.leaves: list[tuple[int, int, int, float]] = []

    def grow(self, tree: int, depth: int, chance: float = 0.7) -> None:
        """One more tree."""
        self._node(tree, depth, chance, [0])

    def _node(self, tree: int, depth: int, chance: float, next_id: list[int]) -> int:
        mine, index = next_id[0], len(self.nodes)
        next_id[0] += 1
        self.nodes.append((tree, mine, 0, "LEAF", 0.0, 0, 0, 0))
        if depth == 0 or (self.random.random() > chance and mine):
            for target in self.named:
                weight = float(np.float32(self.random.standard_normal()))
                self.leaves.append((tree, mine, target, abs(weight) if self.positive else weight))
            return mine
        sides = [self._node(tree, depth - 1, chance, next_id) for _ in range(2)]
        mode = MODES[self.random.integers(6)] if self.mixed else MODES[0]
        feature, flag = int(self.random.integers(FEATURES)), int(self.random.integers(2))
        split = float(self.random.integers(-3, 4))
        self.nodes[index] = (tree, mine, feature, mode, split, sides[0], sides[1], flag)
        return mine

    def attributes(self) -> dict[str, Any]:
        """As ONNX spells them."""
        names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids",
                 "falsenodeids", "missing_value_tracks_true")  # fmt: skip
        columns = zip(*self.nodes, strict=True)
        found = {f"nodes_{k}": list(v) for k, v in zip(names, columns, strict=True)}
        ends = zip(*self.leaves, strict=True)
        sides = [f"{self.side}_{name}" for name in ("treeids", "nodeids", "ids", "weights")]
        return found | {k: list(v) for k, v in zip(sides, ends, strict=True)}


def rows(random: np.random.Generator, kinds: int = 5) -> Array:
    x = random.integers(-4, 5, (20, FEATURES))
    kind = [np.float32, np.float32, np.float64, np.int64, np.int32][random.integers(kinds)]
    made = x.astype(kind)
    if np.issubdtype(kind, np.floating):
        made[random.random(made.shape) < 0.1] = np.nan
    return made


def grown(random: np.random.Generator, side: str, named: list[int]) -> dict[str, Any]:
    trees = Trees(random, side, named)
    for tree in range(int(random.integers(1, 5))):
        trees.grow(tree, int(random.integers(1, 5)))
    return trees.attributes()


def regressor(random: np.random.Generator) -> Drawn:
    targets = int(random.integers(1, 4))
    aggregate = str(random.choice(["SUM", "AVERAGE", "MIN", "MAX"]))
    kinds = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"] if targets > 1 else ["NONE"]
    base = random.standard_normal(targets).astype(np.float32).tolist()
    attributes = {
        "n_targets": targets, "aggregate_function": aggregate,
        "post_transform": str(random.choice(kinds)),
    }  # fmt: skip
    attributes |= {"base_values": base} if random.random() < 0.5 else {}
    return [rows(random, 3)], 1, attributes | grown(random, "target", list(range(targets)))


def classifier(random: np.random.Generator) -> Drawn:
    classes = int(random.integers(2, 5))
    named = [0, 1][random.integers(2) :][:1] if random.random() < 0.7 else [0, 1]
    named = named if classes == 2 else list(range(int(random.integers(1, classes + 1))))
    kinds = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"]
    attributes = grown(random, "class", named) | {
        "classlabels_int64s": random.permutation(9)[:classes].tolist(),
        "post_transform": str(random.choice(kinds)),
    }
    if random.random() < 0.5:
        sizes = [1, 2] if classes == 2 else [classes]
        size = int(random.choice(sizes))
        attributes["base_values"] = random.standard_normal(size).astype(np.float32).tolist()
    return [rows(random)], 2, attributes


CASES = {"TreeEnsembleClassifier": classifier, "TreeEnsembleRegressor": regressor}


@pytest.mark.parametrize("seeds", [15, pytest.param(400, marks=pytest.mark.campaign("onnx"))])
@pytest.mark.parametrize("op", CASES)
def test_older_trees_give_what_onnx_runtime_gives(op: str, seeds: int) -> None:
    compiled = 0
    for seed in range(seeds):
        proto, arrays = one_node(op, CASES[op](np.random.default_rng(seed)), ML)
        try:
            from_onnx(proto)
        except CompileError as error:
            assert "passes over" in str(error) or "others do not" in str(error)
            continue
        compiled += 1
        assert_as_runtime(proto, arrays)
    assert compiled > seeds // 2


def test_a_large_ensemble_is_walked_without_a_matrix_of_nodes_and_leaves() -> None:
    random = np.random.default_rng(3)
    trees = Trees(random, "target", [0])
    for tree in range(100):
        trees.grow(tree, 8, chance=1)
    assert len(trees.leaves) == 100 * 2**8
    x = random.integers(-4, 5, (5, FEATURES)).astype(np.float32)
    assert_as_runtime(*one_node(REGRESSOR, ([x], 1, trees.attributes() | {"n_targets": 1}), ML))


def test_numbers_in_full_precision_decide_in_full_precision() -> None:
    split = 1 + 2.0**-40
    attributes = _stump([[1.0], [2.0]]) | {"n_targets": 1}
    del attributes["nodes_values"], attributes["target_weights"]
    attributes["nodes_values_as_tensor"] = numpy_helper.from_array(np.array([split, 0, 0]))
    attributes["target_weights_as_tensor"] = numpy_helper.from_array(np.array([1.0, 2.0]))
    x = np.array([[1.0], [split], [1 + 2.0**-39]])
    proto, arrays = one_node(REGRESSOR, ([x], 1, attributes), ML, 3)
    np.testing.assert_array_equal(ours(proto, arrays)[0], [[1], [1], [2]])
    assert_as_runtime(proto, arrays)


def _stump(weights: list[list[float]], side: str = "target") -> dict[str, Any]:
    """One question and two leaves, which name targets 0, 1, ... in order."""
    named = [(leaf + 1, i, w) for leaf, given in enumerate(weights) for i, w in enumerate(given)]
    nodes, ids, numbers = zip(*named, strict=True)
    return {
        "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.0] * 3,
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
        f"{side}_treeids": [0] * len(nodes), f"{side}_nodeids": list(nodes),
        f"{side}_ids": list(ids), f"{side}_weights": list(numbers),
    }  # fmt: skip


def _classes(weights: list[list[float]], **more: Any) -> dict[str, Any]:
    return _stump(weights, "class") | {"classlabels_int64s": [3, 4]} | more


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        (CLASSIFIER, _classes([[1], [2]], classlabels_strings=["a", "b"]), "words as labels"),
        (CLASSIFIER, _classes([[1], [2]], classlabels_int64s=[1]), "two labels"),
        (CLASSIFIER, _classes([[1], [2, 3]]), "others do not"),
        (CLASSIFIER, _classes([[1], [2]], base_values=[0.1, 0.2]), "passes over"),
        (CLASSIFIER, _classes([[1], [2]], post_transform="SOFTMAX"), "passes over"),
        (REGRESSOR, _stump([[1], [2]]), "'n_targets'"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1 << 21}, "'n_targets'"),
        (REGRESSOR, _stump([[1], [2, 3]]) | {"n_targets": 1}, "of no target"),
        (REGRESSOR, _stump([[1], [2, 3]]) | {"n_targets": 2, "aggregate_function": "MIN"}, "MIN"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "post_transform": "LOGISTIC"}, "passes"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "base_values": [1.0] * 3}, "base_values"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "nodes_truenodeids": [0] * 3}, "twice"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "nodes_truenodeids": [9] * 3}, "no node"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "nodes_nodeids": [0] * 3}, "one name"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "nodes_featureids": [7] * 3}, "feature"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "nodes_modes": ["A"] * 3}, "nodes_modes"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "target_ids": [0]}, "target_ids"),
        (REGRESSOR, _stump([[1], [2]]) | {"n_targets": 1, "target_nodeids": [1, 1]}, "two weights"),
    ],
)  # fmt: skip
def test_trees_that_are_not_sound_or_not_defined_are_refused(
    op: str, attributes: dict[str, Any], words: str
) -> None:
    x = np.ones((2, 1), np.float32)
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(one_node(op, ([x], 2 if op == CLASSIFIER else 1, attributes), ML)[0])
