"""What ONNX Runtime's optimizer writes (`com.microsoft`), in plain operations.

Comes in: a node. Goes out: what plain operations make of its operands. Must not know: scopes,
files.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from stitch.frontend.onnx.calls import Lowering, to_one, to_several
from stitch.frontend.onnx.contrib import contrib_attention, fused_operators

_CONV = "auto_pad dilations group kernel_shape pads strides activation activation_params"
_GEMM = "alpha beta transA transB activation activation_alpha activation_beta activation_gamma"
_PRODUCT = "alpha transA transB transBatchA transBatchB"
_HEADS = "num_heads unidirectional mask_filter_value scale"

#: The operators of `com.microsoft` by their names.
LOWERINGS: Mapping[str, Lowering] = {
    "Attention": to_several(contrib_attention.attention, 6, f"{_HEADS} qkv_hidden_sizes"),
    "BiasGelu": to_one(fused_operators.gelu, 2),
    "DequantizeLinear": to_one(fused_operators.as_own_operator, 3, "axis"),
    "EmbedLayerNormalization": to_several(
        contrib_attention.embeddings, 9, "epsilon mask_index_type", (0, 1, 2)
    ),
    "FastGelu": to_one(partial(fused_operators.gelu, approximate="tanh"), 2),
    "FusedConv": to_one(fused_operators.convolution, 4, _CONV),
    "FusedGemm": to_one(fused_operators.gemm, 3, _GEMM),
    "FusedMatMul": to_one(fused_operators.product, 2, _PRODUCT),
    "Gelu": to_one(fused_operators.gelu, 1),
    "MatMulIntegerToFloat": to_one(fused_operators.scaled_product, 7),
    "MultiHeadAttention": to_several(
        contrib_attention.multi_head_attention, 8, _HEADS, (0, 1, 2)
    ),
    "QuantizeLinear": to_one(fused_operators.as_own_operator, 3, "axis"),
    "QuickGelu": to_one(fused_operators.quick_gelu, 1, "alpha"),
    "SkipLayerNormalization": to_several(
        partial(fused_operators.normalized_sum, "LayerNormalization", 4), 5, "epsilon", (0, 3)
    ),
    "SkipSimplifiedLayerNormalization": to_several(
        partial(fused_operators.normalized_sum, "RMSNormalization", 3), 4, "epsilon", (0, 3)
    ),
    "TransposeMatMul": to_one(fused_operators.product, 2, "alpha transA transB"),
}  # fmt: skip
#: What ONNX Runtime puts among ONNX's own, and functions whose bodies are wrong for some sizes.
OWN_DOMAIN_LOWERINGS: Mapping[str, Lowering] = {
    "AffineGrid": replace(to_one(fused_operators.affine_grid, 2, "align_corners"), decides=1),
    "SimplifiedLayerNormalization": to_one(
        fused_operators.root_mean_square, 2, "axis epsilon stash_type"
    ),
}

__all__ = ["LOWERINGS", "OWN_DOMAIN_LOWERINGS"]
