"""Architectures of torch and transformers, small and with random weights, and their examples.

`made` gives a module in evaluation mode, the same one every time and in every process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    # transformers warns of what it will rename; nothing here depends on it.
    warnings.simplefilter("ignore")
    import transformers as tr

IDS = torch.tensor([[3, 17, 8, 41, 2, 9], [11, 5, 44, 7, 30, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
WORDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
ONE_WAY = {**SMALL, **WORDS, "num_key_value_heads": 1, "use_cache": False}


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
    "BERT": lambda: (
        tr.BertModel(tr.BertConfig(**SMALL, **WORDS)), {"input_ids": IDS, "attention_mask": MASK}
    ),
    "RoBERTa": lambda: (
        tr.RobertaForSequenceClassification(tr.RobertaConfig(**SMALL, **WORDS)), {"input_ids": IDS}
    ),
    "DistilBERT": lambda: (
        tr.DistilBertModel(
            tr.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=50)
        ),
        {"input_ids": IDS},
    ),
    "GPT-2": lambda: (
        tr.GPT2LMHeadModel(
            tr.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False, **WORDS)
        ),
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "Llama": lambda: (
        tr.LlamaForCausalLM(tr.LlamaConfig(**ONE_WAY)), {"input_ids": IDS, "attention_mask": MASK}
    ),
    "Mistral": lambda: (tr.MistralForCausalLM(tr.MistralConfig(**ONE_WAY)), {"input_ids": IDS}),
    "Qwen2": lambda: (tr.Qwen2ForCausalLM(tr.Qwen2Config(**ONE_WAY)), {"input_ids": IDS}),
    "T5": lambda: (
        tr.T5ForConditionalGeneration(
            tr.T5Config(
                d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50,
                use_cache=False,
            )
        ),
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]},
    ),
    "ViT": lambda: (
        tr.ViTModel(tr.ViTConfig(**SMALL, image_size=16, patch_size=8)),
        {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
    "ConvNeXt": lambda: (
        tr.ConvNextModel(tr.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])),
        {"pixel_values": torch.randn(1, 3, 32, 32)},
    ),
    "ResNet": lambda: (
        tr.ResNetModel(
            tr.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
            )
        ),
        {"pixel_values": torch.randn(1, 3, 32, 32)},
    ),
}  # fmt: skip


def made(name: str) -> tuple[Any, Any]:
    """A module by its name in `ARCHITECTURES`, and its examples (a tuple, or a dict by name)."""
    torch.manual_seed(3)
    module, examples = ARCHITECTURES[name]()
    return module.eval(), examples
