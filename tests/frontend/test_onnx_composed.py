"""Operators of other domains that are a few of ONNX's, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from stitch.errors import CompileError, FormatError, TaskError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import (
    INT64,
    Drawn,
    assert_as_runtime,
    drawn,
    info,
    model,
    one_node,
    ours,
    runtime,
)

FUSED, ML = "com.microsoft", "ai.onnx.ml"


def model_of(op: str, case: Drawn) -> tuple[onnx.ModelProto, list[Array]]:
    return one_node(op, case, FUSED)


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def chance(random: np.random.Generator, array: Array) -> Array | None:
    return array if random.random() < 0.5 else None


def product(random: np.random.Generator) -> Drawn:
    rank, flags = int(random.integers(2, 5)), [int(f) for f in random.integers(0, 2, 4)]
    flags = [*flags[:2], *(flags[2:] if rank > 2 else [0, 0])]
    batch = [int(n) for n in random.integers(2, 4, rank - 2)]
    sides = []
    for shape, turned, moved in zip(([3, 4], [4, 5]), flags[:2], flags[2:], strict=True):
        full = [*batch, *(shape[::-1] if turned else shape)]
        sides.append(normal(random, *([full[-2], *full[:-2], full[-1]] if moved else full)))
    names = ("transA", "transB", "transBatchA", "transBatchB")
    return [*sides], 1, dict(zip(names, flags, strict=True)) | {"alpha": 0.5}


def product_of_old(random: np.random.Generator) -> Drawn:
    flags = [int(f) for f in random.integers(0, 2, 2)]
    a, b = ((s[::-1] if f else s) for s, f in zip(((3, 4), (4, 5)), flags, strict=True))
    attributes = {"transA": flags[0], "transB": flags[1], "alpha": 0.5}
    return [normal(random, 2, *a), normal(random, 2, *b)], 1, attributes


def gemm(random: np.random.Generator) -> Drawn:
    turned = [int(f) for f in random.integers(0, 2, 2)]
    shapes = [s[::-1] if f else s for s, f in zip(((2, 3), (3, 4)), turned, strict=True)]
    name, numbers = activation(random)
    given = {f"activation_{k}": v for k, v in zip(("alpha", "beta"), numbers, strict=False)}
    added = normal(random, *[(4,), (2, 4), (1, 4)][random.integers(3)])
    attributes = {"transA": turned[0], "transB": turned[1], "alpha": 0.7, "beta": 1.5}
    return (
        [*(normal(random, *s) for s in shapes), chance(random, added)], 1,
        attributes | given | {"activation": name},
    )  # fmt: skip


def activation(random: np.random.Generator) -> tuple[str, list[float]]:
    numbers = {"LeakyRelu": [0.3], "HardSigmoid": [0.3, 0.4]}
    name = str(random.choice(["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid"]))
    return name, numbers.get(name, [])


def convolution(random: np.random.Generator) -> Drawn:
    group, stride = int(random.integers(1, 3)), int(random.integers(1, 3))
    x, w = normal(random, 2, 4, 7, 6), normal(random, 6, 4 // group, 3, 3)
    name, numbers = [activation(random), ("Clip", [-0.4, 0.6])][random.integers(2)]
    size = [(n + 2 - 3) // stride + 1 for n in (7, 6)]
    added = chance(random, normal(random, 2, 6, *size))
    attributes = {"group": group, "strides": [stride] * 2, "pads": [1] * 4, "activation": name}
    given = {"activation_params": numbers} if numbers else {}
    bias = normal(random, 6) if added is not None else chance(random, normal(random, 6))
    return [x, w, bias, added], 1, attributes | given


def skip_layers(random: np.random.Generator) -> Drawn:
    skip = normal(random, *[(2, 3, 8), (3, 8), (1, 3, 8)][random.integers(3)])
    rest = [normal(random, 8), *(chance(random, normal(random, 8)) for _ in range(2))]
    names = ["y", "", "", "sum"] if random.random() < 0.5 else ["y"]
    return [normal(random, 2, 3, 8), skip, *rest], names, {"epsilon": 1e-3}


def skip_squares(random: np.random.Generator) -> Drawn:
    operands, names, attributes = skip_layers(random)
    return [*operands[:3], operands[4]], names, attributes


CASES: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "BiasGelu": lambda random: ([normal(random, 2, 3, 4), normal(random, 4)], 1, {}),
    "FastGelu": lambda random: (
        [normal(random, 2, 3, 4), chance(random, normal(random, 4))], 1, {}
    ),
    "FusedConv": convolution,
    "FusedGemm": gemm,
    "FusedMatMul": product,
    "Gelu": lambda random: ([normal(random, 2, 3)], 1, {}),
    "QuickGelu": lambda random: (
        [normal(random, 2, 3)], 1, {"alpha": float(random.uniform(0.5, 2))}
    ),
    "SkipLayerNormalization": skip_layers,
    "SkipSimplifiedLayerNormalization": skip_squares,
    "TransposeMatMul": product_of_old,
}  # fmt: skip


@pytest.mark.parametrize("seeds", [3, pytest.param(100, marks=pytest.mark.campaign("onnx"))])
@pytest.mark.parametrize("op", CASES)
def test_fused_operators_give_what_onnx_runtime_gives(op: str, seeds: int) -> None:
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        assert_as_runtime(*model_of(op, CASES[op](random)))


def test_simplified_layer_normalization_stands_among_the_operators_of_onnx() -> None:
    random = np.random.default_rng(1)
    case: Drawn = ([normal(random, 2, 5), normal(random, 5)], 1, {"axis": -1, "epsilon": 1e-3})
    assert_as_runtime(*one_node("SimplifiedLayerNormalization", case, ""))


def written_by_optimizer() -> tuple[onnx.ModelProto, list[Array]]:
    """Layers as PyTorch exports them: an image, rows of it, their products, two kinds of Gelu."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "kernel"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["image"]),
        node("Reshape", ["image", "rows"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
        node("MatMul", ["r", "t"], ["m"]),
        node("Mul", ["m", "half"], ["scores"]),
        node("Softmax", ["scores"], ["s"], axis=-1),
        node("MatMul", ["s", "r"], ["a"]),
        node("Add", ["a", "r"], ["joined"]),
        node("LayerNormalization", ["joined", "gamma", "beta"], ["n"], axis=-1),
        node("Relu", ["n"], ["w"]),
        node("Add", ["w", "bias"], ["b"]),
        node("Div", ["b", "root"], ["d"]),
        node("Erf", ["d"], ["e"]),
        node("Add", ["e", "one"], ["f"]),
        node("Mul", ["b", "f"], ["g"]),
        node("Mul", ["g", "half"], ["gelu"]),
        node("Mul", ["gelu", "quick"], ["k"]),
        node("Sigmoid", ["k"], ["l"]),
        node("Mul", ["gelu", "l"], ["q"]),
        node("ReduceMean", ["q", "axis"], ["pooled"], keepdims=0),
        node("Gemm", ["pooled", "weight", "bias"], ["z"]),
        node("Tanh", ["z"], ["y"]),
    ]
    numbers = {"half": 0.5, "one": 1.0, "root": np.sqrt(2), "quick": 1.702}
    weights: dict[str, Array] = {k: np.array(v, np.float32) for k, v in numbers.items()}
    weights |= {name: drawn(8, seed=i) for i, name in enumerate(("gamma", "beta", "bias"))}
    weights |= {"weight": drawn(8, 8), "kernel": drawn(4, 3, 3, 3)}
    weights |= {"rows": np.array([2, 8, 8]), "axis": np.array([1])}
    return model(nodes, [info("x", [2, 3, 4, 4])], ["y"], weights, opset=20), [drawn(2, 3, 4, 4)]


def optimized(proto: onnx.ModelProto, path: Path, level: Any) -> onnx.ModelProto:
    options = SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    return onnx.load(path)


def test_what_the_optimizer_of_onnx_runtime_writes_compiles_to_the_same(tmp_path: Path) -> None:
    proto, arrays = written_by_optimizer()
    level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    written = optimized(proto, tmp_path / "m.onnx", level)
    found = {one.op_type for one in written.graph.node if one.domain == FUSED}
    wanted = {"FusedConv", "FusedMatMul", "SkipLayerNormalization", "BiasGelu", "FusedGemm"}
    assert found >= wanted | {"QuickGelu"}
    for mine, other in zip(ours(written, arrays), runtime(proto, arrays), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_a_layout_of_one_machine_is_refused_with_what_to_do() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "first", domain="com.microsoft.nchwc")
    weights = {"w": drawn(16, 16, 3, 3)}
    proto = model([node], [info("x", [1, 16, 5, 5])], ["y"], weights,
                  domains={"com.microsoft.nchwc": 1})  # fmt: skip
    with pytest.raises(CompileError, match=r"nchwc.Conv is not supported .*ORT_ENABLE_EXTENDED"):
        from_onnx(proto)


X = np.zeros((2, 3, 8), np.float32)
W = np.zeros((8, 24), np.float32)


@pytest.mark.parametrize(
    ("op", "case", "words"),
    [
        ("SkipLayerNormalization", ([X], 1, {}), "operand 1"),
        ("FusedGemm", ([X[0], W], 1, {"activation": "Acos"}), "with this activation"),
        ("FusedGemm", ([X[0], W], 1, {"activation": 3}), "with this activation"),
        ("FusedMatMul", ([X, W], 1, {"transBatchA": 1}), "one rank"),
        ("FusedMatMul", ([X, W], 1, {"alpha": "a"}), "one number"),
        ("FusedMatMul", ([X, W, W], 1, {}), "with operand 2"),
    ],
)  # fmt: skip
def test_what_a_lowering_does_not_know_is_refused(op: str, case: Drawn, words: str) -> None:
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(model_of(op, case)[0])


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [(0.5, [0, 0, 1, 1]), (-0.5, [0, 1, 1, 1]), (-9e30, [1, 1, 1, 1]), (9e30, [0, 0, 0, 0])],
)
def test_whole_numbers_are_compared_with_the_threshold_itself(
    threshold: float, wanted: list[int]
) -> None:
    nodes = [helper.make_node("Binarizer", ["x"], ["y"], domain=ML, threshold=threshold)]
    proto = model(nodes, [info("x", [4], INT64)], ["y"], domains={ML: 3})
    limits = np.iinfo(np.int64)
    assert ours(proto, [np.array([limits.min, 0, 1, limits.max])])[0].tolist() == wanted


def test_a_map_of_labels_is_a_tensor_with_a_column_for_each() -> None:
    """What ONNX Runtime gives as a list of dictionaries."""
    x = drawn(3, 2)
    case: Drawn = ([x], 1, {"classlabels_strings": ["a", "b"]})
    np.testing.assert_array_equal(ours(*one_node("ZipMap", case, ML))[0], x)
    with pytest.raises(FormatError, match="'classlabels'"):
        from_onnx(one_node("ZipMap", ([x], 1, {"classlabels_int64s": [1]}), ML)[0])


def number(value: float, kind: Any = np.int64) -> Array:
    return np.array(value, kind)


def mel(bins: float, low: float = 0.0, high: float = 100.0, length: int = 16) -> list[Array | None]:
    edges = [number(edge, np.float32) for edge in (low, high)]
    return [number(bins), number(length), number(8000), *edges]


IMAGE, SIGNAL = np.zeros((1, 4, 4, 4), np.float32), np.zeros((1, 9, 1), np.float32)
PLACES = np.zeros((1, 4, 4, 4), np.int64)


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "words"),
    [
        ("DepthToSpace", [X], {"blocksize": 2}, "takes images"),
        ("DepthToSpace", [IMAGE], {"blocksize": 3}, "does not divide"),
        ("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "XYZ"}, "'mode'"),
        ("EyeLike", [X], {}, "takes a matrix"),
        ("LpNormalization", [X], {"p": 3}, "'p'"),
        ("MaxUnpool", [IMAGE, PLACES[:, :1]], {"kernel_shape": [2, 2]}, "do not fit"),
        ("MaxUnpool", [IMAGE, PLACES], {"kernel_shape": [2, 2], "pads": [9] * 4}, "do not fit"),
        ("MaxUnpool", [IMAGE, PLACES, np.array([1, 4, 2, 9])], {"kernel_shape": [2, 2]}, "not fit"),
        ("MaxUnpool", [IMAGE, PLACES], {"kernel_shape": [1 << 25] * 2}, "too large"),
        ("AffineGrid", [IMAGE[0, :1, :2, :3], np.array([1, 4, 2, 9, 3])], {}, "do not fit"),
        ("MelWeightMatrix", mel(0), {}, "do not fit"),
        ("MelWeightMatrix", mel(4, low=200.0), {}, "do not fit"),
        ("MelWeightMatrix", mel(1 << 30), {}, "do not fit"),
        ("MelWeightMatrix", mel(4, high=9000.0), {}, "beyond the spectrogram"),
        ("MelWeightMatrix", mel(4), {"output_datatype": 9}, "do not fit"),
        ("MelWeightMatrix", [np.array([1, 2]), *mel(4)[1:]], {}, "must be numbers"),
        ("ReverseSequence", [X, np.array([1, 2])], {"time_axis": 2}, "takes time_axis"),
        ("ReverseSequence", [X, np.array([1, 2])], {}, "takes time_axis"),
        ("STFT", [SIGNAL, number(0), None, number(4)], {}, "do not fit"),
        ("STFT", [SIGNAL, number(1), None, number(10)], {}, "do not fit"),
        ("STFT", [SIGNAL, number(1), SIGNAL[0, :3, 0], number(4)], {}, "do not fit"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_a_composed_operator_are_refused(
    op: str, operands: list[Array | None], attributes: dict[str, Any], words: str
) -> None:
    proto, _ = one_node(op, (operands, 1, attributes), "", constants=range(len(operands)))
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("op", "operands", "attributes"),
    [
        ("ReverseSequence", [X[0], np.array([4] + [1] * 7)], {}),
        ("MaxUnpool", [IMAGE, PLACES - 1], {"kernel_shape": [2, 2]}),
        ("MaxUnpool", [IMAGE, PLACES + 999], {"kernel_shape": [2, 2]}),
    ],
)
def test_lengths_and_places_out_of_range_are_refused_when_they_run(
    op: str, operands: list[Array], attributes: dict[str, Any]
) -> None:
    with pytest.raises(TaskError, match="out of range"):
        ours(*one_node(op, ([*operands], 1, attributes), ""))


def test_norms_use_absolute_values_and_keep_rows_of_zeros() -> None:
    """ONNX's reference sums x ** p, which for p = 1 is not a norm."""
    x = np.array([[3, -4], [0, 0]], np.float32)
    (one,) = ours(*one_node("LpNormalization", ([x], 1, {"p": 1}), ""))
    np.testing.assert_allclose(one, np.array([[3 / 7, -4 / 7], [0, 0]]), rtol=1e-6)
    (two,) = ours(*one_node("LpNormalization", ([x.astype(np.float16)], 1, {}), ""))
    np.testing.assert_allclose(two, np.array([[0.6, -0.8], [0, 0]]), rtol=1e-3)
