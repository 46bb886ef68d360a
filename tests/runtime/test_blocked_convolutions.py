"""Convolutions by weights that are operands, on images in blocks of channels."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Program
from stitch.runtime.executors import blocked_convolutions
from stitch.runtime.executors.blocked_convolutions import blocked_part
from stitch.runtime.executors.onnx.blocked_writer import DOMAIN, block_channels
from stitch.runtime.executors.onnx.model_form import onnx_form

SEED = int(os.environ.get("STITCH_SEED", "0"))
CAMPAIGN = pytest.param(300, marks=pytest.mark.full, id="long")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks saved very much: small images are put into them too."""
    monkeypatch.setattr(blocked_convolutions, "SAVED_PRODUCT_NS", 1e6)
    monkeypatch.setattr(blocked_convolutions, "SAVED_DEPTHWISE_NS", 1e6)


def program_of(graph: ComputationGraph) -> Program:
    return stitch.compile(graph, target="host").binary.programs[0]


def operators(graph: ComputationGraph) -> Counter[str]:
    """The operators of the model, those in blocks with a star."""
    nodes = onnx.load_from_string(onnx_form(program_of(graph)).model).graph.node
    return Counter(f"{n.op_type}*" if n.domain == DOMAIN else n.op_type for n in nodes)


def results(graph: ComputationGraph, arrays: dict[str, np.ndarray], executor: str) -> list[Any]:
    with stitch.open_device("host", executor=executor) as device:
        found = device.load(stitch.compile(graph, target="host"))(**arrays)
        found = found if isinstance(found, tuple) else (found,)
        return [tensor.numpy() for tensor in found]


def assert_agrees(graph: ComputationGraph, arrays: dict[str, np.ndarray]) -> None:
    """NumPy's kernels and the blocks give the same, but for rounding of so many sums."""
    ours, theirs = (results(graph, arrays, name) for name in ("numpy", "onnxruntime"))
    for one, other in zip(ours, theirs, strict=True):
        scale = np.abs(np.where(np.isfinite(one), one, 0)).max(initial=1e-3)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=float(scale) * 2e-5)


def drawn(graph: ComputationGraph, seed: int) -> dict[str, np.ndarray]:
    """Numbers for the inputs; those named after variances are positive."""
    numbers = np.random.default_rng(seed)
    arrays = {}
    for place, slot in enumerate(graph.inputs):
        name, kind = slot.name, graph.input_type(place)
        data = numbers.standard_normal(kind.shape)
        data = data**2 + 0.1 if name.startswith("variance") else data
        arrays[name] = data.astype(kind.data_type.dtype)
    return arrays


class Net:
    """A network of images under construction."""

    def __init__(self, seed: int = 0) -> None:
        self.b = ComputationGraphBuilder("net")
        self.numbers = random.Random(seed)
        self.count = 0

    def input(self, name: str, shape: tuple[int, ...]) -> SymbolicTensor:
        self.count += 1
        return self.b.input(f"{name}{self.count}", shape, "float32")

    def conv(self, x: SymbolicTensor, channels: int, side: int = 3, *, bias: bool = False,
             **options: Any) -> SymbolicTensor:  # fmt: skip
        group = options.get("group", 1)
        operands = [x, self.input("weight", (channels, x.shape[1] // group, side, side))]
        if bias:
            operands.append(self.input("bias", (channels,)))
        options.setdefault("pads", [side // 2] * 4)
        result: SymbolicTensor = self.b.op("Conv", *operands, **options)
        return result

    def norm(self, x: SymbolicTensor) -> SymbolicTensor:
        names = ("scale", "shift", "mean", "variance")
        operands = [self.input(name, (x.shape[1],)) for name in names]
        return self.b.op("BatchNormalization", x, *operands, epsilon=1e-3)

    def relu6(self, x: SymbolicTensor) -> SymbolicTensor:
        return self.b.op("Clip", x, np.float32(0), np.float32(6))

    def graph(self, *outputs: SymbolicTensor) -> ComputationGraph:
        for place, value in enumerate(outputs):
            self.b.output(f"y{place}", value)
        return self.b.build()


def residual(channels: int = 32, side: int = 16) -> tuple[Net, SymbolicTensor]:
    net = Net()
    x = net.input("x", (2, channels, side, side))
    inner = net.b.op("Relu", net.norm(net.conv(x, channels)))
    return net, net.b.op("Relu", net.b.op("Add", net.norm(net.conv(inner, channels)), x))


def test_this_processor_has_blocks() -> None:
    assert block_channels() in (8, 16)


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
    """Results that are read twice or given, normalization by a batch, bounds that are operands."""
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


def test_weights_of_small_images_are_not_arranged() -> None:
    """Arranging a weight takes longer than what its few places save."""
    net, y = residual(channels=32, side=4)
    assert blocked_part(program_of(net.graph(y))).convolutions == {}
    net, y = residual(channels=32, side=40)
    assert len(blocked_part(program_of(net.graph(y))).convolutions) == 2


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


def test_weights_are_arranged_when_they_are_needed(tmp_path: Path) -> None:
    """Not all of them before the first convolution: they would lie in memory all at once."""
    net = Net()
    y = net.input("x", (1, 32, 40, 40))
    for _ in range(4):
        y = net.b.op("Relu", net.norm(net.conv(y, 32)))
    graph = net.graph(y)
    arrays, options = drawn(graph, 0), onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(
        onnx_form(program_of(graph)).model, options, providers=["CPUExecutionProvider"]
    )
    given = dict(zip((i.name for i in session.get_inputs()), arrays.values(), strict=True))
    session.run(None, given)
    ran = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    order = [e["args"]["op_name"] for e in ran if e["name"].endswith("kernel_time")]
    moved = [op for op in order if op in ("Conv", "Transpose")]
    assert moved == ["Transpose", "Conv"] * 4


def test_without_such_a_layout_convolutions_are_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stitch.runtime.executors.onnx.model_form.block_channels", lambda: 0)
    net, y = residual(side=40)
    found = operators(net.graph(y))
    assert found["Conv"] == 2
    assert found["BatchNormalization"] == 2


def random_net(seed: int) -> ComputationGraph:
    """Convolutions of all kinds, and what may come between them, some of it seen outside."""
    net = Net(seed)
    draw = net.numbers
    batch, side = draw.choice((1, 1, 3)), draw.randint(5, 14)
    values = [net.input("x", (batch, draw.choice((3, 8, 16, 24, 32, 48)), side, side))]
    for _ in range(draw.randint(3, 12)):
        values.append(_drawn_step(net, values))
    outputs = {values[-1], *draw.sample(values[1:], min(len(values) - 1, draw.randint(0, 2)))}
    return net.graph(*[net.b.op("Identity", v) for v in values if v in outputs])


def _drawn_step(net: Net, values: list[SymbolicTensor]) -> SymbolicTensor:
    draw = net.numbers
    x = draw.choice(values[-3:])
    channels, side = x.shape[1], min(x.shape[2:])
    others = ("depth", "groups", "norm", "unary", "binary", "pool", "clip", "concat")
    kind = draw.choice(("conv",) * 4 + others)
    if kind in ("conv", "depth", "groups"):
        window = draw.choice((1, 3, 5)) if side > 10 else 1
        group = {"conv": 1, "depth": channels, "groups": 2}[kind]
        outer = channels if kind == "depth" else draw.choice((8, 16, 24, 32, 64))
        group = group if channels % group == 0 else 1
        y = net.conv(
            x, outer, window, bias=draw.random() < 0.5, group=group,
            strides=[draw.choice((1, 1, 2))] * 2, dilations=[draw.choice((1, 1, 2))] * 2,
            pads=[draw.randint(window // 2, window) for _ in range(4)] if window > 1 else [0] * 4,
        ) if side >= 2 else net.conv(x, outer, 1)  # fmt: skip
        y = net.b.op("Mul", y, np.float32(1 / max(1, channels // group * window**2) ** 0.5))
        return y if draw.random() < 0.3 else net.conv(y, channels, 1)
    if kind == "norm":
        return net.norm(x)
    if kind == "clip":
        return net.relu6(x)
    if kind == "pool" and side >= 4:
        op = draw.choice(("MaxPool", "AveragePool"))
        more: dict[str, Any] = (
            {"count_include_pad": draw.randint(0, 1)} if op == "AveragePool" else {}
        )
        more |= {"strides": [draw.choice((1, 2))] * 2, "ceil_mode": draw.randint(0, 1)}
        pooled: SymbolicTensor = net.b.op(op, x, kernel_shape=[3, 2], pads=[1, 0, 1, 1], **more)
        return pooled
    alike = [v for v in values if v.shape == x.shape]
    if kind == "binary":
        return net.b.op(draw.choice(("Add", "Mul", "Sub")), x, draw.choice(alike))
    if kind == "concat":
        return net.b.op("Concat", x, draw.choice(alike), axis=1)
    return net.b.op(draw.choice(("Relu", "Sigmoid", "Tanh", "Neg", "Abs")), x)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("count", [pytest.param(25, id="short"), CAMPAIGN])
def test_random_networks(count: int) -> None:
    in_blocks = 0
    for seed in range(SEED, SEED + count):
        graph = random_net(seed)
        in_blocks += operators(graph)["Conv*"]
        try:
            assert_agrees(graph, drawn(graph, seed))
        except AssertionError as error:
            raise AssertionError(f"network {seed}") from error
    assert in_blocks > count
