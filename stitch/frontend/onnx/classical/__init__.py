"""Models of classical machine learning (`ai.onnx.ml`) in plain operations.

Comes in: a node. Goes out: labels, scores, probabilities; trees are walked, products taken. Must
not know: scopes, files.
"""

from collections.abc import Mapping

from stitch.frontend.onnx.calls import Lowering, to_one, to_several
from stitch.frontend.onnx.classical import linear_models, small_operators, trees

_VECTORS = "coefficients kernel_params kernel_type post_transform rho support_vectors"
_CLASS_TREES = (
    "class_ids class_nodeids class_treeids class_weights class_weights_as_tensor "
    "classlabels_int64s classlabels_strings"
)
_TARGET_TREES = (
    "aggregate_function n_targets target_ids target_nodeids target_treeids target_weights "
    "target_weights_as_tensor"
)

#: The operators of `ai.onnx.ml` by their names.
LOWERINGS: Mapping[str, Lowering] = {
    "ArrayFeatureExtractor": to_one(small_operators.feature_extractor, 2),
    "Binarizer": to_one(small_operators.binarizer, 1, "threshold"),
    "Imputer": to_one(
        small_operators.imputer, 1,
        "imputed_value_floats imputed_value_int64s replaced_value_float replaced_value_int64",
    ),
    "LinearClassifier": to_several(
        linear_models.classifier, 1,
        "classlabels_ints classlabels_strings coefficients intercepts multi_class post_transform",
    ),
    "LinearRegressor": to_one(
        linear_models.regressor, 1, "coefficients intercepts post_transform targets"
    ),
    "Normalizer": to_one(small_operators.normalizer, 1, "norm"),
    "SVMClassifier": to_several(
        linear_models.vector_classifier, 1,
        f"{_VECTORS} classlabels_ints classlabels_strings prob_a prob_b vectors_per_class",
    ),
    "SVMRegressor": to_one(
        linear_models.vector_regressor, 1, f"{_VECTORS} n_supports one_class"
    ),
    "Scaler": to_one(small_operators.scaler, 1, "offset scale"),
    "TreeEnsemble": to_one(trees.lower_trees, 1, trees.ATTRIBUTES),
    "TreeEnsembleClassifier": to_several(
        trees.lower_classifier, 1, f"{trees.OLDER_ATTRIBUTES} {_CLASS_TREES}"
    ),
    "TreeEnsembleRegressor": to_one(
        trees.lower_regressor, 1, f"{trees.OLDER_ATTRIBUTES} {_TARGET_TREES}"
    ),
    "ZipMap": to_one(small_operators.zip_map, 1, "classlabels_int64s classlabels_strings"),
}  # fmt: skip

__all__ = ["LOWERINGS"]
