"""Networks of sounds and of series of numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.torch.zoo.shared import IDS, SMALL, Maker, network

_WAVE = {"input_values": torch.linspace(0, 60, 2 * 400).sin().view(2, 400)}
_SPEECH: dict[str, Any] = {
    **SMALL,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "vocab_size": 12,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MEL = torch.linspace(-2, 2, 2 * 16 * 20).cos()

SOUNDS: dict[str, Maker] = {
    "AST": network(
        "ASTModel",
        "ASTConfig",
        {"input_values": _MEL.view(2, 20, 16)},
        **SMALL,
        patch_size=8,
        max_length=20,
        num_mel_bins=16,
        frequency_stride=4,
        time_stride=4,
    ),
    "HuBERT": network("HubertModel", "HubertConfig", _WAVE, **_SPEECH),
    "PatchTST": network(
        "PatchTSTModel",
        "PatchTSTConfig",
        {"past_values": _MEL[: 2 * 16 * 4].view(2, 16, 4)},
        num_input_channels=4,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=32,
        num_hidden_layers=2,
        do_mask_input=False,
    ),
    "PatchTSMixer": network(
        "PatchTSMixerModel",
        "PatchTSMixerConfig",
        {"past_values": _MEL[: 2 * 16 * 4].view(2, 16, 4)},
        num_input_channels=4,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_layers=2,
    ),
    "SEW": network("SEWModel", "SEWConfig", _WAVE, **_SPEECH, squeeze_factor=2),
    "Wav2Vec2": network("Wav2Vec2Model", "Wav2Vec2Config", _WAVE, **_SPEECH),
    "Wav2Vec2-Conformer": network(
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        _WAVE,
        **_SPEECH,
        conv_depthwise_kernel_size=3,
    ),
    "WavLM": network("WavLMModel", "WavLMConfig", _WAVE, **_SPEECH, num_buckets=8),
    "Whisper": network(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"input_features": _MEL.view(2, 16, 20), "decoder_input_ids": IDS[:, :4]},
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=16,
        max_source_positions=10,
        max_target_positions=16,
        vocab_size=50,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        use_cache=False,
    ),
}
