"""Products that are only read transposed are made so, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler.passes.matrix_products import transpose_products
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from tests.support.stitched_models import one

Build = Callable[[ComputationGraphBuilder, Any, Any], Any]
EXCHANGE = (0, 1, 3, 2)


def graph_of(build: Build) -> ComputationGraph:
    b = ComputationGraphBuilder("g")
    x, y = b.input("x", (2, 3, 4, 5), "float32"), b.input("y", (2, 3, 4, 6), "float32")
    b.output("z", build(b, x, y))
    return b.build()


def transposed(b: ComputationGraphBuilder, value: Any) -> Any:
    return b.transpose(value, EXCHANGE)


def of_a_transpose(b: ComputationGraphBuilder, x: Any, y: Any) -> Any:
    return b.transpose(b.matmul(transposed(b, x), y), (0, 3, 1, 2))


def of_two_plain(b: ComputationGraphBuilder, x: Any, y: Any) -> Any:
    return transposed(b, b.matmul(transposed(b, x) * 2.0, y))


def twice(b: ComputationGraphBuilder, x: Any, y: Any) -> Any:
    inner = transposed(b, b.matmul(transposed(b, x), y))
    return transposed(b, b.matmul(inner, inner[:, :, :5] * 1.0))


def shared(b: ComputationGraphBuilder, x: Any, y: Any) -> Any:
    made = b.matmul(transposed(b, x), y)
    return b.op("ReduceSum", transposed(b, made), [2]) + b.op("ReduceSum", made, [3])[:, :, :1]


def moved_rows(b: ComputationGraphBuilder, x: Any, y: Any) -> Any:
    return b.transpose(b.matmul(transposed(b, x), y), (0, 2, 1, 3))


def run(graph: ComputationGraph) -> Any:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(0, 1, s).astype(np.float32) for s in ((2, 3, 4, 5), (2, 3, 4, 6)))
    with stitch.open_device("host") as device:
        return one(device.load(stitch.compile(graph, target="host"))(x=x, y=y)).numpy()


@pytest.mark.parametrize(
    "build", [of_a_transpose, of_two_plain, twice, shared, moved_rows], ids=lambda f: f.__name__
)
def test_transposed_products_give_the_same_numbers(build: Build) -> None:
    graph = graph_of(build)
    np.testing.assert_allclose(run(transpose_products(graph)), run(graph), rtol=1e-5, atol=1e-5)
