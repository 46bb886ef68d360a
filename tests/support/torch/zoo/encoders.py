"""Encoders of words."""

from __future__ import annotations

import torch

from tests.support.torch.zoo.shared import IDS, MASK, SMALL, TEXT, WORDS, Maker, network

_BERT = {**SMALL, **WORDS, "max_position_embeddings": 32}
_LONG = {"input_ids": IDS.repeat(1, 2), "attention_mask": MASK.repeat(1, 2)}
_BOXES = torch.tensor([[[1, 2, 3, 4]] * 8] * 2)

ENCODERS: dict[str, Maker] = {
    "ALBERT": network(
        "AlbertModel", "AlbertConfig", TEXT, **_BERT, embedding_size=8, num_hidden_groups=1
    ),
    "BERT": network("BertModel", "BertConfig", TEXT, **_BERT),
    "BigBird": network(
        "BigBirdModel", "BigBirdConfig", TEXT, **_BERT, attention_type="original_full"
    ),
    "CANINE": network(
        "CanineModel",
        "CanineConfig",
        TEXT,
        **{**_BERT, "vocab_size": 50},
        num_hash_buckets=64,
        local_transformer_stride=4,
        downsampling_rate=2,
        num_hash_functions=2,
    ),
    "ConvBERT": network(
        "ConvBertModel", "ConvBertConfig", TEXT, **_BERT, embedding_size=16, conv_kernel_size=3
    ),
    "DeBERTa v2": network(
        "DebertaV2Model",
        "DebertaV2Config",
        TEXT,
        **_BERT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
    ),
    "DistilBERT": network(
        "DistilBertModel",
        "DistilBertConfig",
        TEXT,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        vocab_size=50,
    ),
    "ESM": network("EsmModel", "EsmConfig", TEXT, **_BERT, mask_token_id=1),
    "FlauBERT": network(
        "FlaubertModel", "FlaubertConfig", TEXT, emb_dim=16, n_layers=2, n_heads=2, n_words=50
    ),
    "FNet": network("FNetModel", "FNetConfig", {"input_ids": IDS}, **_BERT),
    "Funnel": network(
        "FunnelModel",
        "FunnelConfig",
        TEXT,
        vocab_size=50,
        block_sizes=[1, 1],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        num_decoder_layers=1,
    ),
    "I-BERT": network("IBertModel", "IBertConfig", TEXT, **_BERT, quant_mode=False),
    "LayoutLM": network(
        "LayoutLMModel",
        "LayoutLMConfig",
        {**TEXT, "bbox": _BOXES},
        **_BERT,
        max_2d_position_embeddings=16,
    ),
    "Longformer": network(
        "LongformerModel", "LongformerConfig", _LONG, **_BERT, attention_window=8, sep_token_id=1
    ),
    "LUKE": network(
        "LukeModel", "LukeConfig", TEXT, **_BERT, entity_vocab_size=10, entity_emb_size=8
    ),
    "MobileBERT": network(
        "MobileBertModel",
        "MobileBertConfig",
        TEXT,
        **_BERT,
        embedding_size=16,
        intra_bottleneck_size=8,
        true_hidden_size=8,
    ),
    "ModernBERT": network(
        "ModernBertModel",
        "ModernBertConfig",
        TEXT,
        **_BERT,
        cls_token_id=1,
        sep_token_id=2,
        global_attn_every_n_layers=2,
        local_attention=4,
        reference_compile=False,
    ),
    "MPNet": network("MPNetModel", "MPNetConfig", TEXT, **_BERT),
    "RoBERTa": network("RobertaForSequenceClassification", "RobertaConfig", TEXT, **_BERT),
    "RoBERTa, norms first": network(
        "RobertaPreLayerNormModel", "RobertaPreLayerNormConfig", TEXT, **_BERT
    ),
    "RoFormer": network("RoFormerModel", "RoFormerConfig", TEXT, **_BERT, embedding_size=16),
    "SqueezeBERT": network(
        "SqueezeBertModel",
        "SqueezeBertConfig",
        TEXT,
        **_BERT,
        embedding_size=16,
        q_groups=2,
        k_groups=2,
        v_groups=2,
        post_attention_groups=1,
        intermediate_groups=2,
        output_groups=2,
    ),
    "XLM": network("XLMModel", "XLMConfig", TEXT, emb_dim=16, n_layers=2, n_heads=2, n_words=50),
    "XLNet": network(
        "XLNetModel",
        "XLNetConfig",
        TEXT,
        vocab_size=50,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=32,
        use_mems_eval=False,
        use_mems_train=False,
    ),
    "X-MOD": network(
        "XmodModel",
        "XmodConfig",
        TEXT,
        **_BERT,
        languages=["en_XX"],
        default_language="en_XX",
        adapter_reduction_factor=2,
    ),
    "YOSO": network(
        "YosoModel", "YosoConfig", TEXT, **_BERT, use_expectation=True, num_hash=2, hash_code_len=2
    ),
}
