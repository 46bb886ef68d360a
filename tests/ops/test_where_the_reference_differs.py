"""Cases in which ONNX's reference evaluator does not do what its specification says.

Each test says why, and compares with the specification instead.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stitch.errors import CompileError
from stitch.ops import evaluate
from stitch.program import Array


def floats(*shape: int) -> Array:
    return np.random.default_rng(3).normal(0, 1, shape).astype(np.float32)


def test_groups_of_a_transposed_convolution_are_independent() -> None:
    """The reference cuts the weights by output channels and gives every group the same bias."""
    x, w, b = floats(2, 4, 3, 5), floats(4, 3, 3, 3), floats(6)
    (whole,) = evaluate("ConvTranspose", [x, w, b], attributes={"group": 2})
    for group in (0, 1):
        rows, columns = slice(2 * group, 2 * group + 2), slice(3 * group, 3 * group + 3)
        (part,) = evaluate("ConvTranspose", [x[:, rows], w[rows], b[columns]])
        np.testing.assert_allclose(whole[:, columns], part, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_same_lower_gives_the_odd_padding_to_the_beginning(op: str) -> None:
    """The reference's MaxPool floors the output size of SAME_LOWER; the specification ceils it."""
    x = floats(2, 3, 9, 8)
    same = {"kernel_shape": (3, 2), "strides": (2, 1), "auto_pad": "SAME_LOWER"}
    explicit = {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 1, 1, 0)}
    (found,) = evaluate(op, [x], attributes=same)
    (wanted,) = evaluate(op, [x], attributes=explicit)
    assert found.shape == (2, 3, 5, 8)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 2), (1, 1, 2, 0)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_maxpool_with_any_padding(pads: tuple[int, ...], strides: tuple[int, int]) -> None:
    """Without dilation the reference runs out of bounds when kernel and padding differ."""
    x = floats(2, 3, 7, 8)
    attributes = {"kernel_shape": (3, 3), "strides": strides, "pads": pads}
    widths = ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))
    padded = np.pad(x, widths, constant_values=-np.inf)
    boxes = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    wanted = boxes.max((-2, -1))[:, :, :: strides[0], :: strides[1]]
    (found,) = evaluate("MaxPool", [x], attributes=attributes)
    np.testing.assert_array_equal(found, wanted)
    values, indices = evaluate("MaxPool", [x], attributes=attributes, outputs=2)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(x.ravel()[indices], wanted)


def test_a_backward_slice_clamps_its_start_to_the_first_element() -> None:
    """The reference slices as Python does; the specification clamps starts to 0..size - 1."""
    x = np.array([1, 2, 3], np.float32)
    operands = [np.array([v]) for v in (-7, -4, 0, -1)]
    assert evaluate("Slice", [x, *operands])[0].tolist() == [1.0]


def test_maxpool_indices_in_column_major_order() -> None:
    """The reference ignores storage_order; this is the example of ONNX's operator tests."""
    x = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)
    attributes = {"kernel_shape": (2, 2), "strides": (2, 2), "storage_order": 1}
    values, indices = evaluate("MaxPool", [x], attributes=attributes, outputs=2)
    assert values.ravel().tolist() == [7, 9, 17, 19]
    assert indices.ravel().tolist() == [6, 16, 8, 18]


def test_global_pools_reduce_all_spatial_axes() -> None:
    """The reference reduces the wrong axes unless there are two spatial ones."""
    for shape in ((2, 3, 5), (2, 3, 4, 2, 3)):
        x = floats(*shape)
        (found,) = evaluate("GlobalMaxPool", [x])
        np.testing.assert_array_equal(found.reshape(2, 3), x.reshape(2, 3, -1).max(2))


def test_negative_pads_crop() -> None:
    """The reference hands negative pads to np.pad, which refuses them."""
    x = floats(4, 5)
    (found,) = evaluate("Pad", [x, np.array([-1, 2, 1, -1])])
    wanted = np.pad(x, ((0, 1), (2, 0)))[1:, :-1]
    np.testing.assert_array_equal(found, wanted)
    (edge,) = evaluate("Pad", [x, np.array([-1, 2, 1, -1])], attributes={"mode": "edge"})
    np.testing.assert_array_equal(edge, np.pad(x[1:, :-1], ((0, 1), (2, 0)), "edge"))
    (gone,) = evaluate("Pad", [x, np.array([-4, 0, 1, 0])])
    np.testing.assert_array_equal(gone, np.zeros((1, 5)))


def test_a_scalar_has_nothing_to_pad() -> None:
    """Indexed by nothing, it would be a number and no array."""
    (found,) = evaluate("Pad", [np.array(3.5, np.float32), np.zeros(0, np.int64)])
    np.testing.assert_array_equal(found, np.float32(3.5))


def test_squares_of_small_integers_keep_their_type() -> None:
    """The reference's np.sum widens int32 to int64."""
    x = np.array([[1, 2], [3, 4]], np.int32)
    (found,) = evaluate("ReduceSumSquare", [x, np.array([1])])
    assert found.dtype == np.int32
    assert found.tolist() == [[5], [25]]


def test_logarithms_of_sums_of_integers_truncate() -> None:
    """The reference refuses integers here; opset 26 still lists them."""
    x = np.array([[1, 2], [300, 4000]], np.int32)
    assert evaluate("ReduceLogSum", [x, np.array([1])])[0].tolist() == [[1], [8]]
    assert evaluate("ReduceLogSumExp", [x, np.array([1])])[0].tolist() == [[2], [4000]]


def test_log_sum_exp_of_infinities_is_infinite() -> None:
    """The reference subtracts an infinite maximum from itself."""
    x = np.array([[np.inf, 1], [-np.inf, -np.inf]], np.float32)
    (found,) = evaluate("ReduceLogSumExp", [x, np.array([1])])
    assert found.ravel().tolist() == [math.inf, -math.inf]


def test_layer_normalization_gives_mean_and_inverse_deviation() -> None:
    """The reference computes in float64 first; float32 throughout is what stash_type=1 asks for."""
    x, scale = floats(3, 4, 5), floats(5)
    y, mean, inverse = evaluate("LayerNormalization", [x, scale], outputs=3)
    assert mean.shape == inverse.shape == (3, 4, 1)
    np.testing.assert_allclose(mean, x.mean(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=1e-5)
    np.testing.assert_allclose(y, (x - mean) * inverse * scale, rtol=1e-5, atol=1e-6)


def test_float64_normalizations_are_exact_to_float64() -> None:
    """The reference stashes in float32, as the default stash_type says; more is not less."""
    x = floats(2, 6, 4).astype(np.float64)
    one, zero = np.ones(6), np.zeros(6)
    groups = {"num_groups": 3, "epsilon": 0.0}
    (found,) = evaluate("GroupNormalization", [x, one, zero], attributes=groups)
    rows = x.reshape(2, 3, 8)
    wanted = (rows - rows.mean(2, keepdims=True)) / rows.std(2, keepdims=True)
    np.testing.assert_allclose(found.reshape(2, 3, 8), wanted, rtol=1e-12, atol=1e-14)


def test_ceil_mode_adds_no_weight_and_no_window_in_the_padding() -> None:
    """The reference spreads what ceil_mode adds over both ends; it belongs to the end."""
    x = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5)
    base = {"kernel_shape": (2,), "strides": (2,), "ceil_mode": 1}
    assert evaluate("AveragePool", [x], attributes=base)[0].ravel().tolist() == [1.5, 3.5, 5.0]
    counted = {**base, "count_include_pad": 1}
    assert evaluate("AveragePool", [x], attributes=counted)[0].ravel().tolist() == [1.5, 3.5, 5.0]
    padded = {**counted, "pads": (1, 1)}
    assert evaluate("AveragePool", [x], attributes=padded)[0].ravel().tolist() == [0.5, 2.5, 4.5]
    assert evaluate("MaxPool", [x], attributes=base)[0].ravel().tolist() == [2, 4, 5]


def test_cumulative_products_follow_the_rule_of_cumulative_sums() -> None:
    """The reference of CumProd is compared by its definition, for both flags."""
    x = np.array([[2.0, 3.0, 4.0]], np.float32)
    axis = np.array(1)
    for flags, wanted in (
        ({}, [2, 6, 24]),
        ({"exclusive": 1}, [1, 2, 6]),
        ({"reverse": 1}, [24, 12, 4]),
        ({"exclusive": 1, "reverse": 1}, [12, 4, 1]),
    ):
        assert evaluate("CumProd", [x, axis], attributes=flags)[0].ravel().tolist() == wanted


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grids_are_sampled_as_pytorch_samples_them(
    mode: str, padding: str, align_corners: int
) -> None:
    """The reference clamps a cubic's place to the border, and not its neighbours
    (onnxruntime#28090)."""
    x, grid = floats(2, 2, 4, 5), floats(2, 6, 7, 2)
    words = {"linear": "bilinear", "cubic": "bicubic"}
    wanted = torch.nn.functional.grid_sample(
        torch.from_numpy(x), torch.from_numpy(grid), words.get(mode, mode), padding,
        bool(align_corners),
    )  # fmt: skip
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    (found,) = evaluate("GridSample", [x, grid], attributes=attributes)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_cubics_far_beyond_a_border_are_its_element() -> None:
    x, grid = floats(1, 1, 3, 4), np.full((1, 1, 2, 2), 1e30, np.float32)
    grid[:, :, 1] = -np.inf
    attributes = {"mode": "cubic", "padding_mode": "border"}
    (found,) = evaluate("GridSample", [x, grid], attributes=attributes)
    np.testing.assert_array_equal(found.ravel(), [x[0, 0, -1, -1], x[0, 0, 0, 0]])


def test_pads_below_zero_crop_before_what_is_left_is_wrapped() -> None:
    """The reference hands negative pads to np.pad; this is what ONNX Runtime does."""
    x = np.arange(5, dtype=np.float32)
    for pads in ((2, -1), (-1, 3), (-2, 4)):
        (found,) = evaluate("Pad", [x, np.array(pads)], attributes={"mode": "wrap"})
        left = x[max(-pads[0], 0) : 5 + min(pads[1], 0)]
        wanted = np.pad(left, (max(pads[0], 0), max(pads[1], 0)), "wrap")
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("mode", "pads"), [("edge", (-3, 1)), ("wrap", (1, -3)), ("reflect", (-1, 2))]
)
def test_nothing_that_is_left_of_an_axis_cannot_be_repeated(
    mode: str, pads: tuple[int, int]
) -> None:
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(CompileError, match="cannot be padded"):
        evaluate("Pad", [x, np.array(pads)], attributes={"mode": mode})


def test_weights_of_n_grams_are_in_the_order_of_the_pool() -> None:
    """The reference takes them by column; ONNX says, and ONNX Runtime takes, the i-th n-gram's."""
    pool = {
        "ngram_counts": (0, 2), "ngram_indexes": (2, 0, 1), "pool_int64s": (5, 6, 5, 6),
        "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0,
        "weights": (10.0, 100.0, 1000.0),
    }  # fmt: skip
    x = np.array([5, 6, 5])
    for mode, wanted in (("TF", [1, 1, 2]), ("IDF", [100, 1000, 10]), ("TFIDF", [100, 1000, 20])):
        assert (
            evaluate("TfIdfVectorizer", [x], attributes=pool | {"mode": mode})[0].tolist() == wanted
        )


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize("pads", [(2, 0), (0, 2), (10**9, 10**9)])
def test_pads_as_long_as_a_window_are_refused(op: str, pads: tuple[int, int]) -> None:
    x = np.zeros((1, 1, 4), np.float32)
    attributes = {"kernel_shape": (2,), "strides": (10**9,), "dilations": (2,), "pads": pads}
    with pytest.raises(CompileError, match=f"pads of {op}"):
        evaluate(op, [x], attributes=attributes)


def test_an_empty_image_is_not_sampled_by_offsets() -> None:
    operands = [np.zeros(s, np.float32) for s in ((1, 1, 0, 4), (1, 1, 2, 2), (1, 8, 1, 3))]
    with pytest.raises(CompileError, match="image without elements"):
        evaluate("DeformConv", operands, attributes={"pads": (1, 0, 1, 0)})


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("onesided", [0, 1])
def test_a_transform_of_nothing_but_padding_is_zeros(inverse: int, onesided: int) -> None:
    # NumPy's irfft of no elements leaves its result as the memory was.
    parts = 1 if onesided and not inverse else 2
    operands = [np.zeros((3, 0, parts), np.float32), np.array(5), np.array(1)]
    how = {"inverse": inverse, "onesided": onesided}
    for _ in range(3):
        (made,) = evaluate("DFT", operands, attributes=how)
        assert made.shape[1] == (3 if onesided and not inverse else 5)
        np.testing.assert_array_equal(made, np.zeros(made.shape, np.float32))
