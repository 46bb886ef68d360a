"""Layers over a sequence: which are a wave, and that every schedule gives what lists give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from stitch import fractal as ops
from stitch.compiler import SCHEDULES
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.grids import in_pairs, in_turn
from tests.support.plain_nests import assert_same, lists_of

WIDTH = 3
#: From the functions over nests, a sequence and what a layer has: the sequence for the next.
Layer = Callable[[Any, Any, Any], Any]


def step(h: Any, x: Any, own: Any) -> Any:
    w, u, _ = own
    return np.tanh(x @ w + h @ u)


def start(own: Any) -> Any:
    return own[2]


def recurrent(o: Any, xs: Any, own: Any) -> Any:
    return o.scanl(lambda h, x: step(h, x, own), xs, np.zeros((1, WIDTH), np.float32))


def own_starts(o: Any, xs: Any, own: Any) -> Any:
    return o.scanl(lambda h, x: step(h, x, own), xs, start(own))


def two_states(o: Any, xs: Any, own: Any) -> Any:
    def round_(state: Any, x: Any) -> Any:
        said, kept = state
        gates = 1 / (1 + np.exp(-(x @ own[0] + said @ own[1])))
        kept = gates * kept + x * 0.5
        return np.tanh(kept) * gates, kept

    return o.scanl(round_, xs, (start(own), start(own)))[0]


def residual(o: Any, xs: Any, own: Any) -> Any:
    """The element is read in its round."""

    def round_(state: Any, x: Any) -> Any:
        after = step(state[0], x, own)
        return after, after + x

    return o.scanl(round_, xs, (start(own), start(own)))[1]


def whole_numbers(o: Any, xs: Any, own: Any) -> Any:
    return o.scanl(lambda h, x: (h * 3 + x * own[0] - own[1]) % 1009, xs, own[2])


def last_state_read(o: Any, xs: Any, own: Any) -> Any:
    after = own_starts(o, xs, own)
    last = o.foldl(lambda h, x: step(h, x, own), xs, start(own))
    return o.map(lambda y: y + last, after)


def sequence_read_beside(o: Any, xs: Any, own: Any) -> Any:
    return o.map(lambda p: p[0] + p[1], o.zip(own_starts(o, xs, own), xs))


def head_read(o: Any, xs: Any, own: Any) -> Any:
    first = xs[0]
    return o.scanl(lambda h, x: step(h, x, own) + first, xs, start(own))


def first_element_as_state(o: Any, xs: Any, own: Any) -> Any:
    return o.scanl(lambda h, x: step(h, x, own), xs)


def from_the_right(o: Any, xs: Any, own: Any) -> Any:
    return o.scanr(lambda h, x: step(h, x, own), xs, start(own))


def from_both_sides(o: Any, xs: Any, own: Any) -> Any:
    there, back = own_starts(o, xs, own), from_the_right(o, xs, own)
    return o.map(lambda p: p[0] + p[1], o.zip(there, back))


def mapped_before(o: Any, xs: Any, own: Any) -> Any:
    return own_starts(o, o.map(lambda x: x * 0.5, xs), own)


WAVES: tuple[Layer, ...] = (recurrent, own_starts, two_states, residual, whole_numbers)
OTHERS: tuple[Layer, ...] = (
    last_state_read, sequence_read_beside, head_read, first_element_as_state, from_the_right,
    from_both_sides, mapped_before,
)  # fmt: skip


def of_layers(depth: int, length: int, layer: Layer) -> tuple[Any, list[Any]]:
    """A sequence, and for each layer two weights and a first state."""
    numbers = np.random.default_rng(depth * 10 + length)

    def drawn(*shape: int) -> Any:
        if layer is whole_numbers:
            return numbers.integers(0, 99, (shape[0], 1))
        return numbers.normal(size=shape).astype(np.float32)

    xs = drawn(length, 1, WIDTH)
    return xs, [drawn(depth, *rest) for rest in ((WIDTH, WIDTH), (WIDTH, WIDTH), (1, WIDTH))]


def network(o: Any, layer: Layer, outer: str, xs: Any, *own: Any) -> Any:
    return getattr(o, outer)(lambda seq, each: layer(o, seq, each), o.zip(*own), xs)


def expected_of(layer: Layer, outer: str, xs: Any, own: list[Any]) -> Any:
    return network(plain, layer, outer, list(xs), *map(list, own))


@pytest.mark.parametrize(
    ("depth", "layer", "outer"), in_pairs(range(2, 6), WAVES, ["scanl", "foldl"])
)
def test_layers_are_a_wave_of_any_depth_and_length(layer: Layer, outer: str, depth: int) -> None:
    tolerance = 0 if layer is whole_numbers else 1e-5
    for length in (1, 2, 3, 6):
        xs, own = of_layers(depth, length, layer)
        nests = [FractalTensor(each) for each in (xs, *own)]
        compiled = ops.compile(
            lambda *given, f=layer: network(ops, f, outer, *given), *nests, schedule="wave"
        )
        if length > 1:
            assert [n.schedule for n in compiled.loops if n.count == depth][:1] == ["wave"]
        expected = expected_of(layer, outer, xs, own)
        assert_same(lists_of(compiled(*nests)), expected, tolerance)


@pytest.mark.parametrize(
    ("layer", "outer", "shape"),
    # Of four shapes, so that in turn each meets every function.
    in_turn([*WAVES, *OTHERS], ["scanl", "foldl", "scanr"], [(2, 3), (4, 2), (3, 1), (2, 4)]),
)
def test_every_schedule_of_layers_gives_the_same(
    layer: Layer, outer: str, shape: tuple[int, int]
) -> None:
    xs, own = of_layers(*shape, layer)
    nests = [FractalTensor(each) for each in (xs, *own)]
    expected = expected_of(layer, outer, xs, own)
    for schedule in (None, *SCHEDULES):
        compiled = ops.compile(
            lambda *given: network(ops, layer, outer, *given), *nests, schedule=schedule
        )
        if layer in OTHERS or outer == "scanr":
            assert "wave" not in [note.schedule for note in compiled.loops]
        found = lists_of(compiled(*nests))
        assert_same(found, expected, 0 if layer is whole_numbers else 1e-5, str(schedule))


def test_a_layer_of_a_wave_computes_nothing_that_warns() -> None:
    """Rounds past the end of a sequence, and before its begin, are computed on elements of it."""
    xs, own = np.arange(1.0, 5.0, dtype=np.float32), np.ones((3, 1), np.float32)

    def layers(o: Any, xs: Any, own: Any) -> Any:
        return o.scanl(
            lambda seq, w: o.scanl(lambda h, x: np.log(x + h) + w, seq, np.ones(1, np.float32)),
            own, xs,
        )  # fmt: skip

    with np.errstate(all="raise"), ops.mode("parallel", schedule="wave"):
        found = layers(ops, FractalTensor(xs[:, None]), FractalTensor(own))
    assert_same(lists_of(found), layers(plain, list(xs[:, None]), list(own)), 1e-5)


def test_layers_that_look_past_the_end_of_the_sequence_are_no_wave() -> None:
    """A place in a table goes on from element to element, and the table ends where they do."""
    drawn = np.random.default_rng(3)
    xs, own, table = (drawn.normal(size=(n, WIDTH)).astype(np.float32) for n in (6, 3, 6))

    def layers(o: Any, xs: Any, own: Any, table: Any) -> Any:
        def layer(seq: Any, w: Any) -> Any:
            def round_(state: Any, x: Any) -> Any:
                place, _ = state
                return place + 1, np.tanh(x * w + table[place])

            return o.scanl(round_, seq, (np.int64(0), np.zeros(WIDTH, np.float32)))[1]

        return o.scanl(layer, own, xs)

    nests = [FractalTensor(each) for each in (xs, own, table)]
    expected = layers(plain, list(xs), list(own), list(table))
    for schedule in (None, *SCHEDULES):
        compiled = ops.compile(lambda *given: layers(ops, *given), *nests, schedule=schedule)
        assert "wave" not in [note.schedule for note in compiled.loops]
        assert_same(lists_of(compiled(*nests)), expected, 1e-5, str(schedule))


def of_all_rows(layer: Layer, outer: str, xs: Any, *own: Any) -> Any:
    return ops.map(lambda row, each: network(ops, layer, outer, row, *each), xs, own)


@pytest.mark.parametrize(("layer", "outer"), in_turn(WAVES, ["scanl", "foldl"]))
def test_layers_in_a_map_are_a_wave_of_all_elements(layer: Layer, outer: str) -> None:
    """Lanes stand around a sequence, and inside its elements while rounds run."""
    for depth, length, lanes in ((2, 3, 4), (3, 5, 2), (4, 2, 3)):
        rows = [of_layers(depth, length + 10 * i, layer)[0][:length] for i in range(lanes)]
        own = of_layers(depth, length, layer)[1]
        nests = [FractalTensor([FractalTensor(row) for row in rows]), *map(FractalTensor, own)]
        expected = [expected_of(layer, outer, each, own) for each in rows]
        for schedule in ("wave", None, "rows"):
            compiled = ops.compile(
                partial(of_all_rows, layer, outer), *nests, name="rows", schedule=schedule
            )
            if schedule == "wave":
                assert "wave" in [note.schedule for note in compiled.loops]
            found = lists_of(compiled(*nests))
            assert_same(found, expected, 0 if layer is whole_numbers else 1e-5, str(schedule))
