"""Loops without states as one computation for all rounds: the same as one by one, of many operators
and of loops in loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stitch import fractal as ops
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.grids import every
from tests.support.plain_nests import assert_same, lists_of

NUMBERS = np.random.default_rng(5)
#: Elements of a map, one per round.
XS = NUMBERS.normal(size=(3, 4, 4)).astype(np.float32)
W, VECTOR = NUMBERS.normal(size=(2, 4, 4)).astype(np.float32)[0], XS[1, 2]

CELLS: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: x @ W,
    "product from the left": lambda x: W @ x,
    "product with itself": lambda x: x @ x.T,
    "product with a vector": lambda x: x @ VECTOR,
    "product of vectors": lambda x: x[0] @ x[1],
    "einsum": lambda x: np.einsum("ij,jk->ki", x, W),
    "einsum of three": lambda x: np.einsum("ij,jk,il->lk", x, W, x),
    "sums": lambda x: np.sum(x, axis=0) + np.mean(x, axis=-1) + np.max(x),
    "sum of all": lambda x: np.sum(x * VECTOR),
    "sums that keep": lambda x: x - np.max(x, axis=-1, keepdims=True),
    "places": lambda x: np.argmax(x, axis=0),
    "shapes": lambda x: np.reshape(np.transpose(x), (2, 8))[:, 1:7:2],
    "turned": lambda x: x[::-1, 1:][:, ::-1],
    "joined": lambda x: np.concatenate([x, W, x * 2], axis=1),
    "stacked": lambda x: np.stack([x, W], axis=2),
    "parts": lambda x: np.split(x, 2, axis=1)[1],
    "chosen": lambda x: np.where(x > W, x, VECTOR),
    "taken": lambda x: np.take(x, np.array([2, 0, 2]), axis=1),
    "broadcast": lambda x: np.broadcast_to(x[:1], (4, 4)) + x,
    "bools": lambda x: np.logical_and(x > 0, np.logical_not(x > VECTOR)),
    "types": lambda x: (x * 10).astype(np.int64) % 3,
    "powers": lambda x: np.sqrt(np.abs(x)) ** 3 / (1 + np.exp(-x)),
    "the same for all": lambda x: W + VECTOR,
    "one of the same": lambda x: (x * 0 + W) @ W,
    "a number": lambda x: 3,
    "outer axes": lambda x: x[:, None, :] * x[None, :, :],
    "scalar place": lambda x: x[1, 2] * x[3],
}


@pytest.mark.parametrize("cell", every(3, CELLS.values()), ids=CELLS)
def test_operators_for_all_elements_at_once(cell: Callable[[Any], Any]) -> None:
    xs = FractalTensor(XS)
    expected = plain.map(cell, list(XS))
    for schedule in ("batch", "rounds"):
        compiled = ops.compile(lambda xs: ops.map(cell, xs), xs, schedule=schedule)
        assert [note.schedule for note in compiled.loops] == [schedule]
        found = lists_of(compiled(xs))
        assert_same(found, expected, 1e-5, schedule)
    twice = ops.compile(
        lambda xs: ops.map(lambda x: ops.map(lambda y: cell(x + y), xs), xs), xs, schedule="batch"
    )
    both = plain.map(lambda x: plain.map(lambda y: cell(x + y), list(XS)), list(XS))
    assert_same(lists_of(twice(xs)), both, 1e-5, "twice")


@pytest.mark.parametrize("name", [name for name in CELLS if name != "a number"])
def test_operators_in_loops_of_all_rows_at_once(name: str) -> None:
    """The state differs from row to row, and so do elements."""
    rows, cell = np.stack([XS, XS * 2]) * np.float32(0.1), CELLS[name]

    def network(o: Any, rows: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            return s * 0.5 + np.sum(cell(x + s).astype(np.float32)) * 0.125

        return o.map(lambda row: o.scanr(step, row, VECTOR), rows)

    nest = FractalTensor([FractalTensor(row) for row in rows])
    expected = network(plain, [list(row) for row in rows])
    for schedule in ("batch", "rounds"):
        compiled = ops.compile(lambda rows: network(ops, rows), nest, schedule=schedule)
        assert_same(lists_of(compiled(nest)), expected, 1e-4, schedule)


def test_loops_in_loops_in_loops() -> None:
    """A map of maps of scans of folds over zipped rows, of all schedules."""
    cube = NUMBERS.normal(size=(2, 3, 4)).astype(np.float32)

    def network(o: Any, planes: Any) -> Any:
        def plane(rows: Any) -> Any:
            sums = o.map(lambda row: o.foldr(lambda s, x: s * 0.5 + x, row, np.float32(1)), rows)
            scans = o.scanl(
                lambda s, p: o.map(lambda q: q[0] * 0.5 + q[1] * p[1], o.zip(s, p[0])),
                o.zip(rows, sums), rows[0],
            )  # fmt: skip
            return o.map(lambda row: o.scanl(lambda s, x: s - x, row), scans), sums

        return o.map(plane, planes)

    listed = [[list(row) for row in plane] for plane in cube]
    expected = network(plain, listed)
    planes = FractalTensor(cube.tolist())
    for schedule in (None, "batch", "hoisted", "rounds", "rows", "wave"):
        compiled = ops.compile(lambda xs: network(ops, xs), planes, schedule=schedule)
        assert_same(lists_of(compiled(planes)), expected, 1e-5, str(schedule))
