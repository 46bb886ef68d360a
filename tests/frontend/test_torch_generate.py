"""`generate()` of transformers with a forward pass that Stitch compiled says what eager says.

Models are small and have random weights; the tokens are the likeliest ones, so a difference in a
logit that matters shows. Caches grow by one word in each step, or have their length from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr

import stitch
from stitch.torch import graph_counts
from tests.support.torch.zoo.shared import IDS, SMALL

STEPS = 6
#: Nothing ends a sentence before its time.
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 50}


def llama() -> tuple[Any, dict[str, Any]]:
    """Words in, words out."""
    config = tr.LlamaConfig(**{**SMALL, **SPECIAL, "num_hidden_layers": 1}, num_key_value_heads=1)
    return tr.LlamaForCausalLM(config), {"input_ids": IDS}


def t5() -> tuple[Any, dict[str, Any]]:
    """An encoder whose result stays in a cache beside the one that grows."""
    config = tr.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **SPECIAL
    )
    return tr.T5ForConditionalGeneration(config), {"input_ids": IDS}


def whisper() -> tuple[Any, dict[str, Any]]:
    """Sounds in, words out."""
    config = tr.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=4,
        max_source_positions=10, max_target_positions=24, decoder_start_token_id=3, **SPECIAL,
    )  # fmt: skip
    return tr.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 4, 20)}


def made(make: Callable[[], tuple[Any, dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
    """The same model and inputs every time, in evaluation mode."""
    torch.manual_seed(3)
    model, inputs = make()
    return model.eval(), inputs


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        (llama, "dynamic"),
        *(
            pytest.param(*pair, marks=pytest.mark.campaign("networks"))
            for pair in [(llama, "static"), (t5, "dynamic"), (t5, "static"),
                         (whisper, "dynamic"), (whisper, "static")]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_generated_tokens_are_those_of_eager_torch(
    make: Callable[[], tuple[Any, dict[str, Any]]], cache: str
) -> None:
    model, inputs = made(make)
    # transformers would compile what has a static cache by itself.
    how: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True,
                           "min_new_tokens": STEPS, "num_beams": 1, "use_cache": True}  # fmt: skip
    if cache == "static":
        how["cache_implementation"] = "static"
    wanted = model.generate(**inputs, **how)
    torch._dynamo.reset()
    device = stitch.device_of()
    before, counts = device.statistics(), graph_counts()
    graphs, again = counts.graphs, counts.recompilations
    model.forward = torch.compile(model.forward, backend="stitch")
    assert torch.equal(model.generate(**inputs, **how), wanted)
    assert wanted.shape[1] >= STEPS
    after = device.statistics()
    if (make, cache) == (llama, "dynamic"):
        # The prompt, the first step, and all further ones: their length is a symbol.
        assert (counts.graphs - graphs, counts.recompilations - again) == (3, 0)
    runs = after.batches + after.replays - before.batches - before.replays
    assert runs >= STEPS
