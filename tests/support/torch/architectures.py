"""Architectures of torch and transformers, small and with random weights, and their examples.

`made` gives a module in evaluation mode, the same one every time and in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.torch.zoo import ZOO
from tests.support.torch.zoo.shared import IDS


class Tied(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Words in and out through one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.inner, self.bend = nn.Linear(8, 8), nn.ReLU()
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.bend(self.inner(self.embedding(ids))))


class Recurrent(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two cells unrolled in Python, then an LSTM and a GRU of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gated = nn.RNNCell(4, 5), nn.LSTMCell(5, 6)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 3)

    def forward(self, x: Any) -> Any:
        state, memory = x.new_zeros(x.shape[0], 5), None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            memory = self.gated(state, memory)
        sequence, (last, _) = self.lstm(x)
        return memory, self.gru(sequence)[0], last


class Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm, self.bend = nn.BatchNorm2d(width), nn.ReLU()
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.bend(x + self.second(self.bend(self.norm(self.first(x)))))


class Translator(nn.Module):  # type: ignore[misc]  # torch has no types here
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, source: Any, target: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.both(source, target, tgt_mask=mask, tgt_is_causal=True)


def _cnn() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Residual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.Softmax(-1),
    )  # fmt: skip
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return net


ARCHITECTURES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "MLP": lambda: (
        nn.Sequential(nn.Linear(6, 9), nn.ELU(), nn.Linear(9, 4), nn.GELU(), nn.LayerNorm(4)),
        (torch.randn(5, 6),),
    ),
    "CNN": lambda: (_cnn(), (torch.randn(2, 3, 17, 17),)),
    "RNN": lambda: (Recurrent(), (torch.randn(2, 3, 4),)),
    "tied weights": lambda: (Tied(), (IDS % 20,)),
    "Transformer encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        (torch.randn(2, 5, 8),),
    ),
    "Transformer": lambda: (Translator(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8))),
    **{name: ZOO[name] for name in (
        "BERT", "RoBERTa", "DistilBERT", "GPT-2", "Llama", "Mistral", "Qwen2", "T5", "ViT",
        "ConvNeXt", "ResNet",
    )},
}  # fmt: skip


def made(name: str) -> tuple[Any, Any]:
    """A module by its name in `ARCHITECTURES`, and its examples (a tuple, or a dict by name)."""
    torch.manual_seed(3)
    module, examples = ARCHITECTURES[name]()
    return module.eval(), examples
