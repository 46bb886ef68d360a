"""Functions over nests are traced once for each type of element, and never when they mean the same;
what cannot be judged is traced anew, and said."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor, kept_programs, parallel
from stitch.fractal.meanings import array_contents
from stitch.fractal.meanings.array_contents import ArrayContents
from stitch.fractal.tracing import GraphMeaning
from tests.support.garbage import only_of_here

FACTOR = 2.0
XS = FractalTensor([1.0, 2.0])


@pytest.fixture
def within() -> Iterator[stitch.Device]:
    with stitch.open_device("host") as device, ops.mode("parallel", device=device):
        yield device


class Runs:
    """How often functions ran: what they print is no data."""

    def __init__(self, read: pytest.CaptureFixture[str]) -> None:
        self._read = read

    def of(self, run: Callable[[], Any]) -> list[str]:
        self._read.readouterr()
        run()
        return self._read.readouterr().out.split()


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(capsys)


def ragged(*lengths: int) -> FractalTensor:
    return FractalTensor([[float(k) for k in range(n)] for n in lengths])


def test_a_leaf_function_runs_once_for_rows_of_many_lengths(
    within: stitch.Device, runs: Runs
) -> None:
    def step(state: Any, x: Any) -> Any:
        print("step")
        return state + x

    def sums(nest: FractalTensor) -> Any:
        return ops.map(lambda row: ops.scan(step, row, 0.0), nest)

    assert runs.of(lambda: sums(ragged(*range(1, 21)))) == ["step"]
    assert runs.of(lambda: sums(ragged(*range(1, 21)))) == []
    assert runs.of(lambda: sums(ragged(1, 30, 2, 55))) == []
    assert sums(ragged(3, 1)).tolist() == [[0.0, 1.0, 3.0], [0.0]]


def test_a_function_of_rows_runs_once_for_each_length(within: stitch.Device, runs: Runs) -> None:
    def row(xs: Any) -> Any:
        print(len(xs))
        return xs[0] * len(xs)

    nest = FractalTensor([[1.0], [2.0, 3.0], [4.0]])
    assert runs.of(lambda: ops.map(row, nest)) == ["1", "2"]
    assert runs.of(lambda: ops.map(row, FractalTensor([[5.0, 6.0], [7.0, 8.0, 9.0]]))) == ["3"]
    assert ops.map(row, nest).tolist() == [1.0, 4.0, 4.0]


def test_folds_and_reductions_of_new_lengths_run_no_function(
    within: stitch.Device, runs: Runs
) -> None:
    def add(a: Any, b: Any) -> Any:
        print("add")
        return a + b

    for call in (ops.fold, ops.foldr, ops.reduce, ops.scan, ops.scanr):
        runs.of(functools.partial(call, add, FractalTensor([1.0, 2.0, 3.0])))
        again = FractalTensor([1.0, 2.0, 3.0, 4.0, 5.0])
        assert runs.of(functools.partial(call, add, again)) == []
    assert float(ops.reduce(add, again)) == 15.0


def test_other_types_are_other_traces(within: stitch.Device, runs: Runs) -> None:
    def double(x: Any) -> Any:
        print(x.dtype, x.ndim)
        return x * 2

    assert runs.of(lambda: ops.map(double, XS)) == ["float32", "0"]
    assert runs.of(lambda: ops.map(double, FractalTensor([1, 2]))) == ["int64", "0"]
    assert runs.of(lambda: ops.map(double, FractalTensor(np.ones((2, 3))))) == ["float64", "1"]


def test_what_a_leaf_takes_from_around_is_that_of_each_call(
    within: stitch.Device, runs: Runs
) -> None:
    large = np.arange(5000, dtype=np.float32)

    def rows(row: Any, scale: Any) -> Any:
        half = scale / 2

        def leaf(x: Any) -> Any:
            print("leaf")
            return x * half + scale * scale + (large * half)[3] + np.sum(large[:2] * scale)

        return ops.map(leaf, row)

    def expected(row: list[float], scale: float) -> list[float]:
        return [x * scale / 2 + scale * scale + 1.5 * scale + scale for x in row]

    scales = FractalTensor([2.0, 3.0])
    first = ops.map(rows, ops.zip(FractalTensor([[1.0], [2.0, 3.0]]), scales))
    assert first.tolist() == [expected([1.0], 2.0), expected([2.0, 3.0], 3.0)]
    nest = FractalTensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    assert runs.of(lambda: ops.map(rows, ops.zip(nest, scales))) == []
    found = ops.map(rows, ops.zip(nest, scales))
    assert found.tolist() == [
        expected(row, scale) for row, scale in zip(nest.tolist(), (2.0, 3.0), strict=True)
    ]


# What changes ------------------------------------------------------------------------------------


def values(f: Callable[..., Any], *more: Any) -> list[float]:
    """What a map of a function gives, twice."""
    first: list[float] = ops.map(f, XS, *more).tolist()
    assert ops.map(f, XS, *more).tolist() == first
    return first


def test_a_changed_global_is_seen(within: stitch.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Any) -> Any:
        return x * FACTOR

    assert values(scaled) == [2.0, 4.0]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert values(scaled) == [3.0, 6.0]


def test_changed_defaults_are_seen(within: stitch.Device) -> None:
    def scaled(x: Any, by: float = 2.0, *, plus: float = 1.0) -> Any:
        return x * by + plus

    assert values(scaled) == [3.0, 5.0]
    scaled.__defaults__ = (4.0,)
    assert values(scaled) == [5.0, 9.0]
    assert scaled.__kwdefaults__ is not None
    scaled.__kwdefaults__["plus"] = 0.0
    assert values(scaled) == [4.0, 8.0]


@pytest.mark.parametrize("size", [4, 100_000])
def test_arrays_written_in_place_are_seen(within: stitch.Device, size: int) -> None:
    weights = np.ones(size, np.float32)
    read_only = weights.view()
    read_only.flags.writeable = False

    def with_default(x: Any, w: Any = weights) -> Any:
        return np.max(x * w)

    uses: list[Callable[[Any], Any]] = [
        lambda x: x * weights[-1], lambda x: (x * weights)[-1], lambda x: (x * read_only)[-1],
        lambda x: x * float(weights.sum() - size + 1),
        with_default, functools.partial(lambda w, x: np.max(x * w), weights),
    ]  # fmt: skip
    for use in uses:
        weights[:] = 1
        assert values(use) == [1.0, 2.0]
        weights[-1] = 3
        assert values(use) == [3.0, 6.0]


def test_arrays_that_are_replaced_are_seen(within: stitch.Device) -> None:
    weights = np.ones((2, 2048), np.float32)

    def largest(x: Any) -> Any:
        return np.max(x * weights)

    for number in (1, 2, 1, 3):
        weights = np.full((2, 2048), number, np.float32)
        assert values(largest) == [number, 2.0 * number]


def test_counters_of_functions_count_on(within: stitch.Device) -> None:
    count = 0

    def counted(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    assert [ops.map(counted, XS).tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    count = 0
    assert [ops.map(counted, XS).tolist()[0] for _ in range(2)] == [1.0, 2.0]


def test_functions_made_in_loops_read_what_their_variable_is_now(within: stitch.Device) -> None:
    late, bound = [], []
    for k in (1.0, 2.0, 3.0):
        late.append(lambda x: x * k)  # noqa: B023  # as it is meant
        bound.append(lambda x, k=k: x * k)
    assert [values(f)[0] for f in late] == [3.0, 3.0, 3.0]
    assert [values(f)[0] for f in bound] == [1.0, 2.0, 3.0]
    k = 5.0
    assert [values(f)[0] for f in late] == [5.0, 5.0, 5.0]


def test_recursion_reads_itself_as_it_is_now(within: stitch.Device) -> None:
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1)

    before = power
    assert values(power, 3) == [1.0, 8.0]
    assert values(power, 2) == [1.0, 4.0]

    def power(x: Any, n: int) -> Any:  # type: ignore[no-redef]
        return x + 1

    assert values(before, 3) == [2.0, 6.0]


class Layer:
    shared = 1.0

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return self.apply(x)

    def apply(self, x: Any) -> Any:
        return x * self.scale * self.shared


class Pair(NamedTuple):
    scale: float
    plus: float

    def apply(self, x: Any) -> Any:
        return x * self.scale + self.plus


@dataclass
class Settings:
    scale: float


def test_changed_attributes_are_seen(
    within: stitch.Device, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, settings = Layer(2.0), Settings(1.0)
    bound = layer.apply
    for f in (layer, bound, lambda x: layer.apply(x) * settings.scale):
        layer.scale, settings.scale = 2.0, 1.0
        assert values(f) == [2.0, 4.0]
        layer.scale = 3.0
        assert values(f) == [3.0, 6.0]
        with monkeypatch.context() as patched:
            patched.setattr(Layer, "shared", 2.0)
            assert values(f) == [6.0, 12.0]
            patched.setattr(Layer, "apply", lambda self, x: x)
            # A method that was bound before is that of before.
            assert values(f) == ([6.0, 12.0] if f is bound else [1.0, 2.0])
        assert values(f) == [3.0, 6.0]
    assert values(Pair(2.0, 1.0).apply) == [3.0, 5.0]
    assert values(Pair(2.0, 2.0).apply) == [4.0, 6.0]
    settings.scale = 7.0
    assert values(lambda x: x * settings.scale) == [7.0, 14.0]


def test_what_objects_with_code_of_their_own_read_is_seen(within: stitch.Device) -> None:
    class Finding:
        held = 2.0

        def __getattribute__(self, name: str) -> Any:
            return Finding.held if name == "scale" else object.__getattribute__(self, name)

    class Reading:
        @property
        def scale(self) -> float:
            return Finding.held

        @property
        def __array_interface__(self) -> Any:
            return np.full(1, Finding.held, np.float32).__array_interface__

    reading = Reading()
    for f in (
        lambda x: x * Finding().scale,
        lambda x: x * reading.scale,
        lambda x: x * np.asarray(reading)[0],
    ):
        Finding.held = 2.0
        assert values(f) == [2.0, 4.0]
        Finding.held = 3.0
        assert values(f) == [3.0, 6.0]


def test_a_class_that_is_matched_is_read(within: stitch.Device) -> None:
    settings = Settings(2.0)

    def scaled(x: Any) -> Any:
        match settings:
            case Settings(scale=by):
                return x * by
        raise AssertionError

    assert values(scaled) == [2.0, 4.0]
    settings.scale = 3.0
    assert values(scaled) == [3.0, 6.0]


def test_changed_modules_are_seen(within: stitch.Device) -> None:
    module: Any = types.ModuleType("settings")
    module.scale, module.inner = 2.0, types.ModuleType("inner")
    module.inner.plus = 1.0

    def read(settings: Any) -> Any:
        return settings.scale

    def scaled(x: Any) -> Any:
        return x * read(module) + module.inner.plus

    assert values(scaled) == [3.0, 5.0]
    module.scale = 3.0
    assert values(scaled) == [4.0, 7.0]
    module.inner.plus = 0.0
    assert values(scaled) == [3.0, 6.0]


def test_lists_and_tables_are_read_as_they_are(within: stitch.Device) -> None:
    factors, table, log = [2.0], {"a": [1.0]}, list[Any]()

    def scaled(x: Any) -> Any:
        log.append(len(factors))
        return x * sum(factors) + table["a"][0]

    assert values(scaled) == [3.0, 5.0]
    factors.append(1.0)
    assert values(scaled) == [4.0, 7.0]
    table["a"][0] = 0.0
    assert values(scaled) == [3.0, 6.0]
    assert log == [1, 1, 2, 2, 2, 2]


def test_iterators_give_what_comes_next(within: stitch.Device) -> None:
    numbers = iter([1.0, 2.0, 3.0])
    made = (k for k in (1.0, 2.0, 3.0))
    assert [ops.map(lambda x: x * next(numbers), XS).tolist()[0] for _ in range(3)] == [1, 2, 3]
    assert [ops.map(lambda x: x * next(made), XS).tolist()[0] for _ in range(3)] == [1, 2, 3]


def test_attributes_that_no_code_names_are_not_missed(within: stitch.Device) -> None:
    import operator

    class Bare:
        """What it has is set from outside."""

    settings: Any = Bare()
    name, text = "scale", "{0.scale}"
    by_name = operator.attrgetter("scale")
    for f in (
        lambda x: x * by_name(settings), lambda x: x * getattr(settings, name),
        lambda x: x * vars(settings)["scale"], lambda x: x * settings.__dict__["scale"],
        lambda x: x * float(text.format(settings)),
        lambda x: x * operator.attrgetter("scale")(settings),
        lambda x: x * globals()["FACTOR_" + "NOW"],
    ):  # fmt: skip
        globals()["FACTOR_NOW"] = settings.scale = 2.0
        assert values(f) == [2.0, 4.0]
        globals()["FACTOR_NOW"] = settings.scale = 3.0
        assert values(f) == [3.0, 6.0]


def test_compiled_nests_within_functions_are_told_apart(within: stitch.Device) -> None:
    nets = [ops.compile(lambda x, k=k: x * k, np.float32(1)) for k in (2.0, 3.0)]
    assert [values(lambda x, net=net: net(x)) for net in nets] == [[2.0, 4.0], [3.0, 6.0]]


def test_torch_modules_whose_weights_change_are_seen(within: stitch.Device) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 2, bias=False)
    xs = FractalTensor(np.ones((3, 1, 2), np.float32))
    for number in (1.0, 2.0):
        with torch.no_grad():
            module.weight.fill_(number)
        for _ in range(2):
            assert ops.map(module, xs).numpy().tolist() == [[[2 * number] * 2]] * 3


def test_threads_that_change_what_they_read(within: stitch.Device) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            weights = np.full(8000, number, np.float32)
            for turn in range(8):
                weights[:] = number * 10 + turn
                with ops.mode("parallel", device=within):
                    found = ops.map(lambda x: np.max(x * weights), XS)
                assert found.tolist() == [number * 10 + turn, 2 * (number * 10 + turn)]
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed, failed


# What is said, and what is kept ------------------------------------------------------------------


def test_a_report_says_what_cannot_be_judged() -> None:
    generator, count = np.random.default_rng(0), 0

    def counted(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    with ops.mode("parallel") as report:
        ops.map(lambda x: x * generator.random(), XS)
        ops.map(lambda x: x * np.random.random(), XS)
        ops.map(counted, XS)
        ops.map(lambda x: x * 2, XS)
    lines = [line.rpartition("; ")[2] for line in report.explain().splitlines()]
    assert lines[0] == "traced at each call, as it reads 'generator', of type Generator"
    assert lines[1].startswith("traced at each call, as it reads 'random', of type ")
    assert lines[2] == "traced at each call, as it changes what it reads"
    assert "traced" not in lines[3]


def test_random_numbers_are_drawn_anew(within: stitch.Device) -> None:
    drawn = {ops.map(lambda x: x * np.random.random(), XS).tolist()[0] for _ in range(5)}
    assert len(drawn) == 5


def test_calls_that_are_kept_are_few(
    within: stitch.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "MAX_CALL_NBYTES", 4096)
    for k in range(50):
        assert values(lambda x, k=k: x + k) == [1.0 + k, 2.0 + k]
    (way,) = [way for way in within.kept.values() if isinstance(way, parallel.Parallel)]
    assert 0 < len(way._calls) < 50 and way._calls.nbytes <= 4096


def test_arrays_that_were_closed_over_are_let_go(within: stitch.Device) -> None:
    def of(number: int) -> weakref.ref[Any]:
        weights = np.full(100_000, number, np.float32)
        assert values(lambda x: np.max(x * weights)) == [number, 2.0 * number]
        return weakref.ref(weights)

    with only_of_here():
        gone = [of(number) for number in range(3)]
        gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_a_call_keeps_no_constants_of_a_program_that_was_dropped(
    within: stitch.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_programs, "MAX_CONSTANT_NBYTES", 1_000_000)

    def graphs() -> int:
        gc.collect()
        return sum(type(each) is GraphMeaning for each in gc.get_objects())

    before = graphs()
    for number in range(8):
        weights = np.full(100_000, number, np.float32)
        assert values(lambda x, w=weights: np.max(x * w)) == [number, 2.0 * number]
    assert graphs() - before <= 3


def test_copies_to_compare_with_go_with_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ArrayContents()
    arrays = [np.full(1000, k) for k in range(3)]
    held = [seen.of(array) for array in arrays]
    assert [seen.of(array) for array in arrays] == held and seen.nbytes == 24_000
    del arrays[1:]
    assert held[0].copy is not None and held[1].copy is held[2].copy is None
    assert seen.of(arrays[0]) is held[0] and (len(seen), seen.nbytes) == (1, 8000)
    monkeypatch.setattr(array_contents, "MAX_CONTENT_NBYTES", 12_000)
    other = np.ones(1000)
    seen.of(other)
    assert held[0].copy is None and seen.nbytes == 8000
