"""Edge cases of convolutions in blocks of channels, compared with NumPy's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest

from stitch.graph import ComputationGraph, SymbolicTensor
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.executors.blocked_checks import (
    assert_agrees,
    operators,
    program_of,
    save_very_much,
)
from tests.support.executors.blocked_networks import Net, drawn

Value = SymbolicTensor


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    save_very_much(monkeypatch)


def in_blocks(graph: ComputationGraph) -> int:
    """How many nodes compute on images in blocks."""
    made, count = set[str](), 0
    for node in onnx.load_from_string(write_model(program_of(graph)).serialized).graph.node:
        is_reading = not made.isdisjoint(node.input[:1])
        is_arranging = node.op_type in ("Reshape", "Transpose")
        if is_arranging or node.op_type == "ReorderOutput":
            continue
        if is_reading or node.op_type == "ReorderInput":
            made.update(node.output)
            count += is_reading
    return count


def normalized(net: Net, x: Value) -> Value:
    """With a shift of its own before."""
    return net.norm(net.conv(x, 16, bias=True))


def by_the_batch(net: Net, x: Value) -> Value:
    operands = [net.input(name, (16,)) for name in ("scale", "shift", "mean", "variance")]
    result, *_ = net.b.op(
        "BatchNormalization", net.conv(x, 16), *operands, training_mode=1, outputs=3
    )
    return result


def as_weight(net: Net, x: Value) -> Value:
    """The result of one convolution, in blocks for another, is the weight of a third."""
    one = net.conv(net.input("x", (16, 16, 3, 3)), 16)
    mean = net.b.op("ReduceMean", net.conv(one, 16), keepdims=0)
    return net.b.op("Add", net.b.op("Conv", net.input("x", (1, 16, 9, 8)), one), mean)


def broadcast(net: Net, x: Value) -> Value:
    """What is added lies in blocks, and is one place for each channel."""
    places = net.b.op("GlobalAveragePool", net.conv(x, 16))
    return net.b.op("Add", net.conv(x, 16), places)


def pool(op: str, outputs: int = 1, **attributes: Any) -> Callable[[Net, Value], Value]:
    def written(net: Net, x: Value) -> Value:
        found = net.b.op(op, net.conv(x, 16), kernel_shape=[3, 2], strides=[2, 3], outputs=outputs,
                         **attributes)  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return written


def joined(axis: int) -> Callable[[Net, Value], Value]:
    def written(net: Net, x: Value) -> Value:
        one = net.conv(x, 16)
        return net.conv(net.b.op("Concat", one, net.b.op("Neg", one), axis=axis), 16)

    return written


def in_a_run(net: Net, x: Value) -> Value:
    """Five operations on as many numbers as are else computed by chunks."""
    x = net.input("x", (1, 16, 64, 64))
    y, other = net.conv(x, 16), net.b.op("Exp", net.input("x", (1, 16, 64, 64)))
    for op in ("Tanh", "Neg", "Abs", "Sigmoid", "Tanh", "Neg"):
        y = net.b.op(op, y)
    return net.b.op("Add", net.b.op("MaxPool", net.conv(y, 16), kernel_shape=[1, 1]), other)


@pytest.mark.parametrize(
    ("written", "blocked"),
    [
        (normalized, 1), (by_the_batch, 1), (as_weight, 3), (broadcast, 3),
        (pool("AveragePool", ceil_mode=1), 1), (pool("AveragePool", count_include_pad=1), 2),
        (pool("MaxPool", ceil_mode=1, pads=[1, 1, 1, 0]), 2), (pool("MaxPool", storage_order=1), 2),
        (pool("MaxPool", outputs=2), 1), (pool("MaxPool", auto_pad="SAME_LOWER"), 2),
        (pool("AveragePool", dilations=[1, 2]), 2),
        (joined(0), 3), (joined(1), 4), (joined(2), 3), (joined(-1), 3), (joined(-3), 4),
        (in_a_run, 9),
    ],
)  # fmt: skip
def test_edges(written: Callable[[Net, Value], Value], blocked: int) -> None:
    net = Net()
    graph = net.graph(written(net, net.input("x", (2, 16, 8, 7))))
    assert in_blocks(graph) == blocked
    assert_agrees(graph, drawn(graph, 7))


def of_kind(kind: str) -> ComputationGraph:
    net = Net()
    x, weight = net.b.input("x", (1, 16, 6, 6), kind), net.b.input("w", (16, 16, 1, 1), kind)
    return net.graph(net.b.op("Conv", x, weight).cast("float32"))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_types_are_computed_as_float32_is(kind: str) -> None:
    graph = of_kind(kind)
    assert in_blocks(graph) == 1
    arrays = {name: (data / 8).astype(data.dtype) for name, data in drawn(graph, 8).items()}
    assert_agrees(graph, arrays, 1e-2)


def test_float64_is_never_in_blocks() -> None:
    assert in_blocks(of_kind("float64")) == 0


@pytest.mark.parametrize("shape", [(0, 16, 5, 5), (2, 16, 9), (1, 16, 4, 5, 3)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    net, places = Net(), len(shape) - 2
    weight = net.input("weight", (16, 16, *[3] * places))
    graph = net.graph(net.b.op("Conv", net.input("x", shape), weight, pads=[1] * (2 * places)))
    assert operators(graph)["Conv*"] == 0
    assert_agrees(graph, drawn(graph, 9))


def test_windows_of_all_kinds() -> None:
    kinds: list[dict[str, Any]] = [
        {"auto_pad": "SAME_UPPER", "strides": [2, 3]}, {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID", "dilations": [2, 1]}, {"pads": [4, 0, 7, 5]},
        {"pads": [5, 6, 5, 0], "dilations": [3, 2], "strides": [2, 1]}, {"pads": [0, 3, 0, 3]},
    ]  # fmt: skip
    net = Net()
    x = net.input("x", (2, 16, 7, 8))
    weight = net.input("weight", (16, 16, 3, 3))
    graph = net.graph(*[net.b.op("Conv", x, weight, **kind) for kind in kinds])
    assert operators(graph)["Conv*"] == len(kinds)
    assert_agrees(graph, drawn(graph, 10))
