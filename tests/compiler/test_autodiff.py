"""Autodiff: what is saved, what is computed again, what comes out where nothing flows back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from stitch.compiler import Recompute, differentiate
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, InputKind
from stitch.testing import evaluate_graph as run
from tests.support.gradients.running import gradients_of, inputs_of

Build = Callable[[ComputationGraphBuilder], None]


def graph_of(build: Build) -> ComputationGraph:
    builder = ComputationGraphBuilder("net")
    build(builder)
    return builder.build()


def network(b: ComputationGraphBuilder) -> None:
    """A bit of everything: products, activations, a normalization, a branch, a softmax."""
    x = b.input("x", (4, 6), "float32")
    w = b.input("w", (6, 8), "float32", InputKind.PARAMETER)
    scale = b.input("scale", (8,), "float32", InputKind.PARAMETER)
    v = b.input("v", (8, 3), "float32", InputKind.PARAMETER)
    hidden = b.relu(b.matmul(x, w))
    normal = b.apply("LayerNormalization", [hidden, scale], 1, {})[0]
    both = b.tanh(normal) + b.gelu(hidden)
    b.output("y", b.softmax(b.matmul(b.exp(both * 0.1), v)))


def linear(b: ComputationGraphBuilder) -> None:
    x = b.input("x", (4, 3), "float32")
    w = b.input("w", (2, 3), "float32", InputKind.PARAMETER)
    bias = b.input("b", (2,), "float32", InputKind.PARAMETER)
    b.output("y", b.apply("Gemm", [x, w, bias], 1, {"transB": 1})[0])


def f32(data: Any) -> Array:
    return np.array(data, np.float32)


def test_the_forward_graph_computes_what_it_did() -> None:
    graph = graph_of(network)
    feeds = inputs_of(graph, 2)
    both = differentiate(graph)
    assert run(both.forward, feeds)["y"].tobytes() == run(graph, feeds)["y"].tobytes()
    assert both.forward.outputs[0].name == "y"


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_gradients_do_not_depend_on_what_is_computed_again(recompute: Recompute) -> None:
    graph = graph_of(network)
    feeds = inputs_of(graph, 2)
    expected = gradients_of(differentiate(graph), feeds)
    made = gradients_of(differentiate(graph, recompute=recompute), feeds)
    assert made.keys() == expected.keys()
    assert all(made[name].tobytes() == expected[name].tobytes() for name in made)


def test_a_wanted_input_that_nothing_depends_on_gets_zeros() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2, 3), "float32")
        b.input("unused", (3, 2), "float32")
        b.output("y", x * 2.0)

    both = differentiate(graph_of(build), ["unused", "x"])
    made = gradients_of(both, {"x": f32([[1] * 3] * 2), "unused": f32([[5] * 2] * 3)})
    assert sorted(made) == ["unused", "x"]
    np.testing.assert_array_equal(made["unused"], np.zeros((3, 2), np.float32))


def test_steps_stop_a_gradient() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (3,), "float32")
        b.output("y", b.floor(x) + 0.0)

    both = differentiate(graph_of(build), ["x"])
    assert gradients_of(both, {"x": f32([1.5, 2, 3])})["x"].tolist() == [0, 0, 0]


def test_a_value_used_twice_gets_the_sum() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (3,), "float32")
        b.output("y", x * x + x)

    both = differentiate(graph_of(build), ["x"])
    made = gradients_of(both, {"x": f32([1, 2, 3])}, {"y.grad": f32([1, 1, 2])})
    assert made["x"].tolist() == [3, 5, 14]


def test_two_outputs_have_a_gradient_each() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2,), "float32")
        y = x * 3.0
        b.output("y", y)
        b.output("z", y * y)
        b.output("count", b.argmax(x, 0))

    graph = graph_of(build)
    both = differentiate(graph, ["x"])
    assert both.seeds == (("y", "y.grad"), ("z", "z.grad"))
    seeds = {"y.grad": f32([1, 10]), "z.grad": f32([1, 0])}
    assert gradients_of(both, {"x": f32([1, 2])}, seeds)["x"].tolist() == [21, 30]
    only = differentiate(graph, ["x"], outputs=["z"])
    assert only.seeds == (("z", "z.grad"),)
    assert gradients_of(only, {"x": f32([1, 2])}, {"z.grad": f32([1, 1])})["x"].tolist() == [18, 36]


def test_an_output_that_is_an_input_passes_its_gradient_on() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2,), "float32")
        b.output("y", x)

    both = differentiate(graph_of(build), ["x"])
    assert gradients_of(both, {"x": f32([1, 2])}, {"y.grad": f32([3, 4])})["x"].tolist() == [3, 4]


def test_one_result_of_several_may_be_used() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (5,), "float32")
        first, _ = b.apply("Split", [x, [2, 3]], 2, {})
        b.output("y", first * 2.0)

    both = differentiate(graph_of(build), ["x"])
    made = gradients_of(both, {"x": f32([1] * 5)}, {"y.grad": f32([1, 3])})
    assert made["x"].tolist() == [2, 6, 0, 0, 0]


def test_operators_without_a_gradient_are_named_with_their_place() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        q = b.input("q", (4,), "int8")
        scale = b.input("scale", (), "float32")
        with b.at("net.py:12"):
            first = b.apply("DequantizeLinear", [q, scale], 1, {})[0]
        with b.at("net.py:13"):
            again = b.apply("BitCast", [first * scale], 1, {"to": 1})[0]
        b.output("y", again)

    graph = graph_of(build)
    with pytest.raises(CompileError) as raised:
        differentiate(graph, ["scale"])
    assert "DequantizeLinear at net.py:12, BitCast at net.py:13" in str(raised.value)


def test_a_gradient_ends_where_a_value_becomes_an_integer() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4,), "float32")
        quantized = b.apply("QuantizeLinear", [x, f32(0.1)], 1, {})[0]
        b.output("y", b.apply("DequantizeLinear", [quantized, f32(0.1)], 1, {})[0] + x)

    both = differentiate(graph_of(build), ["x"])
    made = gradients_of(both, {"x": f32([1, 2, 3, 4])}, {"y.grad": f32([5, 6, 7, 8])})
    assert made["x"].tolist() == [5, 6, 7, 8]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(CompileError, match="no input 'wegiht'"):
        differentiate(graph_of(linear), ["wegiht"])
    with pytest.raises(CompileError, match="no output 'loss'"):
        differentiate(graph_of(linear), outputs=["loss"])


def test_integers_have_no_gradient() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        b.input("i", (3,), "int64")
        b.output("y", b.input("x", (3,), "float32") * 2.0)

    with pytest.raises(CompileError, match="not floating"):
        differentiate(graph_of(build), ["i"])


def test_a_graph_that_depends_on_no_wanted_input_is_refused() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        b.input("w", (3,), "float32")
        b.output("y", b.input("x", (3,), "float32") * 2.0)

    with pytest.raises(CompileError, match="depends on the inputs to differentiate"):
        differentiate(graph_of(build), ["w"])
