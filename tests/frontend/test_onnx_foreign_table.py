"""Operators of ONNX Runtime's CPU provider that Stitch does not define give what ONNX Runtime gives
on the model itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

import stitch
from stitch.errors import StitchError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import Drawn, one_node, runtime
from tests.support.run_seed import SEED

MICROSOFT, CLASSICAL = "com.microsoft", "ai.onnx.ml"


class Drawer:
    """Random operands."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def f(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def u8(self, *shape: int) -> Array:
        return self.random.integers(0, 256, shape).astype(np.uint8)

    def i8(self, *shape: int) -> Array:
        return self.random.integers(-128, 128, shape).astype(np.int8)

    def i(self, below: int, *shape: int, kind: Any = np.int64) -> Array:
        return self.random.integers(0, below, shape).astype(kind)

    def scale(self) -> Array:
        return np.array(self.random.uniform(0.01, 0.1), np.float32)

    def zero(self) -> Array:
        return np.array(self.random.integers(100, 150), np.uint8)

    def quantized(self, *shape: int) -> list[Array]:
        """A tensor, its scale and its zero point."""
        return [self.u8(*shape), self.scale(), self.zero()]


@dataclass(frozen=True)
class Case:
    """One node: operands, results, attributes; which operands are initializers.

    `atol`: of results; one step of a quantized result.
    """

    op: str
    draw: Callable[[Drawer], Drawn]
    constants: Collection[int] = ()
    domain: str = MICROSOFT
    version: int = 1
    atol: float = 1e-5


def attention_operands(d: Drawer) -> list[Array | None]:
    return [d.f(2, 3, 8), d.f(8, 24), d.f(24)]


def grouped(d: Drawer) -> Drawn:
    """Two heads of queries to one of keys, no past: a prompt of three words."""
    past = np.zeros((1, 1, 0, 8), np.float32)
    lengths, total = np.array([2], np.int32), np.array(3, np.int32)
    operands = [d.f(1, 3, 16), d.f(1, 3, 8), d.f(1, 3, 8), past, past, lengths, total]
    return [*operands], 3, {"num_heads": 2, "kv_num_heads": 1}


def lstm(d: Drawer) -> Drawn:
    scale, zero = np.array([0.01], np.float32), np.array([128], np.uint8)
    return (
        [d.f(3, 2, 4), d.u8(1, 4, 20), d.u8(1, 5, 20), d.f(1, 40), None, None, None, None,
         scale, zero, scale, zero], 3, {"hidden_size": 5},
    )  # fmt: skip


def linear(rows: int, kind: Any = np.float32, **attributes: Any) -> Callable[[Drawer], Drawn]:
    """So many rows of coefficients, for three features and an intercept."""
    return lambda d: (
        [d.f(4, 3).astype(kind)], 1 + ("classlabels_ints" in attributes),
        {"coefficients": d.f(rows * 3).tolist(), "intercepts": d.f(rows).tolist(), **attributes},
    )  # fmt: skip


def vectors(classes: int, *, with_chances: bool = False) -> Callable[[Drawer], Drawn]:
    """A machine of two support vectors for each class."""

    def draw(d: Drawer) -> Drawn:
        pairs = classes * (classes - 1) // 2
        chances = {name: d.f(pairs).tolist() for name in ("prob_a", "prob_b") if with_chances}
        return [d.f(4, 3)], 2, {
            "kernel_type": "RBF", "kernel_params": [0.3, 0.2, 2.0], "rho": d.f(pairs).tolist(),
            "classlabels_ints": [5, 3, 8, 1][:classes], "vectors_per_class": [2] * classes,
            "support_vectors": d.f(2 * classes * 3).tolist(),
            "coefficients": d.f(2 * classes * (classes - 1)).tolist(), **chances,
        }  # fmt: skip

    return draw


def vector_regressor(d: Drawer) -> Drawn:
    attributes = {
        "kernel_type": "POLY", "kernel_params": [0.3, 0.2, 2.0], "n_supports": 2,
        "support_vectors": d.f(6).tolist(), "coefficients": d.f(2).tolist(), "rho": [0.1],
    }  # fmt: skip
    return [d.f(4, 3)], 1, attributes


def trees(side: str, many: int, kind: Any = np.float32) -> Callable[[Drawer], Drawn]:
    """Two trees of one question each, whose leaves count for `many` targets or classes; of float64
    with their numbers as tensors."""

    def draw(d: Drawer) -> Drawn:
        ends = [(tree, leaf, one) for tree in (0, 1) for leaf in (1, 2) for one in range(many)]
        of_trees, leaves, ids = (list(column) for column in zip(*ends, strict=True))
        attributes = {
            "nodes_treeids": [0, 0, 0, 1, 1, 1], "nodes_nodeids": [0, 1, 2] * 2,
            "nodes_featureids": [1, 0, 0, 2, 0, 0],
            "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 2,
            "nodes_truenodeids": [1, 0, 0] * 2, "nodes_falsenodeids": [2, 0, 0] * 2,
            f"{side}_treeids": of_trees, f"{side}_nodeids": leaves, f"{side}_ids": ids,
        }  # fmt: skip
        for name, numbers in (("nodes_values", d.f(6)), (f"{side}_weights", d.f(len(ends)))):
            wide = numpy_helper.from_array(numbers.astype(np.float64))
            given = {name: numbers.tolist()} if kind is np.float32 else {f"{name}_as_tensor": wide}
            attributes |= given
        told = {"n_targets": many} if side == "target" else {"classlabels_int64s": [7, 4, 9][:many]}
        return [d.f(5, 3).astype(kind)], 1 + (side == "class"), attributes | told

    return draw


def newest_trees(d: Drawer) -> Drawn:
    """Two trees of one question: is it at most a number, is it one of a set."""
    members = np.array([-1, 1, np.nan], np.float32)
    attributes = {
        "tree_roots": [0, 1], "n_targets": 2, "nodes_featureids": [0, 2],
        "nodes_modes": numpy_helper.from_array(np.array([0, 6], np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.zeros(2, np.float32)),
        "nodes_truenodeids": [0, 2], "nodes_trueleafs": [1, 1],
        "nodes_falsenodeids": [1, 3], "nodes_falseleafs": [1, 1],
        "leaf_targetids": [0, 1, 1, 0], "leaf_weights": numpy_helper.from_array(d.f(4)),
        "membership_values": numpy_helper.from_array(members),
    }  # fmt: skip
    return [d.i(4, 9, 3, kind=np.float32) - 1], 1, attributes


CASES = (
    Case("Attention", lambda d: (attention_operands(d), 1, {"num_heads": 2})),
    Case("Attention", lambda d: ([*attention_operands(d), None, d.f(2, 2, 2, 2, 4)], 2,
                                 {"num_heads": 2})),
    Case("CDist", lambda d: ([d.f(3, 4), d.f(5, 4)], 1, {"metric": "sqeuclidean"})),
    Case("DynamicQuantizeLSTM", lstm, range(1, 12)),
    Case("EmbedLayerNormalization", lambda d: (
        [d.i(9, 2, 4, kind=np.int32), None, d.f(9, 8), d.f(6, 8), None, d.f(8), d.f(8)], 2, {})),
    Case("ExpandDims", lambda d: ([d.f(3, 4), np.array(1, np.int32)], 1, {}), [1]),
    Case("GroupQueryAttention", grouped),
    Case("MatMulNBits", lambda d: (
        [d.f(2, 32), d.u8(6, 2, 8), np.abs(d.f(6, 2))], 1, {"N": 6, "K": 32, "bits": 4,
                                                        "block_size": 16}), [1, 2]),
    Case("MurmurHash3", lambda d: ([d.i(99, 3, kind=np.int32)], 1, {"positive": 1})),
    Case("NhwcMaxPool", lambda d: ([d.i8(1, 4, 4, 2)], 1, {"kernel_shape": [2, 2]})),
    Case("QAttention", lambda d: ([d.u8(1, 3, 8), d.i8(8, 24), d.f(24), d.scale(), d.scale(), None,
                                   d.zero(), np.array(0, np.int8)], 1, {"num_heads": 2}),
         [1, 2, 3, 4, 6, 7]),
    Case("QGemm", lambda d: ([*d.quantized(2, 4), *d.quantized(4, 3), None, d.scale(), d.zero()], 1,
                             {}), [4, 5, 7, 8], atol=1),
    Case("QLinearAdd", lambda d: ([*d.quantized(2, 4), *d.quantized(4), d.scale(), d.zero()], 1,
                                  {}), atol=1),
    Case("QLinearSoftmax", lambda d: ([*d.quantized(2, 4), d.scale(), d.zero()], 1, {"opset": 13}),
         [1, 2, 3, 4], atol=1),
    Case("Range", lambda d: ([np.array(n, np.float32) for n in (1, 7, 2)], 1, {}), [0, 1, 2]),
    Case("Trilu", lambda d: ([d.f(3, 4), np.array(1)], 1, {"upper": 0})),
    Case("ArrayFeatureExtractor", lambda d: ([d.f(2, 4), np.array([1, 3])], 1, {}), [1], CLASSICAL),
    Case("FeatureVectorizer", lambda d: ([d.f(2, 4), d.f(2, 3)], 1, {"inputdimensions": [4, 3]}),
         (), CLASSICAL),
    Case("Imputer", lambda d: ([d.f(2, 4)], 1, {"imputed_value_floats": [1.0],
                                                "replaced_value_float": 0.5}), (), CLASSICAL),
    Case("LabelEncoder", lambda d: ([d.i(4, 5)], 1, {"keys_int64s": [0, 1, 2],
                                                     "values_floats": [0.5, 1.5, 2.5]}),
         (), CLASSICAL, 2),
    Case("LinearRegressor", lambda d: ([d.f(2, 3)], 1, {"coefficients": [1.0, 2.0, 3.0],
                                                        "intercepts": [0.5]}), (), CLASSICAL),
    Case("LinearRegressor", linear(2, targets=2), (), CLASSICAL),
    Case("LinearClassifier", linear(3, classlabels_ints=[4, 2, 9], post_transform="SOFTMAX"), (),
         CLASSICAL),
    Case("LinearClassifier", linear(1, np.int64, classlabels_ints=[4, 2]), (), CLASSICAL),
    *(Case("SVMClassifier", vectors(count, with_chances=with_chances), (), CLASSICAL)
      for count in (2, 3, 4) for with_chances in (False, True)),
    Case("SVMClassifier", lambda d: ([d.f(4, 3)], 2, {
        "kernel_type": "LINEAR", "kernel_params": [0.0] * 3, "rho": [0.1],
        "classlabels_ints": [2, 1, 3], "coefficients": d.f(9).tolist()}), (), CLASSICAL),
    Case("SVMRegressor", vector_regressor, (), CLASSICAL),
    Case("TreeEnsemble", newest_trees, (), CLASSICAL, 5),
    Case("TreeEnsembleClassifier", trees("class", 2), (), CLASSICAL),
    Case("TreeEnsembleClassifier", trees("class", 3), (), CLASSICAL),
    Case("TreeEnsembleRegressor", trees("target", 2), (), CLASSICAL),
    Case("TreeEnsembleRegressor", trees("target", 1, np.float64), (), CLASSICAL, 3),
    Case("LabelEncoder", lambda d: ([d.i(4, 5, kind=np.int64)], 1, {
        "keys_tensor": numpy_helper.from_array(np.arange(3)), "values_tensor":
        numpy_helper.from_array(np.array([4, 5, 6])), "default_tensor":
        numpy_helper.from_array(np.array([9]))}), (), CLASSICAL, 4),
    Case("Normalizer", lambda d: ([d.f(2, 4)], 1, {"norm": "L2"}), (), CLASSICAL),
    Case("OneHotEncoder", lambda d: ([d.i(4, 2, 3)], 1, {"cats_int64s": [0, 1, 2], "zeros": 1}), (),
         CLASSICAL),
    Case("Scaler", lambda d: ([d.f(2, 4)], 1, {"offset": [0.5] * 4, "scale": [2.0] * 4}), (),
         CLASSICAL),
    Case("SimplifiedLayerNormalization", lambda d: ([d.f(2, 8), d.f(8)], 1, {}), domain=""),
    Case("DynamicQuantizeLinear", lambda d: ([d.f(3, 4)], 3, {}), domain="", atol=1),
    Case("HannWindow", lambda d: ([np.array(8)], 1, {}), [0], "", 17),
    Case("Shrink", lambda d: ([d.f(3, 4)], 1, {"lambd": 0.5}), domain=""),
)  # fmt: skip


def _marked() -> list[Any]:
    """The quick suite runs every third."""
    marks = pytest.mark.campaign("foreign_operators")
    return [
        pytest.param(case, id=f"{case.op}-{number}", marks=() if number % 3 == 0 else marks)
        for number, case in enumerate(CASES)
    ]


@pytest.mark.parametrize("case", _marked())
def test_a_registered_operator_gives_what_onnx_runtime_gives(case: Case, tmp_path: Path) -> None:
    drawer = Drawer(zlib.crc32(case.op.encode()) + SEED)
    drawn = case.draw(drawer)
    proto, arrays = one_node(
        case.op, drawn, case.domain, case.version, constants=tuple(case.constants)
    )
    wanted = runtime(proto, arrays)
    stitch.compile(proto, tuple(arrays)).save(tmp_path / "m.ttb")
    for executor in ("onnxruntime", "auto"):
        with stitch.open_device("wormhole_n150", executor=executor) as device:
            made = device.load(tmp_path / "m.ttb")(*arrays)
            mine = [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]
        for own, other in zip(mine, wanted, strict=True):
            assert (own.shape, own.dtype) == (other.shape, other.dtype)
            close = np.asarray(own, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(*close, rtol=1e-4, atol=case.atol, err_msg=executor)


@pytest.mark.campaign("foreign_operators")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_a_node_with_operands_of_other_shapes_compiles_or_is_refused(case: Case) -> None:
    """Whatever a node is given, there is a graph or one of Stitch's errors."""
    drawer = Drawer(zlib.crc32(case.op.encode()) + SEED + 1)
    operands, results, attributes = case.draw(drawer)
    for index, operand in enumerate(operands):
        if operand is None:
            continue
        for other in (operand[None], operand.reshape(-1)[:0], operand.reshape(-1)[:1]):
            changed = [*operands[:index], other, *operands[index + 1 :]]
            proto, _ = one_node(case.op, (changed, results, attributes), case.domain, case.version,
                                constants=tuple(case.constants))  # fmt: skip
            try:
                from_onnx(proto)
            except StitchError as error:
                assert str(error)
