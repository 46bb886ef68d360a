"""Networks of images whose weights are inputs, some drawn at random, and what blocks give."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Program
from stitch.runtime.executors.onnx.blocked_writer import DOMAIN
from stitch.runtime.executors.onnx.onnx_model import write_model
from stitch.runtime.executors.prices import blocked_convolutions


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

    def spread(self, x: SymbolicTensor, channels: int, **options: Any) -> SymbolicTensor:
        weight = self.input("weight", (x.shape[1], channels, 3, 3))
        result: SymbolicTensor = self.b.op("ConvTranspose", x, weight, pads=[1] * 4, **options)
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
    others = ("depth", "groups", "norm", "unary", "binary", "pool", "clip", "concat", "spread")
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
    if kind == "spread":
        y = net.spread(x, draw.choice((8, 16, 32)), strides=[draw.choice((1, 1, 2))] * 2)
        return net.b.op("Mul", y, np.float32(1 / (9 * channels) ** 0.5))
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


def save_very_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks saved very much: small images are put into them too."""
    monkeypatch.setattr(blocked_convolutions, "SAVED_PRODUCT_NS", 1e6)
    monkeypatch.setattr(blocked_convolutions, "SAVED_DEPTHWISE_NS", 1e6)


def program_of(graph: ComputationGraph) -> Program:
    return stitch.compile(graph, target="host").binary.programs[0]


def operators(graph: ComputationGraph) -> Counter[str]:
    """The operators of the model, those in blocks with a star."""
    nodes = onnx.load_from_string(write_model(program_of(graph)).serialized).graph.node
    return Counter(f"{n.op_type}*" if n.domain == DOMAIN else n.op_type for n in nodes)


def results(graph: ComputationGraph, arrays: dict[str, np.ndarray], executor: str) -> list[Any]:
    with stitch.open_device("host", executor=executor) as device:
        found = device.load(stitch.compile(graph, target="host"))(**arrays)
        found = found if isinstance(found, tuple) else (found,)
        return [tensor.numpy() for tensor in found]


def assert_agrees(
    graph: ComputationGraph, arrays: dict[str, np.ndarray], rtol: float = 1e-4
) -> None:
    """NumPy's kernels and the blocks give the same, but for rounding of so many sums.

    A network may multiply the rounding of its values (large ones that cancel), so a second run of
    NumPy's kernels, on inputs that differ by two units in their last place, says how much.
    """
    ours, theirs = (results(graph, arrays, name) for name in ("numpy", "onnxruntime"))
    signs = np.random.default_rng(0)
    moved = {
        name: data * (1 + signs.choice((-1, 1), data.shape).astype(data.dtype) * 2.0**-22)
        for name, data in arrays.items()
    }
    moved = {name: data.astype(arrays[name].dtype) for name, data in moved.items()}
    for one, other, near in zip(ours, theirs, results(graph, moved, "numpy"), strict=True):
        finite = np.isfinite(one) & np.isfinite(near)
        scale = np.abs(np.where(finite, one, 0)).max(initial=1e-3)
        rounding = np.abs(np.where(finite, near, 0) - np.where(finite, one, 0)).max(initial=0)
        atol = max(float(scale) * rtol / 5, 4 * float(rounding))
        np.testing.assert_allclose(other, one, rtol=rtol, atol=atol)
