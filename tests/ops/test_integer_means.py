"""The mean of integers is exact and truncated, whatever its sum would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stitch.ops import evaluate

TYPES = ["int32", "int64", "uint32", "uint64"]


def truncated(total: int, count: int) -> int:
    return total // count if total >= 0 else -(-total // count)


def drawn(dtype: Any, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    """Numbers of all sizes, and the limits themselves."""
    limits, random = np.iinfo(dtype), np.random.default_rng(seed)
    wide = random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    small = random.integers(max(-9, limits.min), 9, shape).astype(dtype)
    found = np.where(random.random(shape) < 0.5, wide, small)
    limit = np.array((limits.min, limits.max)[seed % 2], dtype)
    return np.where(random.random(shape) < 0.3, limit, found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 70000])
def test_the_mean_is_that_of_python_integers(dtype: str, count: int) -> None:
    for seed in range(20 if count < 100 else 2):
        data = drawn(dtype, (4, count), seed)
        (found,) = evaluate("ReduceMean", [data, np.array([1])], attributes={"keepdims": 0})
        assert found.dtype == data.dtype
        assert found.tolist() == [truncated(sum(row), count) for row in data.tolist()]


@pytest.mark.parametrize("dtype", TYPES)
def test_without_axes_nothing_changes(dtype: str) -> None:
    limits = np.iinfo(dtype)
    data = np.array([limits.max, limits.max - 1, limits.min, limits.min + 1], dtype)
    (found,) = evaluate("ReduceMean", [data], attributes={"noop_with_empty_axes": 1})
    assert found.tolist() == data.tolist()


def test_the_mean_of_no_integers_is_zero() -> None:
    (found,) = evaluate("ReduceMean", [np.zeros((2, 0), np.int64), np.array([1])])
    assert found.tolist() == [[0], [0]]
