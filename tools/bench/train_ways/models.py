"""The models that are trained: torch modules with random weights, and one batch for each.

`mlp` is the tutorial's 784-512-512-10; `cnn` has two convolutions with batch normalization and max
pooling; `transformer` has two layers of self-attention over embedded tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

MODELS = ("mlp", "cnn", "transformer")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large: `batch` everywhere; `image` for the cnn; the others for the transformer."""

    batch: int = 64
    image: int = 28
    length: int = 32
    width: int = 128
    heads: int = 4
    words: int = 256
    classes: int = 10


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be made again with the same weights, one batch, and its labels."""

    name: str
    make: Callable[[], nn.Module]
    batch: torch.Tensor
    labels: torch.Tensor
    #: Bounds for ours over eager and over torch.compile.
    eager_goal: float
    compile_goal: float


class Convolutional(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Conv-BatchNorm-ReLU-MaxPool twice, then a linear layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        side = sizes.image // 4
        self.head = nn.Linear(32 * side * side, sizes.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes] of images [batch, 1, side, side]."""
        return self.head(torch.flatten(self.features(x), 1))


class Layer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Self-attention and a feed-forward net, each normalized before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.into(self.before(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Embedded tokens and places, two layers, the mean over places, a linear layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.words, sizes.width)
        self.places = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.layers = nn.Sequential(*(Layer(sizes.width, sizes.heads) for _ in range(2)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes] of tokens [batch, length]."""
        found = self.layers(self.tokens(x) + self.places)
        return self.head(self.norm(found).mean(1))


def _mlp(sizes: Sizes) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, sizes.classes),
    )  # fmt: skip


def subjects(names: list[str], sizes: Sizes) -> tuple[Subject, ...]:
    """The models by name; weights, batches and labels are the same every time."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(sizes.classes, (sizes.batch,), generator=draw)
    images = torch.randn(sizes.batch, 1, sizes.image, sizes.image, generator=draw)
    words = torch.randint(sizes.words, (sizes.batch, sizes.length), generator=draw)
    rows = torch.randn(sizes.batch, 784, generator=draw)
    known = {
        "mlp": Subject("mlp", _seeded(_mlp, sizes), rows, labels, 0.85, 0.95),
        "cnn": Subject("cnn", _seeded(Convolutional, sizes), images, labels, 1.2, 0.95),
        "transformer": Subject(
            "transformer", _seeded(Transformer, sizes), words, labels, 0.85, 0.95
        ),
    }
    return tuple(known[name] for name in names)


def _seeded(make: Callable[[Sizes], nn.Module], sizes: Sizes) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make(sizes).train()

    return made
