"""Products with transposed matrices become a Gemm, and no shape of a value is saved twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler import CompileOptions, compile_graph, differentiate
from stitch.compiler.passes.matrix_products import fold_transposes, transpose_products
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.machine import load_machine
from stitch.program import InputKind
from tests.support.gradients.running import gradients_of, inputs_of, run, seeds_of
from tests.support.stitched_models import one


def layer(shape: tuple[int, ...], data_type: str = "float32") -> ComputationGraph:
    """x W' + b with W [5, 4]."""
    b = ComputationGraphBuilder("net")
    x = b.input("x", shape, data_type)
    w = b.input("w", (5, 4), data_type, InputKind.PARAMETER)
    bias = b.input("b", (5,), data_type, InputKind.PARAMETER)
    b.output("y", b.add(b.matmul(x, b.transpose(w)), bias))
    return b.build()


def names(graph: ComputationGraph) -> list[str]:
    return [operation.op for operation in graph.operations]


def agrees(graph: ComputationGraph) -> None:
    feeds = inputs_of(graph, 3)
    ours, theirs = run(fold_transposes(graph), feeds), run(graph, feeds)
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 0, 4), (1, 2, 3, 4)])
def test_a_linear_layer_reads_its_weight_as_it_is(shape: tuple[int, ...]) -> None:
    graph = layer(shape)
    expected = ["Gemm"] if len(shape) == 2 else ["Reshape", "Gemm", "Reshape"]
    assert names(fold_transposes(graph)) == expected
    agrees(graph)


def test_programs_read_matrices_as_they_lie_where_sums_may_change_their_order() -> None:
    graph, machine = layer((2, 3, 4)), load_machine("host")
    for reassociate, transposes in ((True, 0), (False, 1)):
        options = CompileOptions(reassociate=reassociate)
        program = compile_graph(graph, machine, options).program
        assert [o.op for o in program.operations].count("Transpose") == transposes


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_no_gradient_of_a_linear_layer_transposes(shape: tuple[int, ...]) -> None:
    graph = layer(shape)
    feeds = inputs_of(graph, 3)
    both = differentiate(graph, ["x", "w", "b"])
    assert "Transpose" not in names(both.forward) + names(both.backward)
    assert not both.saved
    made = gradients_of(both, feeds)
    seed = seeds_of(both, run(both.forward, feeds))["y.grad"].reshape(-1, 5)
    np.testing.assert_allclose(made["w"], seed.T @ feeds["x"].reshape(-1, 4), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["b"], seed.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["x"].reshape(-1, 4), seed @ feeds["w"], rtol=1e-5, atol=1e-6)


def test_transposes_on_both_sides_of_a_gemm_turn_its_attributes() -> None:
    b = ComputationGraphBuilder("net")
    x, w = b.input("x", (4, 3), "float32"), b.input("w", (4, 5), "float32")
    operands = [b.transpose(x), b.transpose(w)]
    b.output("y", b.apply("Gemm", operands, 1, {"transB": 1, "alpha": 0.5})[0])
    b.output("z", b.matmul(b.transpose(x), w))
    folded = fold_transposes(b.build())
    assert names(folded) == ["Gemm", "Gemm"]
    assert folded.operations[0].attributes == {"transA": 1, "transB": 0, "alpha": 0.5}
    agrees(b.build())


def test_a_product_that_others_read_too_keeps_its_addition_apart() -> None:
    b = ComputationGraphBuilder("net")
    x, w = b.input("x", (3, 4), "float32"), b.input("w", (5, 4), "float32")
    bias, square = b.input("b", (5,), "float32"), b.input("s", (5, 5), "float32")
    product = b.matmul(x, b.transpose(w))
    b.output("y", b.add(product, bias) * product)
    b.output("z", b.matmul(square, b.transpose(square)) + b.input("c", (5, 1), "float32"))
    assert names(fold_transposes(b.build())) == ["Gemm", "Add", "Mul", "Gemm", "Add"]
    agrees(b.build())


def test_a_type_that_rounds_every_result_keeps_its_addition_apart() -> None:
    assert names(fold_transposes(layer((3, 4), "bfloat16"))) == ["Gemm", "Add"]


def test_what_is_saved_is_what_a_value_is_a_shape_of() -> None:
    b = ComputationGraphBuilder("net")
    x = b.input("x", (2, 6), "float32", InputKind.PARAMETER)
    flat = b.reshape(b.exp(x), (12,))
    b.output("y", b.reshape(flat, (3, 4)) + b.reshape(b.op("Softplus", flat), (3, 4)))
    both = differentiate(b.build(), ["x"])
    kinds = {s.name: both.forward.output_type(i).shape for i, s in enumerate(both.forward.outputs)}
    assert [kinds[name] for name in both.saved] == [(2, 6)]


Build = Callable[[ComputationGraphBuilder, Any, Any], Any]
EXCHANGE = (0, 1, 3, 2)


def product_of(build: Build) -> ComputationGraph:
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


def run_on_host(graph: ComputationGraph) -> Any:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(0, 1, s).astype(np.float32) for s in ((2, 3, 4, 5), (2, 3, 4, 6)))
    with stitch.open_device("host") as device:
        return one(device.load(stitch.compile(graph, target="host"))(x=x, y=y)).numpy()


@pytest.mark.parametrize(
    "build", [of_a_transpose, of_two_plain, twice, shared, moved_rows], ids=lambda f: f.__name__
)
def test_transposed_products_give_the_same_numbers(build: Build) -> None:
    graph = product_of(build)
    np.testing.assert_allclose(
        run_on_host(transpose_products(graph)), run_on_host(graph), rtol=1e-5, atol=1e-5
    )
