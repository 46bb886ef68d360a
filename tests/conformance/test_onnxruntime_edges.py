"""Where ONNX Runtime's kernels are wrong or stop at the edges of a type, and programs are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch import ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime.executors import make_executor
from tests.support.operators.one_operation import MACHINE, Binding, Row, one_operation
from tests.support.stitched_models import model, one

WIDE = np.array([2**31, -(2**31) - 1, 2**40, 5, -7, 2**63 - 1, -(2**63), 2**32 + 3] * 3)
OTHER = np.array([5, 3, -2, 2**32, 2**50, 1, 0, 3] * 3)


def computed(row: Row, *operands: Array) -> list[Array]:
    """The outputs of ONNX Runtime's executor."""
    program = one_operation(row).program
    return Binding(make_executor("onnxruntime").prepare(program, MACHINE), program).run(operands)


@pytest.mark.parametrize(("op", "function"), [("Max", np.maximum), ("Min", np.minimum)])
def test_extremes_of_whole_numbers_beyond_32_bits(op: str, function: Any) -> None:
    (made,) = computed(Row(op, ["i64[24]", "i64[24]", "i64[]"]), WIDE, OTHER, np.array(-3))
    np.testing.assert_array_equal(made, function(function(WIDE, OTHER), -3))


@pytest.mark.parametrize("bounds", [(-3, 2**40), (2**33, None), (None, -(2**33)), (5, 3)])
def test_clipping_whole_numbers_beyond_32_bits(bounds: tuple[int | None, int | None]) -> None:
    specs = [None if bound is None else "i64[]" for bound in bounds]
    given = [np.array(bound) for bound in bounds if bound is not None]
    (made,) = computed(Row("Clip", ["i64[24]", *specs]), WIDE, *given)
    limits = np.iinfo(np.int64)
    least = limits.min if bounds[0] is None else bounds[0]
    most = limits.max if bounds[1] is None else bounds[1]
    np.testing.assert_array_equal(made, np.minimum(np.maximum(WIDE, least), most))


def test_signs_of_whole_numbers_beyond_32_bits() -> None:
    np.testing.assert_array_equal(computed(Row("Sign", ["i64[24]"]), WIDE)[0], np.sign(WIDE))


@pytest.mark.parametrize(("op", "function"), [("ReduceMax", np.max), ("ReduceMin", np.min)])
@pytest.mark.parametrize("axes", [None, [0], [1, 2], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_extremes_along_axes_of_whole_numbers_beyond_32_bits(
    op: str, function: Any, axes: list[int] | None, keepdims: int
) -> None:
    x = WIDE.reshape(3, 4, 2)
    specs = ["i64[3,4,2]", *([] if axes is None else [axes])]
    (made,) = computed(Row(op, specs, {"keepdims": keepdims}), x)
    wanted = function(x, axis=None if axes is None else tuple(axes), keepdims=bool(keepdims))
    np.testing.assert_array_equal(made, wanted)


def test_a_channel_of_one_number_is_normalized_to_zeros() -> None:
    x = np.full((2, 3, 4, 5), 7, np.float32)
    x[:, 1] = np.arange(40).reshape(2, 4, 5)
    (made,) = computed(Row("MeanVarianceNormalization", ["f32[2,3,4,5]"]), x)
    assert not made[:, [0, 2]].any()
    np.testing.assert_allclose(made[:, 1].std(), 1, rtol=1e-5)


def test_a_dropout_that_drops_nothing_takes_any_ratio() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, mask = computed(Row("Dropout", ["f32[2,3]", "f32[]"], {}, 2), x, np.array(7, np.float32))
    np.testing.assert_array_equal(y, x)
    assert mask.all()


def test_zeros_around_an_image_are_pooled_with_numbers_below_zero() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (1, 1, 2, 2), "float32")
        padded = b.op("Pad", x, [0, 0, 1, 0, 0, 0, 0, 0])
        b.output("y", b.op("MaxPool", padded, kernel_shape=(2, 2)))

    x = np.array([[[[-1, -2], [-3, -4]]]], np.float32)
    with stitch.open_device("host", executor="onnxruntime") as device:
        y = one(device.load(model("padded", build, target="host"))(x))
        assert y.numpy().ravel().tolist() == [0, -1]


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto"])
def test_indices_of_a_floating_type_are_cut_to_whole_numbers(executor: str) -> None:
    """As ONNX says of OneHot; its reference, and ONNX Runtime below 1.32, compare as they are."""

    def build(b: ComputationGraphBuilder) -> None:
        indices = b.input("x", (6,), "float32")
        b.output("y", b.op("OneHot", indices, np.array(3), np.array([0, 1]), axis=-1))

    with stitch.open_device("tiny", executor=executor) as device:
        program = device.load(model("hot", build))
        given = np.array([0.6, 2.9, -0.5, -1.2, np.nan, 3.4e38], np.float32)
        hot = one(program(given)).numpy().argmax(1) - (one(program(given)).numpy().sum(1) == 0)
    np.testing.assert_array_equal(hot, [0, 2, 0, 2, -1, -1])


def test_a_batch_without_momentum_is_free_of_what_ran_before_in_every_run() -> None:
    # The kernel writes over the statistics that it is given.
    rng = np.random.default_rng(3)
    row = Row(
        "BatchNormalization", ["f32[4,3,5]", *["f32[3]"] * 4],
        {"training_mode": 1, "momentum": 0.0}, 3,
    )  # fmt: skip
    program = one_operation(row).program
    binding = Binding(make_executor("onnxruntime").prepare(program, MACHINE), program)
    one, wild = np.ones(3, np.float32), np.array([np.inf, np.nan, -1e38], np.float32)
    for spoiled in (True, False, True):
        x = rng.normal(2, 1, (4, 3, 5)).astype(np.float32)
        x[0, 0, 0] = np.nan if spoiled else 0
        before = [array.copy() for array in (x, one, one, wild, wild)]
        _, mean, variance = binding.run(before)
        for given, kept in zip(before, (x, one, one, wild, wild), strict=True):
            np.testing.assert_array_equal(given, kept)
        assert np.isnan(mean[0]) == spoiled
        np.testing.assert_allclose(mean[1:], x.mean((0, 2))[1:], rtol=1e-5)
        np.testing.assert_allclose(variance[1:], x.var((0, 2))[1:], rtol=1e-5)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize("padding", ["SAME_LOWER", "SAME_UPPER"])
def test_pools_that_are_dilated_are_padded_for_it(op: str, padding: str) -> None:
    """ONNX Runtime (1.32) counts a window's pads as if it were not dilated."""
    attributes = {"kernel_shape": (2, 3), "dilations": (2, 2), "auto_pad": padding}
    row, x = Row(op, ["f32[2,3,5,6]"], attributes), np.arange(180, dtype=np.float32)
    program = one_operation(row).program
    wanted = Binding(make_executor("numpy").prepare(program, MACHINE), program)
    given = x.reshape(2, 3, 5, 6) % 7
    (made,) = computed(row, given)
    np.testing.assert_allclose(made, wanted.run([given])[0], rtol=1e-6)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
def test_pools_without_results_give_none(op: str) -> None:
    """ONNX Runtime (1.32) divides by their number, which ends the process."""
    row = Row(op, ["f32[1,16,1,1]"], {"kernel_shape": (2, 1), "ceil_mode": 1})
    (made,) = computed(row, np.ones((1, 16, 1, 1), np.float32))
    assert made.shape == (1, 16, 0, 1)
