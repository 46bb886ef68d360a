"""Kernels that cut long operands into blocks: what holds across the seams, and beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stitch.ops import bind, evaluate
from stitch.ops.steps import CHUNK_SIZE
from stitch.program import Array


def drawn(*shape: int, seed: int = 0, scale: float = 1.0, at: float = 0.0) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(at, scale, shape)).astype(np.float32)


def run_twice(op: str, inputs: list[Array], outs: list[Array], **attributes: Any) -> None:
    steps = bind(op, inputs, outs, attributes=attributes)
    for _ in range(2):
        for out in outs:
            out[...] = np.nan
        with np.errstate(all="ignore"):
            for step in steps:
                step()


@pytest.mark.parametrize("at", [0.0, 60.0, -60.0, 200.0, -1e4], ids=str)
def test_a_softmax_of_any_magnitude_is_exact_row_by_row(at: float) -> None:
    x = drawn(3 * CHUNK_SIZE // 32 + 5, 32, scale=3.0, at=at)
    x[7] -= 300.0  # one row of a block alone is far from the others
    x[11, 3] = -np.inf
    (found,) = evaluate("Softmax", [x])
    wide = x.astype(np.float64)
    powers = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=2e-6, atol=1e-30)


def test_rows_of_a_softmax_that_are_not_finite_do_not_spoil_their_block() -> None:
    x = drawn(64, 8)
    x[3], x[5, 2], x[9, 1] = -np.inf, np.inf, np.nan
    (found,) = evaluate("Softmax", [x])
    spoiled = np.isnan(found).any(1)
    assert list(np.flatnonzero(spoiled)) == [3, 5, 9]
    np.testing.assert_allclose(found[~spoiled].sum(1), 1.0, rtol=1e-6)


def test_a_softmax_in_the_place_of_its_operand_is_the_same() -> None:
    x = drawn(40, 16, at=500.0)
    (wanted,) = evaluate("Softmax", [x])
    for step in bind("Softmax", [x], [x]):
        step()
    np.testing.assert_allclose(x, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [(9,), (1, 3), (300, 5), (2000, 70), (5, 4, 1, 3), (64, 6, 28, 28), (3, 70, 40, 40),
     (2, 3, 190, 190), (3, 40000, 1), (33, 100, 5, 5), (40, 2, 16)],
    ids=str
)  # fmt: skip
@pytest.mark.parametrize("training", [0, 1], ids=["stored", "of the batch"])
def test_a_batch_of_any_shape_is_normalized(shape: tuple[int, ...], training: int) -> None:
    channels = shape[1] if len(shape) > 1 else 1
    x = drawn(*shape, scale=2.0, at=3.0)
    scale, shift, mean = (drawn(channels, seed=i) for i in (1, 2, 3))
    variance = np.abs(drawn(channels, seed=4)) + np.float32(0.1)
    outs = [np.empty_like(x), np.empty_like(mean), np.empty_like(mean)][: 1 + 2 * training]
    operands = [x, scale, shift, mean, variance]
    run_twice("BatchNormalization", operands, outs, training_mode=training)
    axes, row = tuple({*range(len(shape))} - {1}), (1, -1, *(1,) * (len(shape) - 2))[: len(shape)]
    wide = x.astype(np.float64)
    used = (wide.mean(axes), wide.var(axes)) if training else (mean, variance)
    center, spread = (np.reshape(np.asarray(v, np.float64), row) for v in used)
    normal = (wide - center) / np.sqrt(spread + 1e-5)
    wanted = normal * scale.reshape(row) + shift.reshape(row)
    # Of one sample nothing is left but how far its mean was rounded, times a large factor.
    np.testing.assert_allclose(outs[0], wanted, rtol=1e-5, atol=1e-4)
    for out, old, now in zip(outs[1:], (mean, variance), used, strict=False):
        np.testing.assert_allclose(out, 0.9 * old + 0.1 * now, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 5 * CHUNK_SIZE // 96], ids=["few rows", "many rows"])
@pytest.mark.parametrize("whole", [False, True], ids=["a row of weights", "weights of each row"])
def test_a_layer_is_normalized_in_every_run(rows: int, whole: bool) -> None:
    x = drawn(rows, 96, scale=2.0, at=1.0)
    scale, shift = (drawn(*((rows, 96) if whole else (96,)), seed=i) for i in (1, 2))
    outs = [np.empty_like(x), np.empty((rows, 1), np.float32), np.empty((rows, 1), np.float32)]
    run_twice("LayerNormalization", [x, scale, shift], outs)
    normal = F.layer_norm(torch.from_numpy(x), [96]).numpy()
    np.testing.assert_allclose(outs[0], normal * scale + shift, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outs[1][:, 0], x.mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dilation", "padding", "size", "stride"),
    [(1, 1, 9, 1), (2, 3, 11, 1), (3, 0, 12, 1), (1, 2, 3, 1), (1, 1, 9, 2), (1, 4, 2, 1)],
)
@pytest.mark.parametrize("channels", [(2, 4), (32, 2)], ids=["few", "many"])
def test_a_transposed_convolution_is_that_of_torch(
    dilation: int, padding: int, size: int, stride: int, channels: tuple[int, int]
) -> None:
    x, w = drawn(5, channels[0], size, size + 1), drawn(channels[0], channels[1], 3, 2, seed=1)
    bias = drawn(2 * channels[1], seed=2)
    wanted = F.conv_transpose2d(
        *map(torch.from_numpy, (x, w, bias)), stride=stride, dilation=dilation, groups=2,
        padding=(min(padding, 2 * dilation), 0),
    )  # fmt: skip
    sides = (min(padding, 2 * dilation), 0)
    out = np.empty(tuple(wanted.shape), np.float32)
    run_twice(
        "ConvTranspose", [x, w, bias], [out], strides=(stride,) * 2, dilations=(dilation,) * 2,
        pads=sides + sides, group=2,
    )  # fmt: skip
    np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [(1, 1), (1, 2), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 2, 0, 3), (4, 5, 4, 5)], ids=str)
def test_columns_hold_every_window_and_zero_beside_the_image(
    stride: tuple[int, int], pads: tuple[int, ...]
) -> None:
    x, w = drawn(7, 3, 8, 5), drawn(4, 3, 3, 3, seed=1)
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    wanted = F.conv2d(torch.from_numpy(padded), torch.from_numpy(w), stride=stride)
    out = np.empty(tuple(wanted.shape), np.float32)
    run_twice("Conv", [x, w], [out], strides=stride, pads=pads)
    np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [(0,), (0, 1), (2,), (1, 2), (0, 2), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceL2", "ReduceL1"])
def test_sums_over_any_axes_are_exact_for_whole_numbers(op: str, axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(-8, 9, (6, 5, 300)).astype(np.float32)
    (found,) = evaluate(op, [x, np.array(axes, np.int64)], attributes={"keepdims": 0})
    count = np.prod([x.shape[axis] for axis in axes])
    wanted = {
        "ReduceSum": x.sum(axes),
        "ReduceMean": x.sum(axes) / np.float32(count),
        "ReduceL2": np.sqrt((x * x).sum(axes)),
        "ReduceL1": np.abs(x).sum(axes),
    }[op]
    np.testing.assert_array_equal(found, wanted.astype(np.float32))
