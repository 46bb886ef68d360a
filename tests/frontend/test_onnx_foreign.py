"""Operators that Stitch does not define and ONNX Runtime computes, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import stitch
from stitch import report
from stitch.compiler import differentiate
from stitch.errors import CompileError, FormatError, OutOfMemoryError
from stitch.frontend.onnx import from_onnx
from stitch.graph import as_json, from_json
from stitch.program import Array
from stitch.ttb import encode, load
from tests.support.onnx.models import Drawn, drawn, info, model, one_node, runtime

MICROSOFT = "com.microsoft"
DOMAINS = {MICROSOFT: 1, "ai.onnx.ml": 3}


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = MICROSOFT,
         **attributes: Any) -> Any:  # fmt: skip
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


def single(result: object) -> Array:
    assert isinstance(result, stitch.Tensor)
    return result.numpy()


def distances() -> tuple[onnx.ModelProto, list[Array]]:
    """Plain operators around a foreign one."""
    nodes = [
        node("Mul", ["x", "x"], ["a"], ""),
        node("CDist", ["a", "y"], ["b"], metric="sqeuclidean"),
        node("Relu", ["b"], ["z"], ""),
    ]
    proto = model(nodes, [info("x", [3, 4]), info("y", [5, 4])], ["z"], opset=17, domains=DOMAINS)
    return proto, [drawn(3, 4), drawn(5, 4, seed=4)]


def results(binary: Any, arrays: Sequence[Array], executor: str) -> list[Array]:
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        made = device.load(binary)(*arrays)
        return [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]


def assert_same(proto: onnx.ModelProto, arrays: Sequence[Array], folder: Path,
                executors: Sequence[str] = ("onnxruntime", "auto")) -> None:  # fmt: skip
    """The results of ONNX Runtime on the model itself, by a program that was stored."""
    stitch.compile(proto, tuple(arrays)).save(folder / "m.ttb")
    for executor in executors:
        made = results(folder / "m.ttb", arrays, executor)
        for mine, other in zip(made, runtime(proto, arrays), strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, err_msg=executor)


def test_a_foreign_operator_gives_what_onnx_runtime_gives_from_a_file(tmp_path: Path) -> None:
    assert_same(*distances(), tmp_path)


@pytest.mark.parametrize("executor", ["numpy", "torch"])
def test_loading_says_which_operator_an_executor_cannot_run(executor: str) -> None:
    proto, arrays = distances()
    compiled = stitch.compile(proto, tuple(arrays))
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        words = rf"executor '{executor}' cannot run com.microsoft.CDist"
        with pytest.raises(CompileError, match=words) as caught:
            device.load(compiled)
    assert "executor='onnxruntime'" in str(caught.value) and "--executor" in str(caught.value)


def test_a_file_names_the_feature_and_holds_the_version() -> None:
    proto, arrays = distances()
    binary = stitch.compile(proto, tuple(arrays)).binary
    assert binary.requires == ("foreign_operators",)
    again = load(encode(binary))
    (foreign,) = again.programs[0].foreign_operations()
    assert (foreign.title, foreign.opset) == ("com.microsoft.CDist", 1)
    assert dict(foreign.attributes) == {"metric": "sqeuclidean"}
    assert "opset=1" in again.programs[0].text()
    assert again.programs == binary.programs


def test_a_graph_with_a_foreign_operator_has_a_json_form() -> None:
    graph = from_onnx(*distances())
    again = from_json(as_json(graph))
    assert again == graph
    assert [o.opset for o in again.operations] == [0, 1, 0]


def test_a_file_that_calls_an_operator_of_stitch_foreign_is_refused() -> None:
    proto, arrays = distances()
    binary = stitch.compile(proto, tuple(arrays)).binary
    program = binary.programs[0]
    operations = [replace(o, opset=13) if o.op == "Relu" else o for o in program.operations]
    lying = replace(binary, programs=(replace(program, operations=tuple(operations)),))
    words = "Relu is marked as a foreign operator of opset 13"
    with (
        stitch.open_device("wormhole_n150", executor="onnxruntime") as device,
        pytest.raises(FormatError, match=words),
    ):
        device.load(lying)


def proto_of_square() -> onnx.ModelProto:
    nodes = [node("CDist", ["x", "y"], ["z"], metric="euclidean")]
    return model(nodes, [info("x", [3, 4]), info("y", [3, 4])], ["z"], opset=17, domains=DOMAINS)


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_linked_programs_with_foreign_operators_give_the_bits_of_the_parts(executor: str) -> None:
    square = [drawn(3, 4), drawn(3, 4, seed=5)]
    inverse = model([node("Inverse", ["x"], ["y"])], [info("x", [3, 3])], ["y"], opset=17,
                    domains=DOMAINS)  # fmt: skip
    parts = [
        stitch.compile(proto_of_square(), tuple(square)),
        stitch.compile(inverse, (drawn(3, 3),)),
    ]
    linked = stitch.link([part.binary for part in parts])
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        a, b, whole = device.load(parts[0]), device.load(parts[1]), device.load(linked)
        apart = single(b(a(*square)))
        np.testing.assert_array_equal(single(whole(*square)), apart)


def test_versions_of_an_operator_that_mean_the_same_are_one() -> None:
    """LabelEncoder of ai.onnx.ml 2 and 3 is one operator; that of 4 is another."""
    kept = []
    for version in (2, 3, 4):
        label = node("LabelEncoder", ["x"], ["y"], "ai.onnx.ml", keys_int64s=[1, 2],
                     values_floats=[0.5, 1.5])  # fmt: skip
        proto = model(
            [label], [info("x", [3], TensorProto.INT64)], ["y"], domains={"ai.onnx.ml": version}
        )
        (operation,) = from_onnx(proto).operations
        kept.append(operation.opset)
    assert kept == [2, 2, 4]


@pytest.mark.parametrize(
    ("op", "domain", "case", "words"),
    [
        ("Unique", MICROSOFT, ([drawn(4)], 3, {}), "shape of its result depends on data"),
        ("Multinomial", "", ([drawn(2, 3)], 1, {}), "differs from run to run"),
        ("Nothing", MICROSOFT, ([drawn(4)], 1, {}), r"com\.microsoft\.Nothing is not supported"),
        ("CDist", MICROSOFT, ([drawn(3, 4), drawn(3, 4)], 1, {"metric": "cubic"}), "refuses"),
        (
            "LabelEncoder", "ai.onnx.ml",
            ([drawn(3)], 1, {"keys_floats": [1.0], "values_strings": ["a"]}),
            r"result 'y0' is of type tensor\(string\)",
        ),
        ("ExpandDims", MICROSOFT, ([drawn(3, 4), np.array(1, np.int32)], 1, {}),
         "the values of 'x1' decide shapes"),
    ],
)  # fmt: skip
def test_what_no_foreign_operator_stands_for_is_refused(
    op: str, domain: str, case: Drawn, words: str
) -> None:
    proto, _ = one_node(op, case, domain, 3 if domain == "ai.onnx.ml" else 1)
    with pytest.raises(CompileError, match=words):
        from_onnx(proto)


def test_gradients_through_a_foreign_operator_are_refused() -> None:
    graph = from_onnx(*distances())
    with pytest.raises(CompileError, match=r"no gradient for com\.microsoft\.CDist"):
        differentiate(graph, ("x",))


def test_the_host_bytes_of_a_foreign_operator_are_bounded() -> None:
    """Attention makes a matrix for each head, larger than all its operands."""
    heads, length, width = 8, 512, 16
    x, w = np.zeros((1, length, width), np.uint8), np.zeros((width, 3 * width), np.uint8)
    scale = np.ones((), np.float32)
    case: Drawn = ([x, w, drawn(3 * width), scale, scale], 1, {"num_heads": heads})
    proto, arrays = one_node("QAttention", case, MICROSOFT)
    compiled = stitch.compile(proto, tuple(arrays))
    with stitch.open_device("wormhole_n150", executor="auto") as device:
        assert device.load(compiled).host_bytes.peak > heads * length * length * 4


def test_a_pipeline_as_scikit_learn_exports_it_gives_labels_and_a_tensor_of_chances() -> None:
    nodes = [
        node("Imputer", ["x"], ["i"], "ai.onnx.ml", imputed_value_floats=[0.5, 1.5, 2.5],
             replaced_value_float=float("nan")),
        node("Scaler", ["i"], ["s"], "ai.onnx.ml", offset=[0.1, 0.2, 0.3], scale=[2.0] * 3),
        node("LinearClassifier", ["s"], ["label", "scores"], "ai.onnx.ml",
             classlabels_ints=[3, 5, 8], coefficients=drawn(9).tolist(),
             intercepts=drawn(3).tolist(), post_transform="LOGISTIC", multi_class=1),
        node("Cast", ["label"], ["output_label"], "", to=7),
        node("Normalizer", ["scores"], ["chances"], "ai.onnx.ml", norm="L1"),
        node("ZipMap", ["chances"], ["output_probability"], "ai.onnx.ml",
             classlabels_int64s=[3, 5, 8]),
    ]  # fmt: skip
    names = ["output_label", "output_probability"]
    proto = model(nodes, [info("x", ["N", 3])], names, opset=9, domains={"ai.onnx.ml": 1})
    x = drawn(9, 3)
    x[2, 1] = np.nan
    label, chances = results(stitch.compile(proto, (x,)).binary, [x], "auto")
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    wanted, maps = session.run(None, {"x": x})
    np.testing.assert_array_equal(label, wanted)
    columns = np.array([[row[key] for key in (3, 5, 8)] for row in maps])
    np.testing.assert_allclose(chances, columns, rtol=1e-4, atol=1e-6)


def test_an_attribute_that_is_a_tensor_is_held_as_text_and_checked_when_it_is_read() -> None:
    split = 1 + 2.0**-40
    numbers = {"nodes_values": [split, 0, 0], "target_weights": [1.0, 2.0]}
    tensors = {f"{k}_as_tensor": numpy_helper.from_array(np.array(v)) for k, v in numbers.items()}
    case: Drawn = ([np.array([[1.0], [split], [1 + 2.0**-39]])], 1, {
        "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0] * 2, "target_nodeids": [1, 2],
        "target_ids": [0] * 2, "n_targets": 1, **tensors,
    })  # fmt: skip
    proto, arrays = one_node("TreeEnsembleRegressor", case, "ai.onnx.ml", 3)
    binary = stitch.compile(proto, tuple(arrays)).binary
    assert results(binary, arrays, "onnxruntime")[0].tolist() == [[1], [1], [2]]
    program = binary.programs[0]
    (tree,) = program.operations
    broken = replace(tree, attributes={**tree.attributes, "nodes_values_as_tensor": "no tensor"})
    lying = replace(binary, programs=(replace(program, operations=(broken,)),))
    with pytest.raises((FormatError, CompileError), match="not an encoded tensor"):
        results(lying, arrays, "onnxruntime")


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm"])
def test_weights_between_quantized_tensors_keep_their_numbers(op: str, tmp_path: Path) -> None:
    """onnxruntime#24711: an int8 weight with a scale a channel, an int32 bias. ONNX Runtime would
    make weights int8 that are known as float32, one scale for all."""
    rng = np.random.default_rng(3)
    shape = [1, 3, 8, 8] if op != "Gemm" else [5, 3]
    weight = rng.integers(-128, 128, (3, 3, 3, 3) if op != "Gemm" else (3, 3)).astype(np.int8)
    scales = np.array([0.01, 0.5, 0.003], np.float32)
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"], ""),
        node("DequantizeLinear", ["q", "sx", "zx"], ["dx"], ""),
        node("DequantizeLinear", ["w", "sw", "zw"], ["dw"], "", axis=0),
        node("DequantizeLinear", ["b", "sb"], ["db"], "", axis=0),
        node(op, ["dx", "dw", "db"], ["c"], ""),
        node("QuantizeLinear", ["c", "sy", "zy"], ["r"], ""),
        node("DequantizeLinear", ["r", "sy", "zy"], ["y"], ""),
    ]
    weights = {
        "sx": np.float32(0.02), "zx": np.uint8(128), "w": weight, "sw": scales,
        "zw": np.zeros(3, np.int8), "b": rng.integers(-999, 999, 3).astype(np.int32),
        "sb": scales * np.float32(0.02), "sy": np.float32(0.5), "zy": np.uint8(120),
    }  # fmt: skip
    proto = model(nodes, [info("x", shape)], ["y"], {n: np.asarray(a) for n, a in weights.items()},
                  opset=13)  # fmt: skip
    assert_same(proto, [drawn(*shape)], tmp_path, ("numpy", "onnxruntime", "auto", "torch"))


@pytest.mark.parametrize("form", ["linear", "by axis"])
def test_sparse_initializers_are_dense_parameters(form: str, tmp_path: Path) -> None:
    proto = model([node("Add", ["x", "w"], ["y"], "")], [info("x", [2, 3])], ["y"], opset=17)
    places = np.array([1, 5]) if form == "linear" else np.array([[0, 1], [1, 2]])
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([2, 3], np.float32), "w"),
        numpy_helper.from_array(places, "w.places"), [2, 3],
    )  # fmt: skip
    proto.graph.sparse_initializer.append(sparse)
    x = drawn(2, 3)
    (made,) = results(stitch.compile(proto, (x,)).binary, [x], "numpy")
    np.testing.assert_array_equal(made, x + np.array([[0, 2, 0], [0, 0, 3]], np.float32))


@pytest.mark.parametrize(
    ("places", "shape", "words", "error"),
    [
        ([6, 0], [2, 3], "beyond its shape", FormatError),
        ([-1, 0], [2, 3], "beyond its shape", FormatError),
        ([0], [2, 3], "do not fit its values", FormatError),
        ([0, 1], [-2, 3], "impossible shape", FormatError),
        ([0, 1], [1 << 40, 1 << 20], "stored sparse", OutOfMemoryError),
    ],
)
def test_sparse_initializers_that_are_not_sound_are_refused(
    places: list[int], shape: list[int], words: str, error: Any
) -> None:
    proto = model([node("Identity", ["w"], ["y"], "")], [], ["y"])
    sparse = proto.graph.sparse_initializer.add(dims=shape)
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array(places)))
    with pytest.raises(error, match=words):
        from_onnx(proto)


def test_a_shape_that_onnx_runtime_does_not_infer_is_what_the_model_says() -> None:
    """WordConvEmbedding has no inference function; the model declares its result."""
    operands: list[Any] = [np.ones((2, 4), np.int32), drawn(5, 3, 3), drawn(5), drawn(9, 3)]
    sizes = {"embedding_size": 5, "conv_window_size": 3, "char_embedding_size": 3}
    case: Drawn = (operands, 1, sizes)
    proto, _ = one_node("WordConvEmbedding", case, MICROSOFT)
    with pytest.raises(CompileError, match="ONNX Runtime does not infer it"):
        from_onnx(proto)
    proto.graph.output[0].CopyFrom(info("y0", [2, 5]))
    (slot,) = from_onnx(proto).outputs
    assert from_onnx(proto).values[slot.value].type.shape == (2, 5)


def test_an_operand_that_decides_no_shape_holds_data() -> None:
    """Of the words that a cache holds and the length of its results, which are both whole numbers,
    only the length is fixed."""
    past = drawn(2, 1, 4, 8)
    operands: list[Any] = [drawn(2, 1, 16), drawn(2, 1, 8), drawn(2, 1, 8), past, past]
    operands += [np.array([4, 3], np.int32), np.array([5], np.int32)]
    case: Drawn = (operands, 3, {"num_heads": 2, "kv_num_heads": 1})
    proto, arrays = one_node("GroupQueryAttention", case, MICROSOFT)
    compiled = stitch.compile(proto, arrays)
    arrays[5] = np.array([1, 4], np.int32)
    for mine, theirs in zip(results(compiled, arrays, "auto"), runtime(proto, arrays), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_narrow_floats_go_into_a_foreign_operator_as_they_are(executor: str) -> None:
    kind = TensorProto.FLOAT16
    nodes = [node("Add", ["x", "x"], ["a"], ""), node("QuickGelu", ["a"], ["b"], alpha=1.5),
             node("Trilu", ["b"], ["y"], upper=1)]  # fmt: skip
    proto = model(nodes, [info("x", [3, 3], kind)], ["y"], opset=17, domains=DOMAINS)
    x = drawn(3, 3).astype(np.float16)
    (mine,), (other,) = (
        results(stitch.compile(proto, (x,)).binary, [x], executor),
        runtime(proto, [x]),
    )
    assert mine.dtype == other.dtype == np.float16
    np.testing.assert_allclose(mine, other, rtol=2e-3)


def label(version: int) -> onnx.ModelProto:
    """One operator of two versions of its domain that mean different things."""
    made = node(
        "LabelEncoder", ["x"], ["y"], "ai.onnx.ml", keys_int64s=[1, 2], values_int64s=[2, 1]
    )
    return model(
        [made],
        [info("x", [3], TensorProto.INT64)],
        ["y"],
        opset=17,
        domains={"ai.onnx.ml": version},
    )


def test_versions_that_no_model_can_import_together_run_as_calls_of_their_own() -> None:
    x = np.array([1, 2, 3])
    parts = [stitch.compile(label(version), (x,)).binary for version in (2, 4)]
    linked = stitch.link(parts)
    (made,) = results(linked, [x], "auto")
    np.testing.assert_array_equal(made, [1, 2, -1])
    with pytest.raises(CompileError, match=r"LabelEncoder of opset 4 and of opset 2") as caught:
        results(linked, [x], "onnxruntime")
    assert "executor='auto'" in str(caught.value)


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_a_file_with_an_operator_that_onnx_runtime_lacks_is_refused(executor: str) -> None:
    proto, arrays = distances()
    binary = stitch.compile(proto, tuple(arrays)).binary
    program = binary.programs[0]
    operations = tuple(replace(o, op="Nothing") if o.is_foreign else o for o in program.operations)
    other = replace(binary, programs=(replace(program, operations=operations),))
    with pytest.raises(CompileError, match=r"cannot run com\.microsoft\.Nothing"):
        results(other, arrays, executor)


@pytest.mark.parametrize("rounds", [3, 20])
def test_foreign_operators_run_in_the_rounds_of_a_scan(rounds: int, tmp_path: Path) -> None:
    body = helper.make_graph(
        [
            node("Add", ["s", "x"], ["a"], ""),
            node("Trilu", ["a"], ["b"]),
            node("Inverse", ["b"], ["t"]),
            node("Identity", ["t"], ["y"], ""),
        ],
        "round", [info("s", [3, 3]), info("x", [3, 3])], [info("t", [3, 3]), info("y", [3, 3])],
    )  # fmt: skip
    scan = node("Scan", ["s0", "xs"], ["s", "ys"], "", num_scan_inputs=1, body=body)
    inputs = [info("s0", [3, 3]), info("xs", [rounds, 3, 3])]
    proto = model([scan], inputs, ["s", "ys"], opset=17, domains=DOMAINS)
    xs = 0.1 * drawn(rounds, 3, 3) + 3 * np.eye(3, dtype=np.float32)
    assert_same(proto, [np.eye(3, dtype=np.float32), xs], tmp_path)


def test_foreign_operators_of_a_models_own_function_are_theirs(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    nodes = [node("Inverse", ["x"], ["i"]), node("Mul", ["i", "i"], ["y"], "")]
    function = helper.make_function("own", "F", ["x"], ["y"], nodes, imports)
    calls = [node("F", ["x"], ["a"], "own"), node("F", ["a"], ["y"], "own")]
    proto = model(calls, [info("x", [3, 3])], ["y"], opset=17, functions=[function],
                  domains=DOMAINS | {"own": 1})  # fmt: skip
    assert_same(proto, [drawn(3, 3)], tmp_path)


class Calibration(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types here
    """A few random inputs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rows = iter([{"x": drawn(*shape, seed=seed)} for seed in range(3)])

    def get_next(self) -> Any:
        return next(self.rows, None)


def images() -> onnx.ModelProto:
    """A network of everything that the static quantizer has an operator for."""
    nodes = [
        node("Conv", ["x", "kernel"], ["c"], "", pads=[1, 1, 1, 1]),
        node("LeakyRelu", ["c"], ["l"], "", alpha=0.1),
        node("Add", ["l", "c"], ["a"], ""),
        node("Sigmoid", ["a"], ["s"], ""),
        node("Mul", ["a", "s"], ["m"], ""),
        node("AveragePool", ["m"], ["p"], "", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["p", "p"], ["t"], "", axis=1),
        node("GlobalAveragePool", ["t"], ["g"], ""),
        node("Flatten", ["g"], ["f"], ""),
        node("Gemm", ["f", "weight", "bias"], ["d"], ""),
        node("Softmax", ["d"], ["y"], ""),
    ]
    weights = {"kernel": drawn(4, 3, 3, 3), "weight": drawn(8, 5), "bias": drawn(5)}
    return model(nodes, [info("x", [2, 3, 8, 8])], ["y"], weights, opset=17)


@pytest.mark.parametrize("signed", [False, True])
def test_what_the_static_quantizer_writes_compiles(signed: bool, tmp_path: Path) -> None:
    onnx.save(images(), tmp_path / "plain.onnx")
    kind = QuantType.QInt8 if signed else QuantType.QUInt8
    quantize_static(
        tmp_path / "plain.onnx", tmp_path / "m.onnx", Calibration((2, 3, 8, 8)),
        quant_format=QuantFormat.QOperator, activation_type=kind, weight_type=QuantType.QInt8,
    )  # fmt: skip
    proto = onnx.load(tmp_path / "m.onnx")
    found = {one.op_type for one in proto.graph.node if one.domain == MICROSOFT}
    assert found == {
        "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
        "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax",
    }  # fmt: skip
    assert_same(proto, [drawn(2, 3, 8, 8, seed=9)], tmp_path)


@pytest.mark.parametrize("kind", [QuantType.QInt16, QuantType.QInt4], ids=["int16", "int4"])
def test_quantizers_of_onnx_runtime_below_opset_21_compile(kind: Any, tmp_path: Path) -> None:
    """ONNX's own have int16 and int4 since opset 21 only."""
    narrow = getattr(TensorProto, kind.name[1:].upper())
    zero = helper.make_tensor("zero", narrow, [], [1])
    weight = helper.make_tensor("weight", narrow, [3], [1, -2, 3])
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        node("DequantizeLinear", ["weight", "scale", "zero"], ["w"]),
        node("Mul", ["d", "w"], ["y"], ""),
    ]
    scale = {"scale": np.array(0.4, np.float32)}
    proto = model(nodes, [info("x", [2, 3])], ["y"], scale, opset=17, domains=DOMAINS)
    proto.graph.initializer.extend([zero, weight])
    assert_same(proto, [drawn(2, 3)], tmp_path, ("numpy", "onnxruntime", "auto"))


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_what_is_around_a_foreign_operator_is_compared_with_its_reference(executor: str) -> None:
    proto, arrays = distances()
    compiled = stitch.compile(proto, tuple(arrays))
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        with report.OperationComparison(device) as comparison:
            single(device.load(compiled)(*arrays))
        assert [line.op for line in comparison.lines] == ["Mul", "Relu"]
        assert all(line.verdict.passed for line in comparison.lines)
