"""Operators of other domains than ONNX's own, and how each is said in its words.

Comes in: a node of `ai.onnx.ml`, `com.microsoft`, or one that ONNX Runtime puts among ONNX's own.
Goes out: its results, made of plain operations. What a lowering does not know (an attribute, an
operand, a result) is refused here, never passed over. Must not know: scopes, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stitch.errors import CompileError
from stitch.frontend.onnx.calls.upgrades import NodeCall
from stitch.frontend.onnx.classical import linear_models, small_operators, tree_classes, trees
from stitch.frontend.onnx.contrib import contrib_attention, fused_operators
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
    "ArrayFeatureExtractor": _one(small_operators.feature_extractor, 2),
    "Binarizer": _one(small_operators.binarizer, 1, "threshold"),
    "Imputer": _one(
        small_operators.imputer, 1,
        "imputed_value_floats imputed_value_int64s replaced_value_float replaced_value_int64",
    ),
    "LinearClassifier": _many(
        linear_models.classifier, 1,
        "classlabels_ints classlabels_strings coefficients intercepts multi_class post_transform",
    ),
    "LinearRegressor": _one(
        linear_models.regressor, 1, "coefficients intercepts post_transform targets"
    ),
    "Normalizer": _one(small_operators.normalizer, 1, "norm"),
    "SVMClassifier": _many(
        linear_models.vector_classifier, 1,
        f"{_VECTORS} classlabels_ints classlabels_strings prob_a prob_b vectors_per_class",
    ),
    "SVMRegressor": _one(
        linear_models.vector_regressor, 1, f"{_VECTORS} n_supports one_class"
    ),
    "Scaler": _one(small_operators.scaler, 1, "offset scale"),
    "TreeEnsemble": _one(trees.lower_trees, 1, trees.ATTRIBUTES),
    "TreeEnsembleClassifier": _many(
        tree_classes.lower_classifier, 1, f"{trees.OLDER_ATTRIBUTES} {_CLASS_TREES}"
    ),
    "TreeEnsembleRegressor": _one(
        trees.lower_regressor, 1, f"{trees.OLDER_ATTRIBUTES} {_TARGET_TREES}"
    ),
    "ZipMap": _one(small_operators.zip_map, 1, "classlabels_int64s classlabels_strings"),
}  # fmt: skip
#: What the optimizer of ONNX Runtime writes.
_FUSED: Mapping[str, _Lowering] = {
    "Attention": _many(contrib_attention.attention, 6, f"{_HEADS} qkv_hidden_sizes"),
    "BiasGelu": _one(fused_operators.gelu, 2),
    "EmbedLayerNormalization": _many(
        contrib_attention.embeddings, 9, "epsilon mask_index_type", (0, 1, 2)
    ),
    "FastGelu": _one(fused_operators.fast_gelu, 2),
    "FusedConv": _one(fused_operators.convolution, 4, _CONV),
    "FusedGemm": _one(fused_operators.gemm, 3, _GEMM),
    "FusedMatMul": _one(fused_operators.product, 2, _PRODUCT),
    "Gelu": _one(fused_operators.gelu, 1),
    "MatMulIntegerToFloat": _one(fused_operators.scaled_product, 7),
    "MultiHeadAttention": _many(
        contrib_attention.multi_head_attention, 8, _HEADS, (0, 1, 2)
    ),
    "QuickGelu": _one(fused_operators.quick_gelu, 1, "alpha"),
    "SkipLayerNormalization": _many(
        fused_operators.skip_layer_normalization, 5, "epsilon", (0, 3)
    ),
    "SkipSimplifiedLayerNormalization": _many(
        fused_operators.skip_root_mean_square, 4, "epsilon", (0, 3)
    ),
    "TransposeMatMul": _one(fused_operators.product, 2, "alpha transA transB"),
}  # fmt: skip
_LOWERINGS: Mapping[tuple[str, str], _Lowering] = {
    **{("ai.onnx.ml", name): lowering for name, lowering in _CLASSICAL.items()},
    **{("com.microsoft", name): lowering for name, lowering in _FUSED.items()},
    ("", "SimplifiedLayerNormalization"): _one(
        fused_operators.root_mean_square, 2, "axis epsilon stash_type"
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
