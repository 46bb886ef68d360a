"""ONNX models that compile: opsets, functions, branches, symbolic dimensions, ways of storing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

import stitch
from stitch.errors import CompileError, TaskError
from stitch.frontend.onnx import from_onnx
from stitch.ops import onnx_code
from stitch.program import ValueType
from tests.support.grids import in_turn
from tests.support.onnx.models import (
    FLOAT,
    INT64,
    assert_agree,
    assert_as_runtime,
    drawn,
    info,
    model,
    ours,
    theirs,
)
from tests.support.stitched_models import one

node = helper.make_node


def sparse_tensor(values: list[float], places: list[Any], shape: list[int]) -> Any:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.array(values, np.float32)),
        numpy_helper.from_array(np.array(places, np.int64)), shape,
    )  # fmt: skip


def test_a_path_a_string_and_a_proto_give_the_same_results(tmp_path: Path) -> None:
    x = drawn(2, 4)
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 4])], ["y"], {"w": drawn(4, 3)}
    )
    onnx.save(proto, tmp_path / "m.onnx")
    expected = theirs(proto, [x])[0]
    for source in (proto, tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        np.testing.assert_allclose(ours(source, [x])[0], expected, rtol=1e-6)


def test_locations_name_file_and_node(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["h"], name="/block/relu"), node("Neg", ["h"], ["y"])]
    onnx.save(model(nodes, [info("x", [2])], ["y"]), tmp_path / "m.onnx")
    graph = from_onnx(tmp_path / "m.onnx")
    assert [o.location for o in graph.operations] == ["m.onnx:/block/relu", "m.onnx:#1"]


def test_symbolic_dimensions_take_the_sizes_of_examples() -> None:
    proto = model(
        [node("Add", ["x", "y"], ["z"])], [info("x", ["b", 3]), info("y", ["b", "n"])], ["z"]
    )
    kind = from_onnx(proto, (drawn(2, 3), drawn(2, 3))).output_type(0)
    assert kind.shape == (2, 3)
    described = from_onnx(proto, {"y": ValueType((5, 1), kind.data_type)}, {"x": (5, 3)})
    assert described.output_type(0).shape == (5, 3)


def test_a_dimension_is_bound_by_another_input_of_the_same_name() -> None:
    proto = model([node("Add", ["x", "y"], ["z"])], [info("x", ["b"]), info("y", ["b"])], ["z"])
    assert from_onnx(proto, {}, {"x": (7,)}).input_type(1).shape == (7,)


def test_an_input_that_decides_a_shape_takes_its_example_only() -> None:
    proto = model(
        [node("Neg", ["s"], ["n"]), node("Neg", ["n"], ["m"]), node("Reshape", ["x", "m"], ["y"])],
        [info("x", [2, 6]), info("s", [2], INT64)],
        ["y"],
    )
    x = drawn(2, 6)
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(stitch.compile(proto, (x, np.array([3, 4]))))
        np.testing.assert_array_equal(one(program(x, np.array([3, 4]))).numpy(), x.reshape(3, 4))
        with pytest.raises(TaskError, match="one value of 's'") as caught:
            one(program(x, np.array([4, 3]))).numpy()
        assert "[3, 4]" in str(caught.value)
        assert "[4, 3]" in str(caught.value)


def test_functions_of_the_model_are_expanded_with_their_attributes() -> None:
    inner = node("Elu", ["a"], ["b"])
    inner.attribute.append(
        onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    )
    function = helper.make_function(
        "mine", "Twice", ["a"], ["c"], [inner, node("Add", ["b", "b"], ["c"])],
        [helper.make_opsetid("", 22)], ["slope"],
    )  # fmt: skip
    proto = model(
        [node("Twice", ["x"], ["y"], domain="mine", slope=0.25)], [info("x", [5])], ["y"],
        functions=[function], domains={"mine": 1},
    )  # fmt: skip
    x = drawn(5)
    expected = 2 * np.where(x > 0, x, 0.25 * np.expm1(x))
    np.testing.assert_allclose(ours(proto, [x])[0], expected, rtol=1e-5)
    assert from_onnx(proto).values[-1].name == "y"


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_of_a_constant_condition_is_inlined(condition: bool) -> None:
    branches = {
        name: helper.make_graph([node(op, ["h"], [f"{op}_y"])], name, [], [info(f"{op}_y", None)])
        for name, op in (("then_branch", "Neg"), ("else_branch", "Exp"))
    }
    nodes = [node("Abs", ["x"], ["h"]), node("If", ["c"], ["y"], **branches)]
    proto = model(nodes, [info("x", [4])], ["y"], {"c": np.array(condition)})
    assert [o.op for o in from_onnx(proto).operations] == ["Abs", "Neg" if condition else "Exp"]
    assert_agree(proto, [drawn(4)])


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"value": numpy_helper.from_array(np.array([[1, 2]], np.int32))}, [[1, 2]]),
        ({"value_int": 7}, 7),
        ({"value_ints": [1, 2]}, [1, 2]),
        ({"value_float": 0.5}, 0.5),
        ({"value_floats": [0.5, 2.0]}, [0.5, 2.0]),
        ({"sparse_value": sparse_tensor([2.0, 3.0], [1, 5], [2, 3])}, [[0, 2, 0], [0, 0, 3]]),
        ({"sparse_value": sparse_tensor([2.0], [[1, 0]], [2, 2])}, [[0, 0], [2, 0]]),
        ({"sparse_value": sparse_tensor([], [], [2, 1])}, [[0], [0]]),
    ],
)
def test_constant_nodes_of_every_form_of_numbers(attributes: dict[str, Any], expected: Any) -> None:
    proto = model([node("Constant", [], ["y"], **attributes)], [], ["y"])
    (found,) = ours(proto, [])
    assert found.tolist() == expected


TENSOR_TYPES = [
    "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float4_e2m1fn", "int4", "uint4", "int2", "uint2",
]  # fmt: skip


@pytest.mark.parametrize(("raw", "name"), in_turn([True, False], TENSOR_TYPES))
def test_initializers_of_every_type_and_form(name: str, raw: bool) -> None:
    data_type = stitch.DataType.parse(name)
    array = np.array([[1, 0, 1]]).astype(data_type.dtype)
    code = onnx_code(data_type)
    if raw:
        tensor = numpy_helper.from_array(array, "w")
    else:
        tensor = helper.make_tensor("w", code, [1, 3], array.ravel().tolist())
    proto = model([node("Identity", ["w"], ["y"])], [], ["y"])
    proto.graph.initializer.append(tensor)
    (found,) = ours(proto, [])
    assert found.dtype == array.dtype
    assert found.astype(np.float64).tolist() == [[1, 0, 1]]


def test_external_data_is_mapped_from_beside_the_model(tmp_path: Path) -> None:
    weight, x = drawn(64, 32), drawn(2, 64)
    proto = model([node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 64])], ["y"], {"w": weight})
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin",
              size_threshold=0)  # fmt: skip
    assert (tmp_path / "w.bin").stat().st_size >= weight.nbytes
    np.testing.assert_allclose(ours(tmp_path / "m.onnx", [x])[0], x @ weight, rtol=1e-4)


def test_operands_and_results_may_be_absent() -> None:
    nodes = [
        node("Clip", ["x", "", "top"], ["c"]),
        node("Dropout", ["c"], ["d", ""]),
        node("LayerNormalization", ["d", "scale"], ["y", "", "inverse"]),
    ]
    weights = {"top": np.array(0.5, np.float32), "scale": np.ones(4, np.float32)}
    proto = model(nodes, [info("x", [3, 4])], ["y", "inverse"], weights)
    assert_agree(proto, [drawn(3, 4)])


def test_shapes_that_are_computed_from_shapes_are_known() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Concat", ["b", "rest"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["y"]),
        node("Size", ["x"], ["n"]),
        node("Cast", ["n"], ["m"], to=FLOAT),
        node("Add", ["y", "m"], ["z"]),
    ]
    weights = {"zero": np.array([0]), "rest": np.array([-1])}
    assert_agree(model(nodes, [info("x", ["b", 3, 4])], ["z"], weights), [drawn(2, 3, 4)])


def test_operators_that_stitch_lacks_are_computed_where_all_is_known() -> None:
    nodes = [node("NonZero", ["mask"], ["i"]), node("Gather", ["x", "i"], ["y"])]
    proto = model(nodes, [info("x", [4])], ["y"], {"mask": np.array([True, False, True, True])})
    assert_agree(proto, [drawn(4)])


def test_a_real_signal_may_lack_its_last_axis_as_exporters_write_it() -> None:
    """onnxruntime#14316, and torch.stft: [batch, length], where ONNX has [batch, length, 1]."""
    weights = {"step": np.array(5), "length": np.array(8), "window": drawn(8, seed=4)}
    nodes = [node("STFT", ["x", "step", "window", "length"], ["y"])]
    proto = model(nodes, [info("x", [2, 33])], ["y"], weights, opset=17)
    assert_as_runtime(proto, [drawn(2, 33)])


def test_an_initializer_gives_an_input_its_default() -> None:
    proto = model(
        [node("Add", ["x", "w"], ["y"])], [info("x", [2]), info("w", [2])], ["y"], {"w": drawn(2)}
    )
    assert [slot.name for slot in from_onnx(proto).inputs] == ["x"]
    assert [slot.name for slot in from_onnx(proto, {"w": drawn(2)}).inputs] == ["x", "w"]


def test_the_same_model_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [2])], ["y"])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        onnx.save(proto, tmp_path / folder / "m.onnx")
    one, two = (stitch.compile(tmp_path / folder / "m.onnx") for folder in ("one", "two"))
    assert one.encode() == two.encode()


def test_without_the_package_the_error_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "import stitch\n"
        "try: stitch.compile('m.onnx')\n"
        "except stitch.CompileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "stitch-runtime[onnx]" in done.stdout


@pytest.mark.parametrize(
    "declared", [["N", "N"], ["?", "?"], ["-1", "-1"], ["", ""], ["a b", "a b"]]
)
def test_dimensions_of_one_name_take_what_onnx_runtime_takes(declared: list[str]) -> None:
    proto = model([node("Neg", ["x"], ["y"])], [info("x", declared)], ["y"])
    x = drawn(2, 3)
    session = InferenceSession(proto.SerializeToString())
    np.testing.assert_array_equal(ours(proto, [x])[0], session.run(None, {"x": x})[0])


def test_names_that_are_no_identifiers_bind_nothing_elsewhere() -> None:
    inputs = [info("x", ["?", 3]), info("v", ["?"])]
    proto = model([node("Neg", ["x"], ["y"])], inputs, ["y"])
    with pytest.raises(CompileError, match=r"input .v..*left unbound: axis 0"):
        from_onnx(proto, {"x": drawn(2, 3)})


def test_initializers_of_ir_version_3_need_not_be_inputs() -> None:
    x, w = drawn(2, 3), drawn(3)
    nodes = [node("Add", ["x", "w"], ["s"]), node("Squeeze", ["s"], ["y"], axes=[0])]
    proto = model(nodes, [info("x", [1, 2, 3])], ["y"], {"w": w}, opset=8)
    proto.ir_version = 3
    np.testing.assert_allclose(ours(proto, [x[None]])[0], x + w, rtol=1e-6)
    assert proto.ir_version == 3


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "torch"])
@pytest.mark.parametrize("outputs", [["", "y", "", ""], ["y", "", "", ""], ["", "", "", "y"]])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_a_split_has_as_many_parts_as_names_wanted_or_not(
    executor: str, outputs: list[str], opset: int
) -> None:
    """ONNX Runtime ends the process over such a file (onnxruntime#18601)."""
    given = {"num_outputs": 4} if opset == 18 else {}
    split = helper.make_node("Split", ["x"], outputs, axis=1, **given)
    x = np.arange(40, dtype=np.float32).reshape(2, 20)
    proto = model([split], [info("x", [2, 20])], ["y"], opset=opset)
    made = stitch.compile(proto, (x,), executor=executor)(x)
    at = 5 * outputs.index("y")
    np.testing.assert_array_equal(made.numpy(), x[:, at : at + 5])


def test_group_normalization_had_one_scale_per_group_before_opset_21() -> None:
    x, scale, bias = drawn(2, 6, 5), np.array([2, 3], np.float32), np.array([1, -1], np.float32)
    nodes = [node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)]
    weights = {"s": scale, "b": bias}
    old = ours(model(nodes, [info("x", [2, 6, 5])], ["y"], weights, opset=18), [x])[0]
    grouped = x.reshape(2, 2, 15)
    centred = grouped - grouped.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)
    expected = scaled * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(old, expected.reshape(x.shape), rtol=1e-4, atol=1e-5)
