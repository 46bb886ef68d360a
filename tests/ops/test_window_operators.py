"""Windows back and forth, caches, bits and other operators that stand alone, against ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import stitch
from stitch.ops import evaluate
from stitch.program import Array
from tests.support.operators.against_onnx import check


def at(value: Any, data_type: Any = np.int64) -> Array:
    return np.array(value, data_type)


#: Two single items and two pairs of them.
POOL = {
    "ngram_counts": (0, 2),
    "ngram_indexes": (0, 1, 2, 3),
    "pool_int64s": (2, 3, 2, 3, 3, 1),
    "min_gram_length": 1,
    "max_gram_length": 2,
    "max_skip_count": 1,
    "mode": "TF",
}
CASES: list[tuple[Any, ...]] = [
    ("TfIdfVectorizer", ["i64[2,9]"], POOL),
    ("TfIdfVectorizer", [[2, 2, 3, 1, 3, 2, 1]], POOL),
    ("TfIdfVectorizer", ["i32[3,7]"], POOL | {"mode": "IDF", "weights": (1.0, 2.0, 3.0, 4.0)}),
    ("TfIdfVectorizer", ["i32[3,7]"], POOL | {"mode": "TFIDF", "weights": (1.0, 2.0, 3.0, 4.0)}),
    ("Col2Im", ["f32[2,12,20]", [5, 6], [2, 2]], {}),
    ("Col2Im", ["f32[1,6,25]", [5, 6], [3, 2]], {"pads": (1, 0, 1, 0), "strides": (1, 1)}),
    ("Col2Im", ["f32[1,4,6]", [5, 6], [2, 2]], {"strides": (2, 2), "dilations": (2, 1)}),
    ("Col2Im", ["f64[1,8,12]", [3, 4, 3], [2, 2, 2]], {}),
    ("Det", ["f64[4,4]"], {}),
    ("Det", ["f64[2,3,3,3]"], {}),
    ("TensorScatter", ["f32[2,3,5,4]", "f32[2,3,2,4]", at([1, 3])], {}),
    ("TensorScatter", ["i32[2,5,4]", "i32[2,3,4]", at([3, 4])], {"mode": "circular", "axis": 1}),
    ("TensorScatter", ["f32[2,5,4]", "f32[2,3,4]"], {}),
    ("LpPool", ["f32[2,3,7,8]"], {"kernel_shape": (2, 3)}),
    ("LpPool", ["f32[2,3,7,8]"], {"kernel_shape": (3, 2), "strides": (2, 1), "p": 3}),
    ("LpPool", ["f32[2,3,9]"], {"kernel_shape": (3,), "pads": (1, 1), "p": 1}),
    ("LRN", ["f32[3,3,4,5]"], {"size": 3}),
    ("LRN", ["f64[4,4,2,2]"], {"size": 4, "alpha": 0.5, "beta": 0.5, "bias": 2.0}),
    ("BitCast", ["f32[3,4]"], {"to": 6}),
    ("BitCast", ["i64[5]"], {"to": 11}),
    ("BitCast", ["ui8[2,3]"], {"to": 3}),
    ("BitCast", ["i16[]"], {"to": 4}),
]


def test_counting_ends_whatever_skips_and_lengths_are_asked_for() -> None:
    endless = POOL | {"max_skip_count": 1 << 40, "max_gram_length": 1 << 40}
    row = at([2, 3, 1, 3, 2, 1, 3])
    (counted,) = evaluate("TfIdfVectorizer", [row], attributes=endless)
    # Pairs (2, 3): places 0 and 1, 3, 6; 4 and 6. Pairs (3, 1): places 1 and 2, 5; 3 and 5.
    assert counted.tolist() == [2, 3, 4, 3]


@pytest.mark.parametrize("row", CASES, ids=[f"{i}-{c[0]}-{c[2]}" for i, c in enumerate(CASES)])
def test_a_window_operator_agrees_with_onnx(row: tuple[Any, ...]) -> None:
    check(*row)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_window_that_is_longer_than_the_operand_is_one_if_by_less_than_a_stride(op: str) -> None:
    """Of operand, kernel and stride, as ONNX Runtime: it divides towards 0."""
    for size, kernel, stride in ((1, 2, 2), (2, 3, 2), (1, 4, 4), (1, 2, 1), (1, 3, 2), (3, 2, 2)):
        node = helper.make_node(
            op, ["x"], ["y"], kernel_shape=[kernel] * 2, strides=[stride] * 2
        )  # fmt: skip
        x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, size, size])
        y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "pool", [x], [y])
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
        )  # fmt: skip
        values = np.arange(2 * size * size, dtype=np.float32).reshape(1, 2, size, size) - 1
        session = onnxruntime.InferenceSession(model.SerializeToString())
        (wanted,) = session.run(None, {"x": values})
        for executor in ("numpy", "onnxruntime", "torch", "torch:cpu"):
            found = np.asarray(stitch.compile(model, executor=executor)(values))
            assert found.shape == wanted.shape, (executor, size, kernel, stride)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=executor)
