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
