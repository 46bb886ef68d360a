"""Convolutions by weights that are operands, on images in blocks of channels."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.executors.blocked_checks import (
    assert_agrees,
    operators,
    program_of,
    results,
    save_very_much,
)
from tests.support.executors.blocked_networks import Net, drawn, random_net, residual
from tests.support.executors.blocked_reference import blocked_results
from tests.support.grids import in_turn
from tests.support.run_seed import SEED

CAMPAIGN = pytest.param(300, marks=pytest.mark.campaign("executors"), id="long")


@pytest.fixture
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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


@pytest.mark.usefixtures("always")
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
