"""Convolutions by weights that are operands, on images in blocks of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.executors.blocked_networks import (
    Net,
    assert_agrees,
    drawn,
    operators,
    program_of,
    random_net,
    residual,
    results,
    save_very_much,
)
from tests.support.executors.blocked_reference import blocked_results
from tests.support.grids import in_turn
from tests.support.run_seed import SEED

CAMPAIGN = pytest.param(300, marks=pytest.mark.campaign("executors"), id="long")
Value = SymbolicTensor


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are put into blocks too."""
    save_very_much(monkeypatch)


def assert_fits_blocks(
    graph: ComputationGraph,
    arrays: dict[str, np.ndarray],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is right on a processor whose blocks have so many channels."""
    for module in ("blocked_writer", "onnx_model"):
        name = f"stitch.runtime.executors.onnx.{module}.block_channels"
        monkeypatch.setattr(name, lambda: block)
    program = program_of(graph)
    given = {slot.value: arrays[slot.name] for slot in program.inputs}
    found = blocked_results(write_model(program), given, block)
    for one, other in zip(results(graph, arrays, "numpy"), found, strict=True):
        scale = np.abs(one).max(initial=1e-3)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=float(scale) * 2e-5)


def test_a_residual_block_is_two_convolutions() -> None:
    net, y = residual()
    graph = net.graph(y)
    found = operators(graph)
    # The image, and the weights of both: its normalizations, additions and activations are inside.
    assert found["Conv*"] == 2
    assert found["ReorderInput*"] == 3
    assert found["ReorderOutput*"] == 1
    assert not {"BatchNormalization", "Relu", "Conv"} & found.keys()
    assert_agrees(graph, drawn(graph, 0))


@pytest.mark.parametrize(
    ("channels", "blocked"),
    [((16, 24, 40), 2), ((24, 24, 24), 2), ((3, 16, 20), 2), ((20, 33, 16), 1), ((3, 8, 16), 1)],
)
def test_channels_that_fill_no_block(channels: tuple[int, int, int], blocked: int) -> None:
    net, (first, second, third) = Net(), channels
    x = net.input("x", (1, first, 9, 7))
    y = net.b.op("Relu", net.conv(x, second, bias=True, strides=[2, 2]))
    graph = net.graph(net.norm(net.conv(y, third, side=1)), y)
    # None reads 33 channels, or makes 8.
    assert operators(graph)["Conv*"] == blocked
    assert_agrees(graph, drawn(graph, 1))


@pytest.mark.parametrize(("block", "first"), in_turn([8, 16], [1, 3, 7, 8, 9, 12, 15, 16, 20, 24]))
def test_blocks_of_every_processor(first: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2 blocks have 8 channels: 8 of an image fill one, and 24 of a result fill three."""
    net = Net()
    x = net.input("x", (1, first, 5, 4))
    y = net.b.op("Relu", net.conv(x, 24))
    deep = net.relu6(net.norm(net.conv(net.conv(y, 32, bias=True), 32, group=32)))
    graph = net.graph(net.conv(net.b.op("Add", net.conv(deep, 32, 1, group=2), deep), 20), y)
    assert operators(graph)["Conv*"] == (5 if first < 8 or first % 4 == 0 else 4)
    assert_fits_blocks(graph, drawn(graph, 6), block, monkeypatch)


def test_infinities_stay_in_their_channels() -> None:
    """Channels that fill up a block are 0 x inf = NaN, and must not come into the next sums."""
    net = Net()
    y = net.b.op("Relu", net.conv(net.input("x", (1, 16, 6, 6)), 24))
    graph = net.graph(net.conv(y, 24))
    arrays = {name: np.abs(data) for name, data in drawn(graph, 2).items()}
    arrays["x1"][0, 3, 2, 2] = np.inf
    (found,) = results(graph, arrays, "onnxruntime")
    assert operators(graph)["Conv*"] == 2
    assert np.isinf(found).any()
    assert not np.isnan(found).any()
    assert_agrees(graph, arrays)


def test_what_only_looks_like_a_part_is_computed_apart() -> None:
    net = Net()
    x = net.input("x", (1, 16, 8, 8))
    seen = net.conv(x, 16)
    low, high = net.b.input("low", (), "float32"), net.b.input("high", (), "float32")
    bounded = net.b.op("Clip", net.conv(x, 16), low, high)
    doubled = net.conv(x, 16)
    doubled = net.b.op("Add", doubled, doubled)
    wide = net.b.op("Add", net.conv(x, 16), net.input("column", (16, 1, 1)))
    graph = net.graph(net.norm(seen), seen, bounded, doubled, wide)
    found = operators(graph)
    assert found["Conv*"] == 4
    assert found["BatchNormalization"] == found["Clip"] == 1
    assert_agrees(
        graph,
        drawn(graph, 3) | {"low": np.array(-1, np.float32), "high": np.array(0.5, np.float32)},
    )


def test_what_follows_stays_in_blocks() -> None:
    net = Net()
    x = net.input("x", (2, 16, 12, 12))
    one = net.b.op("Sigmoid", net.conv(x, 32))
    two = net.b.op("Mul", one, net.b.op("Tanh", one))
    pool = net.b.op("MaxPool", two, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    mean = net.b.op("AveragePool", pool, kernel_shape=[2, 2], pads=[1, 1, 0, 0],
                    count_include_pad=1)  # fmt: skip
    both = net.b.op("Concat", mean, net.b.op("Neg", mean), axis=1)
    graph = net.graph(net.b.op("GlobalAveragePool", net.conv(both, 48, group=1)))
    found = operators(graph)
    # An image comes in, weights of two convolutions are arranged; only the last result goes out.
    assert (found["ReorderInput*"], found["ReorderOutput*"]) == (3, 1)
    assert_agrees(graph, drawn(graph, 4))


def test_constant_weights_are_left_to_onnx_runtime() -> None:
    b = ComputationGraphBuilder("net")
    weight = np.random.default_rng(0).standard_normal((32, 32, 3, 3), dtype=np.float32)
    b.output("y", b.op("Conv", b.input("x", (1, 32, 40, 40), "float32"), weight, pads=[1] * 4))
    assert operators(b.build()) == {"Conv": 1}


def test_weights_that_change_are_read_again() -> None:
    net, y = residual(side=40)
    graph = net.graph(y)
    arrays = drawn(graph, 5)
    with stitch.open_device("host", executor="onnxruntime") as device:
        function = device.load(stitch.compile(graph, target="host"))
        for seed in range(3):
            arrays |= {k: v for k, v in drawn(graph, seed).items() if not k.startswith("x")}
            (want,) = results(graph, arrays, "numpy")
            found = function(**arrays)
            assert isinstance(found, stitch.Tensor)
            np.testing.assert_allclose(found.numpy(), want, rtol=1e-3, atol=1e-2)


def test_without_such_a_layout_convolutions_are_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stitch.runtime.executors.onnx.onnx_model.block_channels", lambda: 0)
    net, y = residual(side=40)
    found = operators(net.graph(y))
    assert found["Conv"] == 2
    assert found["BatchNormalization"] == 2


@pytest.mark.parametrize("count", [pytest.param(25, id="short"), CAMPAIGN])
def test_random_networks(count: int) -> None:
    in_blocks = 0
    for seed in range(SEED, SEED + count):
        graph = random_net(seed)
        in_blocks += operators(graph)["Conv*"]
        try:
            assert_agrees(graph, drawn(graph, seed))
            with pytest.MonkeyPatch.context() as patch:
                assert_fits_blocks(graph, drawn(graph, seed), 8, patch)
        except AssertionError as error:
            raise AssertionError(f"network {seed}") from error
    assert in_blocks > count


# Edges.


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


# Transposed convolutions.


def transposed(
    channels: tuple[int, int], kernel: tuple[int, ...] = (3, 3), **attributes: Any
) -> ComputationGraph:
    """One of an image of so many channels to so many."""
    net = Net()
    x = net.input("x", (2, channels[0], *(7, 6)[: len(kernel)]))
    group = attributes.get("group", 1)
    weight = net.input("weight", (channels[0], channels[1] // group, *kernel))
    bias = net.input("bias", (channels[1],))
    return net.graph(net.b.op("ConvTranspose", x, weight, bias, **attributes))


@pytest.mark.parametrize(("attributes", "kernel"), in_turn([
        {}, {"pads": [1, 1, 1, 1]}, {"pads": [1, 0, 1, 2]}, {"dilations": [2, 1]},
        {"dilations": [1, 2], "pads": [0, 3, 1, 1]}, {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "dilations": [2, 1]}, {"output_shape": [7, 8]},
        {"dilations": [2, 2], "output_padding": [1, 0]},
    ], [(3, 3), (2, 3), (1, 1)]))  # fmt: skip
def test_one_without_strides_is_a_convolution_in_blocks(
    kernel: tuple[int, int], attributes: dict[str, Any]
) -> None:
    if kernel == (1, 1) and attributes.keys() & {"pads", "output_shape", "output_padding"}:
        attributes = {}
    graph = transposed((32, 16), kernel, **attributes)
    found = operators(graph)
    assert (found["Conv*"], found["ConvTranspose"]) == (1, 0)
    assert_agrees(graph, drawn(graph, 1))


@pytest.mark.parametrize(
    ("channels", "kernel", "attributes"),
    [
        ((32, 16), (3, 3), {"strides": [1, 2]}), ((32, 16), (3, 3), {"group": 2}),
        ((32, 16), (3, 3), {"pads": [3, 0, 0, 0]}), ((33, 16), (3, 3), {}),
        ((32, 8), (3, 3), {}), ((32, 16), (3,), {}),
    ],
)  # fmt: skip
def test_others_stay_as_they_are(
    channels: tuple[int, int], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    graph = transposed(channels, kernel, **attributes)
    found = operators(graph)
    assert (found["Conv*"], found["ConvTranspose"]) == (0, 1)
    assert_agrees(graph, drawn(graph, 2))


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("first", [3, 8, 20])
def test_transposed_ones_in_blocks_of_every_processor(
    first: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = transposed((first, 24), (3, 2), pads=[1, 0, 1, 1])
    assert operators(graph)["Conv*"] == 1
    assert_fits_blocks(graph, drawn(graph, 3), block, monkeypatch)


def test_what_follows_one_is_part_of_it() -> None:
    net = Net()
    x, weight = net.input("x", (2, 32, 9, 8)), net.input("weight", (32, 16, 3, 3))
    y = net.norm(net.b.op("ConvTranspose", x, weight, pads=[1] * 4))
    graph = net.graph(net.conv(net.b.op("Relu", y), 16))
    found = operators(graph)
    assert (found["Conv*"], found["ReorderOutput*"]) == (2, 1)
    assert not {"BatchNormalization", "Relu", "ConvTranspose"} & found.keys()
    assert_agrees(graph, drawn(graph, 4))
