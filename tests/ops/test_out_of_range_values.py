"""What is no number, infinite, or out of range, where a kernel must not spread or wrap it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError, TaskError
from stitch.ops import evaluate


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("lengths", [[4, 1], [-1, 3]])
def test_a_sequence_longer_than_its_steps_or_of_less_than_none_is_refused(
    op: str, gates: int, lengths: list[int]
) -> None:
    x = np.ones((3, 2, 4), np.float32)
    weights = [np.ones((1, 5 * gates, size), np.float32) for size in (4, 5)]
    with pytest.raises(TaskError, match=f"{op}: a length is out of range") as caught:
        evaluate(op, [x, *weights, None, np.array(lengths, np.int32)], outputs=2)
    assert caught.value.expected == "0 to 3"


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38, 1e6])
def test_a_region_that_is_not_finite_or_far_larger_than_its_image_is_refused(odd: float) -> None:
    regions = np.array([[0, 0, 3, 3], [-odd, 0, odd, 3]], np.float32)
    with pytest.raises(TaskError, match="RoiAlign: a region"):
        evaluate("RoiAlign", [np.ones((1, 1, 4, 4), np.float32), regions, np.array([0, 0])])


def test_a_cache_is_written_round_and_round_from_any_start() -> None:
    cache, update = np.zeros((1, 5, 1)), np.arange(1.0, 4.0).reshape(1, 3, 1)
    start = np.array([2**63 - 1])
    (made,) = evaluate("TensorScatter", [cache, update, start],
                       attributes={"mode": "circular", "axis": 1})  # fmt: skip
    assert made.ravel().tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_resizing_spreads_what_is_no_number_to_its_neighbours_only(mode: str, odd: float) -> None:
    x = np.ones((1, 1, 16), np.float32)
    x[0, 0, 8] = odd
    scales = np.array([1, 1, 2], np.float32)
    (made,) = evaluate("Resize", [x, None, scales], attributes={"mode": mode})
    reach = 2 if mode == "linear" else 4
    touched = np.flatnonzero(~np.isfinite(made[0, 0]))
    assert touched.tolist() == list(range(17 - reach, 17 + reach))


def test_resizing_reads_nothing_that_weighs_nothing() -> None:
    x = np.array([[[1.0, np.inf, 3.0]]], np.float32)
    attributes = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    (made,) = evaluate("Resize", [x, None, None, np.array([1, 1, 5])], attributes=attributes)
    assert made[0, 0].tolist() == [1.0, np.inf, np.inf, np.inf, 3.0]


@pytest.mark.parametrize(
    ("data_type", "least"), [(np.int8, -128), (np.uint8, 0), (np.int16, -32768)]
)
def test_what_is_no_number_is_quantized_to_the_least(data_type: Any, least: int) -> None:
    x, scale = np.array([np.nan, 1.0], np.float32), np.array(0.5, np.float32)
    (made,) = evaluate("QuantizeLinear", [x, scale, np.array(3, data_type)])
    assert made.tolist() == [least, 5]


@pytest.mark.parametrize("shape", [(1, 0, 4, 5), (0, 2, 4, 5)])
def test_images_without_channels_or_batches_without_images_are_sampled(
    shape: tuple[int, ...],
) -> None:
    x, grid = np.zeros(shape, np.float32), np.zeros((shape[0], 3, 4, 2), np.float32)
    (made,) = evaluate("GridSample", [x, grid])
    assert made.shape == (*shape[:2], 3, 4)


def test_as_much_may_be_cut_off_one_side_as_is_padded_on_the_other() -> None:
    x, far = np.arange(4, dtype=np.float32), 2**63 - 1
    (cut,) = evaluate("Pad", [x, np.array([-far, far])])
    assert cut.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", ["wrap", "edge"])
def test_an_axis_of_which_nothing_is_left_is_padded_by_no_element_of_it(mode: str) -> None:
    x, far = np.arange(4, dtype=np.float32), 2**63 - 1
    with pytest.raises(CompileError, match="axis 0 of size 4 cannot be padded"):
        evaluate("Pad", [x, np.array([-far, far])], attributes={"mode": mode})


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_a_block_of_less_than_nothing_is_refused(op: str) -> None:
    x = np.ones((3, 4), np.float32 if op == "QuantizeLinear" else np.int8)
    with pytest.raises(CompileError, match="block_size=-7"):
        evaluate(op, [x, np.ones((3, 0), np.float32)], attributes={"axis": -1, "block_size": -7})
