"""What the families of the zoo share: small sizes, words, and how networks are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

with warnings.catch_warnings():
    # transformers warns of what it will rename; nothing here depends on it.
    warnings.simplefilter("ignore")
    import transformers

IDS = torch.tensor([[3, 17, 8, 41, 2, 9, 33, 4], [11, 5, 44, 7, 30, 1, 21, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK}
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
WORDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

Maker = Callable[[], tuple[Any, Any]]


def network(model: str, config: str, inputs: dict[str, Any], **sizes: Any) -> Maker:
    """How a network of transformers is made; `sizes` are its config's."""

    def make() -> tuple[Any, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made, {name: value.clone() for name, value in inputs.items()}

    return make
