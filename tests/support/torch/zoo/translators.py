"""Encoders and decoders of words, in one network."""

from __future__ import annotations

from typing import Any

from tests.support.torch.zoo.shared import IDS, MASK, Maker, network

_BOTH = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4]}
_BART: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "dropout": 0.0,
}
_T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 50,
    "use_cache": False,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

TRANSLATORS: dict[str, Maker] = {
    "BART": network("BartForConditionalGeneration", "BartConfig", _BOTH, **_BART),
    "LED": network(
        "LEDForConditionalGeneration",
        "LEDConfig",
        _BOTH,
        **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
        attention_window=4,
    ),
    "LongT5": network(
        "LongT5ForConditionalGeneration", "LongT5Config", _BOTH, **_T5, local_radius=3
    ),
    "NLLB-MoE": network(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        _BOTH,
        **_BART,
        num_experts=4,
        expert_capacity=8,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
    ),
    "ProphetNet": network(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        _BOTH,
        vocab_size=50,
        hidden_size=16,
        encoder_ffn_dim=32,
        num_encoder_layers=1,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_decoder_layers=1,
        num_decoder_attention_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        dropout=0.0,
    ),
    "Switch": network(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        _BOTH,
        **_T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=8,
        router_jitter_noise=0.0,
    ),
    "T5": network("T5ForConditionalGeneration", "T5Config", _BOTH, **_T5),
    "UMT5": network("UMT5ForConditionalGeneration", "UMT5Config", _BOTH, **_T5),
}
