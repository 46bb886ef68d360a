"""Windows of any length: their memory is bounded by what is there, not by their kernels."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.ops import bind, infer_types, kernel_workspace
from stitch.ops import windows as window_file
from stitch.ops.pooling import places_of_maxima
from stitch.ops.steps import strides_of
from stitch.ops.windows import Sliding, Windows, windows_of
from stitch.program import Array, DataType, ValueType

MIB = 1 << 20


def run(
    op: str, *operands: Array, outputs: int = 1, domain: str = "", **attributes: Any
) -> tuple[list[Array], int]:
    """Results of an operation, and the bytes that its kernel took beside them at most."""
    kinds = [ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands]
    words: dict[str, Any] = {"attributes": attributes, "domain": domain}
    types = infer_types(op, kinds, outputs=outputs, constants=operands, **words)
    results = [np.empty(t.shape, t.data_type.compute_dtype) for t in types]
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            for step in bind(op, operands, results, **words):
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
@pytest.mark.parametrize("short", [0, 32], ids=["by a loop", "by elements"])
@settings(max_examples=40, deadline=None)
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
        patch.setattr(window_file, "SHORT", short)
        patch.setattr(window_file, "MEDIUM", 0)
        patch.setattr(window_file, "PLANES_NBYTES", piece)
        for ufunc, nothing in ((np.maximum, -np.inf), (np.add, 0.0)):
            out = np.full((3, *windows.output), np.nan, np.float32)
            for step in Sliding(ufunc, nothing, windows, 3, out.dtype).steps(x, out):
                step()
            np.testing.assert_array_equal(out, plainly(ufunc.reduce, nothing, x, windows))


@settings(max_examples=80, deadline=None)
@given(drawn=st.lists(axes, min_size=1, max_size=3), ceil=st.booleans(), by_columns=st.booleans())
def test_the_place_of_a_maximum_is_the_first_of_several_or_the_first_nan(
    drawn: list[tuple[int, ...]], ceil: bool, by_columns: bool
) -> None:
    size, kernel, strides, dilations, begin, end = zip(*drawn, strict=True)
    attributes: dict[str, Any] = {"auto_pad": "NOTSET", "strides": strides, "dilations": dilations,
                                  "pads": (*begin, *end)}  # fmt: skip
    windows = windows_of(attributes, size, kernel, ceil)
    if min(windows.output) < 1:
        return
    x = np.random.default_rng(5).integers(-2, 2, (2, *size)).astype(np.float32)
    x[x == 0] = -np.inf
    x[np.random.default_rng(6).random(x.shape) < 0.03] = np.nan
    counts = strides_of(size[::-1])[::-1] if by_columns else strides_of(size)
    values = plainly(np.max, -np.inf, x, windows)
    places = places_of_maxima(x, values, windows, counts)
    numbers_of = sum(
        (np.arange(n) * count).reshape(-1, *(1,) * (len(size) - 1 - axis))
        for axis, (n, count) in enumerate(zip(size, counts, strict=True))
    )
    for n, *window in np.ndindex(places.shape):
        seen = (x[n], np.broadcast_to(numbers_of, size))
        for axis, at in enumerate(window):
            taps = (
                at * strides[axis] - windows.begin[axis] + np.arange(kernel[axis]) * dilations[axis]
            )
            inside = taps[(taps >= 0) & (taps < size[axis])]
            seen = (np.take(seen[0], inside, axis), np.take(seen[1], inside, axis))
        pairs = zip(seen[0].ravel(), seen[1].ravel(), strict=True)
        hits = [k for v, k in pairs if v == values[(n, *window)] or np.isnan(v)]
        assert places[(n, *window)] == (hits[0] if hits else -1)


def test_places_over_many_planes_count_in_the_whole_operand() -> None:
    x = np.random.default_rng(4).integers(-9, 9, (40, 50, 14, 14)).astype(np.int8)
    (values, places), _ = run("MaxPool", x, outputs=2, kernel_shape=(2, 2), strides=(2, 2))
    np.testing.assert_array_equal(values, x.reshape(40, 50, 7, 2, 7, 2).max((3, 5)))
    np.testing.assert_array_equal(x.reshape(-1)[places], values)
    assert (np.diff(places.reshape(2000, -1)[:, 0]) > 0).all()


def test_gradients_of_long_windows_go_where_those_of_short_ones_do() -> None:
    x = np.random.default_rng(1).permutation(2 * 3 * 40 * 9).reshape(2, 3, 40, 9)
    x = x.astype(np.float32)
    attributes: dict[str, Any] = {"kernel_shape": (30, 5), "strides": (1, 2), "pads": (4, 2, 4, 2)}
    (y,), _ = run("MaxPool", x, **attributes)
    gradient = numbers(*y.shape)
    (given_back,), _ = run("MaxPoolGradient", gradient, x, y, domain="stitch", **attributes)
    (_, places), _ = run("MaxPool", x, outputs=2, **attributes)
    expected = np.zeros(x.size, np.float32)
    np.add.at(expected, places.ravel(), gradient.ravel())
    np.testing.assert_array_equal(given_back, expected.reshape(x.shape))


def test_a_window_of_a_thousand_elements_gives_its_gradient_back() -> None:
    x = np.random.default_rng(0).normal(size=(1, 1, 1_200)).astype(np.float32)
    attributes: dict[str, Any] = {"kernel_shape": (1_001,), "pads": (500, 500)}
    (y,), _ = run("MaxPool", x, **attributes)
    (given_back,), _ = run("MaxPoolGradient", y * 0 + 1, x, y, domain="stitch", **attributes)
    assert given_back.sum() == y.size
    assert np.count_nonzero(given_back) == np.unique(y).size


def test_an_average_of_sixteen_thousand_numbers_is_exact_to_the_last_bits() -> None:
    x = 1000 + np.random.default_rng(0).normal(size=(1, 1, 20_000)).astype(np.float32)
    (out,), taken = run("AveragePool", x, kernel_shape=(16_001,), strides=(7,))
    assert taken < MIB
    for place in (0, 300, out.size - 1):
        seen = x[0, 0, place * 7 : place * 7 + 16_001].astype(np.float64)
        assert out[0, 0, place] == pytest.approx(seen.mean(), rel=2e-7)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_kernel_beyond_all_sizes_reads_what_is_there(op: str) -> None:
    far = 1 << 40
    x = numbers(2, 3, 5, 4)
    (out,), taken = run(op, x, kernel_shape=(2 * far + 1, 3), pads=(far, 1, far, 1), strides=(1, 1))
    assert taken < MIB
    (usual,), _ = run(op, x, kernel_shape=(9, 3), pads=(4, 1, 4, 1))
    np.testing.assert_array_equal(out, usual)


def test_a_dilation_as_long_as_the_input_reads_what_is_there() -> None:
    x = numbers(1, 2, 6)
    (out,), _ = run("MaxPool", x, kernel_shape=(2,), dilations=(6,), pads=(1, 1))
    np.testing.assert_array_equal(out, x[:, :, [5, 0]])


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pools_never_pad_their_input(op: str) -> None:
    x = numbers(8, 16, 96, 96)
    _, taken = run(op, x, kernel_shape=(5, 5), pads=(2, 2, 2, 2))
    assert taken < 3 * MIB < x.nbytes
