"""Gradients whose form depends on sizes: ONNX Runtime agrees with our kernels on large tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import stitch
from stitch.compiler import differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array
from tests.support.grids import in_turn
from tests.support.stitched_models import one, several


@pytest.fixture(scope="module")
def device() -> Iterator[stitch.Device]:
    with stitch.open_device(executor="onnxruntime") as opened:
        yield opened


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


@pytest.mark.parametrize(("ours", "theirs"), [(32, 64), (64, 32)])
def test_a_wide_product_over_many_rows(device: stitch.Device, ours: int, theirs: int) -> None:
    graph = product(1024, ours, theirs)
    rng = np.random.default_rng(1)
    a, b = (rng.normal(0, 1, (1024, n)).astype(np.float32) for n in (ours, theirs))
    made = device.load(stitch.compile(graph))(a=a, b=b)
    expected: Array = 0.5 * a.T.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(one(made).numpy(), expected, rtol=1e-4, atol=1e-4)


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
