"""Scans over rows of different lengths, merged into segments: the same as row by row, which are
merged, and what `explain` says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.compiler import differentiate
from stitch.fractal import FractalTensor
from stitch.graph import trace
from tests.support import plain_nests as plain
from tests.support.gradients.scans import loop_gradients
from tests.support.grids import in_turn, named
from tests.support.plain_nests import assert_same, lists_of

WIDTH = 3
NUMBERS = np.random.default_rng(11)


def drawn(*shape: int) -> Any:
    return NUMBERS.normal(size=shape).astype(np.float32) * np.float32(0.5)


W, U, START, TABLE = drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH), drawn(1, WIDTH), drawn(64, WIDTH)
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
    return o.foldl(step, row, START)


def two_states(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(long_and_short, row, (START, own))[0]


def two_last_states(o: Any, row: Any, own: Any) -> Any:
    return o.foldl(long_and_short, row, (own, START))


def counting(o: Any, row: Any, own: Any) -> Any:
    return o.foldl(counted, row, (np.int64(1), own))


def counting_all(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(counted, row, (np.int64(1), own))


def own_factor(o: Any, row: Any, own: Any) -> Any:
    return o.scanr(lambda h, x: np.tanh(h * own + x @ W), row, START)


def both_ways(o: Any, row: Any, own: Any) -> Any:
    there, back = o.scanl(step, row, own), o.scanr(step, row, own)
    return o.map(lambda p: p[0] + p[1], o.zip(there, back))


def layers(o: Any, row: Any, own: Any) -> Any:
    return o.scanl(step, o.scanl(step, row, own), START)


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


def states_of(nest: Any) -> Any:
    return ops.map(lambda row: ops.scan(step, row, START), nest)


def schedules_of(compiled: Any) -> list[str]:
    return [note.schedule for note in compiled.loops]


@pytest.mark.parametrize(
    ("name", "cell"),
    in_turn(["scanl", "scanr", "foldl", "foldr"], named(lambda f: f.__name__, [step, sums])),
)
def test_rows_of_any_lengths_run_together(cell: Any, name: str) -> None:
    def states(o: Any, nest: Any) -> Any:
        return o.map(lambda row: getattr(o, name)(cell, row, START), nest)

    for lengths in LENGTHS:
        rows, _ = rows_of(lengths)
        nest = FractalTensor(rows)
        compiled = ops.compile(lambda nest: states(ops, nest), nest, schedule="segments")
        assert "segments" in schedules_of(compiled)
        found, expected = lists_of(compiled(nest)), states(plain, rows)
        assert_same(found, expected, 1e-5 if cell is step else 0, str(lengths))


@pytest.mark.parametrize(
    ("row", "lengths", "other"), in_turn(ROWS, LENGTHS, [None, "hoisted", "rounds"])
)
def test_whatever_rows_do_around_their_scans(
    row: Row, lengths: list[int], other: str | None
) -> None:
    rows, own = rows_of(lengths)
    nests = FractalTensor(rows), FractalTensor(own)
    expected = network(plain, row, rows, own)
    for schedule in ("segments", other):
        compiled = ops.compile(lambda *given: network(ops, row, *given), *nests, schedule=schedule)
        assert ("segments" in schedules_of(compiled)) >= (schedule == "segments")
        assert_same(lists_of(compiled(*nests)), expected, 1e-5, str(schedule))


@pytest.mark.parametrize("schedule", ["segments", "batch", "blocks", "rounds", None])
def test_rows_in_rows_whose_inner_lanes_differ_in_length(schedule: str | None) -> None:
    """What is the scan of the inner lanes is then one for the outer lanes."""
    parts, own = rows_of([4, 2, 4, 3])
    lanes = [own, own[::-1], own[1:] + own[:1]]

    def nested(o: Any, parts: Any, lanes: Any) -> Any:
        def inner(starts: Any) -> Any:
            return o.map(lambda p: o.scanl(step, *p), o.zip(parts, starts))

        return o.map(inner, lanes)

    nests = FractalTensor(parts), FractalTensor(lanes)
    compiled = ops.compile(lambda *given: nested(ops, *given), *nests, schedule=schedule)
    assert_same(lists_of(compiled(*nests)), nested(plain, parts, lanes), 1e-5)


@pytest.mark.parametrize("schedule", ["segments", None])
def test_rows_whose_cell_runs_rows(schedule: str | None) -> None:
    rows, own = rows_of([5, 2, 5])
    inner, _ = rows_of([2, 3, 2])

    def cell(o: Any, inner: Any) -> Any:
        def round_(h: Any, x: Any) -> Any:
            said = o.map(lambda part: o.foldl(step, part, h), inner)
            return np.tanh(said[0] + said[1] - said[2] + x)

        return round_

    def nested(o: Any, rows: Any, own: Any, inner: Any) -> Any:
        return o.map(lambda p: o.scanl(cell(o, inner), *p), o.zip(rows, own))

    nests = FractalTensor(rows), FractalTensor(own), FractalTensor(inner)
    compiled = ops.compile(lambda *given: nested(ops, *given), *nests, schedule=schedule)
    assert_same(lists_of(compiled(*nests)), nested(plain, rows, own, inner), 1e-5)


def test_scans_of_other_weights_stay_apart() -> None:
    rows, _ = rows_of([4, 7])
    other = drawn(WIDTH, WIDTH)

    def scans(a: Any, b: Any, w: Any, u: Any) -> Any:
        def run_of(row: Any, weights: Any) -> Any:
            return ops.scan(lambda h, x: np.tanh(x + h @ weights), row, START)

        return run_of(a, w), run_of(b, u)

    nests = [FractalTensor(row) for row in rows]
    compiled = ops.compile(scans, *nests, other, W, schedule="segments")
    assert not any(note.merged for note in compiled.loops)


def test_rows_without_elements_and_of_one() -> None:
    rows, own = rows_of([0, 3, 1, 0, 5])
    nests = FractalTensor([FractalTensor(np.array(r).reshape(-1, 1, WIDTH).astype(np.float32))
                           for r in rows]), FractalTensor(own)  # fmt: skip
    for row in (last_state, two_last_states):
        compiled = ops.compile(
            lambda *given, r=row: network(ops, r, *given), *nests, schedule="segments"
        )
        assert_same(lists_of(compiled(*nests)), network(plain, row, rows, own), 1e-5)


def test_gradients_through_segments_are_those_of_pytorch() -> None:
    lengths = [5, 9, 2, 14, 9, 3]
    index = FractalTensor(rows_of(lengths)[0]).index
    feeds = {"flat": drawn(sum(lengths), 1, WIDTH), "w": W, "u": U}

    def states(flat: Any, w: Any, u: Any) -> Any:
        nest = FractalTensor.of(flat, index)
        return ops.flatten(
            ops.map(lambda row: ops.scan(lambda h, x: np.tanh(x @ w + h @ u), row, START), nest)
        )

    graph = trace(states, *feeds.values())
    both = differentiate(graph, list(feeds))
    for part in (both.forward, both.backward):
        loops = stitch.compile(part, target="host").loops
        assert "segments" in [note.schedule for note in loops]
    results, seeds, found = loop_gradients(both, dict(zip(
        [slot.name for slot in graph.inputs], feeds.values(), strict=True)))  # fmt: skip
    tensors = [torch.tensor(each, requires_grad=True) for each in feeds.values()]
    flat, w, u = tensors
    said = []
    for row in torch.split(flat, lengths):
        h = torch.tensor(START)
        for x in row:
            h = torch.tanh(x @ w + h @ u)
            said.append(h)
    ((name, seed),) = seeds.items()
    whole = torch.stack(said).reshape(results[name].shape)
    np.testing.assert_allclose(results[name], whole.detach().numpy(), 1e-5, 1e-6)
    (whole * torch.from_numpy(seed)).sum().backward()
    for ours, tensor in zip(found.values(), tensors, strict=True):
        np.testing.assert_allclose(ours, tensor.grad.numpy(), 1e-4, 1e-5)


def test_explain_names_rows_lengths_and_loops() -> None:
    rows, _ = rows_of([30, 2, 31, 9, 2])
    nest = FractalTensor(rows)
    compiled = ops.compile(states_of, nest, schedule="hoisted")
    assert "hoisted, 5 rows of 4 lengths by length" in compiled.explain()
    compiled = ops.compile(states_of, nest)
    assert "segments, 5 rows of 4 lengths in 1 loop (" in compiled.explain()
    assert "; not hoisted (" in compiled.explain()
