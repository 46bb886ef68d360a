"""`stitch.Window`: rows at equal distances along axes, copied by kernels or seen by executors."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.compiler import compile_graph
from stitch.errors import CompileError, TaskError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import load_machine
from stitch.ops import bind, evaluate, infer_types, row_copies
from stitch.program import Array, DataType, ValueType
from stitch.runtime.executors import make_executor
from tests.support.operators.one_operation import Binding

FLOAT = DataType.FLOAT32
HOST = load_machine("host")
TYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.bool_, np.int8, np.int64)


def numbers(base: int, strides: Any, lengths: tuple[int, ...]) -> Array:
    """The rows as their definition says them."""
    rows = np.zeros(lengths, np.int64)
    for place in np.ndindex(*lengths):
        rows[place] = base + sum(i * s for i, s in zip(place, strides, strict=True))
    return rows


def window(data: Array, base: int, strides: Any, lengths: tuple[int, ...]) -> Array:
    operands = [data, np.array(base), np.array(strides, np.int64)]
    return evaluate("Window", operands, domain="stitch", attributes={"lengths": lengths})[0]


@st.composite
def windows(draw: st.DrawFn) -> tuple[Array, int, tuple[int, ...], tuple[int, ...]]:
    count, rank = draw(st.integers(0, 30)), draw(st.integers(0, 3))
    leaf = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    data = rng.integers(0, 2, (count, *leaf)).astype(draw(st.sampled_from(TYPES)))
    lengths = tuple(draw(st.integers(0, 5)) for _ in range(rank))
    strides = tuple(draw(st.integers(-4, 4)) for _ in range(rank))
    return data, draw(st.integers(-1, count)), strides, lengths


@settings(max_examples=100, deadline=None)
@given(windows())
def test_a_window_has_the_rows_of_its_definition_or_is_refused(
    drawn: tuple[Array, int, tuple[int, ...], tuple[int, ...]],
) -> None:
    data, base, strides, lengths = drawn
    rows = numbers(base, strides, lengths)
    if rows.size and not 0 <= rows.min() <= rows.max() < len(data):
        with pytest.raises(TaskError, match="Window: a row is out of range") as caught:
            window(data, base, strides, lengths)
        assert caught.value.got == f"{rows.min()} to {rows.max()}"
        return
    found = window(data, base, strides, lengths)
    assert found.dtype == data.dtype
    wanted = data[rows] if rows.size else np.empty((*lengths, *data.shape[1:]), data.dtype)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def test_long_windows_of_few_rows_are_copied_place_by_place() -> None:
    data = np.arange(2000, dtype=np.float32).reshape(1000, 2)
    np.testing.assert_array_equal(
        window(data, 3, [1, 5, 40], (100, 3, 2)), data[numbers(3, [1, 5, 40], (100, 3, 2))]
    )


def test_first_row_and_strides_are_read_in_every_run() -> None:
    data, base, strides = np.arange(12.0), np.array(0), np.array([4, 1])
    out = np.empty((3, 2))
    steps = bind(
        "Window", [data, base, strides], [out], domain="stitch", attributes={"lengths": (3, 2)}
    )
    for first, moved in ((0, (4, 1)), (11, (-4, -1)), (5, (0, 0)), (2, (3, 1))):
        base[()], strides[:] = first, moved
        for step in steps:
            step()
        np.testing.assert_array_equal(out, numbers(first, moved, (3, 2)))
    base[()] = 7
    with pytest.raises(TaskError, match="out of range") as caught:
        for step in steps:
            step()
    assert (caught.value.expected, caught.value.got) == ("0 to 11", "7 to 14")


@pytest.mark.parametrize("stride", [2**62, -(2**62)])
def test_a_stride_along_which_nobody_goes_may_be_any(stride: int) -> None:
    assert window(np.arange(5), 3, [stride, 1], (1, 2)).tolist() == [[3, 4]]
    with pytest.raises(TaskError, match="out of range"):
        window(np.arange(5), 3, [stride, stride], (3, 3))


@pytest.mark.parametrize(
    ("shapes", "lengths", "said"),
    [
        (((4, 2), (1,), (2,)), (2, 2), "wrong shape"),
        (((4, 2), (), (2,)), (2,), "lengths"),
        (((4, 2), (), (1,)), (-1,), "lengths"),
        (((4, 2), (), (0,)), (1,), "lengths"),
        (((), (), (1,)), (1,), "has rank 0"),
    ],
)
def test_what_is_no_window_is_refused(shapes: Any, lengths: Any, said: str) -> None:
    kinds = [DataType.FLOAT32, DataType.INT64, DataType.INT64]
    types = [ValueType(s, kind) for s, kind in zip(shapes, kinds, strict=True)]
    with pytest.raises(CompileError, match=said):
        infer_types("Window", types, domain="stitch", attributes={"lengths": lengths})


def graph_of(known: bool, lengths: tuple[int, ...] = (3, 2)) -> Any:
    """Rows of a window through a product of batches, first row and strides known or not."""
    b = ComputationGraphBuilder("windows")
    x, w = b.input("x", (9, 4), FLOAT), b.input("w", (3, 4, 5), FLOAT)
    base: Any = np.array(1) if known else b.input("base", (), DataType.INT64)
    strides: Any = np.array([3, 1]) if known else b.input("strides", (2,), DataType.INT64)
    b.output("y", b.window_rows(x, base, strides, lengths) @ w)
    return compile_graph(b.build(), HOST).program


@pytest.mark.parametrize("name", ["numpy", "onnxruntime", "torch", "auto"])
@pytest.mark.parametrize("known", [True, False])
def test_executors_agree(name: str, known: bool) -> None:
    program, rng = graph_of(known), np.random.default_rng(0)
    binding = Binding(make_executor(name).prepare(program, HOST.shape), program)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((9, 4), (3, 4, 5)))
    for base, strides in [(1, (3, 1))] if known else [(1, (3, 1)), (8, (-3, -2)), (4, (0, 4))]:
        more = [] if known else [np.array(base), np.array(strides)]
        found = binding.outcome([x, w, *more])
        assert not isinstance(found, TaskError)
        wanted = x[numbers(base, strides, (3, 2))] @ w
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
    if known:
        return
    for base, strides in ((-1, (3, 1)), (3, (3, 1)), (0, (1, -1)), (2**62, (2**62, 2**62))):
        assert isinstance(binding.outcome([x, w, np.array(base), np.array(strides)]), TaskError)


@pytest.mark.parametrize("name", ["numpy", "onnxruntime"])
def test_a_known_window_out_of_range_is_refused(name: str) -> None:
    b = ComputationGraphBuilder("outside")
    b.output("y", b.window_rows(b.input("x", (9, 4), FLOAT), 5, [2], (3,)) + 1.0)
    program = compile_graph(b.build(), HOST).program
    with pytest.raises((TaskError, CompileError)):
        binding = Binding(make_executor(name).prepare(program, HOST.shape), program)
        outcome = binding.outcome([np.zeros((9, 4), np.float32)])
        if isinstance(outcome, TaskError):
            raise outcome


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_copies_of_runs_are_copies_of_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    kind = data.draw(st.sampled_from(TYPES))
    order = data.draw(st.permutations(range(len(shape))))
    source = (np.arange(math.prod(shape)) % 99).reshape(shape).astype(kind).transpose(order)
    parts = tuple(data.draw(st.sampled_from([slice(None), slice(1, None), slice(None, None, 2)]))
                  for _ in shape)  # fmt: skip
    taken = source[parts]
    whole = np.zeros(source.shape, kind)
    there = whole[tuple(slice(0, n) for n in taken.shape)]
    for pair in row_copies(there, taken):
        np.copyto(*pair)
    assert there.tobytes() == taken.tobytes()
    wanted = np.zeros(source.shape, kind)
    wanted[tuple(slice(0, n) for n in taken.shape)] = taken
    assert whole.tobytes() == wanted.tobytes()


def test_a_window_copies_no_more_than_its_rows() -> None:
    """A strided view, copied as runs: what lies between its rows is not touched."""
    data = np.full((100, 2), math.nan)
    data[::10] = 1.0
    assert np.isfinite(window(data, 0, [10], (10,))).all()
