"""Convolutions in tiles: as those in one piece, and with little room whatever the kernel."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CompileError
from stitch.ops import bind, convolution_tiles, evaluate, infer_types, kernel_workspace
from stitch.program import Array, DataType, ValueType
from tests.support.grids import in_turn

MIB = 1 << 20


def numbers(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def run(op: str, *operands: Array, domain: str = "", **attributes: Any) -> tuple[Array, int]:
    """The result of an operation, and the bytes that its kernel took beside it at most."""
    kinds = [ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands]
    words: dict[str, Any] = {"domain": domain, "attributes": attributes}
    types = infer_types(op, kinds, **words)
    out = np.empty(types[0].shape, types[0].data_type.compute_dtype)
    tracemalloc.start()
    try:
        for step in bind(op, operands, [out], **words):
            step()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken <= kernel_workspace(op, kinds, types, **words)
    return out, taken


axes = st.tuples(
    st.integers(1, 7),  # size
    st.integers(1, 4),  # kernel
    st.integers(1, 3),  # stride
    st.integers(1, 2),  # dilation
    st.integers(0, 4),  # pad before
    st.integers(0, 4),  # pad after
)


@pytest.mark.parametrize(
    ("op", "nbytes"),
    in_turn(["Conv", "ConvTranspose", "ConvWeightGradient"], [1, 100, 1000, 10_000]),
)
@settings(max_examples=25, deadline=None)
@given(
    drawn=st.lists(axes, min_size=1, max_size=3),
    group=st.integers(1, 2),
    channels=st.integers(1, 5),
    filters=st.integers(1, 2),
)
def test_tiles_of_any_size_make_the_whole(
    op: str, nbytes: int, drawn: list[tuple[int, ...]], group: int, channels: int, filters: int
) -> None:
    size, kernel, strides, dilations, begin, end = zip(*drawn, strict=True)
    attributes: dict[str, Any] = {
        "group": group, "strides": strides, "dilations": dilations, "pads": (*begin, *end),
    }  # fmt: skip
    x, w = numbers(2, group * channels, *size), numbers(group * filters, channels, *kernel)
    words: dict[str, Any] = {"attributes": attributes}
    try:
        if op == "ConvWeightGradient":
            made = evaluate("Conv", [x, w], attributes=attributes)[0]
            w, attributes["kernel_shape"], words["domain"] = made, kernel, "stitch"
        elif op == "ConvTranspose":
            w = numbers(group * channels, filters, *kernel)
        whole = evaluate(op, [x, w], **words)[0]
    except CompileError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_tiles, "MOST_NBYTES", -1)
        patch.setattr(convolution_tiles, "TILE_NBYTES", nbytes)
        np.testing.assert_array_equal(evaluate(op, [x, w], **words)[0], whole)


def test_a_kernel_of_64_by_64_takes_a_few_megabytes() -> None:
    x, w = numbers(1, 1, 110, 110), numbers(2, 1, 64, 64, seed=4)
    out, taken = run("Conv", x, w, pads=(1, 1, 1, 1))
    assert taken < 12 * MIB
    padded = np.pad(x[0, 0], 1)
    for y, z in ((0, 0), (17, 31), (48, 48)):
        seen = padded[y : y + 64, z : z + 64]
        np.testing.assert_array_equal(out[0, :, y, z], (w[:, 0] * seen).sum((1, 2)))


@pytest.mark.campaign("onnx")
def test_a_kernel_of_64_by_64_over_a_million_places_takes_a_few_megabytes() -> None:
    out, taken = run("Conv", numbers(1, 1, 1024, 1024), numbers(1, 1, 64, 64, seed=4))
    assert out.shape == (1, 1, 961, 961)
    assert taken < 12 * MIB


def test_a_transposed_convolution_spreads_a_few_channels_at_a_time() -> None:
    x, w = numbers(1, 8, 60, 60), numbers(8, 16, 12, 12, seed=4)
    out, taken = run("ConvTranspose", x, w, strides=(2, 2), pads=(3, 3, 3, 3))
    assert taken < 8 * MIB
    # Place (50, 51) lies under kernel elements of one parity each.
    rows, columns = np.arange(1, 12, 2), np.arange(0, 12, 2)
    seen = x[0][:, (50 + 3 - rows) // 2][:, :, (51 + 3 - columns) // 2]
    taps = w[:, :, rows][:, :, :, columns]
    np.testing.assert_array_equal(out[0, :, 50, 51], np.einsum("cab,cfab->f", seen, taps))


def test_windows_far_apart_cost_nothing_between_them() -> None:
    far = 1 << 33
    x, w = numbers(1, 1, 4, 5), numbers(1, 1, 3, 1)
    out, taken = run("Conv", x, w, dilations=(far, 1), pads=(far, 0, far, 0), strides=(1, 1))
    assert taken < 12 * MIB
    np.testing.assert_array_equal(out, x * w[0, 0, 1, 0])


def test_the_gradient_of_weights_of_a_large_image_takes_a_few_megabytes() -> None:
    x, gradient = numbers(1, 16, 128, 128), numbers(1, 4, 124, 124, seed=4)
    out, taken = run("ConvWeightGradient", x, gradient, domain="stitch", kernel_shape=(5, 5))
    assert taken < 14 * MIB
    place = (3, 9, 2, 4)
    seen = x[0, 9, 2 : 2 + 124, 4 : 4 + 124]
    assert out[place] == (seen.astype(np.float64) * gradient[0, 3]).sum()
