"""Operators of other domains than ONNX's own, and how each is said in its words.

Comes in: a node of `ai.onnx.ml`, `com.microsoft`, or one that ONNX Runtime puts among ONNX's own.
Goes out: its results, made of plain operations. What a lowering does not know (an attribute, an
operand, a result) is refused here, never passed over. Must not know: scopes, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stitch.errors import CompileError
from stitch.frontend import (
    onnx_classical,
    onnx_fused_attention,
    onnx_fusions,
    onnx_linear,
    onnx_tree_classes,
    onnx_trees,
)  # fmt: skip
from stitch.frontend.onnx_upgrades import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

#: None stands for a result that is not wanted.
Results = Sequence[SymbolicTensor | None]
_Make = Callable[[ComputationGraphBuilder, NodeCall], Results]
_MakeOne = Callable[[ComputationGraphBuilder, NodeCall], SymbolicTensor]


@dataclass(frozen=True, slots=True)
class _Lowering:
    """How an operator is lowered, and all that it may be given; `results` are their indices."""

    make: _Make
    operands: int
    attributes: frozenset[str]
    results: tuple[int, ...]


def _one(make: _MakeOne, operands: int, attributes: str = "") -> _Lowering:
    """A lowering to one result."""
    return _many(lambda builder, call: [make(builder, call)], operands, attributes, (0,))


def _many(
    make: _Make, operands: int, attributes: str = "", results: tuple[int, ...] = (0, 1)
) -> _Lowering:
    return _Lowering(make, operands, frozenset(attributes.split()), results)


_CONV = "auto_pad dilations group kernel_shape pads strides activation activation_params"
_GEMM = "alpha beta transA transB activation activation_alpha activation_beta activation_gamma"
_PRODUCT = "alpha transA transB transBatchA transBatchB"
_HEADS = "num_heads unidirectional mask_filter_value scale"

_VECTORS = "coefficients kernel_params kernel_type post_transform rho support_vectors"
_CLASS_TREES = (
    "class_ids class_nodeids class_treeids class_weights class_weights_as_tensor "
    "classlabels_int64s classlabels_strings"
)
_TARGET_TREES = (
    "aggregate_function n_targets target_ids target_nodeids target_treeids target_weights "
    "target_weights_as_tensor"
)

_CLASSICAL: Mapping[str, _Lowering] = {
    "ArrayFeatureExtractor": _one(onnx_classical.feature_extractor, 2),
    "Binarizer": _one(onnx_classical.binarizer, 1, "threshold"),
    "Imputer": _one(
        onnx_classical.imputer, 1,
        "imputed_value_floats imputed_value_int64s replaced_value_float replaced_value_int64",
    ),
    "LinearClassifier": _many(
        onnx_linear.classifier, 1,
        "classlabels_ints classlabels_strings coefficients intercepts multi_class post_transform",
    ),
    "LinearRegressor": _one(
        onnx_linear.regressor, 1, "coefficients intercepts post_transform targets"
    ),
    "Normalizer": _one(onnx_classical.normalizer, 1, "norm"),
    "SVMClassifier": _many(
        onnx_linear.vector_classifier, 1,
        f"{_VECTORS} classlabels_ints classlabels_strings prob_a prob_b vectors_per_class",
    ),
    "SVMRegressor": _one(
        onnx_linear.vector_regressor, 1, f"{_VECTORS} n_supports one_class"
    ),
    "Scaler": _one(onnx_classical.scaler, 1, "offset scale"),
    "TreeEnsemble": _one(onnx_trees.lower_trees, 1, onnx_trees.ATTRIBUTES),
    "TreeEnsembleClassifier": _many(
        onnx_tree_classes.lower_classifier, 1, f"{onnx_trees.OLDER_ATTRIBUTES} {_CLASS_TREES}"
    ),
    "TreeEnsembleRegressor": _one(
        onnx_trees.lower_regressor, 1, f"{onnx_trees.OLDER_ATTRIBUTES} {_TARGET_TREES}"
    ),
    "ZipMap": _one(onnx_classical.zip_map, 1, "classlabels_int64s classlabels_strings"),
}  # fmt: skip
#: What the optimizer of ONNX Runtime writes.
_FUSED: Mapping[str, _Lowering] = {
    "Attention": _many(onnx_fused_attention.attention, 6, f"{_HEADS} qkv_hidden_sizes"),
    "BiasGelu": _one(onnx_fusions.gelu, 2),
    "EmbedLayerNormalization": _many(
        onnx_fused_attention.embeddings, 9, "epsilon mask_index_type", (0, 1, 2)
    ),
    "FastGelu": _one(onnx_fusions.fast_gelu, 2),
    "FusedConv": _one(onnx_fusions.convolution, 4, _CONV),
    "FusedGemm": _one(onnx_fusions.gemm, 3, _GEMM),
    "FusedMatMul": _one(onnx_fusions.product, 2, _PRODUCT),
    "Gelu": _one(onnx_fusions.gelu, 1),
    "MatMulIntegerToFloat": _one(onnx_fusions.scaled_product, 7),
    "MultiHeadAttention": _many(
        onnx_fused_attention.multi_head_attention, 8, _HEADS, (0, 1, 2)
    ),
    "QuickGelu": _one(onnx_fusions.quick_gelu, 1, "alpha"),
    "SkipLayerNormalization": _many(
        onnx_fusions.skip_layer_normalization, 5, "epsilon", (0, 3)
    ),
    "SkipSimplifiedLayerNormalization": _many(
        onnx_fusions.skip_root_mean_square, 4, "epsilon", (0, 3)
    ),
    "TransposeMatMul": _one(onnx_fusions.product, 2, "alpha transA transB"),
}  # fmt: skip
_LOWERINGS: Mapping[tuple[str, str], _Lowering] = {
    **{("ai.onnx.ml", name): lowering for name, lowering in _CLASSICAL.items()},
    **{("com.microsoft", name): lowering for name, lowering in _FUSED.items()},
    ("", "SimplifiedLayerNormalization"): _one(
        onnx_fusions.root_mean_square, 2, "axis epsilon stash_type"
    ),
}


def is_lowered(op: str, domain: str) -> bool:
    """Whether an operator is among them."""
    return (domain, op) in _LOWERINGS


def lowered(builder: ComputationGraphBuilder, call: NodeCall) -> Results:
    """The results of a node of such an operator; raises `CompileError`, `FormatError`."""
    known = _LOWERINGS[call.domain, call.op]
    strange = sorted(call.attributes.keys() - known.attributes)
    strange += [
        f"operand {i}"
        for i, one in enumerate(call.inputs)
        if one is not None and i >= known.operands
    ]
    wanted = [i for i, name in enumerate(call.outputs) if name]
    strange += [f"result {i}" for i in wanted if i not in known.results]
    if strange:
        domain = f"{call.domain}." if call.domain else ""
        raise CompileError(
            f"operator {domain}{call.op} is not supported with {', '.join(strange)}",
            where=call.where,
        )
    return known.make(builder, call)
