"""Recurrent layers, resizing and quantized products, against ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.program import Array
from tests.support.operators.against_onnx import check


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def at(value: float, data_type: Any) -> Array:
    return np.array(value, data_type)


#: Sequence of 3, batch 2, input 4, hidden 5.
X = "f32[3,2,4]"
RECURRENT = [
    ("RNN", [X, "f32[1,5,4]1", "f32[1,5,5]1"], {}, 2),
    ("RNN", [X, "f32[1,5,4]1", "f32[1,5,5]1", "f32[1,10]"], {"hidden_size": 5}, 1),
    ("RNN", [X, "f32[1,5,4]1", "f32[1,5,5]1", None, None, "f32[1,2,5]"], {}, 2),
    ("GRU", [X, "f32[1,15,4]1", "f32[1,15,5]1", "f32[1,30]"], {}, 2),
    ("GRU", [X, "f32[1,15,4]1", "f32[1,15,5]1", "f32[1,30]"], {"linear_before_reset": 1}, 2),
    ("GRU", ["f64[3,2,4]", "f64[1,15,4]1", "f64[1,15,5]1"], {}, 2),
    ("LSTM", [X, "f32[1,20,4]1", "f32[1,20,5]1", "f32[1,40]"], {}, 2),
    (
        "LSTM",
        [X, "f32[1,20,4]1", "f32[1,20,5]1", "f32[1,40]", None, "f32[1,2,5]", "f32[1,2,5]",
         "f32[1,15]"],
        {},
        2,
    ),
]  # fmt: skip
IMAGE = "f32[1,2,4,6]"
RESIZED = [
    ("Resize", [IMAGE, None, f32(1, 1, 2, 0.5)], {"mode": mode, **more})
    for mode in ("nearest", "linear", "cubic")
    for more in (
        {},
        {"coordinate_transformation_mode": "align_corners"},
        {"coordinate_transformation_mode": "asymmetric"},
        {"coordinate_transformation_mode": "pytorch_half_pixel"},
        {"coordinate_transformation_mode": "half_pixel_symmetric"},
    )
] + [
    ("Resize", [IMAGE, None, None, [1, 2, 3, 5]], {"mode": "linear", "antialias": 1}),
    ("Resize", [IMAGE, None, None, [1, 2, 3, 5]], {"mode": "cubic", "exclude_outside": 1}),
    ("Resize", [IMAGE, None, None, [7, 9]], {"axes": (2, 3), "nearest_mode": "ceil"}),
    ("Resize", ["i32[1,2,4,6]", None, None, [7, 9]], {"axes": (3, 2), "nearest_mode": "floor"}),
    (
        "Resize",
        [IMAGE, None, None, [7, 9]],
        {"axes": (2, 3), "keep_aspect_ratio_policy": "not_larger"},
    ),
    (
        "Resize",
        [IMAGE, f32(0.2, -0.4, 0.6, 1.2), None, [3, 5]],
        {
            "axes": (2, 3),
            "mode": "linear",
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "extrapolation_value": 7.0,
        },
    ),
]
SCALE = at(0.5, np.float32)
BYTE = at(3, np.uint8)
QUANTIZED = [
    ("QuantizeLinear", ["f32[3,4]", SCALE, BYTE], {}),
    ("QuantizeLinear", ["f32[3,4]", SCALE], {}),
    ("QuantizeLinear", ["f32[3,4]", f32(0.5, 1, 0.25, 2), "i8[4]"], {"axis": 1}),
    ("QuantizeLinear", ["f32[3,4]", "f32[3,2]+", "i16[3,2]"], {"axis": 1, "block_size": 2}),
    ("DequantizeLinear", ["ui8[3,4]", SCALE, BYTE], {}),
    ("DequantizeLinear", ["i8[3,4]", "f32[3]", "i8[3]"], {"axis": 0}),
    ("DequantizeLinear", ["i32[3,4]", "f32[3,2]"], {"axis": -1, "block_size": 2}),
    ("MatMulInteger", ["ui8[3,4]", "i8[4,5]"], {}),
    ("MatMulInteger", ["ui8[2,3,4]", "ui8[4,5]", BYTE, at(2, np.uint8)], {}),
    (
        "QLinearMatMul",
        ["ui8[3,4]", SCALE, BYTE, "i8[4,5]", SCALE, at(-1, np.int8), at(0.3, np.float32),
         at(9, np.uint8)],
        {},
    ),
    ("ConvInteger", ["ui8[1,2,5,6]", "ui8[3,2,2,3]", BYTE, at(1, np.uint8)],
     {"pads": (1, 0, 1, 2)}),
    (
        "QLinearConv",
        ["ui8[1,2,5,6]", SCALE, BYTE, "ui8[3,2,2,3]", f32(0.5, 0.25, 1), np.arange(3, dtype="u1"),
         at(0.7, np.float32), at(5, np.uint8)],
        {"strides": (2, 1)},
    ),
]  # fmt: skip
CASES: list[tuple[Any, ...]] = [*RECURRENT, *RESIZED, *QUANTIZED]


@pytest.mark.parametrize("row", CASES, ids=[f"{i}-{c[0]}-{c[2]}" for i, c in enumerate(CASES)])
def test_a_layer_operator_agrees_with_onnx(row: tuple[Any, ...]) -> None:
    check(*row)
