"""float8, float4, int4, int2: every code through Cast, against ml_dtypes and ONNX's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from stitch.errors import CompileError
from stitch.ops import evaluate, infer_types, onnx_code
from stitch.program import DataType, ValueType

NARROW = [t for t in DataType if not t.is_block and t.is_narrow]
FLOATS8 = [t for t in NARROW if t.value.startswith("float8") and t is not DataType.FLOAT8_E8M0]
E8M0 = DataType.FLOAT8_E8M0


def codes_of(kind: DataType) -> NDArray[Any]:
    """Every element of a type."""
    return np.arange(1 << kind.bits, dtype=np.uint8).view(kind.dtype)


def cast(values: NDArray[Any], kind: DataType, **attributes: Any) -> NDArray[Any]:
    (made,) = evaluate("Cast", [values], attributes={"to": onnx_code(kind), **attributes})
    return made


def reference(op: str, inputs: list[NDArray[Any]], **attributes: Any) -> NDArray[Any]:
    """What ONNX's reference makes of one node."""
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, onnx_code(DataType.from_dtype(x.dtype)), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(op, names, ["y"], **attributes)
    made = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "one", infos, [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    with np.errstate(all="ignore"):
        (found,) = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    return np.asarray(found)


def awkward() -> NDArray[np.float32]:
    """Numbers on, between and beside those of every narrow float, and far beyond them."""
    with np.errstate(all="ignore"):
        exact = np.concatenate(
            [codes_of(t).astype(np.float32) for t in NARROW if t.is_floating and t is not E8M0]
        )
        exact = np.unique(exact[np.isfinite(exact)])
        middle = (exact[1:] + exact[:-1]) / 2
    inside = np.concatenate([exact, middle])
    far = np.array([500, 1e6, -1e6, 1e-9, 0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    beside = [
        np.nextafter(inside, s, dtype=np.float32) for s in (np.float32(9e9), -np.float32(9e9))
    ]
    return np.concatenate([inside, *beside, far]).astype(np.float32)


def same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Equal bits, where neither is NaN."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    signs = np.signbit(a) == np.signbit(b)
    return bool((((a == b) & signs) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("kind", NARROW, ids=lambda t: t.value)
def test_every_code_widens_to_its_number_and_comes_back(kind: DataType) -> None:
    codes = codes_of(kind)
    wide = cast(codes, DataType.FLOAT32)
    np.testing.assert_array_equal(wide, codes.astype(np.float32))
    back = cast(wide, kind, saturate=0)
    numbers = ~np.isnan(wide)
    assert (back.view(np.uint8) == codes.view(np.uint8))[numbers].all()
    assert np.isnan(back.astype(np.float32))[~numbers].all()


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("kind", FLOATS8, ids=lambda t: t.value)
def test_float8_rounds_and_saturates_as_onnx_says(kind: DataType, saturate: int) -> None:
    values = awkward()
    wanted = reference("Cast", [values], to=onnx_code(kind), saturate=saturate)
    assert same(cast(values, kind, saturate=saturate), wanted)


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_by_their_mode(mode: str) -> None:
    values = np.array(
        [0.124, 0.25, 0.3, 0.375, 0.5, 1.1, 1.5, 1.75, 3, 2.0**127, 1e-30], np.float32
    )
    wanted = reference("Cast", [values], to=TensorProto.FLOAT8E8M0, saturate=1, round_mode=mode)
    found = cast(values, E8M0, saturate=1, round_mode=mode)
    assert found.view(np.uint8).tolist() == wanted.view(np.uint8).tolist()


def test_powers_of_two_saturate_or_become_nan() -> None:
    values = np.array([0.0, np.nan, np.inf, 3e38, 1e-40], np.float32)
    assert cast(values, E8M0).view(np.uint8).tolist() == [0, 255, 254, 254, 0]
    found = cast(values, E8M0, saturate=0, round_mode="nearest").view(np.uint8).tolist()
    assert found == [255, 255, 255, 255, 255]


@pytest.mark.parametrize("kind", [DataType.INT4, DataType.UINT4, DataType.INT2, DataType.UINT2])
@pytest.mark.parametrize("wide", [np.float32, np.float16, np.int64, np.int8])
def test_small_integers_keep_the_low_bits(kind: DataType, wide: type) -> None:
    values: NDArray[Any] = np.arange(-20, 21).astype(wide)
    wanted = reference("Cast", [values], to=onnx_code(kind))
    assert cast(values, kind).view(np.uint8).tolist() == wanted.view(np.uint8).tolist()


def test_numbers_that_are_none_become_zero_as_small_integers() -> None:
    values = np.array([np.nan, 1.9, -1.9], np.float32)
    assert cast(values, DataType.INT4).astype(int).tolist() == [0, 1, -1]


@pytest.mark.parametrize("kind", FLOATS8, ids=lambda t: t.value)
def test_wide_numbers_round_once_to_float8(kind: DataType) -> None:
    """Just above halfway in float64, which float32 would round to halfway, and then to even."""
    exact = codes_of(kind).astype(np.float64)
    exact = np.unique(exact[np.isfinite(exact) & (exact > 0)])
    values = (exact[1:] + exact[:-1]) / 2 * (1 + 2.0**-40)
    assert (cast(values, kind).astype(np.float64) == exact[1:]).all()


@pytest.mark.parametrize("kind", [t for t in NARROW if t is not E8M0], ids=lambda t: t.value)
@pytest.mark.parametrize("block", [0, 4])
def test_quantizing_agrees_with_the_reference(kind: DataType, block: int) -> None:
    random = np.random.default_rng(3)
    x = (random.standard_normal((3, 8)) * 9).astype(np.float32)
    scale = random.uniform(0.5, 2, (3, 2) if block else ()).astype(np.float32)
    zero = np.zeros(scale.shape, kind.dtype)
    if not kind.is_floating:
        zero = np.ones(scale.shape, kind.dtype)
    attributes: dict[str, Any] = {"axis": 1, "block_size": block}
    wanted = reference("QuantizeLinear", [x, scale, zero], **attributes)
    (found,) = evaluate("QuantizeLinear", [x, scale, zero], attributes=attributes)
    assert found.dtype == wanted.dtype == kind.dtype
    assert same(found, wanted)
    (real,) = evaluate("DequantizeLinear", [found, scale, zero], attributes=attributes)
    np.testing.assert_array_equal(
        real, reference("DequantizeLinear", [wanted, scale, zero], **attributes)
    )


@pytest.mark.parametrize("code", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_the_precision_of_the_division_may_be_given(code: int) -> None:
    x = (np.random.default_rng(4).standard_normal((4, 500)) * 40).astype(np.float32)
    scale = np.array(0.37, np.float32)
    attributes = {"precision": code, "output_dtype": TensorProto.INT8}
    wanted = reference("QuantizeLinear", [x, scale], **attributes)
    (found,) = evaluate("QuantizeLinear", [x, scale], attributes=attributes)
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(CompileError, match="precision"):
        infer_types(
            "QuantizeLinear", [ValueType((2,), DataType.FLOAT32), ValueType((), DataType.FLOAT32)],
            attributes={"precision": TensorProto.INT8},
        )  # fmt: skip


def test_a_zero_point_may_be_a_vector_of_one() -> None:
    zero = np.ones(1, DataType.INT4.dtype)
    x, scale = np.array([2, 4], np.float32), np.array(2, np.float32)
    (made,) = evaluate("QuantizeLinear", [x, scale, zero])
    assert made.astype(int).tolist() == [2, 3]


def test_a_scale_may_be_a_power_of_two() -> None:
    x = np.array([[1, 2, 3, 4]], np.float32)
    scale = np.array([[0.5, 2]], np.float32).astype(E8M0.dtype)
    attributes = {"axis": 1, "block_size": 2, "output_dtype": TensorProto.INT4}
    (made,) = evaluate("QuantizeLinear", [x, scale], attributes=attributes)
    assert made.astype(int).tolist() == [[2, 4, 2, 2]]
    attributes["output_dtype"] = TensorProto.FLOAT
    (back,) = evaluate("DequantizeLinear", [made, scale], attributes=attributes)
    assert back.tolist() == [[1, 2, 4, 4]]


@pytest.mark.parametrize("kind", NARROW, ids=lambda t: t.value)
def test_elements_are_moved_as_they_are(kind: DataType) -> None:
    codes = codes_of(kind).reshape(2, -1)
    (turned,) = evaluate("Transpose", [codes])
    (flat,) = evaluate("Reshape", [turned, np.array([-1])])
    assert flat.view(np.uint8).tolist() == codes.T.reshape(-1).view(np.uint8).tolist()
    (spread,) = evaluate("Expand", [flat, np.array([2, flat.size])])
    assert spread.view(np.uint8).tolist() == [flat.view(np.uint8).tolist()] * 2


@pytest.mark.parametrize("kind", NARROW, ids=lambda t: t.value)
def test_nothing_is_computed_in_narrow_types(kind: DataType) -> None:
    with pytest.raises(CompileError, match="does not support the data type"):
        infer_types("Add", [ValueType((2,), kind), ValueType((2,), kind)])


def test_a_bit_cast_keeps_the_code() -> None:
    codes = codes_of(DataType.UINT4)
    (made,) = evaluate("BitCast", [codes], attributes={"to": TensorProto.FLOAT4E2M1})
    assert made.dtype == DataType.FLOAT4_E2M1.dtype
    assert made.view(np.uint8).tolist() == list(range(16))
    with pytest.raises(CompileError, match="does not support this type"):
        infer_types(
            "BitCast", [ValueType((2,), DataType.UINT4)], attributes={"to": TensorProto.INT8}
        )


def test_an_unknown_round_mode_is_refused() -> None:
    with pytest.raises(CompileError, match="round_mode"):
        infer_types(
            "Cast", [ValueType((2,), DataType.FLOAT32)], attributes={"to": 24, "round_mode": "odd"}
        )
