"""Gradients whose form depends on sizes: ONNX Runtime agrees with our kernels on large tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch

import stitch
from stitch.compiler import differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.grids import in_turn
from tests.support.stitched_models import one, several


@pytest.fixture(scope="module")
def device() -> Iterator[stitch.Device]:
    with stitch.open_device(executor="onnxruntime") as opened:
        yield opened


def nodes_of(graph: ComputationGraph) -> list[onnx.NodeProto]:
    converted = write_model(stitch.compile(graph).binary.programs[0])
    onnx.checker.check_model(converted.serialized)
    return list(onnx.load_model_from_string(converted.serialized).graph.node)


def gelu_gradient(shape: tuple[int, ...], approximate: str) -> ComputationGraph:
    """A Gelu's backward pass."""
    b = ComputationGraphBuilder("gelu")
    x = b.input("x", shape, "float32")
    b.output("y", b.op("Gelu", x, approximate=approximate))
    return differentiate(b.build(), ["x"]).backward


def product(rows: int, ours: int, theirs: int) -> ComputationGraph:
    b = ComputationGraphBuilder("product")
    operands = [b.input("a", (rows, ours), "float32"), b.input("b", (rows, theirs), "float32")]
    b.output("y", b.apply("Gemm", operands, 1, {"transA": 1, "alpha": 0.5})[0])
    return b.build()


@pytest.mark.parametrize(
    ("approximate", "shape"),
    in_turn(["none", "tanh"], [(4, 257), (64, 33, 64), (65537, 2), (131101,)]),
)
def test_a_gelus_gradient_agrees_with_torch_in_blocks_and_without(
    device: stitch.Device, shape: tuple[int, ...], approximate: str
) -> None:
    rng = np.random.default_rng(0)
    x, seed = rng.normal(0, 3, shape).astype(np.float32), rng.normal(0, 1, shape)
    x.flat[:5] = (0, 30, -30, 6, -6)
    given = torch.from_numpy(x).double().requires_grad_()
    made = torch.nn.functional.gelu(given, approximate=approximate)
    (right,) = torch.autograd.grad(made, given, torch.from_numpy(seed))
    program = device.load(stitch.compile(gelu_gradient(shape, approximate)))
    found = one(program(**{"x": x, "y.grad": seed.astype(np.float32)})).numpy()
    np.testing.assert_allclose(found, right.numpy(), rtol=1e-5, atol=1e-5)


def test_only_sizes_that_fall_into_equal_blocks_are_cut() -> None:
    def kinds(*shape: int) -> set[str]:
        return {node.op_type for node in nodes_of(gelu_gradient(shape, "none"))}

    assert "Scan" in kinds(64, 33, 64)
    assert "Scan" not in kinds(4, 257)
    assert "Scan" not in kinds(131101)


@pytest.mark.parametrize(("ours", "theirs", "turns"), [(32, 64, True), (64, 32, False)])
def test_a_wide_product_over_many_rows_is_turned(
    device: stitch.Device, ours: int, theirs: int, turns: bool
) -> None:
    graph = product(1024, ours, theirs)
    assert [node.op_type for node in nodes_of(graph)] == ["Gemm", "Transpose"][: 1 + turns]
    rng = np.random.default_rng(1)
    a, b = (rng.normal(0, 1, (1024, n)).astype(np.float32) for n in (ours, theirs))
    made = device.load(stitch.compile(graph))(a=a, b=b)
    expected: Array = 0.5 * a.T.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(one(made).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_nodes_that_nobody_reads_come_last_and_the_last_of_them_first() -> None:
    b = ComputationGraphBuilder("chain")
    x = b.input("x", (3,), "float32")
    first = b.exp(x)
    b.output("side", b.neg(first))
    second = b.relu(first)
    b.output("far", b.tanh(second))
    assert [n.op_type for n in nodes_of(b.build())] == ["Exp", "Relu", "Tanh", "Neg"]


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto"])
def test_products_over_nothing_are_their_bias_and_no_axes_squeeze_nothing(executor: str) -> None:
    b = ComputationGraphBuilder("empty")
    x, y = b.input("x", (3, 0), "float32"), b.input("y", (0, 4), "float32")
    bias = b.input("bias", (4,), "float32")
    b.output("product", b.matmul(x, y))
    # No matrices at all, and a batch of one matrix to go with them.
    none = b.input("none", (0, 1, 1), "float32")
    b.output("none at all", b.matmul(b.input("one", (1, 1, 1), "float32"), none))
    b.output("scaled", b.apply("Gemm", [x, y, bias], 1, {"beta": 2.0})[0])
    b.output("kept", b.op("Squeeze", b.input("z", (1, 2, 1), "float32"), []))
    shapes = {"x": (3, 0), "y": (0, 4), "bias": (4,), "z": (1, 2, 1)}
    shapes |= {"none": (0, 1, 1), "one": (1, 1, 1)}
    given = {name: np.full(shape, 3.0, np.float32) for name, shape in shapes.items()}
    with stitch.open_device("host", executor=executor) as opened:
        found = opened.load(stitch.compile(b.build(), target="host"))(**given)
        product, empty, scaled, kept = (made.numpy() for made in several(found))
    assert np.array_equal(product, np.zeros((3, 4)))
    assert empty.shape == (0, 1, 1)
    assert np.array_equal(scaled, np.tile(2.0 * given["bias"], (3, 1)))
    assert np.array_equal(kept, given["z"])
