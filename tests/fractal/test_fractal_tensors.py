"""Nests of tensors beside plain Python lists: construction, elements, access, what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stitch
from stitch import fractal as ops
from stitch.errors import UsageError
from stitch.fractal import FractalTensor
from stitch.program import Array

XSS = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]


def nest(choice: random.Random, depth: int, count: Any, uniform: bool = False) -> Any:
    """Nested lists of numbers that count up."""
    lengths = [choice.randrange(1, 4) for _ in range(depth)]

    def level(below: int) -> Any:
        if below == depth:
            return next(count)
        length = lengths[below] if uniform else choice.randrange(4)
        return [level(below + 1) for _ in range(length)]

    return level(0)


# What Python's lists say of each access function.


def listed_slide(xs: list[Any], size: int, stride: int, dilation: int) -> list[Any]:
    span = dilation * (size - 1) + 1
    return [xs[k : k + span : dilation] for k in range(0, len(xs) - span + 1, stride)]


def listed_shifted(xs: list[Any], size: int, dilation: int) -> list[Any]:
    around = range(-(size // 2) * dilation, (size // 2) * dilation + 1, dilation)
    return [[xs[(k + d) % len(xs)] for d in around] for k in range(len(xs))]


def listed_split(xs: list[Any], count: int) -> list[Any]:
    size = len(xs) // count
    cuts = [size * k for k in range(count)] + [len(xs)]
    return [xs[a:b] for a, b in itertools.pairwise(cuts)]


def listed_dilate(xs: list[Any], dilation: int) -> list[Any]:
    return [xs[k::dilation] for k in range(min(dilation, len(xs)))]


Step = tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]]]


def step(choice: random.Random, length: int, depth: int) -> Step:
    """An access function with arguments, and the same of lists."""
    a, b = sorted(choice.randrange(-length - 1, length + 2) for _ in range(2))
    c, n, d = choice.choice([1, 2, 3, -1, -2]), choice.randrange(1, 4), choice.randrange(1, 4)
    chosen = [choice.randrange(-length, length) for _ in range(n)] if length else []
    steps: list[Step] = [
        (lambda xs: xs[a:b:c], lambda xs: xs[a:b:c]),
        (lambda xs: ops.gather(xs, chosen), lambda xs: [xs[k] for k in chosen]),
        (lambda xs: ops.slide(xs, n, d, c % 3 + 1), lambda xs: listed_slide(xs, n, d, c % 3 + 1)),
        (
            lambda xs: ops.shifted_slide(xs, 2 * n - 1, d),
            lambda xs: listed_shifted(xs, 2 * n - 1, d),
        ),
        (lambda xs: ops.split(xs, n), lambda xs: listed_split(xs, n)),
        (lambda xs: ops.dilate(xs, n), lambda xs: listed_dilate(xs, n)),
        (lambda xs: ops.repeat(xs, n), lambda xs: [xs] * n),
        (lambda xs: ops.join(xs, xs[a:b]), lambda xs: xs + xs[a:b]),
    ]
    if depth > 1 and length:
        k = choice.randrange(-length, length)
        steps += [(lambda xs: xs[k], lambda xs: xs[k])] * 3
    return choice.choice(steps)


@given(st.integers(0, 10**9), st.integers(1, 4), st.booleans())
def test_any_accesses_of_accesses_are_those_of_lists_and_copy_nothing(
    seed: int, depth: int, uniform: bool
) -> None:
    choice = random.Random(seed)
    expected = nest(choice, depth, itertools.count(), uniform)
    xs = FractalTensor(expected) if depth == 1 or _leaves(expected) else None
    if xs is None:
        return
    data = xs.data
    for _ in range(5):
        access, model = step(choice, len(expected), xs.depth)
        xs, expected = access(xs), model(expected)
        assert xs.tolist() == expected
        assert xs.data is data and len(xs) == len(expected)
        if xs.numel > 10_000 or xs.depth > 8:
            break


def _leaves(nested: Any) -> bool:
    return any(map(_leaves, nested)) if isinstance(nested, list) else True


@given(st.integers(0, 10**9), st.integers(1, 4), st.sampled_from([(), (3,), (2, 2)]))
def test_nests_come_back_as_they_were_given(seed: int, depth: int, shape: tuple[int, ...]) -> None:
    choice = random.Random(seed)
    given = nest(choice, depth, (np.full(shape, k, np.float32) for k in itertools.count()))

    def plain(nested: Any) -> Any:
        return list(map(plain, nested)) if isinstance(nested, list) else nested.tolist()

    if not _leaves(given) and depth > 1:
        return
    xs = FractalTensor(given, leaf_shape=shape, dtype=np.float32)
    assert xs.depth == depth and xs.leaf_shape == shape and xs.dtype == np.float32
    assert xs.tolist() == plain(given)
    assert FractalTensor(xs) is not xs and FractalTensor(xs).data is xs.data
    if depth > 1:
        again = FractalTensor([xs[k] for k in range(len(xs))])
        assert again.tolist() == xs.tolist() and again.data is xs.data
    assert all(len(x) == len(e) for x, e in zip(xs, given, strict=True) if depth > 1)


def test_the_values_of_the_document() -> None:
    xs, ys, xss = FractalTensor([1, 2, 3, 4]), FractalTensor([7, 8, 9, 10]), FractalTensor(XSS)
    assert ops.zip(xs, ys).tolist() == [(1, 7), (2, 8), (3, 9), (4, 10)]
    assert ops.zip(xs) is xs
    across, down = ops.product(FractalTensor([0, 1, 2]), FractalTensor([0, 1]))
    assert across.tolist() == [[0, 1, 2], [0, 1, 2]] and down.tolist() == [[0, 0, 0], [1, 1, 1]]
    dilated = ops.dilate(FractalTensor(list(range(9))), 5)
    assert dilated.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4]]
    assert xss.width_by_depth(-2) == xss.width_by_depth(1) == [3, 2, 4]
    assert xss.width_by_depth(-1) == [3] and xs[-1] == 4 and ops.tail(xs) == ops.last(xs) == 4
    assert ops.head(xss).tolist() == [0, 1, 2] and (xss.depth, xss.length, xss.numel) == (2, 3, 9)
    assert [p.tolist() for p in ops.slide(ops.zip(xs, ys), 3)] == [
        [[1, 2, 3], [2, 3, 4]], [[7, 8, 9], [8, 9, 10]],
    ]  # fmt: skip
    assert [int(n) for n, _ in ops.enumerate(xss)] == [0, 1, 2]
    assert ops.zip(xs, ys)[1:3].tolist() == [(2, 8), (3, 9)]
    assert [k.tolist() for k in ops.unbind(xss)] == XSS


def test_windows_outside_are_padded() -> None:
    xs = FractalTensor([1, 2, 3])
    assert ops.slide(xs, 3, padding=1, padding_value=0).tolist() == [
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 0],
    ]
    assert ops.window(0, xs, 3, padding_value=9).tolist() == [9, 1, 2]
    assert ops.window(2, xs, 3, 2, padding_value=9).tolist() == [1, 3, 9]
    assert ops.window(-1, xs, 5, padding_value=9).tolist() == [1, 2, 3, 9, 9]
    assert ops.shifted_window(0, xs, 3).tolist() == [3, 1, 2]
    rows = FractalTensor([[1], [2]])
    padded = ops.slide(rows, 2, padding=1, padding_value=FractalTensor([0]))
    assert padded.tolist() == [[[0], [1]], [[1], [2]], [[2], [0]]]
    with pytest.raises(UsageError, match="and there is no padding_value"):
        ops.window(0, xs, 3)


def test_a_nest_is_read_only_and_its_own() -> None:
    array = np.arange(4.0)
    xs = FractalTensor(array)
    array[:] = 7
    assert xs.tolist() == [0, 1, 2, 3]
    for read in (xs.numpy(), xs[::-1].numpy(), xs[::2].leaves()):
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1


def test_nests_over_a_tensor_are_views_of_it_and_its_leaves_are_read() -> None:
    with stitch.open_device("host") as device:
        layout = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.HOST)
        tensor = device.empty(stitch.TensorDesc((4, 3), layout))
        device.write(tensor, np.arange(12, dtype=np.float32).reshape(4, 3))
        xs = ops.slide(FractalTensor(tensor), 2)
        assert xs.leaf_shape == (3,) and xs.dtype == np.float32
        assert xs[1].data is tensor
        assert xs[1][0].numpy().tolist() == [3, 4, 5]
        assert xs.numpy().tolist() == [[[0, 1, 2], [3, 4, 5]], [[3, 4, 5], [6, 7, 8]],
                                       [[6, 7, 8], [9, 10, 11]]]  # fmt: skip
        assert "lengths 3; 2; float32[3]" in repr(xs)


@pytest.mark.parametrize(
    ("nested", "words"),
    [
        ([[1, 2], 3], r"different depths[\s\S]*\[1\] is a leaf, \[0\] a list"),
        ([[[1], 2], [[3], [4]]], r"\[0\]\[1\] is a leaf, \[0\]\[0\] a list"),
        ([[np.zeros(2)], [np.zeros(3)]], r"leaf \[1\]\[0\][\s\S]*float64\[2\][\s\S]*float64\[3\]"),
        (
            [np.int32(1), 2.5],
            r"different shapes or types[\s\S]*leaf \[1\][\s\S]*int32[\s\S]*float32[\s\S]*dtype=",
        ),
        (["a"], "a leaf is not a number"),
        ([None], "a leaf is not a number"),
        ("abc", "made of nested lists"),
        (np.float32(1), "made of nested lists"),
        (np.zeros(()), "at least one axis"),
        ([FractalTensor([1]), 2], r"\[1\] is a leaf, others are FractalTensors"),
        ([2, FractalTensor([1])], r"is a leaf, others are FractalTensors"),
        ([FractalTensor([1]), FractalTensor([[1]])], "different depths or leaf shapes"),
        ([FractalTensor([1]), FractalTensor([1.5])], "leaves of different types"),
    ],
)
def test_what_is_no_nest_is_one_clear_error(nested: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FractalTensor(nested)


def test_what_cannot_be_accessed_is_one_clear_error() -> None:
    xs, xss = FractalTensor([1, 2, 3]), FractalTensor(XSS)
    with pytest.raises(UsageError, match=r"ragged[\s\S]*element \[1\] has length 2, \[0\] has 3"):
        xss.numpy()
    deep = FractalTensor([[[1], [2, 3]], [[4]]])
    with pytest.raises(UsageError, match=r"element \[1\] has length 1, \[0\] has 2"):
        deep.numpy()
    with pytest.raises(IndexError, match="element 3 of a FractalTensor of length 3"):
        xs[3]
    with pytest.raises(IndexError, match="element -4"):
        xs[[0, -4]]
    for bad in ("a", 1.5, None):
        with pytest.raises(UsageError, match="indexed by a whole number"):
            xs[bad]  # type: ignore[index]
    with pytest.raises(UsageError, match="FractalTensor is 0"):
        xs[::0]
    with pytest.raises(UsageError, match=r"lengths[\s\S]*expected: 3[\s\S]*got: 1, argument 1"):
        ops.zip(xs, FractalTensor([1]))
    with pytest.raises(TypeError, match="slide takes a FractalTensor"):
        ops.slide([1, 2, 3], 2)  # type: ignore[arg-type]
    for size in (0, -1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="must be a whole number of at least 1"):
            ops.slide(xs, size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be odd"):
        ops.shifted_slide(xs, 2)
    for depth in (0, 3, -3):
        with pytest.raises(UsageError, match="no lists at this depth"):
            xss.width_by_depth(depth)
    with pytest.raises(IndexError):
        ops.head(xs[:0])


def test_lists_may_be_empty() -> None:
    empty = FractalTensor([], leaf_shape=(2,), dtype=np.int32)
    assert (empty.numel, empty.leaf_shape) == (0, (2,)) and empty.dtype == np.dtype(np.int32)
    assert empty.numpy().shape == (0, 2) and ops.slide(empty, 3).tolist() == []
    assert ops.shifted_slide(empty, 3).tolist() == [] and ops.dilate(empty, 2).tolist() == []
    rows = FractalTensor([[], [1], []])
    assert rows.tolist() == [[], [1], []] and rows[0].tolist() == [] and rows[::2].numel == 0
    assert ops.slide(FractalTensor([1, 2]), 3).tolist() == []


def test_lists_in_themselves_and_long_ones_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    twice: list[Any] = []
    twice.extend([twice, twice])
    for bad in (endless, twice):
        with pytest.raises(UsageError, match="a list contains itself"):
            FractalTensor(bad)
    deep: Any = [1]
    for _ in range(32):
        deep = [deep]
    with pytest.raises(UsageError, match="nested too deeply"):
        FractalTensor(deep)
    shared = [[1] * 5_000] * 5_000
    with pytest.raises(UsageError, match="too many elements"):
        FractalTensor(shared)
    assert FractalTensor([(), [()], [(), (1,)]]).tolist() == [[], [[]], [[], [1]]]
    long = FractalTensor([[k] for k in range(20_000)])
    assert long.numel == 20_000 and long[-1].tolist() == [19_999]


def test_a_type_or_shape_that_is_asked_for_is_given_or_refused() -> None:
    xs = FractalTensor([1])
    assert FractalTensor(xs, dtype="int64", leaf_shape=()).tolist() == [1]
    with pytest.raises(UsageError, match=r"another type[\s\S]*float64[\s\S]*int64"):
        FractalTensor(xs, dtype="float64")
    with pytest.raises(UsageError, match=r"another type[\s\S]*float64[\s\S]*int64"):
        FractalTensor([xs], dtype="float64")
    with pytest.raises(UsageError, match="another shape"):
        FractalTensor(xs, leaf_shape=(5,))
    with pytest.raises(UsageError, match=r"storable number type[\s\S]*floot"):
        FractalTensor([1], dtype="floot")
    with stitch.open_device("host") as device, pytest.raises(UsageError, match="another type"):
        FractalTensor(device.tensor(np.ones(3, np.float32)), dtype="int32")


def test_padding_is_an_element() -> None:
    xs, rows = FractalTensor([1, 2, 3]), FractalTensor(np.ones((3, 2), np.float32))
    assert ops.slide(xs, 2, padding=1, padding_value=np.float64(7)).tolist()[0] == [7, 1]
    assert ops.window(0, rows, 3, padding_value=[0, 0.5]).tolist()[0] == [0, 0.5]
    for nest, value in ((xs, 1.5), (rows, 0), (xs, [1]), (FractalTensor([[1]]), 1), (xs, "a")):
        with pytest.raises(UsageError, match="padding_value must have depth"):
            ops.window(0, nest, 3, padding_value=value)


def test_some_elements_are_chosen_alike_everywhere() -> None:
    xs = FractalTensor([1, 2, 3])
    for numbers in ([2, 0], np.array([2, 0]), FractalTensor([2, 0])):
        assert xs[numbers].tolist() == ops.gather(xs, numbers).tolist() == [3, 1]
        assert ops.zip(xs, xs)[numbers].tolist() == [(3, 3), (1, 1)]
    with pytest.raises(UsageError, match="gather must be a list of whole numbers"):
        ops.gather(xs, 3)
    assert np.asarray(FractalTensor([[1, 2]])).tolist() == [[1, 2]]
    with pytest.raises(UsageError, match="ragged"):
        np.asarray(FractalTensor(XSS))


class Lies(list):  # type: ignore[type-arg]
    """A list that says that it is longer."""

    def __len__(self) -> int:
        return 10**6


class Raises:
    def __array__(self, *_: object, **__: object) -> Array:
        raise RuntimeError("as told")


def test_foreign_objects_are_what_they_hold_or_one_clear_error() -> None:
    assert FractalTensor([Lies([1, 2]), Lies([3])]).tolist() == [[1, 2], [3]]
    with pytest.raises(UsageError, match=r"a leaf is not[\s\S]*as told"):
        FractalTensor([Raises()])
    with pytest.raises(UsageError, match="whole number"):
        FractalTensor([1, 2])[[True, False]]
    with pytest.raises(UsageError, match="do not fit into int8"):
        FractalTensor([300], dtype="int8")
    assert FractalTensor([0.1], dtype="float64").tolist() == [0.1]
    for shape in ((-1,), (10**12,) * 3):
        with pytest.raises(UsageError, match="leaf_shape is not a valid shape"):
            FractalTensor([], leaf_shape=shape)


HUGE = 10**12


def test_huge_sizes_cost_nothing_or_are_one_clear_error() -> None:
    u, rows, none = FractalTensor([1, 2, 3]), FractalTensor([[1, 2], [3]]), FractalTensor([])
    many = ops.repeat(u, HUGE)
    assert many[HUGE - 1].tolist() == [1, 2, 3] and ops.gather(many, [3, 1]).numel == 6
    assert ops.dilate(many, HUGE // 2).length == HUGE // 2
    for xs in (u, rows, none):
        assert ops.slide(xs, HUGE).tolist() == [] and len(repr(ops.slide(xs, HUGE))) < 200
    assert ops.window(0, u, 3, HUGE, padding_value=0).tolist() == [0, 1, 0]
    assert ops.shifted_window(0, u, 5, 2**40).tolist() == [
        [1, 2, 3][k * 2**40 % 3] for k in (-2, -1, 0, 1, 2)
    ]
    assert u[-(10**30) : 10**30 : 10**30].tolist() == [1]
    for empty in (ops.repeat(none, HUGE), ops.repeat(FractalTensor([[], []]), 10**7)):
        assert len(repr(empty)) < 200
    for call in (
        lambda: ops.repeat(rows, HUGE), lambda: ops.split(u, HUGE), lambda: ops.enumerate(many),
        lambda: ops.slide(u, 2, padding=HUGE, padding_value=0), lambda: ops.join(many, many),
        lambda: ops.window(0, u, HUGE + 1, padding_value=0), lambda: ops.shifted_slide(u, HUGE + 1),
        lambda: ops.shifted_window(0, u, HUGE + 1), lambda: many.tolist(),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="too many lists or leaves"):
            call()
    for call in (
        lambda: ops.slide(u, 1, dilation=10**30), lambda: ops.repeat(u, 2**63 - 1),
        lambda: ops.window("0", u, 3),  # type: ignore[arg-type]
        lambda: u.width_by_depth("x"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(UsageError, match="a whole number"):
            call()
