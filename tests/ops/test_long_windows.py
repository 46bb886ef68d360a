"""Windows of any length: what they cost is bounded by what is there, not by their kernels."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.ops import bind, infer_types, kernel_workspace, sliding
from stitch.ops.sliding import Sliding
from stitch.ops.windows import Windows, windows_of
from stitch.program import Array, DataType, ValueType

MIB = 1 << 20


def run(op: str, *operands: Array, outputs: int = 1, **attributes: Any) -> tuple[list[Array], int]:
    """Results of an operation, and the bytes that its kernel took beside them at most."""
    kinds = [ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands]
    words: Mapping[str, Any] = {"attributes": attributes, "constants": operands}
    types = infer_types(op, kinds, outputs=outputs, **words)
    results = [np.empty(t.shape, t.data_type.compute_dtype) for t in types]
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            for step in bind(op, operands, results, attributes=attributes):
                step()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken <= kernel_workspace(op, kinds, types, **words)
    return results, taken


def numbers(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).integers(-40, 40, shape).astype(np.float32)


def plainly(reduce: Callable[..., Any], nothing: float, x: Array, windows: Windows) -> Array:
    """Every window by itself."""
    out = np.full((len(x), *windows.output), nothing, x.dtype)
    for place in np.ndindex(*windows.output):
        seen = x
        for axis, at in enumerate(place):
            first = at * windows.strides[axis] - windows.begin[axis]
            places = first + np.arange(windows.kernel[axis]) * windows.dilations[axis]
            inside = places[(places >= 0) & (places < windows.size[axis])]
            seen = np.take(seen, inside, axis + 1)
        if seen[0].size:
            out[(slice(None), *place)] = reduce(seen.reshape(len(x), -1), axis=1)
    return out


axes = st.tuples(
    st.integers(1, 12),  # size
    st.integers(1, 15),  # kernel
    st.integers(1, 4),  # stride
    st.integers(1, 3),  # dilation
    st.integers(0, 9),  # pad before
    st.integers(0, 9),  # pad after
)


@pytest.mark.parametrize("piece", [1, 1 << 20], ids=["line by line", "at once"])
@pytest.mark.parametrize("short", [0, 32], ids=["by blocks", "by elements"])
@settings(max_examples=120, deadline=None)
@given(drawn=st.lists(axes, min_size=1, max_size=2), ceil=st.booleans())
def test_every_window_sees_what_it_should(
    short: int, piece: int, drawn: list[tuple[int, ...]], ceil: bool
) -> None:
    size, kernel, strides, dilations, begin, end = zip(*drawn, strict=True)
    attributes: dict[str, Any] = {"auto_pad": "NOTSET", "strides": strides, "dilations": dilations,
                  "pads": (*begin, *end)}  # fmt: skip
    windows = windows_of(attributes, size, kernel, ceil)
    if min(windows.output) < 1:
        return
    x = numbers(3, *size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding, "SHORT", short)
        patch.setattr(sliding, "MEDIUM", 0)
        patch.setattr(sliding, "PIECE_NBYTES", piece)
        for ufunc, nothing in ((np.maximum, -np.inf), (np.add, 0.0)):
            out = np.full((3, *windows.output), np.nan, np.float32)
            for step in Sliding(ufunc, nothing, windows, 3, out.dtype).steps(x, out):
                step()
            np.testing.assert_array_equal(out, plainly(ufunc.reduce, nothing, x, windows))


def test_a_maximum_over_a_hundred_thousand_elements_takes_two_lines() -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 300_000)).astype(np.float32)
    (out,), taken = run("MaxPool", x, kernel_shape=(100_001,), pads=(50_000, 50_000))
    assert taken < 4 * MIB
    for place in (0, 49_999, 50_000, 150_001, 299_999):
        seen = x[:, :, max(0, place - 50_000) : place + 50_001]
        np.testing.assert_array_equal(out[:, :, place], seen.max(2))


def test_an_average_of_sixty_thousand_numbers_is_exact_to_the_last_bits() -> None:
    x = 1000 + np.random.default_rng(0).normal(size=(1, 1, 200_000)).astype(np.float32)
    (out,), taken = run("AveragePool", x, kernel_shape=(60_001,), strides=(7,))
    assert taken < 8 * MIB
    for place in (0, 10_000, 20_000 - 1):
        seen = x[0, 0, place * 7 : place * 7 + 60_001].astype(np.float64)
        assert out[0, 0, place] == pytest.approx(seen.mean(), rel=2e-7)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_kernel_beyond_all_sizes_reads_what_is_there(op: str) -> None:
    far = 1 << 40
    x = numbers(2, 3, 5, 4)
    (out,), taken = run(op, x, kernel_shape=(2 * far + 1, 3), pads=(far, 1, far, 1), strides=(1, 1))
    assert taken < MIB
    (usual,), _ = run(op, x, kernel_shape=(9, 3), pads=(4, 1, 4, 1))
    np.testing.assert_array_equal(out, usual)


def test_a_dilation_beyond_all_sizes_reads_what_is_there() -> None:
    x = numbers(1, 2, 6)
    far = 1 << 40
    (out,), _ = run("MaxPool", x, kernel_shape=(101,), dilations=(far,), pads=(50 * far, 50 * far))
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pools_never_pad_their_input(op: str) -> None:
    x = numbers(8, 16, 96, 96)
    _, taken = run(op, x, kernel_shape=(5, 5), pads=(2, 2, 2, 2))
    assert taken < 3 * MIB < x.nbytes
