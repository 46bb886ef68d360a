"""Scans over rows of different lengths, merged into stretches: the same as row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.compiler import SCHEDULES
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.plain_nests import assert_same, lists_of

WIDTH = 3
NUMBERS = np.random.default_rng(11)


def drawn(*shape: int) -> Any:
    return NUMBERS.normal(size=shape).astype(np.float32) * np.float32(0.5)


W, U, ZERO, TABLE = drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH), drawn(1, WIDTH), drawn(64, WIDTH)
#: From the functions over nests, a row and what it has of its own: what the row gives.
Row = Callable[[Any, Any, Any], Any]


def step(h: Any, x: Any) -> Any:
    return np.tanh(x @ W + h @ U)


def sums(h: Any, x: Any) -> Any:
    return (h * 3 + np.floor(x * 16)) % 1009


def long_and_short(h: Any, x: Any) -> Any:
    said, kept = h
    gate = 1 / (1 + np.exp(-(x @ W + said @ U)))
    kept = gate * kept + x
    return gate * np.tanh(kept), kept


def counted(h: Any, x: Any) -> Any:
    """One state is the same in all rows."""
    number, said = h
    return number + 1, said * 0.5 + x * number.astype(np.float32)


def last_state(o: Any, row: Any, own: Any) -> Any:
    return o.foldl(step, row, ZERO)


def two_states(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(long_and_short, row, (ZERO, own))[0]


def two_last_states(o: Any, row: Any, own: Any) -> Any:
    return o.foldl(long_and_short, row, (own, ZERO))


def counting(o: Any, row: Any, own: Any) -> Any:
    return o.foldl(counted, row, (np.int64(1), own))


def counting_all(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(counted, row, (np.int64(1), own))


def own_factor(o: Any, row: Any, own: Any) -> Any:
    return o.scanr(lambda h, x: np.tanh(h * own + x @ W), row, ZERO)


def both_ways(o: Any, row: Any, own: Any) -> Any:
    there, back = o.scanl(step, row, own), o.scanr(step, row, own)
    return o.map(lambda p: p[0] + p[1], o.zip(there, back))


def layers(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(step, o.scanl(step, row, own), ZERO)


def head_of(o: Any, row: Any, own: Any) -> Any:
    return o.scanr(step, row, own)[0] @ U


def projected(o: Any, row: Any, own: Any) -> Any:
    return o.map(lambda h: h @ U + own, o.scanl(step, row, own))


def loop_in_the_cell(o: Any, row: Any, own: Any) -> Any:
    parts = FractalTensor(TABLE[:4]) if o is ops else list(TABLE[:4])
    return o.scanl(
        lambda h, x: o.foldl(lambda s, t: np.tanh(s * 0.5 + t * x), parts, h), row, own
    )  # fmt: skip


def place_in_the_state(o: Any, row: Any, own: Any) -> Any:
    """What would run past the end of its row would look past the end of the table."""

    table = FractalTensor(TABLE) if o is ops else TABLE

    def round_(state: Any, x: Any) -> Any:
        place, said = state
        return place + 1, said * 0.5 + table[place] * x

    return o.foldl(round_, row, (np.int64(len(TABLE) - len(row)), own))[1]


def place_in_the_element(o: Any, row: Any, own: Any) -> Any:
    table = FractalTensor(TABLE) if o is ops else TABLE
    numbers = o.map(lambda x: (np.abs(x[0, 0]) * 8).astype(np.int64), row)
    return o.foldl(lambda h, n: h * 0.5 + table[n], numbers, own)


LONGEST = 23
ROWS: tuple[Row, ...] = (
    last_state, two_states, two_last_states, counting, counting_all, own_factor, both_ways, layers,
    head_of, projected, loop_in_the_cell, place_in_the_state, place_in_the_element,
)  # fmt: skip
#: Lengths of rows: some alike, of one and of many, far from each other and near.
LENGTHS = ([3, 1, 4, 1, 5, 2, 6, 5], [LONGEST, 2, 2, 9, LONGEST, 8, 7], [2, 12, 2, 2, 12])


def rows_of(lengths: list[int]) -> tuple[list[list[Any]], list[Any]]:
    return [list(drawn(n, 1, WIDTH)) for n in lengths], list(drawn(len(lengths), 1, WIDTH))


def network(o: Any, row: Row, rows: Any, own: Any) -> Any:
    return o.map(lambda p: row(o, *p), o.zip(rows, own))


def schedules_of(compiled: Any) -> list[str]:
    return [note.schedule for note in compiled.loops]


@pytest.mark.parametrize("name", ["scanl", "scanr", "foldl", "foldr"])
@pytest.mark.parametrize("cell", [step, sums], ids=lambda f: f.__name__)
def test_rows_of_any_lengths_run_together(cell: Any, name: str) -> None:
    for lengths in LENGTHS:
        rows, _ = rows_of(lengths)
        compiled = ops.compile(
            lambda nest, n=name: ops.map(lambda row: getattr(ops, n)(cell, row, ZERO), nest),
            FractalTensor(rows), schedule="stretches",
        )  # fmt: skip
        assert "stretches" in schedules_of(compiled)
        expected = [getattr(plain, name)(cell, row, ZERO) for row in rows]
        found = lists_of(compiled(FractalTensor(rows)))
        assert_same(found, expected, 1e-5 if cell is step else 0, str(lengths))


@pytest.mark.parametrize("row", ROWS, ids=lambda f: f.__name__)
def test_whatever_rows_do_around_their_scans(row: Row) -> None:
    for lengths in LENGTHS:
        rows, own = rows_of(lengths)
        nests = FractalTensor(rows), FractalTensor(own)
        expected = network(plain, row, rows, own)
        for schedule in ("stretches", None, "hoisted", "rounds"):
            compiled = ops.compile(
                lambda *given: network(ops, row, *given), *nests, schedule=schedule
            )
            assert ("stretches" in schedules_of(compiled)) >= (schedule == "stretches")
            assert_same(lists_of(compiled(*nests)), expected, 1e-5, f"{schedule} {lengths}")
