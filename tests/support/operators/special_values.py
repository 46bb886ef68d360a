"""Draws of values at the edges of their types, over all operators, and in what results differ."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from stitch.errors import TaskError
from stitch.ops import evaluate
from stitch.program import Array, DataType
from tests.support.operators.against_onnx import tolerance
from tests.support.operators.one_operation import OneOperation, Row, own_rows, table_rows

#: Classes of values, as the table of differences names them.
CLASSES = ("NaN", "infinity", "huge", "denormal", "zero", "integer")
INTEGERS = ("i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
#: Ways to differ: in numbers; in whether the operands are refused; in the sign of a zero; in what
#: is below the smallest normal number, zero on one side.
WAYS = ("number", "refusal", "sign of zero", "flushed")
#: How far apart sound results may lie, in tolerances of one operation.
SLACK = 10
#: Up to so many times the smallest number is what sums of rounded products leave of zero.
ROUNDED = 1024
#: The limits of any float type, those that NumPy does not have included.
limits_of: Callable[[Any], Any] = ml_dtypes.finfo


def _table_rows() -> Iterator[Row]:
    yield from table_rows("elementwise", "structured", "layer", "signal", "window")


_MATRIX, _MANY = "f32[2,3]", "f32[3,4]"
_X, _LENGTHS = "f32[3,2,4]", np.array([3, 1], np.int32)
_POOLED = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
_LAYER = [_MANY, _MANY, "f32[3,1]", "f32[3,1]+", "f32[4]"]
#: What the tables of operators have elsewhere, or not at all.
OTHERS = (
    Row("CumProd", [_MANY, np.array(1)]),
    Row("Det", ["f32[2,3,3]"]),
    Row("DequantizeLinear", ["i32[3,4]", np.array(0.5, np.float32), "i32[]"]),
    Row("ReduceMax", ["bool[2,0,4]", [1]]),
    Row("RNN", [_X, "f32[1,5,4]1", "f32[1,5,5]1", None, _LENGTHS], {}, 2),
    Row("GRU", [_X, "f32[1,15,4]1", "f32[1,15,5]1", None, _LENGTHS], {}, 2),
    Row("LSTM", [_X, "f32[1,20,4]1", "f32[1,20,5]1", None, _LENGTHS], {}, 2),
    Row("GeluGradient", [_MATRIX, _MATRIX], {}, 1, "stitch"),
    Row("GeluGradient", [_MATRIX, _MATRIX], {"approximate": "tanh"}, 1, "stitch"),
    Row("ConvWeightGradient", ["f32[2,2,5,5]", "f32[2,4,3,3]"], {"kernel_shape": (3, 3)}, 1,
        "stitch"),
    Row("MaxPoolGradient", ["f32[1,2,3,3]", "f32[1,2,5,5]", "f32[1,2,3,3]"], _POOLED, 1, "stitch"),
    Row("BatchNormalizationGradient", ["f32[3,2,4]", "f32[3,2,4]", "f32[2]"], {}, 3, "stitch"),
    Row("BatchNormalizationGradient",
        ["f32[3,2,16]", "f32[3,2,16]", "f32[2]", "f32[2]", "f32[2]+"], {}, 3, "stitch"),
    Row("LayerNormalizationGradient", _LAYER, {}, 3, "stitch"),
    Row("SoftmaxGradient", [_MANY, _MANY], {}, 1, "stitch"),
    Row("Window", ["f32[9,2]", "i64[]<9", "i64[2]<3"], {"lengths": (3, 2)}, 1, "stitch"),
    Row("Window", ["i64[5]", "i64[]<5", "i64[1]<3"], {"lengths": (3,)}, 1, "stitch"),
    Row("Repartition", ["f32[1,3,4]"], {"axis": 1, "degree": 2}, 1, "stitch"),
    Row("Combine", ["f32[2,3,4]"], {"axis": 0, "degree": 2}, 1, "stitch"),
    Row("Replicate", [_MATRIX], {"degree": 2}, 1, "stitch"),
    Row("Reduction", ["f32[2,3,4]"], {"degree": 2}, 1, "stitch"),
    Row("Expect", [_MATRIX, "i64[2]", np.array([1, 2])], {"name": "n"}, 1, "stitch"),
)  # fmt: skip


def rows() -> tuple[Row, ...]:
    """Every row: together they have every operator of the registry."""
    return (*_table_rows(), *own_rows(_MATRIX), *OTHERS)


def in_other_integers(row: Row) -> Iterator[Row]:
    """The row with another type of whole numbers in place of one that it has; some do not fit."""
    kinds = {spec.split("[")[0] for spec in row.specs if isinstance(spec, str)}
    for given, wanted in itertools.product(kinds & set(INTEGERS), INTEGERS):
        specs = [
            wanted + spec.removeprefix(given)
            if isinstance(spec, str) and spec.startswith(given + "[")
            else spec
            for spec in row.specs
        ]
        if wanted != given:
            yield dataclasses.replace(row, specs=specs)


def _of_float(name: str, kind: Any) -> list[float]:
    # Of which sums of some dozens are exact, in any order.
    small, normal = 16 * float(kind.smallest_subnormal), float(kind.smallest_normal)
    return {
        "NaN": [np.nan],
        "infinity": [np.inf, -np.inf],
        "huge": [float(kind.max), float(kind.min)],
        "denormal": [small, -small, 0.75 * normal, -0.75 * normal],
        "zero": [-0.0, 0.0],
    }[name]


def members(name: str, dtype: np.dtype[Any]) -> Array | None:
    """The values of a class in one type; None where it has none."""
    if (dtype.kind == "b") or (dtype.kind in "iu") != (name == "integer"):
        return None
    if name != "integer":
        return np.array(_of_float(name, limits_of(dtype)), dtype)
    limits = np.iinfo(dtype)
    edges = (limits.min, limits.max, -1, 0, 1, 2**31, -100, 100, -7, 7)
    return np.array([v for v in edges if limits.min <= v <= limits.max], dtype)


#: Operands that go together, from those that were drawn.
Together = Callable[[list[Array], Mapping[str, Any]], list[Array]]


def _pooled(operands: list[Array], attributes: Mapping[str, Any]) -> list[Array]:
    gradient, x, _ = operands
    return [gradient, x, *evaluate("MaxPool", [x], attributes=attributes)]


TOGETHER: Mapping[str, Together] = {"MaxPoolGradient": _pooled}


def draws(
    row: Row, one: OneOperation, rng: np.random.Generator, times: int = 1
) -> Iterator[tuple[str, list[Array]]]:
    """The class and the operands of each draw.

    In each class so many `times`: some elements of one operand, of each in turn; of all of them;
    all elements of all; and one element of the first.
    """
    for name in CLASSES * times:
        able = [
            index
            for index, array in enumerate(one.operands)
            if array.size and members(name, array.dtype) is not None
        ]
        if not able:
            continue
        plans = [((index,), 0.3) for index in able]
        for which, share in (*plans, (able, 0.3), (able, 1.0), (able[:1], 0.0)):
            operands = [np.array(a) for a in one.operands]
            for index in which:
                array = operands[index].reshape(-1)
                chosen = rng.random(array.size) < share
                chosen[rng.integers(array.size)] = True
                found = members(name, array.dtype)
                assert found is not None
                array[chosen] = rng.choice(found, int(chosen.sum()))
            together = TOGETHER.get(row.op)
            yield name, together(operands, row.attributes) if together else operands


def differences(
    name: str, ours: Sequence[Array] | TaskError, theirs: Sequence[Array] | TaskError
) -> set[str]:
    """The ways in which two outcomes of a draw of this class differ.

    The sign of a zero counts where zeros were drawn: others are what is left of small numbers.
    """
    if isinstance(ours, TaskError) or isinstance(theirs, TaskError):
        both = isinstance(ours, TaskError) and isinstance(theirs, TaskError)
        return set() if both else {"refusal"}
    found: set[str] = set()
    for mine, other in zip(ours, theirs, strict=True):
        if mine.dtype.kind in "iub":
            found |= set() if np.array_equal(mine, other) else {"number"}
        else:
            found |= _of_reals(mine, other)
    return found if name == "zero" else found - {"sign of zero"}


def _of_reals(ours: Array, theirs: Array) -> set[str]:
    data_type = DataType.from_dtype(ours.dtype)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    whole = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    found = set() if (whole | same).all() else {"number"}
    a, b = a[whole], b[whole]
    if not a.size:
        return found
    relative, absolute = tolerance(data_type)
    most = float(np.maximum(abs(a), abs(b)).max())
    near = SLACK * (relative * abs(a) + absolute) + relative * most
    if (abs(a - b) > near).any():
        found.add("number")
    zeros = (a == 0) & (b == 0)
    if (np.signbit(a) != np.signbit(b))[zeros].any():
        found.add("sign of zero")
    if data_type.compute_dtype == data_type.dtype:
        kind = np.finfo(data_type.dtype)
        least = np.minimum(abs(a), abs(b)) == 0
        most_of_two = np.maximum(abs(a), abs(b))[least]
        rounded, normal = ROUNDED * float(kind.smallest_subnormal), float(kind.smallest_normal)
        if ((most_of_two > rounded) & (most_of_two < normal)).any():
            found.add("flushed")
    return found
