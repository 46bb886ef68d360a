"""Products, convolutions, pools, normalizations, reductions, shapes and indices, against ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.grids import every
from tests.support.operators.against_onnx import check

F = "f32"


def _types(rows: list[tuple[Any, ...]], types: str) -> list[tuple[Any, ...]]:
    """Each row once per type, `T` in its operands replaced."""
    return [
        (op, [s.replace("T", t) if isinstance(s, str) else s for s in specs], *rest)
        for op, specs, *rest in rows
        for t in types.split()
    ]


PRODUCTS = [
    ("MatMul", ["T[3,4]", "T[4,5]"], {}),
    ("MatMul", ["T[2,3,4]", "T[4,5]"], {}),
    ("MatMul", ["T[2,1,3,4]", "T[6,4,5]"], {}),
    ("MatMul", ["T[4]", "T[4,5]"], {}),
    ("MatMul", ["T[3,4]", "T[4]"], {}),
    ("MatMul", ["T[4]", "T[4]"], {}),
    ("MatMul", ["T[4]", "T[2,4,5]"], {}),
    ("MatMul", ["T[2,3,4]", "T[4]"], {}),
    ("MatMul", ["T[3,0]", "T[0,5]"], {}),
    ("MatMul", ["T[0,4]", "T[4,5]"], {}),
    ("Gemm", ["T[3,4]", "T[4,5]"], {}),
    ("Gemm", ["T[3,4]", "T[4,5]", "T[5]"], {}),
    ("Gemm", ["T[3,4]", "T[5,4]", "T[3,1]"], {"transB": 1}),
    ("Gemm", ["T[4,3]", "T[5,4]", "T[]"], {"transA": 1, "transB": 1}),
    ("Gemm", ["T[4,3]", "T[4,5]", "T[3,5]"], {"transA": 1, "alpha": 2.0, "beta": 3.0}),
    ("Gemm", ["T[3,4]", "T[4,5]", "T[1,5]"], {"beta": 0.0}),
    ("Gemm", ["T[3,0]", "T[0,5]", "T[5]"], {}),
    ("Einsum", ["T[2,3]", "T[3,4]"], {"equation": "ij,jk->ik"}),
    ("Einsum", ["T[2,3]", "T[3,4]"], {"equation": "ij, jk"}),
    ("Einsum", ["T[5,2,3]", "T[5,3,4]"], {"equation": "...ij,...jk->...ik"}),
    ("Einsum", ["T[3,3]"], {"equation": "ii->i"}),
    ("Einsum", ["T[2,3]"], {"equation": "ij->ji"}),
    ("Einsum", ["T[2,3]"], {"equation": "ij->"}),
    ("Einsum", ["T[2,3,4]"], {"equation": "...j"}),
    ("Einsum", ["T[2,3]", "T[3,4]", "T[4]"], {"equation": "ab,bc,c->a"}),
]
X, W = "T[2,4,9,8]", "T[6,4,3,2]"
CONVOLUTIONS = [
    ("Conv", [X, W], {}),
    ("Conv", [X, W, "T[6]"], {"pads": (1, 0, 2, 1), "strides": (2, 1)}),
    ("Conv", [X, W, "T[6]"], {"dilations": (2, 3), "kernel_shape": (3, 2)}),
    ("Conv", [X, "T[6,2,3,2]", "T[6]"], {"group": 2, "pads": (1, 1, 1, 1)}),
    ("Conv", [X, "T[4,1,3,3]"], {"group": 4}),
    ("Conv", [X, W], {"auto_pad": "SAME_UPPER", "strides": (2, 3)}),
    ("Conv", [X, W], {"auto_pad": "SAME_LOWER", "strides": (2, 3)}),
    ("Conv", [X, W], {"auto_pad": "VALID"}),
    ("Conv", [X, "T[6,4,1,1]", "T[6]"], {}),
    ("Conv", ["T[1,4,5,5]", "T[6,4,1,1]"], {"strides": (2, 2)}),
    ("Conv", ["T[2,3,11]", "T[5,3,4]", "T[5]"], {"pads": (2, 1), "strides": (3,)}),
    ("Conv", ["T[1,2,5,6,4]", "T[3,2,2,3,2]"], {"pads": (1, 0, 1, 0, 1, 0)}),
    ("Conv", ["T[0,4,9,8]", W], {}),
]
TRANSPOSED = [
    ("ConvTranspose", ["T[2,4,3,5]", "T[4,6,3,2]"], {}),
    ("ConvTranspose", ["T[2,4,3,5]", "T[4,6,3,2]", "T[6]"], {"strides": (3, 2)}),
    ("ConvTranspose", ["T[1,4,3,5]", "T[4,6,3,3]"], {"pads": (1, 0, 1, 2), "strides": (2, 2)}),
    (
        "ConvTranspose",
        ["T[1,4,3,5]", "T[4,6,3,3]"],
        {"output_padding": (1, 1), "strides": (3, 2), "pads": (1, 1, 1, 1)},
    ),
    ("ConvTranspose", ["T[1,4,3,5]", "T[4,6,3,3]"], {"dilations": (2, 1)}),
    ("ConvTranspose", ["T[1,4,7]", "T[4,3,3]"], {"strides": (2,)}),
    ("ConvTranspose", ["T[1,4,3,3]", "T[4,2,3,3]"], {"output_shape": (10, 8), "strides": (3, 2)}),
    ("ConvTranspose", ["T[1,4,3,3]", "T[4,2,3,3]"], {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
]
P = "T[2,3,9,8]"
POOLS = [
    ("GlobalAveragePool", [P], {}),
    ("GlobalMaxPool", [P], {}),
    *[
        (op, [P], {"kernel_shape": (3, 2), **attributes})
        for op in ("MaxPool", "AveragePool")
        for attributes in (
            {},
            {"strides": (2, 3)},
            {"pads": (1, 0, 1, 1), "strides": (2, 2)},
            {"ceil_mode": 1, "strides": (3, 3)},
            {"dilations": (2, 3)},
            {"auto_pad": "SAME_UPPER", "strides": (2, 2)},
            {"auto_pad": "VALID"},
        )
    ],
    ("AveragePool", [P], {"kernel_shape": (3, 2), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
    ("AveragePool", ["T[1,2,9]"], {"kernel_shape": (4,), "strides": (2,)}),
    ("MaxPool", [P], {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 1, 1, 0)}, 2),
    ("MaxPool", ["T[1,2,5,4,6]"], {"kernel_shape": (2, 2, 3)}),
]
C = ["T[3]", "T[3]", "T[3]", "T[3]+"]
NORMALIZATIONS = [
    ("BatchNormalization", ["T[2,3,4,5]", *C], {}),
    ("BatchNormalization", ["T[2,3]", *C], {"epsilon": 0.125}),
    ("BatchNormalization", ["T[2,3,4]", *C], {"training_mode": 1}, 3),
    ("BatchNormalization", ["T[2,3,4]", *C], {"training_mode": 1, "momentum": 0.25}, 3),
    ("BatchNormalization", ["T[2,3,4]", *C], {"training_mode": 1, "momentum": 0.0}, 3),
    ("InstanceNormalization", ["T[2,3,4,5]", "T[3]", "T[3]"], {"epsilon": 0.125}),
    ("Softmax", ["T[2,3,4]"], {}),
    ("Softmax", ["T[2,3,4]"], {"axis": 1}),
    ("Softmax", ["T[0,3]"], {}),
    ("LogSoftmax", ["T[2,3,4]"], {"axis": 0}),
    ("Hardmax", ["T[2,3,4]"], {"axis": -2}),
]
LAYERS = [
    ("GroupNormalization", ["T[2,6,4]", "T[6]", "T[6]"], {"num_groups": 3}),
    ("LayerNormalization", ["T[2,3,4]", "T[4]"], {}),
    ("LayerNormalization", ["T[2,3,4]", "T[4]", "T[4]"], {"epsilon": 0.125}),
    ("LayerNormalization", ["T[2,3,4]", "T[3,4]", "T[3,4]"], {"axis": 1}),
    ("RMSNormalization", ["T[2,3,4]", "T[4]"], {}),
    ("RMSNormalization", ["T[2,3,4]", "T[3,4]"], {"axis": -2, "epsilon": 0.125}),
]
REDUCERS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
REDUCTIONS = [
    (f"Reduce{name}", ["T[3,4,2]+", *axes], attributes)
    for name in REDUCERS
    for axes, attributes in (
        ([], {}),
        ([], {"keepdims": 0}),
        ([[1]], {}),
        ([[-1, 0]], {"keepdims": 0}),
        ([[]], {"noop_with_empty_axes": 1}),
        ([[]], {}),
    )
]
EMPTY_REDUCTIONS: list[tuple[Any, ...]] = [
    (f"Reduce{name}", ["f32[2,0,4]", [1]], {}) for name in REDUCERS if name != "Mean"
]
ARGUMENTS = [
    (op, ["T[3,4,2]"], {"axis": axis, **more})
    for op in ("ArgMax", "ArgMin")
    for axis, more in ((0, {}), (-1, {"keepdims": 0}), (1, {"select_last_index": 1}))
]
SCANS = [
    (op, ["T[3,4]", np.array(axis)], attributes)
    for op in ("CumSum",)
    for axis in (0, -1)
    for attributes in ({}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1})
]
SHAPES = [
    ("Identity", ["T[2,3]"], {}),
    ("Reshape", ["T[2,3,4]", [4, -1]], {}),
    ("Reshape", ["T[2,3,4]", [0, 0, 2, 2]], {}),
    ("Reshape", ["T[0,3]", [3, 0]], {"allowzero": 1}),
    ("Reshape", ["T[1]", []], {}),
    ("Flatten", ["T[2,3,4]"], {}),
    ("Flatten", ["T[2,3,4]"], {"axis": 0}),
    ("Flatten", ["T[2,3,4]"], {"axis": -1}),
    ("Flatten", ["T[]"], {"axis": 0}),
    ("Squeeze", ["T[1,3,1]"], {}),
    ("Squeeze", ["T[1,3,1]", [-1]], {}),
    ("Unsqueeze", ["T[3,4]", [0, -1]], {}),
    ("Transpose", ["T[2,3,4]"], {}),
    ("Transpose", ["T[2,3,4]"], {"perm": (1, 0, 2)}),
    ("Concat", ["T[2,3]", "T[2,1]", "T[2,0]"], {"axis": -1}),
    ("Concat", ["T[2,3]"], {"axis": 0}),
    ("Split", ["T[6,2]"], {"num_outputs": 3}, 3),
    ("Split", ["T[7,2]"], {"num_outputs": 3}, 3),
    ("Split", ["T[2,6]", [1, 5, 0]], {"axis": 1}, 3),
    ("Slice", ["T[5,6]", [1], [4]], {}),
    ("Slice", ["T[5,6]", [1, -2], [1000, -100], [0, 1], [2, -1]], {}),
    ("Slice", ["T[5,6]", [-1], [-100], [-1], [-2]], {}),
    ("Slice", ["T[5,6]", [100], [0], [0], [-3]], {}),
    ("Slice", ["T[5,6]", [3], [2], [0]], {}),
    ("Expand", ["T[3,1]", [2, 1, 4]], {}),
    ("Expand", ["T[3,4]", [1]], {}),
    ("Expand", ["T[]", [2, 0]], {}),
    ("Tile", ["T[2,3]", [2, 1]], {}),
    ("Tile", ["T[2,3]", [0, 2]], {}),
    ("Pad", ["T[2,3]", [1, 0, 2, 1]], {}),
    ("Pad", ["T[2,3]", [1, 0, 2, 1], "T[]"], {}),
    ("Pad", ["T[2,3]", [1, 2], None, [-1]], {}),
    ("Pad", ["T[4,3]", [3, 2, 1, 0]], {"mode": "reflect"}),
    ("Pad", ["T[4,3]", [3, 2, 1, 5]], {"mode": "edge"}),
    ("Pad", ["T[4,3]", [5, 2, 1, 4]], {"mode": "wrap"}),
    ("Shape", ["T[2,3,4]"], {}),
    ("Shape", ["T[2,3,4]"], {"start": 1}),
    ("Shape", ["T[2,3,4]"], {"start": -9, "end": -1}),
    ("Size", ["T[2,3,4]"], {}),
    ("Trilu", ["T[2,3,4]"], {}),
    ("Trilu", ["T[3,4]", np.array(-1)], {"upper": 0}),
    ("Trilu", ["T[3,4]", np.array(2)], {}),
]
INDICES = [
    ("Gather", ["T[5,4]", "i64[2,3]<5"], {}),
    ("Gather", ["T[5,4]", "i32[]<4"], {"axis": -1}),
    ("Gather", ["T[5,4]", "i64[0]<4"], {}),
    ("GatherElements", ["T[5,4]", "i64[3,4]<5"], {}),
    ("GatherElements", ["T[5,4]", "i32[5,2]<4"], {"axis": 1}),
    ("GatherND", ["T[5,4,3]", "i64[2,1]<5"], {}),
    ("GatherND", ["T[5,4,3]", "i64[2,6,2]<4"], {}),
    ("GatherND", ["T[5,4,3]", "i64[5,2,1]<4"], {"batch_dims": 1}),
    ("ScatterElements", ["T[5,4]", [[0, 1, 2, 3], [1, -1, 4, 0]], "T[2,4]"], {}),
    ("ScatterElements", ["T[5,4]", [[1, -1], [0, 2]], "T[2,2]"], {"axis": 1}),
    ("ScatterND", ["T[5,4]", [[1], [-2]], "T[2,4]"], {}),
    ("ScatterND", ["T[5,4]", [[1, 2], [0, -1]], "T[2]"], {}),
    ("TopK", ["T[3,6]", [2]], {}, 2),
    ("TopK", ["T[3,6]", [3]], {"axis": 0, "largest": 0}, 2),
    ("OneHot", ["i64[2,3]<4", np.array(4), "T[2]"], {}),
    ("OneHot", ["f32[3]<4", np.array(4), "T[2]"], {"axis": 0}),
]
REDUCED_SCATTERS = [
    (op, specs, {"reduction": reduction})
    for reduction in ("add", "mul", "max", "min")
    for op, specs in (
        ("ScatterElements", ["T[5,4]", [[0, 0, 2, 3], [0, -1, 2, 0]], "T[2,4]"]),
        ("ScatterND", ["T[5,4]", [[1], [1], [-2]], "T[3,4]"]),
    )
]
MADE = [
    ("ConstantOfShape", [[2, 3]], {}),
    ("ConstantOfShape", [[]], {"value_float": 1.5}),
    ("ConstantOfShape", [[2, 0]], {"dtype": 7, "value_int": 2**53 + 1}),
    ("ConstantOfShape", [[2]], {"dtype": 9, "value_int": 1}),
    ("Range", [np.array(1), np.array(10), np.array(3)], {}),
    ("Range", [np.array(5), np.array(-4), np.array(-3)], {}),
    ("Range", [np.array(5), np.array(5), np.array(1)], {}),
    ("Range", [np.array(v, np.float32) for v in (0.0, 1.0, 0.25)], {}),
    ("Dropout", ["f32[2,3]"], {}),
    ("Dropout", ["f32[2,3]", np.array(0.5, np.float32)], {}, 2),
    ("Dropout", ["f16[2,3]", np.array(0.5, np.float32), np.array(False)], {}, 2),
]
_CODES = {"f32": 1, "f64": 11, "f16": 10, "i8": 3, "i64": 7, "ui8": 2, "bool": 9}
CASTS = [
    ("Cast", [f"{source}[3,4]"], {"to": code}) for source in _CODES for code in _CODES.values()
    if not (source in ("f32", "f64", "f16", "i8", "i64") and code == 2)
]  # fmt: skip

CASES: list[tuple[Any, ...]] = [
    *_types(PRODUCTS, "f32 f64 f16 i32 i64"),
    *_types(CONVOLUTIONS + POOLS, "f32 f64"),
    *_types(TRANSPOSED, "f32 f64"),
    *_types(NORMALIZATIONS, "f32 f64 f16"),
    *_types(LAYERS, "f32 f16"),
    *_types(REDUCTIONS, "f32 f64"),
    # The reference widens int32 where it takes squares, and has no logarithms of integers.
    *_types([row for row in REDUCTIONS if "Log" not in row[0]], "i64"),
    *_types([row for row in REDUCTIONS if not row[0].endswith(("Exp", "LogSum", "Square"))], "i32"),
    *EMPTY_REDUCTIONS,
    *_types(ARGUMENTS, "f32 f16 i32 ui8"),
    *_types(SCANS, "f32 f64 i32"),
    *_types(SHAPES, "f32 f16 i64 ui8"),
    *_types(SHAPES, "bool"),
    *_types(INDICES, "f32 f16 i64"),
    *_types(REDUCED_SCATTERS, "f32 i32"),
    *MADE,
    *CASTS,
]


@pytest.mark.parametrize(
    "row", every(2, CASES), ids=[f"{i}-{'-'.join(map(str, c))}" for i, c in enumerate(CASES)]
)
def test_an_operator_agrees_with_onnx(row: tuple[Any, ...]) -> None:
    check(*row)
