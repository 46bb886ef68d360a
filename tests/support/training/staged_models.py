"""Models whose gradients depend on how a training is cut into stages, if it is cut wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, InputKind
from stitch.training import Trainable, as_trainable


def _weight(b: ComputationGraphBuilder, name: str, *shape: int) -> Any:
    return b.input(name, shape, "float32", InputKind.PARAMETER)


def mlp(depth: int = 6, width: int = 16, batch: int = 8) -> ComputationGraph:
    """Products with a bias, and Relu."""
    b = ComputationGraphBuilder("mlp")
    x = b.input("x", (batch, width), "float32")
    for i in range(depth):
        w, bias = _weight(b, f"w{i}", width, width), _weight(b, f"b{i}", width)
        x = b.op("Relu", b.op("Gemm", x, w, bias))
    b.output("y", x)
    return b.build()


def skips(depth: int = 6, width: int = 16, batch: int = 8) -> ComputationGraph:
    """Values that go around several layers, and one that goes around almost all."""
    b = ComputationGraphBuilder("skips")
    x = b.input("x", (batch, width), "float32")
    first: Any = None
    for i in range(depth):
        h = b.op("Tanh", b.op("MatMul", x, _weight(b, f"w{i}", width, width)))
        x = x + h
        first = h if first is None else first
    b.output("y", x * first)
    return b.build()


def norms(depth: int = 4, width: int = 16, batch: int = 8) -> ComputationGraph:
    """Layers with a norm, whose weight is read twice."""
    b = ComputationGraphBuilder("norms")
    x = b.input("x", (batch, width), "float32")
    for i in range(depth):
        w, scale = _weight(b, f"w{i}", width, width), _weight(b, f"s{i}", width)
        h = b.op("LayerNormalization", x, scale, _weight(b, f"c{i}", width), axis=-1)
        h = b.op("Gelu", b.op("MatMul", h, w))
        x = x + b.op("MatMul", h, b.op("Transpose", w, perm=[1, 0]))
    b.output("y", x)
    return b.build()


def convolutions() -> ComputationGraph:
    """Three convolutions, a pool and a product."""
    b = ComputationGraphBuilder("convolutions")
    x, channels = b.input("x", (4, 3, 8, 8), "float32"), 3
    for i in range(3):
        w, bias = _weight(b, f"w{i}", 6, channels, 3, 3), _weight(b, f"b{i}", 6)
        x, channels = b.op("Relu", b.op("Conv", x, w, bias, pads=[1, 1, 1, 1])), 6
    x = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    b.output("y", b.op("MatMul", b.op("Reshape", x, np.array([4, 96])), _weight(b, "w3", 96, 5)))
    return b.build()


def attention(layers: int = 2, batch: int = 2, words: int = 8, width: int = 16) -> ComputationGraph:
    """Layers of attention with skips: four readers of each layer's input."""
    b, heads = ComputationGraphBuilder("attention"), 2
    x = b.input("x", (batch, words, width), "float32")
    shape = np.array([batch, words, heads, width // heads])
    for i in range(layers):
        q, k, v = (
            b.op("Transpose", b.op("Reshape", b.op("MatMul", x, w), shape), perm=[0, 2, 1, 3])
            for w in (_weight(b, f"{name}{i}", width, width) for name in "qkv")
        )
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2])) * np.float32(0.35)
        h = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), v),
                 perm=[0, 2, 1, 3])  # fmt: skip
        h = b.op("Reshape", h, np.array([batch, words, width]))
        x = x + b.op("MatMul", h, _weight(b, f"o{i}", width, width))
    b.output("y", x)
    return b.build()


def twice() -> ComputationGraph:
    """One expression on both sides of a cut: the compiler joins it in the whole."""
    b = ComputationGraphBuilder("twice")
    x = b.input("x", (8, 16), "float32")
    h = b.op("MatMul", x, _weight(b, "w", 16, 16))
    u = b.op("MatMul", b.op("Tanh", h), _weight(b, "v", 16, 16))
    b.output("y", b.op("Mul", u, b.op("Tanh", h)))
    return b.build()


def tied() -> ComputationGraph:
    """A weight that the first, a middle and the last layer read."""
    b = ComputationGraphBuilder("tied")
    x, w = b.input("x", (8, 16), "float32"), _weight(b, "w", 16, 16)
    for i in range(3):
        x = b.op("Tanh", b.op("MatMul", x, w))
        x = b.op("Tanh", b.op("MatMul", x, _weight(b, f"v{i}", 16, 16)))
    b.output("y", b.op("MatMul", x, w))
    return b.build()


def embedding() -> ComputationGraph:
    """A table that looks words up and, transposed, scores them."""
    b = ComputationGraphBuilder("embedding")
    words, table = b.input("x", (8,), "int64"), _weight(b, "table", 7, 16)
    h = b.op("Gather", table, words, axis=0)
    for i in range(3):
        h = h + b.op("Tanh", b.op("MatMul", h, _weight(b, f"w{i}", 16, 16)))
    b.output("y", b.op("MatMul", h, b.op("Transpose", table, perm=[1, 0])))
    return b.build()


def dropped() -> ComputationGraph:
    """Layers with dropout, all drawn from one key."""
    b = ComputationGraphBuilder("dropped")
    x = b.input("x", (8, 16), "float32")
    key = b.input("key", (1,), "int64", InputKind.KEY)
    for i in range(4):
        drawn = np.arange(128).reshape(8, 16) * 7919 + i + b.op("Mod", key, 10007)
        keep = b.cast(b.op("Greater", b.op("Mod", drawn, 3), 0), "float32")
        x = b.op("Tanh", b.op("MatMul", x, _weight(b, f"w{i}", 16, 16))) * keep
    b.output("y", x)
    return b.build()


def statistics() -> ComputationGraph:
    """BatchNormalization with running statistics, and a state that backward reads."""
    b = ComputationGraphBuilder("statistics")
    x = b.input("x", (8, 6, 4, 4), "float32")
    decay = b.input("decay", (6, 1, 1), "float32", InputKind.STATE)
    for i in range(3):
        slots = [_weight(b, f"{name}{i}", 6) for name in ("scale", "shift")]
        names = [f"mean{i}", f"variance{i}"]
        slots += [b.input(name, (6,), "float32", InputKind.STATE) for name in names]
        x, *after = b.apply("BatchNormalization", [x, *slots], 3, {"training_mode": 1})
        for name, value in zip(names, after, strict=True):
            b.output(name, value)
        x = b.op("Relu", b.op("Conv", x, _weight(b, f"w{i}", 6, 6, 3, 3), pads=[1, 1, 1, 1]))
        if i == 1:
            x = x * (_weight(b, "gain", 6, 1, 1) * decay)
            b.output("decay", decay * 0.5)
    b.output("y", x)
    return b.build()


def unread() -> ComputationGraph:
    """A parameter that no operation reads, and one behind the last that the loss depends on."""
    b = ComputationGraphBuilder("unread")
    x = b.input("x", (8, 16), "float32")
    spare = _weight(b, "spare", 16)
    for i in range(3):
        x = b.op("Tanh", b.op("MatMul", x, _weight(b, f"w{i}", 16, 16)))
    x = x * b.op("Floor", spare)
    b.output("y", x)
    _weight(b, "nobody", 4)
    return b.build()


def drawn(seed: int, size: int = 8) -> ComputationGraph:
    """Return a random graph of square matrices: shared weights, skips, transposes, repetitions."""
    rng = np.random.default_rng(seed)
    b = ComputationGraphBuilder(f"drawn_{seed}")
    weights = [_weight(b, f"w{i}", size, size) for i in range(rng.integers(1, 6))]
    made = [b.input("x", (size, size), "float32")]

    def one() -> Any:
        return made[max(0, len(made) - 1 - int(rng.exponential(2)))]

    for _ in range(rng.integers(8, 25)):
        weight = weights[rng.integers(len(weights))]
        kind = rng.integers(10)
        if kind < 3:
            made.append(b.op("Tanh", b.op("MatMul", one(), weight)))
        elif kind == 3:
            made.append(b.op("MatMul", one(), b.op("Transpose", weight, perm=[1, 0])))
        elif kind == 4:
            made.append(b.op("Transpose", one(), perm=[1, 0]))
        elif kind == 5:
            a, c = (int(rng.integers(2)) for _ in range(2))
            made.append(b.op("Gemm", one(), weight, alpha=0.5, transA=a, transB=c))
        elif kind == 6:
            made.append(b.op("Relu", one()))
        elif kind == 7:
            made.append(b.op("Softmax", one() * weight, axis=-1))
        else:
            made.append(one() + one() if kind == 8 else b.op("Tanh", one()) * one())
    b.output("y", b.op("Tanh", made[-1] + b.op("MatMul", made[-2], weights[0])))
    return b.build()


MODELS: Mapping[str, Callable[[], ComputationGraph]] = {
    made.__name__: made
    for made in (mlp, skips, norms, convolutions, attention, twice, tied, embedding, dropped,
                 statistics, unread)
}  # fmt: skip


def model_of(graph: ComputationGraph, seed: int = 0) -> Trainable:
    """Return a graph with drawn weights and states as a trainable model."""
    rng = np.random.default_rng(seed)
    values = {}
    for i, slot in enumerate(graph.inputs):
        if slot.kind in (InputKind.PARAMETER, InputKind.STATE):
            drawn = rng.standard_normal(graph.input_type(i).shape).astype(np.float32)
            values[slot.name] = drawn * np.float32(0.3)
            if slot.kind is InputKind.STATE:
                values[slot.name] = np.abs(drawn) + 1
    return as_trainable(graph, values)


def drawn_batches(
    model: Trainable, count: int, seed: int = 1
) -> list[tuple[dict[str, Array], Array]]:
    """Return micro-batches of inputs by name, and targets of the type of the prediction."""
    rng = np.random.default_rng(seed)
    graph, batches = model.graph, []
    target = next(graph.output_type(i) for i, slot in enumerate(graph.outputs) if slot.name == "y")
    for _ in range(count):
        inputs = {}
        for i, slot in enumerate(graph.inputs):
            kind = graph.input_type(i)
            if slot.kind is not InputKind.ACTIVATION:
                continue
            if kind.data_type.is_floating:
                inputs[slot.name] = rng.standard_normal(kind.shape).astype(np.float32)
            else:
                inputs[slot.name] = rng.integers(0, 7, kind.shape).astype(kind.data_type.dtype)
        batches.append((inputs, rng.standard_normal(target.shape).astype(np.float32)))
    return batches
