"""Ten networks of the usual kinds, and GPT-2 small: whole torch modules with random weights.

They are what `tools/prices --check` divides between executors, and the suite `torch_compile`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from peer_ways.cases import Case, Goal, Subject
from peer_ways.models import Block, Embedding, Part, Residual

#: Words of GPT-2's vocabulary, and those of the others.
GPT2_WORDS, WORDS = 50257, 1000
CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Size:
    """How large a network is: `image` in pixels, `length` in words, `layers`, `width` of values."""

    image: int = 0
    length: int = 0
    layers: int = 0
    width: int = 0
    words: int = WORDS


def mlp(size: Size) -> tuple[nn.Module, Any]:
    """Two layers, for one row of numbers."""
    layers = nn.Sequential(
        nn.Linear(size.width, size.width), nn.ReLU(), nn.Linear(size.width, size.width)
    )
    return layers, torch.randn(1, size.width)


def encoder_layer(size: Size) -> tuple[nn.Module, Any]:
    """A layer of a transformer."""
    return Block(size.width, causal=False), torch.randn(1, size.length, size.width)


def conv_block(size: Size) -> tuple[nn.Module, Any]:
    """A basic block of ResNet."""
    return Residual(size.width, size.width, 1), torch.randn(1, size.width, size.image, size.image)


def resnet18(size: Size) -> tuple[nn.Module, Any]:
    """ResNet-18."""
    widths = [
        (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
        (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
    ]  # fmt: skip
    steps = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *(Residual(*w) for w in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip
    return steps, torch.randn(1, 3, size.image, size.image)


class Inverted(nn.Module):  # type: ignore[misc]  # torch has no types here
    """MobileNet's block: wider, one filter for each channel, narrower; a shortcut where it fits."""

    def __init__(self, inner: int, outer: int, stride: int, times: int) -> None:
        super().__init__()
        wide = inner * times
        layers: list[nn.Module] = []
        if times != 1:
            layers += [nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
        ]  # fmt: skip
        self.body = nn.Sequential(*layers)
        self.is_shortcut = stride == 1 and inner == outer

    def forward(self, x: Any) -> Any:
        return x + self.body(x) if self.is_shortcut else self.body(x)


def mobilenet(size: Size) -> tuple[nn.Module, Any]:
    """MobileNetV2."""
    inner, steps = 32, [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    for times, outer, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            steps.append(Inverted(inner, outer, 1 if number else stride, times))
            inner = outer
    steps += [nn.Conv2d(inner, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    steps += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*steps), torch.randn(1, 3, size.image, size.image)


def transformer(size: Size, causal: bool) -> tuple[nn.Module, Any]:
    """An embedding, layers, and a head: of vectors (BERT), or of the words' logits (GPT)."""
    width = size.width
    embedding = Embedding(size.length, width)
    embedding.words = nn.Embedding(size.words, width)
    last: nn.Module = nn.LayerNorm(width)
    if causal:
        head = nn.Linear(width, size.words, bias=False)
        # Its words' vectors are its head's.
        head.weight = embedding.words.weight
        last = nn.Sequential(last, head)
    steps = [embedding, *(Block(width, causal) for _ in range(size.layers)), last]
    return nn.Sequential(*steps), torch.randint(0, size.words, (1, size.length))


def bert(size: Size) -> tuple[nn.Module, Any]:
    """Like BERT."""
    return transformer(size, causal=False)


def gpt(size: Size) -> tuple[nn.Module, Any]:
    """Like GPT."""
    return transformer(size, causal=True)


class Patches(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An image as a row of vectors, one for each square of 16 by 16 pixels, and their positions."""

    def __init__(self, image: int, width: int) -> None:
        super().__init__()
        self.squares = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.randn(1, (image // 16) ** 2, width))

    def forward(self, x: Any) -> Any:
        return self.squares(x).flatten(2).transpose(1, 2) + self.positions


class MeanHead(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Classes of the mean of a row of vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(x.mean(1)))


def vit(size: Size) -> tuple[nn.Module, Any]:
    """Like ViT."""
    steps = [Patches(size.image, size.width)]
    steps += [Block(size.width, causal=True) for _ in range(size.layers)]
    for block in steps[1:]:
        block.attention.causal = False
    return nn.Sequential(*steps, MeanHead(size.width)), torch.randn(1, 3, size.image, size.image)


class Recurrent(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An LSTM, and classes of its last output."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


def lstm(size: Size) -> tuple[nn.Module, Any]:
    """Layers of an LSTM."""
    return Recurrent(size.width, size.layers), torch.randn(1, size.length, size.width)


def _twice(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Down twice and up again, each step beside the same size of the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_twice(3, width), _twice(width, 2 * width)])
        self.bottom = _twice(2 * width, 4 * width)
        self.wider = nn.ModuleList([
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        ])  # fmt: skip
        self.up = nn.ModuleList([_twice(4 * width, 2 * width), _twice(2 * width, width)])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for step in self.down:
            x = step(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for wider, step in zip(self.wider, self.up, strict=True):
            x = step(torch.cat([kept.pop(), wider(x)], 1))
        return self.last(x)


def unet(size: Size) -> tuple[nn.Module, Any]:
    """Like U-Net."""
    return UNet(size.width), torch.randn(1, 3, size.image, size.image)


@dataclass(frozen=True, slots=True)
class Network:
    """What makes a network, and its sizes: the usual one, and a small one."""

    make: Callable[[Size], tuple[nn.Module, Any]]
    usual: Size
    small: Size


NETWORKS: dict[str, Network] = {
    "mlp": Network(mlp, Size(width=256), Size(width=64)),
    "encoder_layer": Network(encoder_layer, Size(length=64, width=256), Size(length=16, width=64)),
    "conv_block": Network(conv_block, Size(image=32, width=64), Size(image=8, width=16)),
    "resnet18": Network(resnet18, Size(image=112), Size(image=32)),
    "mobilenet": Network(mobilenet, Size(image=112), Size(image=32)),
    "bert": Network(
        bert, Size(length=128, layers=4, width=256), Size(length=16, layers=2, width=64)
    ),
    "gpt": Network(gpt, Size(length=128, layers=4, width=256), Size(length=16, layers=2, width=64)),
    "vit": Network(vit, Size(image=112, layers=4, width=192), Size(image=32, layers=2, width=64)),
    "lstm": Network(lstm, Size(length=32, layers=2, width=128), Size(length=8, layers=1, width=32)),
    "unet": Network(unet, Size(image=64, width=32), Size(image=16, width=8)),
    "gpt2_small": Network(
        gpt, Size(length=128, layers=12, width=768, words=GPT2_WORDS),
        Size(length=16, layers=2, width=128),
    ),
}  # fmt: skip


def make(name: str, *, is_small: bool = False) -> tuple[Any, Any]:
    """A network in evaluation mode, with the same weights every time, and an example input."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    module, x = network.make(network.small if is_small else network.usual)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            # As after training: a mean of 0 and a variance of 1 would be no work to fold.
            nn.init.normal_(layer.running_mean, std=0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return module.eval(), x


# The suite `torch_compile` --------------------------------------------------------------------

#: The most that ours may be of eager torch, and of torch.compile by inductor.
EAGER, INDUCTOR = 1.0, 1.05
#: What a network of few operators may take more than eager torch, in microseconds.
FEW_US = 15.0


def make_case(name: str, *, is_small: bool) -> Case:
    """A network as the one program of a case; eager torch says what it gives."""
    module, x = make(name, is_small=is_small)
    with torch.no_grad():
        expected = module(x).numpy()
    part = Part(module, x)
    return Case((part,), part, x.numpy(), expected)


def subjects(options: Namespace) -> tuple[Subject, ...]:
    """Every network of `--networks`."""
    found = []
    for name in options.networks:
        is_mlp = name == "mlp"
        goals = (
            Goal("ours", "torch eager", EAGER, FEW_US if is_mlp else 0.0),
            Goal("ours", "torch.compile", 1.0 if is_mlp else INDUCTOR),
        )
        make = partial(make_case, name, is_small=options.small)
        text = "small" if options.small else "in its usual size"
        rounds = options.rounds or 15
        found.append(Subject(name, text, math.inf, rounds, make, more_goals=goals))
    return tuple(found)
