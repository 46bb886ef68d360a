"""Numbers that kernels are bound with: of their arrays' type, whatever is asked."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.ops import evaluate
from tests.support.stitched_models import model, one


@pytest.mark.parametrize("alpha", [1e30, 6.5e69, -1e300])
def test_an_attribute_too_large_for_its_type_is_infinite_without_a_warning(alpha: float) -> None:
    def elu(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4,), "float32")
        b.output("y", b.elu(x, alpha))

    x = np.array([-1, 2, -3, 0.5], np.float32)
    with warnings.catch_warnings(), stitch.open_device("host") as device:
        warnings.simplefilter("error")
        y = one(device.load(model("elu", elu, target="host"))(x)).numpy()
    with np.errstate(over="ignore"):
        assert y[0] == np.float32(alpha) * np.expm1(np.float32(-1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_over_x_has_the_bits_of_numpys_reciprocal(dtype: type[np.floating]) -> None:
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max, 3e-41]
    random = np.random.default_rng(0)
    x = np.concatenate([edges, random.normal(size=10_000), random.normal(size=9999) * 1e30])
    x = x.astype(dtype)
    (found,) = evaluate("Reciprocal", [x])
    with np.errstate(all="ignore"):
        assert found.tobytes() == np.reciprocal(x).tobytes()
