"""`stitch.Expect`: hands data on only where an input has the value that was compiled for."""

from __future__ import annotations

import numpy as np
import pytest

from stitch.errors import CompileError, TaskError
from stitch.ops import bind, evaluate, infer_types
from stitch.program import Array, DataType, ValueType

DATA = np.arange(6, dtype=np.float32).reshape(2, 3)
NAMED = {"name": "s"}


def expect(found: Array, wanted: Array) -> Array:
    return evaluate("Expect", [DATA, found, wanted], domain="stitch", attributes=NAMED)[0]


def test_equal_values_let_the_data_through() -> None:
    np.testing.assert_array_equal(expect(np.array([3, 2]), np.array([3, 2])), DATA)


def test_another_value_is_an_error_that_shows_both() -> None:
    with pytest.raises(TaskError, match="one value of 's'") as caught:
        expect(np.array([2, 3]), np.array([3, 2]))
    assert (caught.value.expected, caught.value.got) == ("[3, 2]", "[2, 3]")


def test_the_value_is_looked_at_in_every_run() -> None:
    found, out = np.array([1]), np.empty_like(DATA)
    steps = bind("Expect", [DATA, found, np.array([1])], [out], domain="stitch", attributes=NAMED)
    for step in steps:
        step()
    np.testing.assert_array_equal(out, DATA)
    found[0] = 2
    with pytest.raises(TaskError, match="one value"):
        for step in steps:
            step()


@pytest.mark.parametrize(
    ("kind", "shape"), [(DataType.INT32, (2,)), (DataType.INT64, (3,)), (DataType.INT64, ())]
)
def test_values_of_another_type_or_shape_are_refused(
    kind: DataType, shape: tuple[int, ...]
) -> None:
    types = [
        ValueType((2, 3), DataType.FLOAT32),
        ValueType((2,), DataType.INT64),
        ValueType(shape, kind),
    ]
    with pytest.raises(CompileError):
        infer_types("Expect", types, domain="stitch", attributes=NAMED)
