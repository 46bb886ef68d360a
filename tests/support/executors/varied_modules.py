"""Sixteen torch modules that feed each other: what convolutional networks and transformers are of.

Needs torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stitch
from stitch.program import Array

WIDTH = 64


class Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


class Layer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer of a transformer; `causal`: as GPT has it, else as BERT."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.first_norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def attended(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, 2, -1).transpose(1, 2) for part in self.parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x: Any) -> Any:
        if self.causal:
            x = x + self.attended(self.first_norm(x))
            return x + self.inner(self.last_norm(x))
        x = self.first_norm(x + self.attended(x))
        return self.last_norm(x + self.inner(x))


class Rows(nn.Module):  # type: ignore[misc]  # torch has no types here
    """The pixels of an image as rows of channels."""

    def forward(self, x: Any) -> Any:
        return x.flatten(2).transpose(1, 2)


def varied_programs(target: str) -> tuple[list[stitch.CompiledModel], Array]:
    """The programs, and data for the first."""
    torch.manual_seed(0)
    modules = [
        nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        nn.MaxPool2d(2), Residual(32, 64, 2), Residual(64, 64, 1), nn.Conv2d(64, WIDTH, 1),
        nn.Sigmoid(), nn.AvgPool2d(2), Rows(), Layer(causal=False), Layer(causal=True),
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()), nn.LayerNorm(4 * WIDTH),
        nn.Sequential(nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()), nn.Softmax(-1),
        nn.Linear(WIDTH, WIDTH, bias=False), nn.SiLU(),
    ]  # fmt: skip
    value = first = torch.randn(2, 3, 32, 32)
    models = []
    for i, module in enumerate(modules):
        module.eval()
        models.append(stitch.compile(module, (value,), name=f"m{i}", target=target))
        with torch.no_grad():
            value = module(value)
    return models, first.numpy()
