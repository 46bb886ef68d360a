"""Kernels that work in pieces: the same numbers as at once, in a few megabytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from stitch.ops import bind, evaluate, infer_types, kernel_workspace, steps
from stitch.program import DataType, ValueType
from tests.support.operators.drawn_operands import operands_of

MIB = 1 << 20
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("DFT", ["f32[3,10,4,1]", None, np.array(1)], {}),
    ("DFT", ["f32[3,10,4,2]", np.array(13), np.array(0)], {"inverse": 1}),
    ("GridSample", ["f32[2,3,9,8]", "f32[2,6,7,2]1"], {}),
    ("GridSample", ["f32[2,3,9,8]", "f32[2,6,7,2]1"], {"mode": "cubic"}),
    ("GridSample", ["i32[1,2,4,5,6]", "f32[1,3,4,5,3]1"], {"mode": "nearest"}),
    ("DeformConv", ["f32[2,4,8,9]", "f32[6,2,3,3]", "f32[2,36,6,7]1", "f32[6]",
                    "f32[2,18,6,7]1"], {"group": 2, "offset_group": 2}),
]  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=[f"{i}-{row[0]}" for i, row in enumerate(CASES)])
@pytest.mark.parametrize("nbytes", [1, 5000])
def test_pieces_of_any_size_make_the_whole(
    row: tuple[str, list[Any], dict[str, Any]], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, specs, attributes = row
    operands = operands_of(specs)
    (whole,) = evaluate(op, operands, attributes=attributes)
    monkeypatch.setattr(steps, "PIECE_NBYTES", nbytes)
    (pieces,) = evaluate(op, operands, attributes=attributes)
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-5)


LARGE: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("DFT", ["f32[400,4096,1]"], {}),
    ("GridSample", ["f32[1,16,64,64]", "f32[1,300,300,2]1"], {"mode": "cubic"}),
    ("DeformConv", ["f32[1,32,40,40]", "f32[4,32,5,5]", "f32[1,50,36,36]1"], {}),
    ("Col2Im", ["f32[1,400,6561]", np.array([100, 100]), np.array([20, 20])], {}),
    ("Resize", ["f32[2000,2]", None, None, np.array([2, 2000])], {"mode": "linear"}),
    ("Resize", ["f32[2,2000]", None, None, np.array([2000, 2])], {"mode": "linear"}),
]


@pytest.mark.parametrize("row", LARGE, ids=[f"{i}-{row[0]}" for i, row in enumerate(LARGE)])
def test_a_large_operation_takes_a_few_megabytes(
    row: tuple[str, list[Any], dict[str, Any]],
) -> None:
    op, specs, attributes = row
    operands = operands_of(specs)
    kinds = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    types = infer_types(op, kinds, constants=operands, attributes=attributes)
    declared = kernel_workspace(op, kinds, types, attributes=attributes)
    results = [np.empty(t.shape, t.data_type.compute_dtype) for t in types]
    fixed = [isinstance(spec, np.ndarray) for spec in specs]
    tracemalloc.start()
    try:
        for step in bind(op, operands, results, attributes=attributes, constant=fixed):
            step()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken <= min(declared, 12 * MIB)
