"""Element by element: arithmetic, functions, comparisons, logic and activations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stitch.ops import evaluate
from tests.support.operators.against_onnx import check

FLOATS = ("f32", "f64", "f16")
INTS = ("i8", "i32", "i64", "ui8", "ui32")
NUMERIC = FLOATS + INTS


def _rows() -> list[tuple[str, list[str], dict[str, object]]]:
    rows: list[tuple[str, list[str], dict[str, object]]] = []

    def add(ops: str, types: tuple[str, ...], *operands: str, **attributes: object) -> None:
        rows.extend(
            (op, [operand.replace("T", kind) for operand in operands], attributes)
            for op in ops.split()
            for kind in types
        )

    add("Add Sub Mul", NUMERIC, "T[2,3]", "T[3]")
    add("Div", NUMERIC, "T[2,1,3]", "T[4,1]+")
    add("Mod", INTS, "T[6,5]", "T[5]+")
    add("Mod", NUMERIC, "T[6,5]", "T[5]+", fmod=1)
    add("Pow", FLOATS, "T[2,3]+", "T[3]")
    add("Pow", ("i32", "i64"), "T[4,3]", "T[3]+")
    add("Pow", ("f32",), "T[4,3]", "i64[3]")
    add("Pow", ("i32",), "T[4,3]+", "f32[3]+")
    add("Max Min", NUMERIC, "T[2,3]", "T[3]", "T[2,1]")
    add("Sum Mean", FLOATS, "T[2,3]", "T[3]", "T[2,3]")
    add("Max Sum Mean", ("f32",), "T[4]")
    add("Clip", NUMERIC, "T[3,4]")
    add("Clip", NUMERIC, "T[3,4]", "T[]", "T[]+")
    add("BitwiseAnd BitwiseOr BitwiseXor", INTS, "T[2,3]", "T[3]")
    add("BitwiseNot", INTS, "T[2,3]")
    add("BitShift", ("ui8", "ui16", "ui32", "ui64"), "T[2,3]", "T[3]", direction="LEFT")
    add("BitShift", ("ui8", "ui32"), "T[2,3]", "T[3]", direction="RIGHT")
    add("Neg", (*FLOATS, "i8", "i64"), "T[2,3]")
    add("Abs Sign", NUMERIC, "T[2,3]")
    add("Sqrt Log Reciprocal", FLOATS, "T[2,3]+")
    add("Exp Floor Ceil Round Sin Cos Tan Atan Sinh Cosh Asinh Tanh", FLOATS, "T[2,3]")
    add("Asin Acos Atanh", FLOATS, "T[2,3]1")
    add("Acosh", FLOATS, "T[0,3]+")
    add("Sigmoid Softplus Softsign Mish HardSigmoid", FLOATS, "T[5,7]")
    # In float64 the reference works with float32 constants: see the exact tests below.
    add("HardSwish Gelu Erf", ("f32", "f16"), "T[5,7]")
    add("Gelu", ("f32", "f16"), "T[5,7]", approximate="tanh")
    add("Relu", (*FLOATS, "i8", "i64"), "T[5,7]")
    add("Celu", ("f32",), "T[5,7]")
    add("Celu", ("f32",), "T[5,7]", alpha=1.5)
    add("Elu Selu LeakyRelu ThresholdedRelu Swish", FLOATS, "T[5,7]")
    add("Elu LeakyRelu ThresholdedRelu Swish", FLOATS, "T[5,7]", alpha=1.5)
    add("LeakyRelu", ("f32",), "T[5,7]", alpha=-0.5)
    add("HardSigmoid", FLOATS, "T[5,7]", alpha=0.75, beta=0.125)
    add("Selu", FLOATS, "T[5,7]", alpha=0.75, gamma=1.125)
    add("PRelu", (*FLOATS, "i32"), "T[2,3,4]", "T[3,1]")
    add("Equal", (*NUMERIC, "bool"), "T[2,3]", "T[3]")
    add("Less LessOrEqual Greater GreaterOrEqual", NUMERIC, "T[2,3]", "T[3]")
    add("And Or Xor", ("bool",), "T[2,3]", "T[3]")
    add("Not", ("bool",), "T[2,3]")
    add("IsNaN IsInf", FLOATS, "T[2,3]")
    add("Where", (*NUMERIC, "bool"), "bool[2,1]", "T[3]", "T[2,3]")
    add("Where", ("f32", "bool"), "bool[2,3]", "T[2,3]", "T[2,3]")
    return rows


CASES = _rows()
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 1e30, -1e30])


@pytest.mark.parametrize(
    ("op", "operands", "attributes"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES]
)
def test_an_operator_agrees_with_onnx(
    op: str, operands: list[str], attributes: dict[str, object]
) -> None:
    check(op, operands, attributes)


@pytest.mark.parametrize("op", ["Add", "Mul", "Div", "Less", "Equal", "Max", "Pow"])
def test_random_shapes_broadcast_as_in_onnx(op: str) -> None:
    rng = np.random.default_rng(11)
    for seed in range(12):
        shape = rng.choice([0, 1, 2, 3, 5], size=rng.integers(0, 5), p=[0.1, 0.2, 0.3, 0.2, 0.2])
        sides = []
        for _ in range(2):
            cut = shape[rng.integers(0, len(shape) + 1) :]
            sizes = np.where(rng.random(len(cut)) < 0.3, 1, cut)
            sides.append(f"f32[{','.join(map(str, sizes))}]+")
        check(op, sides, {}, seed=seed)


@pytest.mark.parametrize(
    "op",
    [
        *("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Softsign", "HardSigmoid", "HardSwish", "Elu"),
        *("Selu", "Exp", "Log", "Sqrt", "Abs", "Sign", "Floor", "Round", "Erf", "Gelu", "Neg"),
        *("IsNaN", "IsInf", "ThresholdedRelu"),
    ],
)
def test_special_values_agree_with_onnx(op: str) -> None:
    check(op, [SPECIAL.astype(np.float32)], {})


def test_a_chain_longer_than_one_block_is_complete() -> None:
    for op in ("Gelu", "Mish", "Elu", "Sigmoid"):
        check(op, ["f32[3,16385]"], {})


@pytest.mark.parametrize(("kind", "limit"), [(np.float32, 3e-7), (np.float64, 1e-15)])
def test_erf_is_as_accurate_as_promised(kind: type[np.floating], limit: float) -> None:
    x = np.linspace(-7, 7, 20001).astype(kind)
    (y,) = evaluate("Erf", [x])
    exact = np.array([math.erf(v) for v in x.astype(np.float64)])
    assert abs(y.astype(np.float64) - exact).max() <= limit


def test_erf_keeps_its_relative_accuracy_near_zero() -> None:
    for kind, limit in ((np.float32, 1e-6), (np.float64, 1e-15)):
        x = np.geomspace(1e-30, 1.0, 1001).astype(kind)
        (y,) = evaluate("Erf", [x])
        exact = np.array([math.erf(v) for v in x.astype(np.float64)])
        assert (abs(y.astype(np.float64) - exact) / exact).max() <= limit


def test_float64_activations_are_exact_to_float64() -> None:
    x = np.linspace(-6, 6, 101)
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x])
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    for op, attributes, wanted in (
        ("Gelu", {}, 0.5 * x * (1 + erf)),
        ("Gelu", {"approximate": "tanh"}, 0.5 * x * (1 + tanh)),
        ("HardSwish", {}, x * np.clip(x / 6 + 0.5, 0, 1)),
    ):
        (found,) = evaluate(op, [x], attributes=attributes)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_integer_division_truncates_and_survives_zero_and_overflow() -> None:
    least = np.iinfo(np.int32).min
    a = np.array([-7, 7, -7, 7, least, 5], np.int32)
    b = np.array([2, -2, -2, 2, 3, 0], np.int32)
    (quotient,) = evaluate("Div", [a, b])
    assert quotient[:5].tolist() == [-3, -3, 3, 3, -715827882]
    (overflow,) = evaluate("Div", [np.array([least], np.int32), np.array([-1], np.int32)])
    assert overflow.shape == (1,)


def test_mod_takes_the_sign_of_the_divisor_or_with_fmod_of_the_dividend() -> None:
    a, b = np.array([-4, 7, 5, 4, -7, 8]), np.array([2, -3, 8, -2, 3, 5])
    assert evaluate("Mod", [a, b])[0].tolist() == [0, -2, 5, 0, 2, 3]
    assert evaluate("Mod", [a, b], attributes={"fmod": 1})[0].tolist() == [0, 1, 5, 0, -1, 3]
    assert evaluate("Mod", [a, np.zeros(6, np.int64)])[0].shape == (6,)


def test_integers_to_negative_powers_truncate() -> None:
    base = np.array([2, 1, -1, -1, 0, 3])
    power = np.array([-1, -5, -2, -3, -1, 2])
    assert evaluate("Pow", [base, power])[0].tolist() == [0, 1, 1, -1, 0, 9]


def test_clip_with_bounds_that_cross_gives_the_upper_one() -> None:
    low, high = np.array(3.0, np.float32), np.array(1.0, np.float32)
    assert evaluate("Clip", [np.arange(4, dtype=np.float32), low, high])[0].tolist() == [1.0] * 4


def test_isinf_can_look_for_one_sign_only() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    for negative, positive in ((1, 0), (0, 1), (0, 0), (1, 1)):
        flags = {"detect_negative": negative, "detect_positive": positive}
        wanted = [bool(positive), bool(negative), False, False]
        assert evaluate("IsInf", [x], attributes=flags)[0].tolist() == wanted


@pytest.mark.parametrize("op", ["And", "Or"])
def test_truth_values_with_one_value_for_all_are_those_of_numpy(op: str) -> None:
    # Also where a truth value has another byte than 0 and 1.
    x = np.array([0, 1, 2, 255, 0, 128] * 40, np.uint8).view(np.bool_).reshape(3, 80)
    expected = {"And": np.logical_and, "Or": np.logical_or}[op]
    for one in (np.array(True), np.array(False), np.array([[True]]), np.array([[[False]]])):
        for operands in ((x, one), (one, x), (one, one), (x[:0], one)):
            (found,) = evaluate(op, operands)
            wanted = expected(*operands)
            assert found.shape == wanted.shape and np.array_equal(found, wanted)
