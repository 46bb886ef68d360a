"""The suite `models`: networks with random weights, cut at module boundaries into programs."""

from __future__ import annotations

import io
import logging
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peer_ways.cases import MERGED, Case, Goal, Program, Subject

#: The most that best of ours / best peer may be.
GOAL = 1.03
#: The most that the linked pipeline / the merged session may be.
LINKED_GOAL = 1.0
#: Classes, words, and the width of an attention head.
CLASSES, WORDS, HEAD = 100, 1000, 64


class Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    """ResNet's basic block: two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        changes = stride != 1 or inner != outer
        shortcut = [nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)]
        self.shortcut = nn.Sequential(*shortcut) if changes else nn.Identity()

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention of several heads to itself; `causal`: not to what comes later."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = width // HEAD, causal
        self.queries, self.keys = nn.Linear(width, width), nn.Linear(width, width)
        self.values, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, HEAD).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer of a transformer: BERT's normalises sums, GPT's what enters a branch."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.first_norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.before = Attention(width, causal), causal
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        if self.before:
            x = x + self.attention(self.first_norm(x))
            return x + self.inner(self.last_norm(x))
        x = self.first_norm(x + self.attention(x))
        return self.last_norm(x + self.inner(x))


class Embedding(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Words and their positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.register_buffer("places", torch.arange(length))

    def forward(self, ids: Any) -> Any:
        return self.words(ids) + self.positions(self.places)


def resnet(options: Namespace) -> tuple[list[nn.Module], Any]:
    """A network like ResNet-18 in ten steps, and images."""
    first = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1),
              (256, 512, 2), (512, 512, 1)]  # fmt: skip
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
    steps = [first, *(Residual(*w) for w in widths), last]
    return steps, torch.randn(options.batch, 3, options.image, options.image)


def transformer(options: Namespace, causal: bool) -> tuple[list[nn.Module], Any]:
    """An embedding, layers, and a head: of one vector (BERT) or of the words' logits (GPT)."""
    width = options.width
    last = nn.Linear(width, WORDS, bias=False) if causal else nn.LayerNorm(width)
    steps = [Embedding(options.length, width)]
    steps += [Block(width, causal) for _ in range(options.layers)]
    return [*steps, last], torch.randint(0, WORDS, (options.batch, options.length))


MODELS: dict[str, Callable[[Namespace], tuple[list[nn.Module], Any]]] = {
    "resnet": resnet,
    "bert": partial(transformer, causal=False),
    "gpt": partial(transformer, causal=True),
}


@dataclass(eq=False)
class Part(Program):
    """A torch module with an example of its input."""

    module: nn.Module
    example: Any

    def stitch_source(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        return self.module, (self.example,)

    def torch_module(self) -> Any:
        return self.module

    def onnx_model(self) -> bytes:
        return self._exported

    @cached_property
    def _exported(self) -> bytes:
        """What torch's exporter makes of it, in its own default opset."""
        import onnxscript  # noqa: F401  # The exporter needs it and says so less clearly.

        # It warns of what is not installed and not needed.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        target = io.BytesIO()
        with torch.no_grad():
            torch.onnx.export(
                self.module, (self.example,), target, dynamo=True, verbose=False,
                external_data=False,
            )  # fmt: skip
        return target.getvalue()

    def mlir(self, name: str) -> tuple[str, str, str]:
        """What IREE's importer makes of the ONNX model."""
        from iree.compiler.tools.import_onnx import __main__ as importer

        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "m.onnx"), Path(folder, "m.mlir")
            source.write_bytes(self.onnx_model())
            importer.main(importer.parse_arguments([str(source), "-o", str(target)]))
            text = target.read_text()
        return text.replace("module {", f"module @{name} {{", 1), "onnx", "main_graph"


def split(steps: Sequence[nn.Module], count: int) -> list[nn.Sequential]:
    """The steps as so many modules in a row, each of about as many steps."""
    bounds = [round(k * len(steps) / count) for k in range(count + 1)]
    return [nn.Sequential(*steps[a:b]).eval() for a, b in pairwise(bounds)]


def make_case(model: str, count: int, options: Namespace) -> Case:
    """A model with random weights, the same ones every time, cut in `count`."""
    torch.manual_seed(0)
    steps, x = MODELS[model](options)
    for step in steps:
        for layer in step.modules():
            if isinstance(layer, nn.BatchNorm2d):
                # As after training: a mean of 0 and a variance of 1 would be no work to fold.
                nn.init.normal_(layer.running_mean, std=0.1)
                nn.init.uniform_(layer.running_var, 0.5, 1.5)
    parts, value = [], x
    with torch.no_grad():
        for module in split(steps, count):
            parts.append(Part(module, value))
            value = module(value)
    merged = Part(nn.Sequential(*steps).eval(), x)
    return Case(tuple(parts), merged, x.numpy(), np.asarray(value.numpy()))


def subjects(options: Namespace) -> tuple[Subject, ...]:
    """Every model of `--models` in every number of programs of `--splits`."""
    found = []
    for model in options.models:
        if model == "resnet":
            size = f"{options.batch}x3x{options.image}x{options.image}"
        else:
            size = f"{options.batch}x{options.length}, {options.layers} layers of {options.width}"
        for count in options.splits:
            make = partial(make_case, model, count, options)
            text = f"{model} {size}, {count} programs"
            name = f"{model}/{count}"
            found.append(Subject(
                name, text, GOAL, options.rounds or 15, make, stitched_only=True,
                more_goals=(Goal("linked", MERGED, LINKED_GOAL),),
            ))  # fmt: skip
    return tuple(found)
