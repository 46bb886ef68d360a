"""Functions over nests: the values of the document, plain lists beside them, what is refused."""

from __future__ import annotations

import functools
import itertools
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.errors import UsageError
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES
from stitch.runtime import RuntimeDevice
from tests.support.grids import every

XS, XSS = [1, 2, 3, 4], [[0, 1, 2], [3, 4], [5, 6, 7, 8]]


def add(a: Any, b: Any) -> Any:
    return a + b


def lists(found: Any) -> Any:
    """Nests and numbers as lists."""
    return tuple(map(lists, found)) if isinstance(found, tuple) else found.tolist()


@pytest.fixture(params=["numpy", "onnxruntime", "torch", "auto"])
def device(request: pytest.FixtureRequest) -> Iterator[stitch.Device]:
    with stitch.open_device("host", executor=request.param) as opened:
        yield opened


@pytest.fixture(params=MODES)
def within(request: pytest.FixtureRequest) -> Iterator[str]:
    """A mode, on the default device."""
    with ops.mode(request.param):
        yield request.param


@pytest.mark.parametrize("name", MODES)
def test_the_values_of_the_document(device: stitch.Device, name: str) -> None:
    xs, xss, pairs = FractalTensor(XS), FractalTensor(XSS), FractalTensor(XS)
    even = functools.partial(lambda x: x % 2 == 0)
    with ops.mode(name, device=device):
        found = {
            "map": (ops.map(lambda x: x + x, xs), [2, 4, 6, 8]),
            "map fold": (ops.map(lambda row: ops.fold(add, row), xss), [3, 7, 26]),
            "map k": (ops.map(lambda x, k: x + k, xs, k=1), [2, 3, 4, 5]),
            "map pair": (ops.map(lambda x: (x, x * 2), xs), (XS, [2, 4, 6, 8])),
            "map nested": (
                ops.map(lambda row: ops.map(lambda x: (x, x * 2), row), xss),
                (XSS, [[0, 2, 4], [6, 8], [10, 12, 14, 16]]),
            ),
            "filter": (ops.filter(even, xs), [2, 4]),
            "filter rows": (ops.filter(lambda row: len(row) > 2, xss), [XSS[0], XSS[2]]),
            "filter zip": (ops.filter(lambda p: p[0] > 2, ops.zip(xs, pairs)), ([3, 4], [3, 4])),
            "filter none": (ops.filter(lambda x: x > 9, xs), []),
            "scan": (ops.scan(add, xs), [1, 3, 6, 10]),
            "scan I": (ops.scan(add, xs, 10), [11, 13, 16, 20]),
            "scan -": (ops.scan(lambda s, x: s - x, xs, 10), [9, 7, 4, 0]),
            "scan one": (ops.scan(add, FractalTensor([5])), [5]),
            "scan state": (
                ops.scan(lambda s, x: (s[0] + x, x), xs, (0, 0)), ([1, 3, 6, 10], [1, 2, 3, 4])
            ),
            "fold state": (ops.fold(lambda s, x: (s[0] + x, x), xs, (0, 0)), (10, 4)),
            "fold": (ops.fold(add, xs), 10),
            "fold I": (ops.fold(add, xs, 10), 20),
            "fold -": (ops.fold(lambda s, x: s - x, xs), -8),
            "reduce": (ops.reduce(add, xs), 10),
            "reduce I": (ops.reduce(add, xs, 10), 20),
            "map scan": (
                ops.map(lambda row: ops.scan(add, row), xss),
                [[0, 1, 3], [3, 7], [5, 11, 18, 26]],
            ),
            "shrinking": (
                ops.scan(
                    lambda s, x: ops.map(add, ops.zip(s[: len(x)], x)),
                    FractalTensor([[1, 1, 1], [2, 2], [3]]),
                ),
                [[1, 1, 1], [3, 3], [6]],
            ),
            "scanr": (ops.scanr(lambda s, x: s - x, xs, 10), [0, 1, 3, 6]),
            "foldr": (ops.foldr(lambda s, x: s - x, xs, 10), 0),
            "forall": (ops.forall(lambda x: x + 1, xss), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]),
            "filterall": (ops.filterall(even, xss), [[0, 2], [4], [6, 8]]),
        }  # fmt: skip
    for case, (result, expected) in found.items():
        assert lists(result) == expected, case
    with pytest.raises(TypeError, match="map takes a FractalTensor"):
        ops.map(even, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the function comes first: map\(function, nest\)"):
        ops.map(ops.FractalTensor([1, 2]), even)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", every(6, range(30)))
@pytest.mark.usefixtures("within")
def test_functions_are_those_of_lists(seed: int) -> None:
    choice, count = random.Random(seed), itertools.count()
    rows = [
        [next(count) for _ in range(choice.randrange(4))] for _ in range(choice.randrange(1, 5))
    ]
    xs, start = FractalTensor(rows, dtype="int64"), choice.randrange(9)
    k = choice.randrange(1, 4)
    assert ops.map(lambda row: ops.map(lambda x: x * k - 1, row), xs).tolist() == [
        [x * k - 1 for x in row] for row in rows
    ]
    assert ops.forall(lambda x: x * k, xs).tolist() == [[x * k for x in row] for row in rows]
    assert ops.filterall(lambda x: x % (k + 1) == 0, xs).tolist() == [
        [x for x in row if x % (k + 1) == 0] for row in rows
    ]
    assert ops.filter(lambda row: len(row) >= k, xs).tolist() == [r for r in rows if len(r) >= k]
    step = lambda s, x: s * 2 - x  # noqa: E731
    expected = [list(itertools.accumulate(row, step, initial=start))[1:] for row in rows]
    assert ops.map(lambda row: ops.scanl(step, row, start), xs).tolist() == expected
    assert ops.map(lambda row: ops.scanr(step, row, start), xs).tolist() == [
        list(itertools.accumulate(row[::-1], step, initial=start))[:0:-1] for row in rows
    ]
    assert ops.map(lambda row: ops.foldr(step, row, start), xs).tolist() == [
        functools.reduce(step, row[::-1], start) for row in rows
    ]
    assert ops.map(lambda row: ops.reduce(add, row, start), xs).tolist() == [
        sum(row, start) for row in rows
    ]


@pytest.mark.usefixtures("within")
def test_elements_of_zipped_nests_come_as_one_or_by_part() -> None:
    xs, ys = FractalTensor([1, 2]), FractalTensor([[10], [20, 30]])

    def parts(*inputs: Any) -> Any:
        x, row = inputs
        return x + ops.fold(add, row)

    for f in (lambda p: p[0] + ops.fold(add, p[1]), lambda x, row: x + ops.fold(add, row), parts):
        assert ops.map(f, ops.zip(xs, ys)).tolist() == [11, 52]
    scanned = ops.scan(lambda s, x, y: s + x * y, ops.zip(xs, xs), 0)
    assert scanned.tolist() == [1, 5]
    assert ops.map(lambda n, x: n * 10 + x, ops.enumerate(xs)).tolist() == [1, 12]
    assert ops.map(lambda x, *, by: x * by, xs, by=3).tolist() == [3, 6]
    assert ops.map(lambda p, k: p[0] * k, ops.zip(xs, xs), 5).tolist() == [5, 10]


@pytest.mark.usefixtures("within")
def test_empty_lists_give_empty_nests_or_the_initializer() -> None:
    empty, rows = FractalTensor([], leaf_shape=(2,), dtype="float32"), FractalTensor([[1], [2]])[:0]
    mapped = ops.map(lambda x: (x.sum(), x @ np.ones((2, 3), np.float32)), empty)
    assert [(part.tolist(), part.leaf_shape) for part in mapped] == [([], ()), ([], (3,))]
    assert ops.map(lambda row: ops.scan(add, row), rows).depth == 2
    assert ops.filter(lambda x: x.sum() > 0, empty).leaf_shape == (2,)
    assert ops.scan(lambda s, x: s + x.sum(), empty, np.float32(1)).tolist() == []
    assert float(ops.fold(lambda s, x: s + x.sum(), empty, np.float32(1))) == 1
    assert lists(ops.foldr(add, empty, (1, 2))) == (1, 2)
    for call in (ops.fold, ops.foldr, ops.reduce, ops.scan, ops.scanr):
        with pytest.raises(UsageError, match="of an empty list needs an initializer"):
            call(add, empty)
    with pytest.raises(UsageError, match=r"cannot be inferred[\s\S]*ZeroDivisionError"):
        ops.map(lambda x: 1 // int(x.sum()), empty)


@pytest.mark.usefixtures("within")
def test_what_a_function_must_not_do_is_one_clear_error() -> None:
    xs, xss = FractalTensor([1.0, 2.0]), FractalTensor(XSS)
    with (
        pytest.raises(UsageError, match=r"unknown mode 'paralel'[\s\S]*sequential"),
        ops.mode("paralel"),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"sequential has no loop schedules[\s\S]*parallel"),
        ops.mode("sequential", schedule="wave"),
    ):
        pass
    with pytest.raises(ZeroDivisionError):
        ops.map(lambda x: 1 / 0, xs)
    with pytest.raises(UsageError, match="of the same lengths at every depth"):
        ops.forall(lambda p: p[0], ops.zip(xss, xss[[0, 0, 0]]))


def test_the_page_says_what_its_lines_print(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fractal.md").read_text(encoding="utf-8")
    code = "".join([block.split("```")[0] for block in page.split("```python\n")[1:]])
    exec(compile(code, "docs/fractal.md", "exec"), {})
    said = [line.split("# ", 1)[1] for line in code.splitlines() if "# " in line]
    assert capsys.readouterr().out.splitlines() == said


def test_a_function_may_write_into_its_own_array_again() -> None:
    xs, buffer = (
        FractalTensor(np.arange(6, dtype=np.float32).reshape(3, 2)),
        np.zeros(2, np.float32),
    )

    def add_up(s: Any, x: Any) -> Any:
        return np.add(np.asarray(s), np.asarray(x), out=buffer)

    assert ops.scan(add_up, xs, np.zeros(2, np.float32)).tolist() == [[0, 1], [2, 4], [6, 9]]
    first = np.zeros(2, np.float32)
    folded = ops.fold(lambda s, x: s, xs[:0], first)
    first[:] = 9
    assert folded.tolist() == [0, 0]
    assert np.asarray(folded, dtype=np.float64).dtype == np.dtype(np.float64)


@pytest.mark.usefixtures("within")
def test_a_parameter_with_a_default_is_no_part() -> None:
    xs, ys = FractalTensor([1, 2]), FractalTensor([10, 20])
    for f in (lambda p, w=2: p[0] * w, lambda p, *, w=2: p[0] * w, lambda a, b, w=2: a * w):
        assert ops.map(f, ops.zip(xs, ys)).tolist() == [2, 4]
    assert ops.scan(lambda s, p, w=2: s + p[1] * w, ops.zip(xs, ys), 0).tolist() == [20, 60]


class Line(NamedTuple):
    """What a function may be given beside elements."""

    slope: Any
    offset: Any


def test_a_named_tuple_beside_elements_keeps_its_names(within: str) -> None:
    line, xs = Line(np.array([2, 3], np.float32), 1.0), FractalTensor([1.0, 2.0])
    mapped = ops.map(lambda x, f, g: x * f.slope + g[0].offset, xs, line, g=[line])
    assert mapped.tolist() == [[3.0, 4.0], [5.0, 7.0]]
    found = ops.fold(lambda s, x: (s[0] * x, s[1] + x), xs, line)
    assert lists(found) == ([4.0, 6.0], 4.0)


def test_a_fold_keeps_no_state_but_the_last() -> None:
    """Two take turns, however many rounds there are: a MB each, of 64."""
    xs, first = FractalTensor(list(range(64))), np.zeros(1 << 18, np.float32)
    with ops.mode("sequential", device=RuntimeDevice("host")):
        ops.fold(lambda s, x: s + 1.0, xs[:2], first)
        tracemalloc.start()
        try:
            folded = ops.fold(lambda s, x: s + 1.0, xs, first)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert float(folded[0]) == 64 and peak < 16 << 20


def test_tensors_of_a_function_have_data() -> None:
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append((x.numpy().tolist(), float(x.sum()), bool(x[0] > 1), repr(x[0])))
        return np.maximum(x, 2.0)

    assert ops.map(look, FractalTensor(
        np.array([[1, 2], [3, 0]], np.float32))).tolist() == [[2, 2], [3, 2]]  # fmt: skip
    assert [s[:3] for s in seen] == [([1, 2], 3, False), ([3, 0], 3, True)]
