"""Casts at the edges: NaN, overflow, saturation, wrapping, bool."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.memory import prepare_copy
from stitch.program import DataType, TensorDesc, host_layout

MACHINE = MachineShape("m", (1, 1), SpaceShape(1, 0, 1 << 30, 32))
FLOATS = [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64]
INTEGERS = [
    DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64,
    DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64,
]  # fmt: skip


def cast(values: NDArray[Any], kind: DataType) -> NDArray[Any]:
    before = DataType.from_dtype(values.dtype)
    target = np.zeros(values.shape, kind.dtype)
    kernel = prepare_copy(
        TensorDesc(values.shape, host_layout(before)),
        TensorDesc(values.shape, host_layout(kind)),
        MACHINE,
    )
    kernel.bind(values.view(np.uint8), target.view(np.uint8))()
    return target


@pytest.mark.parametrize("before", FLOATS, ids=lambda t: t.value)
@pytest.mark.parametrize("after", INTEGERS, ids=lambda t: t.value)
def test_float_to_integer_truncates_saturates_and_maps_nan_to_zero(
    before: DataType, after: DataType
) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.75, -1.75, -0.5], before.dtype)
    limits = np.iinfo(after.dtype)
    low = -1 if limits.min else 0
    assert list(cast(values, after)) == [0, limits.max, limits.min, 1, low, 0]


def test_the_largest_float_below_the_limit_is_kept_exactly() -> None:
    below = np.nextafter(2.0**63, 0.0)
    values = np.array([below, 2.0**63, -(2.0**63)], np.float64)
    assert list(cast(values, DataType.INT64)) == [int(below), 2**63 - 1, -(2**63)]
    values = np.array([2.0**63, np.nextafter(2.0**64, 0.0), 2.0**64], np.float64)
    assert list(cast(values, DataType.UINT64)) == [2**63, 2**64 - 2048, 2**64 - 1]


@pytest.mark.parametrize("before", FLOATS, ids=lambda t: t.value)
def test_float_to_bool_is_not_zero(before: DataType) -> None:
    values = np.array([0.0, -0.0, 0.25, np.nan, -np.inf], before.dtype)
    assert list(cast(values, DataType.BOOL)) == [False, False, True, True, True]


def test_too_large_becomes_infinite_without_a_warning() -> None:
    values = np.array([1e300, -1e300, np.nan], np.float64)
    found = cast(values, DataType.FLOAT32)
    assert list(found[:2]) == [np.inf, -np.inf]
    assert np.isnan(found[2])
    assert np.isinf(cast(np.array([7e4], np.float32), DataType.FLOAT16)[0])


def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32)
    found = cast(bits.view(np.float32), DataType.BFLOAT16).view(np.uint16)
    assert [hex(v) for v in found] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80"]


def test_every_bfloat16_survives_float32() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    back = cast(cast(every, DataType.FLOAT32), DataType.BFLOAT16)
    finite = ~np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(back.view(np.uint16)[finite], every.view(np.uint16)[finite])
    assert np.isnan(back[~finite].astype(np.float32)).all()
