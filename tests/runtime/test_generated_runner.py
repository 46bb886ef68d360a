"""Generated code of a plan gives what the loop over its steps gives, failures included."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch import ComputationGraphBuilder, DataType
from tests.support.stitched_models import integers, one, scaled

F32 = DataType.FLOAT32


def picking() -> stitch.CompiledModel:
    """Rows of a table by number: raises at run time where a number is out of range."""
    builder = ComputationGraphBuilder("pick")
    x = builder.input("x", (4, 16), F32)
    rows = builder.input("rows", (2,), DataType.INT64)
    builder.output("y", builder.op("Gather", x, rows, axis=0))
    return stitch.compile(builder.build(), target="tiny")


@pytest.mark.parametrize("good_runs", [0, 1, 6])
def test_a_step_that_fails_leaves_the_same_behind_however_often_the_plan_has_run(
    good_runs: int,
) -> None:
    table = np.arange(64, dtype=np.float32).reshape(4, 16)
    with stitch.open_device("tiny") as device:
        double, pick = device.load(scaled("double", 2.0, shape=(4, 16))), device.load(picking())

        def run(rows: list[int]) -> tuple[stitch.Tensor, stitch.Tensor]:
            first = one(double(table))
            return first, one(pick(first, np.array(rows)))

        for i in range(good_runs):
            _, picked = run([i % 4, 3])
            np.testing.assert_array_equal(picked.numpy(), (table * 2 + 1)[[i % 4, 3]])
            del picked, _
        first, picked = run([1, 9])
        with pytest.raises(stitch.StitchError, match="out of range"):
            picked.numpy()
        np.testing.assert_array_equal(first.numpy(), table * 2 + 1)
        with pytest.raises(stitch.TaskError, match="pick"):
            picked.numpy()
        del first, picked
        _, picked = run([0, 1])
        np.testing.assert_array_equal(picked.numpy(), (table * 2 + 1)[:2])


def test_a_settled_pipeline_whose_kernel_fails_works_again() -> None:
    table = np.arange(64, dtype=np.float32).reshape(4, 16)
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(picking())])
        for rows in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 9], [1, 3]):
            if 9 in rows:
                with pytest.raises(stitch.StitchError, match="out of range"):
                    pipe(table, np.array(rows))
            else:
                picked = one(pipe(table, np.array(rows)))
                np.testing.assert_array_equal(picked.numpy(), table[rows])
                del picked


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.tolist(),
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1][::-1],
        lambda x: x.view(np.recarray),
        lambda x: x.astype(x.dtype.newbyteorder()),
    ],
    ids=["float64", "list", "fortran", "strided", "subclass", "byte order"],
)
def test_arrays_of_another_kind_take_the_careful_way(other: object) -> None:
    assert callable(other)
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0))])
        for start in range(4):
            x = integers(start=start)
            given = other(x) if start % 2 else x
            np.testing.assert_array_equal(one(pipe(given)).numpy(), x * 2 + 1)


def test_an_array_of_another_shape_is_refused_and_the_pipeline_works_on() -> None:
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0))])
        for _ in range(3):
            x = integers()
            np.testing.assert_array_equal(one(pipe(x)).numpy(), x * 2 + 1)
            with pytest.raises(stitch.LinkError):
                pipe(x.reshape(-1))
