"""Networks in six parts: like BERT-base, like GPT-2 small, ResNet-18; each part as a module of
PyTorch and as a graph of Stitch with the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stitch import ComputationGraphBuilder
from stitch.graph import ComputationGraph

PARTS = 6
#: Width of an attention head.
HEAD = 64
#: Of parameters, for names.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the networks.

    Args:
        width, words, length, blocks: Of the transformers; blocks of one part.
        channels, side, classes: Of ResNet.
    """

    width: int = 768
    words: int = 8192
    length: int = 128
    blocks: int = 2
    channels: int = 64
    side: int = 224
    classes: int = 1000


SMALL = Sizes(64, 50, 8, 1, 4, 32, 10)


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Self-attention of several heads."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = max(1, width // HEAD), causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def emit(self, b: ComputationGraphBuilder, x: Any) -> Any:
        parts = self.q, self.k, self.v, self.out
        weights, biases = zip(*[(_own(b, p.weight), _own(b, p.bias)) for p in parts], strict=True)
        return b.multi_head_attention(
            x, x, x, weights, biases, heads=self.heads, causal=self.causal
        )


class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer of a transformer; a causal one normalizes first."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = Attention(width, causal), causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        if self.causal:
            x = x + self.attention(self.first(x))
            return x + self.back(nn.functional.gelu(self.wide(self.second(x))))
        x = self.first(x + self.attention(x))
        return self.second(x + self.back(nn.functional.gelu(self.wide(x))))

    def emit(self, b: ComputationGraphBuilder, x: Any) -> Any:
        def inner(y: Any) -> Any:
            return emit(self.back, b, b.gelu(emit(self.wide, b, y)))

        if self.causal:
            x = x + self.attention.emit(b, emit(self.first, b, x))
            return x + inner(emit(self.second, b, x))
        x = emit(self.first, b, x + self.attention.emit(b, x))
        return emit(self.second, b, x + inner(x))


class Embedding(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Words and their places."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, ids: Any) -> Any:
        return self.words(ids) + self.places.weight

    def emit(self, b: ComputationGraphBuilder, ids: Any) -> Any:
        return b.embedding(ids, _own(b, self.words.weight)) + _own(b, self.places.weight)


class Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        short = nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential(*short) if (inner, stride) != (outer, 1) else nn.Sequential()

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))

    def emit(self, b: ComputationGraphBuilder, x: Any) -> Any:
        return b.relu(emit(self.body, b, x) + emit(self.shortcut, b, x))


def _own(b: ComputationGraphBuilder, tensor: Any) -> Any:
    """A tensor of a module as a parameter of a graph."""
    return b.parameter(f"p{next(_numbers)}", tensor.detach().cpu().numpy())


def emit(module: Any, b: ComputationGraphBuilder, x: Any) -> Any:
    """The operations of a module of PyTorch, in the mode of inference."""
    if hasattr(module, "emit"):
        return module.emit(b, x)
    if isinstance(module, nn.Sequential):
        for each in module:
            x = emit(each, b, x)
        return x
    return _EMITTED[type(module)](module, b, x)


def _normalized(module: Any, b: ComputationGraphBuilder, x: Any) -> Any:
    parts = module.weight, module.bias, module.running_mean, module.running_var
    return b.batch_norm(x, *[_own(b, part) for part in parts], epsilon=module.eps)


_EMITTED: dict[Any, Callable[[Any, ComputationGraphBuilder, Any], Any]] = {
    nn.Linear: lambda m, b, x: b.linear(
        x, _own(b, m.weight), None if m.bias is None else _own(b, m.bias)
    ),
    nn.LayerNorm: lambda m, b, x: b.layer_norm(
        x, _own(b, m.weight), _own(b, m.bias), epsilon=m.eps
    ),
    nn.Conv2d: lambda m, b, x: b.conv2d(x, _own(b, m.weight), stride=m.stride, padding=m.padding),
    nn.BatchNorm2d: _normalized,
    nn.ReLU: lambda m, b, x: b.relu(x),
    nn.MaxPool2d: lambda m, b, x: b.pool2d(x, m.kernel_size, stride=m.stride, padding=m.padding),
    nn.AdaptiveAvgPool2d: lambda m, b, x: b.reduce_mean(x, (2, 3), keepdims=True),
    nn.Flatten: lambda m, b, x: b.flatten(x, m.start_dim, m.end_dim),
}


def graph_of(module: Any, name: str, example: Any) -> ComputationGraph:
    """The graph of a module for arguments like an example."""
    b = ComputationGraphBuilder(name)
    kind = str(example.dtype).removeprefix("torch.")
    b.output("y", emit(module, b, b.input("x", tuple(example.shape), kind)))
    return b.build()


def transformer(sizes: Sizes, causal: bool, batch: int) -> tuple[list[Any], Any]:
    """The parts, and words."""
    width, words = sizes.width, sizes.words
    parts: list[list[Any]] = [
        [Block(width, causal) for _ in range(sizes.blocks)] for _ in range(PARTS)
    ]
    parts[0].insert(0, Embedding(words, sizes.length, width))
    parts[-1].append(nn.Linear(width, words, bias=False) if causal else nn.LayerNorm(width))
    return [nn.Sequential(*part) for part in parts], torch.randint(words, (batch, sizes.length))


def resnet(sizes: Sizes, batch: int) -> tuple[list[Any], Any]:
    """The parts, and images."""
    w = sizes.channels
    first = nn.Sequential(
        nn.Conv2d(3, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    stages = [
        nn.Sequential(
            Residual(w * max(1, k // 2), w * k, 1 if k == 1 else 2), Residual(w * k, w * k, 1)
        )
        for k in (1, 2, 4, 8)
    ]
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * w, sizes.classes))
    return [first, *stages, last], torch.randn(batch, 3, sizes.side, sizes.side)


#: By name: the parts in the mode of inference, and an argument.
NETWORKS: dict[str, Callable[[Sizes, int], tuple[list[Any], Any]]] = {
    "BERT": lambda sizes, batch: transformer(sizes, False, batch),
    "GPT": lambda sizes, batch: transformer(sizes, True, batch),
    "ResNet": resnet,
}


def network(name: str, sizes: Sizes, batch: int) -> tuple[list[Any], Any]:
    """The parts of a network with the same weights each time, and an argument."""
    torch.manual_seed(0)
    parts, x = NETWORKS[name](sizes, batch)
    return [part.eval() for part in parts], x


def layered(count: int, rows: int, width: int) -> tuple[list[Any], Any]:
    """Parts of one product and one rectifier each, and an argument."""
    random = np.random.default_rng(0)
    parts = []
    for _ in range(count):
        layer = nn.Linear(width, width, bias=False)
        drawn = random.standard_normal((width, width)) * (2 / width) ** 0.5
        layer.weight.data = torch.from_numpy(drawn.astype(np.float32))
        parts.append(nn.Sequential(layer, nn.ReLU()).eval())
    return parts, torch.from_numpy(random.standard_normal((rows, width)).astype(np.float32))
