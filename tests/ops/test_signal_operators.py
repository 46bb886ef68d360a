"""Fourier transforms and values read between elements, against ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.program import Array
from tests.support.operators.against_onnx import check


def number(value: int) -> Array:
    return np.array(value, np.int64)


FOURIER = [
    ("DFT", ["f32[2,10,1]"], {}),
    ("DFT", ["f32[2,10,2]", None, number(-2)], {}),
    ("DFT", ["f64[4,5,2]", None, number(0)], {"inverse": 1}),
    ("DFT", ["f64[2,10,1]", None, number(1)], {"onesided": 1}),
    ("DFT", ["f64[2,10,1]", number(7), number(1)], {"onesided": 1}),
    ("DFT", ["f64[2,6,2]", number(9), number(1)], {"inverse": 1, "onesided": 1}),
]
GRIDS = [
    ("GridSample", ["f32[1,2,4,5]", "f32[1,3,4,2]1"], {"mode": mode, "padding_mode": padding,
                                                      "align_corners": corners})
    for mode in ("nearest", "linear", "cubic")
    for padding in ("zeros", "border", "reflection")
    for corners in (0, 1)
] + [("GridSample", ["f32[1,2,3,4,5]", "f32[1,2,3,4,3]1"], {})]  # fmt: skip
ROIS = np.array([[0, 0, 6, 6], [1, 2, 5, 3], [-3, 2, 9, 7]], np.float32)
BATCHES = np.array([0, 1, 1])
ROI = ["f32[2,3,8,9]", ROIS, BATCHES]
SAMPLED = [
    ("RoiAlign", ROI, {"output_height": 2, "output_width": 3, "sampling_ratio": 2}),
    ("RoiAlign", ROI, {"output_height": 2, "output_width": 2}),
    ("RoiAlign", ROI, {"coordinate_transformation_mode": "output_half_pixel", "mode": "max",
                       "spatial_scale": 0.5, "output_height": 2, "sampling_ratio": 1}),
    ("DeformConv", ["f32[1,2,5,6]", "f32[3,2,2,2]", "f32[1,8,4,5]"], {}),
    ("DeformConv", ["f32[2,4,5,6]", "f32[4,2,2,2]", "f32[2,16,3,3]", "f32[4]", "f32[2,8,3,3]"],
     {"group": 2, "offset_group": 2, "strides": (2, 2), "pads": (1, 0, 1, 0)}),
]  # fmt: skip
CASES: list[tuple[Any, ...]] = [*FOURIER, *GRIDS, *SAMPLED]


@pytest.mark.parametrize("row", CASES, ids=[f"{i}-{c[0]}-{c[2]}" for i, c in enumerate(CASES)])
def test_a_signal_operator_agrees_with_onnx(row: tuple[Any, ...]) -> None:
    check(*row)
