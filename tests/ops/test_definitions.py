"""The registry as a whole: it is complete, agrees with ONNX's schemas, and says no by name."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import defs, helper

from stitch.errors import CompileError, TaskError
from stitch.ops import (
    bind,
    data_type_of_code,
    evaluate,
    infer_types,
    lookup,
    onnx_code,
    operators,
    resolve_attributes,
)
from stitch.program import DataType, ValueType
from tests.support.operators.one_operation import table_rows

_KINDS = {"INT": "int", "FLOAT": "float", "STRING": "string", "INTS": "ints", "FLOATS": "floats",
          "STRINGS": "strings"}  # fmt: skip
F32 = DataType.FLOAT32


def kind(text: str) -> ValueType:
    *sizes, data_type = text.split("x")
    return ValueType(tuple(map(int, sizes)), DataType.parse(data_type))


def test_every_operator_has_a_case() -> None:
    tested = {
        row.op for row in table_rows("elementwise", "layer", "signal", "structured", "window")
    }
    # The cases of CumProd are in test_where_the_reference_differs.
    assert {d.name for d in operators() if not d.domain} == tested | {"CumProd"}


@pytest.mark.parametrize(
    "definition", [d for d in operators() if not d.domain], ids=lambda d: d.name
)
def test_a_definition_has_the_arity_and_attributes_of_its_schema(definition: Any) -> None:
    schema = defs.get_schema(definition.name, 26)
    assert definition.inputs[0] == schema.min_input
    assert definition.inputs[1] in (schema.max_input, -1 if schema.max_input > 1000 else None)
    assert definition.outputs[1] in (schema.max_output, -1 if schema.max_output > 1000 else None)
    if definition.name == "ConstantOfShape":
        return  # its tensor attribute is written as three scalars
    assert set(definition.attributes) == set(schema.attributes)
    for name, attribute in schema.attributes.items():
        ours = definition.attributes[name]
        assert ours.kind == _KINDS[attribute.type.name]
        assert ours.required == attribute.required
        if attribute.default_value.name:
            default = helper.get_attribute_value(attribute.default_value)
            if isinstance(default, list):
                default = tuple(d.decode() if isinstance(d, bytes) else d for d in default)
            assert ours.default == (default.decode() if isinstance(default, bytes) else default)


def _one_type_operators() -> list[tuple[Any, Any]]:
    """Definitions whose operands all share one type and need no known numbers or attributes."""
    found = []
    for definition in (d for d in operators() if not d.domain):
        schema = defs.get_schema(definition.name, 26)
        kinds = {operand.type_str for operand in schema.inputs}
        needs = any(attribute.required for attribute in definition.attributes.values())
        if definition.name == "DeformConv":
            continue  # its operands never have shapes of ones only
        if len(kinds) == 1 and kinds == {schema.type_constraints[0].type_param_str} and not needs:
            found.append((definition, schema))
    return found


@pytest.mark.parametrize(
    ("definition", "schema"), _one_type_operators(), ids=lambda value: getattr(value, "name", "")
)
def test_an_operator_takes_the_types_of_its_schema(definition: Any, schema: Any) -> None:
    texts = set(schema.type_constraints[0].allowed_type_strs)
    attributes = {"fmod": 1} if definition.name == "Mod" else {}
    for data_type in DataType:
        if data_type.is_block:
            continue
        name = {F32: "float", DataType.FLOAT64: "double", DataType.FLOAT8_E8M0: "float8e8m0",
                DataType.FLOAT4_E2M1: "float4e2m1"}.get(data_type, data_type.value)  # fmt: skip
        name = name.replace("float8_", "float8")
        taken = False
        for rank, others in ((r, o) for r in range(5) for o in (r, 1)):
            shapes = [(1,) * rank, *[(1,) * others] * (definition.inputs[0] - 1)]
            # A constant where one is asked for (Range); any value of the type will do.
            known = [np.ones(shape, data_type.dtype) for shape in shapes]
            operands = [ValueType(shape, data_type) for shape in shapes]
            try:
                infer_types(definition.name, operands, constants=known, attributes=attributes)
            except CompileError:
                continue
            taken = True
        assert taken == (f"tensor({name})" in texts), data_type


def test_onnx_numbers_of_data_types_go_both_ways() -> None:
    for data_type in DataType:
        if not data_type.is_block:
            assert data_type_of_code(onnx_code(data_type)) is data_type
    with pytest.raises(CompileError, match="not supported"):
        data_type_of_code(8)
    with pytest.raises(CompileError, match="no data type"):
        onnx_code(DataType.BFP8)


def test_an_unknown_operator_names_its_neighbours() -> None:
    with pytest.raises(CompileError, match="Softmaxx") as caught:
        lookup("Softmaxx")
    assert "Softmax" in str(caught.value.remedy)
    with pytest.raises(CompileError, match=r"nowhere\.Add"):
        lookup("Add", "nowhere")


def test_attributes_are_filled_in_and_integers_become_floats() -> None:
    found = resolve_attributes(lookup("Gemm"), {"alpha": 2}, "here")
    assert dict(found) == {"alpha": 2.0, "beta": 1.0, "transA": 0, "transB": 0}
    assert isinstance(found["alpha"], float)
    assert resolve_attributes(lookup("Gemm"), found) == found
    assert dict(resolve_attributes(lookup("Transpose"), {"perm": [1, 0]})) == {"perm": (1, 0)}


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("Gemm", {"alfa": 1.0}, "no attribute 'alfa'"),
        ("Gemm", {"alpha": "one"}, "wrong type"),
        ("Softmax", {"axis": 1.5}, "wrong type"),
        ("Transpose", {"perm": 1}, "wrong type"),
        ("Transpose", {"perm": (1, 0.5)}, "wrong type"),
        ("Concat", {}, "is required"),
        ("Relu", {"alpha": 1.0}, "no attribute"),
    ],
)
def test_a_wrong_attribute_is_refused_by_name(
    op: str, attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        resolve_attributes(lookup(op), attributes, "line 7")
    assert "line 7" in str(caught.value)


WRONG: list[tuple[str, str, dict[str, object]]] = [
    ("Add", "2xf32", {}),
    ("Add", "2xf32 2xf32 2xf32", {}),
    ("Add", "2xf32 3xf32", {}),
    ("Add", "2xf32 2xi32", {}),
    ("Add", "2xi1 2xi1", {}),
    ("Add", "2xbfp8 2xbfp8", {}),
    ("Mod", "2xf32 2xf32", {}),
    ("And", "2xf32 2xf32", {}),
    ("Not", "2xi32", {}),
    ("Exp", "2xi32", {}),
    ("Neg", "2xui8", {}),
    ("Relu", "2xui8", {}),
    ("Where", "2xf32 2xf32 2xf32", {}),
    ("Where", "2xi1 2xf32 2xi32", {}),
    ("BitShift", "2xui8 2xui8", {"direction": "UP"}),
    ("BitShift", "2xi8 2xi8", {"direction": "LEFT"}),
    ("Clip", "2xf32 2xf32", {}),
    ("Pow", "2xui8 2xui8", {}),
    ("Gelu", "2xf32", {"approximate": "sigmoid"}),
    ("PRelu", "3xf32 2x3xf32", {}),
    ("MatMul", "2x3xf32 4x2xf32", {}),
    ("MatMul", "f32 4x2xf32", {}),
    ("MatMul", "2x2x3xf32 3x3x2xf32", {}),
    ("Gemm", "2x3x1xf32 3x2xf32", {}),
    ("Gemm", "2x3xf32 3x2xf32", {"transB": 1}),
    ("Gemm", "2x3xf32 3x2xf32 3xf32", {}),
    ("Conv", "1x3x5x5xf32 2x4x3x3xf32", {}),
    ("Conv", "1x3x5x5xf32 2x3x3xf32", {}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32", {"kernel_shape": (2, 3)}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32 3xf32", {}),
    ("Conv", "1x3x5x5xf32 2x3x7x3xf32", {}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32", {"strides": (0, 1)}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32", {"pads": (1, 1)}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32", {"auto_pad": "SAME"}),
    ("Conv", "1x3x5x5xf32 2x3x3x3xf32", {"auto_pad": "VALID", "pads": (1, 1, 1, 1)}),
    ("Conv", "1x4x5x5xf32 3x2x3x3xf32", {"group": 2}),
    ("ConvTranspose", "1x3x5x5xf32 4x2x3x3xf32", {}),
    ("ConvTranspose", "1x3x5x5xf32 3x2x3x3xf32", {"pads": (9, 9, 9, 9)}),
    ("MaxPool", "3x5xf32", {"kernel_shape": (2,)}),
    ("MaxPool", "1x3x5xf32", {"kernel_shape": (2, 2)}),
    ("MaxPool", "1x3x5xf32", {"kernel_shape": (7,)}),
    ("GlobalMaxPool", "3x5xf32", {}),
    ("BatchNormalization", "2x3xf32 2xf32 3xf32 3xf32 3xf32", {}),
    ("LayerNormalization", "2x3xf32 2xf32", {}),
    ("LayerNormalization", "2x3xf32 3xf32", {"axis": 2}),
    ("LayerNormalization", "2x3xf32 3xf32", {"stash_type": 7}),
    ("GroupNormalization", "2x3x4xf32 3xf32 3xf32", {"num_groups": 2}),
    ("InstanceNormalization", "2x3x4xf32 2xf32 3xf32", {}),
    ("Softmax", "f32", {}),
    ("Softmax", "2xf32", {"axis": 1}),
    ("ReduceSum", "2xi8", {}),
    ("ArgMax", "2xf32", {"axis": 2}),
    ("ArgMax", "2x0xf32", {"axis": 1}),
    ("Flatten", "2xf32", {"axis": 2}),
    ("Transpose", "2x3xf32", {"perm": (0, 0)}),
    ("Concat", "2x3xf32 3x2xf32", {"axis": 0}),
    ("Concat", "2x3xf32 2x3xi32", {"axis": 0}),
    ("Gather", "f32 2xi64", {}),
    ("Gather", "2xf32 2xf32", {}),
    ("GatherElements", "2x2xf32 2xi64", {}),
    ("GatherElements", "2x2xf32 2x3xi64", {}),
    ("GatherND", "2x2xf32 2x3xi64", {}),
    ("GatherND", "2x2xf32 3x1xi64", {"batch_dims": 1}),
    ("ScatterElements", "2x2xf32 1x2xi64 2x2xf32", {}),
    ("ScatterElements", "2x2xf32 1x2xi64 1x2xf32", {"reduction": "mean"}),
    ("ScatterND", "2x2xi1 1x1xi64 1x2xi1", {"reduction": "add"}),
    ("ScatterND", "2x2xf32 1x1xi64 1x3xf32", {}),
    ("Cast", "2xf32", {"to": 8}),
    ("Einsum", "2x3xf32", {"equation": "i->i"}),
    ("Einsum", "2x3xf32", {"equation": "ij,jk"}),
    ("Einsum", "2x3xf32 4x2xf32", {"equation": "ij,jk->ik"}),
    ("Einsum", "2x3xf32", {"equation": "ij->ijk"}),
    ("Einsum", "2x3xf32", {"equation": "i1->i"}),
]


@pytest.mark.parametrize(("op", "operands", "attributes"), WRONG)
def test_operands_that_do_not_fit_are_refused(
    op: str, operands: str, attributes: dict[str, object]
) -> None:
    with pytest.raises(CompileError) as caught:
        infer_types(op, [kind(t) for t in operands.split()], attributes=attributes, location="L3")
    assert op in str(caught.value)


WRONG_CONSTANTS: list[tuple[str, str, list[list[int]], dict[str, object], int]] = [
    ("Reshape", "2x3xf32", [[4, 2]], {}, 1),
    ("Reshape", "2x3xf32", [[-1, -1]], {}, 1),
    ("Reshape", "2x3xf32", [[2, 3, 0]], {}, 1),
    ("Reshape", "2x3xf32", [[-1, 0]], {"allowzero": 1}, 1),
    ("Reshape", "2x3xf32", [[-1, 4]], {}, 1),
    ("Squeeze", "2x1xf32", [[0]], {}, 1),
    ("Squeeze", "2x1xf32", [[2]], {}, 1),
    ("Unsqueeze", "2xf32", [[0, 0]], {}, 1),
    ("Split", "5xf32", [[2, 2]], {}, 2),
    ("Split", "5xf32", [[2, 3]], {"num_outputs": 2}, 2),
    ("Slice", "5xf32", [[0], [2], [0], [0]], {}, 1),
    ("Slice", "5xf32", [[0, 0], [2]], {}, 1),
    ("Slice", "5xf32", [[0], [2], [1]], {}, 1),
    ("Expand", "2xf32", [[3]], {}, 1),
    ("Tile", "2xf32", [[1, 2]], {}, 1),
    ("Pad", "2xf32", [[1]], {}, 1),
    ("Pad", "2xf32", [[-3, 0]], {}, 1),
    ("Pad", "2xf32", [[2, 0]], {"mode": "reflect"}, 1),
    ("Pad", "2xf32", [[2, 0]], {"mode": "mirror"}, 1),
    ("TopK", "3xf32", [[4]], {}, 2),
    ("ReduceSum", "2x3xf32", [[2]], {}, 1),
    ("ReduceSum", "2x3xf32", [[0, -2]], {}, 1),
    ("CumSum", "2xf32", [[1]], {}, 1),
]


@pytest.mark.parametrize(("op", "first", "numbers", "attributes", "outputs"), WRONG_CONSTANTS)
def test_numbers_that_do_not_fit_are_refused(
    op: str, first: str, numbers: list[list[int]], attributes: dict[str, object], outputs: int
) -> None:
    data = [np.array(values, np.int64) for values in numbers]
    types = [kind(first), *(ValueType(d.shape, DataType.INT64) for d in data)]
    with pytest.raises(CompileError, match=op):
        infer_types(op, types, constants=[None, *data], attributes=attributes, outputs=outputs)


@pytest.mark.parametrize(
    ("op", "operands", "name"),
    [
        ("Reshape", "6xf32 2xi64", "shape"),
        ("Squeeze", "1xf32 1xi64", "axes"),
        ("Unsqueeze", "1xf32 1xi64", "axes"),
        ("Slice", "4xf32 1xi64 1xi64", "starts"),
        ("Split", "4xf32 1xi64", "split"),
        ("Expand", "4xf32 1xi64", "shape"),
        ("Tile", "4xf32 1xi64", "repeats"),
        ("Pad", "4xf32 2xi64", "pads"),
        ("ReduceSum", "4xf32 1xi64", "axes"),
        ("TopK", "4xf32 1xi64", "K"),
        ("CumSum", "4xf32 i64", "axis"),
        ("OneHot", "4xi64 i64 2xf32", "depth"),
        ("ConstantOfShape", "2xi64", "input"),
        ("Range", "i64 i64 i64", "start"),
        ("Trilu", "2x2xf32 i64", "k"),
    ],
)
def test_an_operand_that_decides_a_shape_must_be_known(op: str, operands: str, name: str) -> None:
    with pytest.raises(CompileError, match=rf"\({name}\).*known at compile time"):
        infer_types(op, [kind(t) for t in operands.split()])


def test_absent_operands_and_wrong_output_counts_are_refused() -> None:
    with pytest.raises(CompileError, match="operand 1 of Gather is missing"):
        infer_types("Gather", [kind("2xf32"), None])
    with pytest.raises(CompileError, match="number of outputs"):
        infer_types("Relu", [kind("2xf32")], outputs=2)
    with pytest.raises(CompileError, match="training_mode"):
        infer_types("BatchNormalization", [kind("2x3xf32"), *[kind("3xf32")] * 4], outputs=3)


def test_dropout_refuses_to_draw_without_a_key() -> None:
    x, ratio, training = np.ones(4, np.float32), np.array(0.5, np.float32), np.array(True)
    with pytest.raises(CompileError, match="key"):
        evaluate("Dropout", [x, ratio, training])
    with pytest.raises(CompileError, match="key"):
        infer_types("Dropout", [kind("4xf32"), None, kind("i1")])
    assert evaluate("Dropout", [x, np.array(0.0, np.float32), training])[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("index", [5, -6])
@pytest.mark.parametrize("op", ["Gather", "GatherElements", "GatherND", "ScatterND"])
def test_an_index_out_of_range_is_an_error(op: str, index: int) -> None:
    data, places = np.ones(5, np.float32), np.array([index])
    more = [np.ones(1, np.float32)] if op.startswith("Scatter") else []
    places = places[:, None] if op.endswith("ND") else places
    with pytest.raises(TaskError, match=f"{op}: an index is out of range"):
        evaluate(op, [data, places, *more])
    out = np.empty(5 if more else 1, np.float32)
    steps = bind(op, [data, places, *more], [out])
    with pytest.raises(TaskError, match=str(op)):
        for step in steps:
            step()


def test_a_changed_index_is_read_again() -> None:
    data, index, out = np.arange(5.0), np.array([1, -1]), np.empty(2)
    steps = bind("Gather", [data, index], [out])
    for wanted in ([1, -1], [0, 4], [-5, -2]):
        index[:] = wanted
        for step in steps:
            step()
        assert out.tolist() == [w % 5 for w in wanted]


def test_a_dense_layer_is_three_calls() -> None:
    x, w, b = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.ones(4, np.float32)
    y, z = np.empty((2, 4), np.float32), np.empty((2, 4), np.float32)
    constant = [False, True, True]
    gemm = bind("Gemm", [x, w, b], [y], attributes={"transB": 1}, constant=constant)
    relu = bind("Relu", [y], [z])
    names = [step.func.__name__ for step in (*gemm, *relu) if hasattr(step, "func")]
    assert names == ["dot", "add", "maximum"]
    for step in (*gemm, *relu):
        step()
    assert z.tolist() == [[4.0] * 4] * 2


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["Gelu", "Softmax", "ReduceSum", "Mish", "Exp", "LogSoftmax"])
def test_narrow_floats_round_once_per_result(op: str, narrow: Any) -> None:
    x = np.random.default_rng(5).normal(0, 2, (3, 40)).astype(narrow)
    (found,) = evaluate(op, [x])
    (wide,) = evaluate(op, [x.astype(np.float32)])
    assert found.dtype == np.dtype(narrow)
    np.testing.assert_array_equal(found, wide.astype(narrow))


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_a_cast_from_float64_or_integers_rounds_once(narrow: Any) -> None:
    rng = np.random.default_rng(9)
    exact = rng.normal(0, 3, 2000).astype(narrow).astype(np.float64)
    step = np.abs(np.spacing(exact.astype(narrow))).astype(np.float64)
    near_ties = np.concatenate(
        [exact, exact + step / 2 + 1e-13, exact + step / 2 - 1e-13, exact + step / 2]
    )
    near_ties = np.concatenate([near_ties, [np.inf, -np.inf, np.nan, 0.0, -0.0]])
    code = onnx_code(DataType.from_dtype(narrow))
    (found,) = evaluate("Cast", [near_ties], attributes={"to": code})
    lower = np.asarray(near_ties, np.longdouble)
    for value, got in zip(lower, found, strict=True):
        if np.isfinite(value):
            here = abs(float(got) - float(value))
            for side in (-np.inf, np.inf):
                other = np.nextafter(got, np.array(side, narrow), dtype=narrow)
                assert not math.isfinite(float(other)) or here <= abs(float(other) - float(value))


def test_range_of_large_integers_is_exact() -> None:
    start = 2**60 + 1
    numbers = [np.array(v) for v in (start, start + 7, 2)]
    assert evaluate("Range", numbers)[0].tolist() == [start + i for i in (0, 2, 4, 6)]


def test_ties_in_topk_go_to_the_lower_index() -> None:
    x = np.array([1, 3, 3, 2, 1], np.uint8)
    for largest, places in ((1, [1, 2, 3, 0]), (0, [0, 4, 3, 1])):
        values, found = evaluate(
            "TopK", [x, np.array([4])], attributes={"largest": largest}, outputs=2
        )
        assert found.tolist() == places
        assert values.tolist() == x[places].tolist()
