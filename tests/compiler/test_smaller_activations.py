"""Relu goes behind the pool that alone reads it: the same bits and slopes, with less to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stitch.compiler import compile_graph, differentiate
from stitch.compiler.passes.simplification import sink_relu_below_max_pool
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.machine import load_machine
from stitch.program import Array, DataType
from tests.support.gradients.running import backward_feeds, run

Build = Callable[[ComputationGraphBuilder, Any], Any]
SHAPE = (2, 3, 7, 6)


def graph_of(build: Build, data_type: str = "float32") -> ComputationGraph:
    b = ComputationGraphBuilder("g")
    x = b.input("x", SHAPE, data_type)
    for index, made in enumerate(build(b, x)):
        b.output(f"y{index}", made)
    return b.build()


def pooled(b: ComputationGraphBuilder, x: Any, **attributes: Any) -> Any:
    return b.op("MaxPool", x, **{"kernel_shape": [2, 2], "strides": [2, 2], **attributes})


def operators(graph: ComputationGraph) -> list[str]:
    return [operation.op for operation in graph.operations]


#: Few numbers, so that many are equal, zero and below among them; and NaN.
def drawn(data_type: str) -> Array:
    x = np.random.default_rng(4).integers(-3, 3, SHAPE).astype(DataType(data_type).dtype)
    x[0, 0, 0, 0] = x[1, 2, 3, 3] = np.nan
    x[0, 1, :2] = -1
    return x


POOLS = {
    "apart": {},
    "over each other": {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    "dilated": {"dilations": [2, 1]},
    "up to the ends": {"ceil_mode": 1, "kernel_shape": [3, 2]},
    "padded alike": {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]},
}


@pytest.mark.parametrize("data_type", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_results_and_gradients_stay_the_same_to_the_last_bit(
    pool: dict[str, Any], data_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(lambda b, x: [pooled(b, b.relu(x), **pool)], data_type)
    assert operators(sink_relu_below_max_pool(graph)) == ["MaxPool", "Relu"]
    x = drawn(data_type)
    found = []
    for _ in range(2):
        both = differentiate(graph, ["x"])
        results = run(both.forward, {"x": x})
        seed = (
            np.random.default_rng(5)
            .normal(0, 1, results["y0"].shape)
            .astype(DataType(data_type).dtype)
        )
        feeds = backward_feeds(both, {"x": x}, results, {"y0.grad": seed})
        made = run(both.backward, feeds)
        found.append((operators(both.forward), results["y0"], made["x.grad"]))
        monkeypatch.setattr(
            "stitch.compiler.gradients.autodiff.sink_relu_below_max_pool", lambda graph: graph
        )
    (ours, *new), (before, *old) = found
    assert (ours, before) == (["MaxPool", "Relu"], ["Relu", "MaxPool"])
    for a, b in zip(new, old, strict=True):
        # Where a sum begins with another zero, its sign may differ.
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def test_slopes_of_both_are_taken_where_a_pool_is_small() -> None:
    both = differentiate(graph_of(lambda b, x: [pooled(b, b.relu(x))]), ["x"])
    sizes = {o.op: both.backward.values[o.outputs[0]].type.shape for o in both.backward.operations}
    assert sizes["Greater"] == (2, 3, 3, 3) and sizes["MaxPoolGradient"] == SHAPE


def test_results_are_named_and_numbered_as_operations_of_their_kind() -> None:
    def build(b: ComputationGraphBuilder, x: Any) -> Any:
        pooled(b, b.relu(x))  # Read by nothing: their numbers are free.
        return [pooled(b, b.relu(x))]

    program = compile_graph(differentiate(graph_of(build), ["x"]).forward, load_machine("host"))
    values = program.program.values
    assert [values[o.outputs[0]].name for o in program.program.operations] == ["maxpool", "relu"]


KEPT: dict[str, Build] = {
    "read by another": lambda b, x: (lambda r: [pooled(b, r), r + 1.0])(b.relu(x)),
    "an output": lambda b, x: (lambda r: [pooled(b, r), r])(b.relu(x)),
    "its places are read": lambda b, x: b.op("MaxPool", b.relu(x), kernel_shape=[2, 2], outputs=2),
    "an average": lambda b, x: [b.op("AveragePool", b.relu(x), kernel_shape=[2, 2])],
    "no Relu": lambda b, x: [pooled(b, b.op("LeakyRelu", x))],
}


@pytest.mark.parametrize("build", KEPT.values(), ids=KEPT)
def test_what_would_change_stays(build: Build) -> None:
    graph = graph_of(build)
    assert sink_relu_below_max_pool(graph) is graph
