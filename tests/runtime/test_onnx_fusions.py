"""Groups of operations that ONNX Runtime is given as one, and those that only look like it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.grids import in_turn


def gelu_by_tanh(
    *, power: bool = False, turned: bool = False, cubic: float = 0.044715, seen: bool = False,
    data_type: str = "float32",
) -> ComputationGraph:  # fmt: skip
    """GPT-2's Gelu; `turned`: with all operands the other way round, `seen`: its tanh as well."""
    b = ComputationGraphBuilder("gelu")
    x = b.input("x", (4, 8), data_type)
    number = np.float64 if data_type == "float64" else np.float32

    def both(op: str, one: SymbolicTensor, two: SymbolicTensor | np.generic) -> SymbolicTensor:
        return b.op(op, two, one) if turned else b.op(op, one, two)

    cube = b.op("Pow", x, number(3)) if power else both("Mul", b.op("Mul", x, x), x)
    inner = both("Add", x, both("Mul", cube, number(cubic)))
    tanh = b.op("Tanh", both("Mul", inner, number(math.sqrt(2 / math.pi))))
    half, raised = both("Mul", x, number(0.5)), both("Add", tanh, number(1))
    b.output("y", both("Mul", half, raised))
    if seen:
        b.output("t", tanh)
    return b.build()


def operators(graph: ComputationGraph) -> Counter[str]:
    program = stitch.compile(graph, target="host").binary.programs[0]
    model = onnx.load_from_string(write_model(program).serialized)
    return Counter(node.op_type for node in model.graph.node)


def assert_agrees(graph: ComputationGraph) -> None:
    x = np.linspace(-4, 4, 32, dtype=np.float64).reshape(4, 8)
    x = x.astype(graph.input_type(0).data_type.dtype)
    results = []
    for executor in ("numpy", "onnxruntime"):
        with stitch.open_device("host", executor=executor) as device:
            found = device.load(stitch.compile(graph, target="host"))(x)
            found = found if isinstance(found, tuple) else (found,)
            results.append([tensor.numpy() for tensor in found])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gelu_by_tanh_is_one_operator(power: bool, turned: bool) -> None:
    graph = gelu_by_tanh(power=power, turned=turned)
    assert operators(graph) == {"Gelu": 1}
    assert_agrees(graph)


@pytest.mark.parametrize(
    "graph",
    [gelu_by_tanh(cubic=0.05), gelu_by_tanh(seen=True), gelu_by_tanh(data_type="float64")],
    ids=["another coefficient", "its tanh is an output", "float64"],
)
def test_what_only_looks_like_a_gelu_stays_as_it_is(graph: ComputationGraph) -> None:
    assert "Gelu" not in operators(graph)
    assert_agrees(graph)


@pytest.mark.parametrize(
    ("is_constant", "momentum", "kind"), in_turn([True, False], [0.0, 0.5], ["float32", "float64"])
)
def test_statistics_that_ran_before_are_one_value_and_what_follows_each_is_another(
    kind: str, momentum: float, is_constant: bool
) -> None:
    b = ComputationGraphBuilder("batches")
    x, scale, old = b.input("x", (5, 2, 4), kind), b.input("scale", (2,), kind), np.ones(2)
    ran = b.constant(old.astype(kind)) if is_constant else b.input("ran", (2,), kind)
    attributes = {"training_mode": 1, "momentum": momentum}
    for number, each in enumerate((x, b.mul(x, x))):
        operands = [each, scale, scale, ran, ran]
        made = b.apply("BatchNormalization", operands, 3, attributes)
        # Read within the model, so that the kernel may give them where its operands lie.
        b.output(f"sum_{number}", b.add(made[1], made[2]))
        b.output(f"mean_{number}", b.mul(made[1], made[1]))
    b.output("still", b.add(ran, ran))
    graph, data = b.build(), np.random.default_rng(0).normal(1, 2, (5, 2, 4)).astype(kind)
    given = [data, np.ones(2, kind)] + [old.astype(kind)] * (not is_constant)
    results = []
    for executor in ("numpy", "onnxruntime"):
        with stitch.open_device("host", executor=executor) as device:
            loaded = device.load(stitch.compile(graph, target="host"))
            for _ in range(2):
                got = loaded(*given)
                assert isinstance(got, tuple)
                results.append([tensor.numpy().copy() for tensor in got])
    for ours, *others in zip(*results, strict=True):
        for theirs in others:
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_centred", [True, False])
@pytest.mark.parametrize(("shape", "scale"), [((4, 1), (3,)), ((1, 1), (2,)), ((2, 4, 1), (4, 5))])
def test_a_scale_that_makes_norms_of_single_elements_longer_stays_apart(
    is_centred: bool, shape: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    """onnxruntime#31980: its kernel stopped at the scale that its optimizer had joined to it."""
    b = ComputationGraphBuilder("norm")
    x = b.input("x", shape, "float32")
    of = b.op("Sub", x, b.op("ReduceMean", x, [-1])) if is_centred else x
    square = b.op("ReduceMean", b.op("Pow", of, np.float32(2)), [-1])
    norm = b.op("Div", of, b.op("Sqrt", b.op("Add", square, np.float32(1e-5))))
    spread = np.linspace(1, 2, math.prod(scale), dtype=np.float32).reshape(scale)
    scaled = b.op("Mul", norm, spread)
    b.output("y", b.op("Add", scaled, spread) if is_centred else scaled)
    data = np.linspace(-2, 3, math.prod(shape), dtype=np.float32).reshape(shape)
    results = []
    for executor in ("numpy", "onnxruntime"):
        with stitch.open_device("host", executor=executor) as device:
            made = device.load(stitch.compile(b.build(), target="host"))(data)
            assert isinstance(made, stitch.Tensor)
            results.append(made.numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
