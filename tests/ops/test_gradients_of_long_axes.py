"""Gradients along axes too long for a constant matrix of all pairs of places."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.ops import pooling, resampling
from tests.support.gradients.running import Case, case, gradients

POOLS = [
    case("AveragePool", ["f64[2,3,7,8]"], kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    case("AveragePool", ["f64[2,3,7,8]"], kernel_shape=(3, 2), strides=(3, 1), ceil_mode=1),
    case("AveragePool", ["f64[1,2,9]"], kernel_shape=(2,), dilations=(3,), pads=(1, 1)),
    case("AveragePool", ["f64[1,2,9]"], kernel_shape=(4,), strides=(3,), pads=(2, 3),
         count_include_pad=1, ceil_mode=1),
    case("LpPool", ["f64[2,3,7]"], kernel_shape=(3,), strides=(2,), pads=(1, 1), p=3),
    case("LpPool", ["f64[2,3,6,5]"], kernel_shape=(2, 3), strides=(1, 2), p=2),
]  # fmt: skip


@pytest.mark.parametrize("one", POOLS, ids=str)
def test_shares_are_spread_as_a_matrix_would(one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    (by_matrix, *_), _, _ = (list(found.values()) for found in gradients(one))
    monkeypatch.setattr(pooling, "MOST_SHARES", 8)
    (spread, *_), _, _ = (list(found.values()) for found in gradients(one))
    np.testing.assert_allclose(spread, by_matrix, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_an_average_over_a_long_signal_takes_a_few_megabytes() -> None:
    one = case("AveragePool", ["f32[1,1,60000]"], kernel_shape=(301,), strides=(3,))
    tracemalloc.start()
    try:
        made, seeds, _ = gradients(one)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 40 << 20
    ((given_back,), (seed,)) = made.values(), seeds.values()
    assert given_back.sum() == pytest.approx(seed.sum(), abs=1e-2)


def test_a_resize_whose_weights_would_be_too_many_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resampling, "MOST_WEIGHTS", 100)
    one = case("Resize", ["f32[1,1,20]", None, None, [1, 1, 37]], mode="linear")
    with pytest.raises(CompileError, match="axis 2 would need a matrix of 37 x 20 weights"):
        gradients(one)
