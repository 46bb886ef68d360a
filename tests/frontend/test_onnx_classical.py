"""Linear models, support vector machines and what stands around them, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnxruntime import InferenceSession

from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import Drawn, assert_as_runtime, drawn, info, model, one_node, ours

ML = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
FEATURES = 3


def rows(random: np.random.Generator) -> Array:
    """Rows of some type, or one vector."""
    x = random.standard_normal((7, FEATURES)).astype(np.float32) * 2
    kind = [np.float32, np.float32, np.float64, np.int32, np.int64][random.integers(5)]
    return x[0] if random.random() < 0.1 else x.astype(kind)


def numbers(random: np.random.Generator, *shape: int) -> list[float]:
    return [float(x) for x in random.standard_normal(shape).astype(np.float32).reshape(-1)]


def transform(random: np.random.Generator, scores: int) -> str:
    return str(random.choice(TRANSFORMS)) if scores > 1 else "NONE"


def linear_classifier(random: np.random.Generator) -> Drawn:
    classes = int(random.integers(1, 5))
    labels = random.permutation(9)[: max(classes, 2)].tolist()
    attributes = {
        "coefficients": numbers(random, classes, FEATURES), "intercepts": numbers(random, classes),
        "classlabels_ints": labels, "post_transform": transform(random, classes),
    }  # fmt: skip
    return [rows(random)], 2, attributes


def linear_regressor(random: np.random.Generator) -> Drawn:
    targets = int(random.integers(1, 4))
    intercepts = {"intercepts": numbers(random, targets)} if random.random() < 0.7 else {}
    attributes = {
        "targets": targets, "coefficients": numbers(random, targets, FEATURES),
        "post_transform": transform(random, targets),
    }  # fmt: skip
    return [rows(random).astype(np.float32)], 1, attributes | intercepts


def kernel(random: np.random.Generator, count: int) -> dict[str, Any]:
    kind = str(random.choice(["LINEAR", "POLY", "RBF", "SIGMOID"]))
    degree = float(random.integers(1, 4))
    return {
        "kernel_type": kind, "kernel_params": [0.3, 0.2, degree],
        "support_vectors": numbers(random, count, FEATURES),
    }  # fmt: skip


def vector_classifier(random: np.random.Generator) -> Drawn:
    classes = int(random.integers(2, 5))
    counts = random.integers(1, 4, classes).tolist()
    pairs = classes * (classes - 1) // 2
    chances = {"prob_a": numbers(random, pairs), "prob_b": numbers(random, pairs)}
    chances = chances if random.random() < 0.5 else {}
    scores = classes if chances else pairs
    attributes = {
        "classlabels_ints": random.permutation(9)[:classes].tolist(),
        "vectors_per_class": counts, "rho": numbers(random, pairs),
        "coefficients": numbers(random, classes - 1, sum(counts)),
        "post_transform": transform(random, scores),
    }  # fmt: skip
    return [rows(random)], 2, attributes | kernel(random, sum(counts)) | chances


def plane_classifier(random: np.random.Generator) -> Drawn:
    classes = int(random.integers(2, 5))
    factors = np.array(numbers(random, classes, FEATURES))
    factors = np.abs(factors) if random.random() < 0.5 else factors
    attributes = {
        "classlabels_ints": random.permutation(9)[:classes].tolist(), "rho": numbers(random, 1),
        "coefficients": factors.tolist(), "post_transform": transform(random, classes),
        "kernel_type": "LINEAR",
        "kernel_params": [0.0, 0.0, 0.0],
    }  # fmt: skip
    return [rows(random)], 2, attributes


def vector_regressor(random: np.random.Generator) -> Drawn:
    count = int(random.integers(0, 5))
    plane = {"kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0]}
    given = kernel(random, count) if count else plane
    attributes = {
        "n_supports": count, "coefficients": numbers(random, count or FEATURES),
        "rho": numbers(random, 1), "one_class": int(random.integers(0, 2)),
    }  # fmt: skip
    return [rows(random).astype(np.float32)], 1, attributes | given


def scaler(random: np.random.Generator) -> Drawn:
    x = rows(random)
    sizes = random.choice([1, FEATURES]) if x.ndim == 2 else FEATURES
    return [x], 1, {"offset": numbers(random, sizes), "scale": numbers(random, sizes)}


def normalizer(random: np.random.Generator) -> Drawn:
    x = rows(random)
    x = x * (random.random(x.shape[:1] + (1,) * (x.ndim - 1)) < 0.8).astype(x.dtype)
    return [x], 1, {"norm": str(random.choice(["MAX", "L1", "L2"]))}


def imputer(random: np.random.Generator) -> Drawn:
    x = random.integers(-2, 3, (7, FEATURES))
    size = int(random.choice([1, FEATURES]))
    if random.random() < 0.3:
        given = random.integers(5, 9, size).tolist()
        return [x], 1, {"imputed_value_int64s": given, "replaced_value_int64": 1}
    real = x.astype(np.float32)
    gone = float("nan") if random.random() < 0.5 else 1.0
    real[real == 2] = gone
    given = numbers(random, size)
    return [real], 1, {"imputed_value_floats": given, "replaced_value_float": gone}


CASES: dict[str, tuple[str, Callable[[np.random.Generator], Drawn]]] = {
    "Imputer": ("Imputer", imputer),
    "LinearClassifier": ("LinearClassifier", linear_classifier),
    "LinearRegressor": ("LinearRegressor", linear_regressor),
    "Normalizer": ("Normalizer", normalizer),
    "SVMClassifier": ("SVMClassifier", vector_classifier),
    "SVMClassifier without vectors": ("SVMClassifier", plane_classifier),
    "SVMRegressor": ("SVMRegressor", vector_regressor),
    "Scaler": ("Scaler", scaler),
}


@pytest.mark.parametrize("seeds", [6, pytest.param(200, marks=pytest.mark.campaign("onnx"))])
@pytest.mark.parametrize("name", CASES)
def test_classical_operators_give_what_onnx_runtime_gives(name: str, seeds: int) -> None:
    op, draw = CASES[name]
    for seed in range(seeds):
        proto, arrays = one_node(op, draw(np.random.default_rng(seed)), ML)
        assert_as_runtime(proto, arrays)


def test_probit_is_the_quantile_of_the_normal_distribution() -> None:
    chances = np.linspace(0.01, 0.99, 9, dtype=np.float32)[:, None]
    attributes = {"coefficients": [1.0], "intercepts": [0.0], "post_transform": "PROBIT"}
    proto, arrays = one_node("LinearRegressor", ([chances], 1, attributes), ML)
    assert_as_runtime(proto, arrays)
    np.testing.assert_allclose(ours(proto, arrays)[0][4], 0, atol=1e-6)


def test_a_pipeline_as_scikit_learn_exports_it_gives_labels_and_a_tensor_of_chances() -> None:
    random = np.random.default_rng(1)

    def node(op: str, given: str, made: list[str], **attributes: Any) -> Any:
        return helper.make_node(op, [given], made, domain=ML, **attributes)

    nodes = [
        node("Imputer", "x", ["i"], imputed_value_floats=numbers(random, FEATURES),
             replaced_value_float=float("nan")),
        node("Scaler", "i", ["s"], offset=numbers(random, FEATURES), scale=[2.0] * FEATURES),
        node("LinearClassifier", "s", ["label", "scores"], classlabels_ints=[3, 5, 8],
             coefficients=numbers(random, 3, FEATURES), intercepts=numbers(random, 3),
             post_transform="LOGISTIC", multi_class=1),
        helper.make_node("Cast", ["label"], ["output_label"], to=7),
        node("Normalizer", "scores", ["chances"], norm="L1"),
        node("ZipMap", "chances", ["output_probability"], classlabels_int64s=[3, 5, 8]),
    ]  # fmt: skip
    names = ["output_label", "output_probability"]
    proto = model(nodes, [info("x", ["N", FEATURES])], names, opset=9, domains={ML: 1})
    proto.graph.output[1].CopyFrom(helper.make_empty_tensor_value_info("output_probability"))
    x = drawn(9, FEATURES)
    x[2, 1] = np.nan
    label, maps = runtime_with_maps(proto, x)
    mine, chances = ours(proto, [x])
    np.testing.assert_array_equal(mine, label)
    columns = np.array([[row[key] for key in (3, 5, 8)] for row in maps])
    np.testing.assert_allclose(chances, columns, rtol=1e-4, atol=1e-6)


def runtime_with_maps(proto: Any, x: Array) -> tuple[Array, list[dict[int, float]]]:
    session = InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    label, maps = session.run(None, {"x": x})
    return np.asarray(label), maps


X = np.ones((2, FEATURES), np.float32)
ONE = {"coefficients": [1.0] * FEATURES, "intercepts": [0.0]}
VECTORS = {
    "classlabels_ints": [0, 1], "vectors_per_class": [1, 1], "rho": [0.1],
    "coefficients": [1.0, -1.0], "support_vectors": [1.0] * 6, "kernel_type": "LINEAR",
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        ("LinearClassifier", ONE | {"classlabels_strings": ["a", "b"]}, "words as labels"),
        ("LinearClassifier", ONE, "the labels of the classes"),
        ("LinearClassifier", ONE | {"classlabels_ints": [1, 2, 3]}, "'intercepts'"),
        (
            "LinearClassifier",
            ONE | {"classlabels_ints": [0, 1], "post_transform": "LOGISTIC"},
            "passes over",
        ),
        ("LinearRegressor", ONE | {"post_transform": "LOGISTIC"}, "passes over"),
        ("LinearRegressor", ONE | {"post_transform": "CUBE"}, "one of NONE"),
        ("LinearRegressor", {"coefficients": [1.0]}, "'coefficients'"),
        ("LinearRegressor", ONE | {"targets": 2}, "'coefficients'"),
        ("LinearRegressor", {"targets": 0}, "'targets'"),
        ("SVMClassifier", VECTORS | {"rho": [0.1] * 2}, "'rho'"),
        ("SVMClassifier", VECTORS | {"vectors_per_class": [2]}, "'vectors_per_class'"),
        ("SVMClassifier", VECTORS | {"kernel_type": "COSINE"}, "'kernel_type'"),
        ("SVMClassifier", VECTORS | {"post_transform": "LOGISTIC"}, "passes over"),
        ("SVMClassifier", VECTORS | {"classlabels_strings": ["a", "b"]}, "words as labels"),
        ("SVMRegressor", {"coefficients": [1.0] * 3, "rho": [0.1] * 2, "n_supports": 0}, "'rho'"),
        ("Scaler", {"offset": [1.0] * 2, "scale": [1.0]}, "'offset'"),
        ("Normalizer", {"norm": "L3"}, "'norm'"),
        ("ZipMap", {"classlabels_int64s": [1]}, "'classlabels'"),
        ("Imputer", {"imputed_value_floats": [1.0] * 2}, "'imputed values'"),
    ],
)
def test_what_does_not_fit_and_what_onnx_runtime_passes_over_is_refused(
    op: str, attributes: dict[str, Any], words: str
) -> None:
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(one_node(op, ([X], 1 + op.endswith("Classifier"), attributes), ML)[0])
