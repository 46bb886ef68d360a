"""Bins: an assignment exactly where there is one, else a refutation that replays."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.packing import bins, gaps_between, pack
from tests.support.packing_brute_force import fits_somehow, replays

SIZES = st.lists(st.integers(1, 9), max_size=6)
GAPS = st.lists(st.integers(0, 15), max_size=4)


def fits(pieces: list[int], gaps: list[int], chosen: tuple[int, ...]) -> bool:
    room = list(gaps)
    for size, gap in zip(pieces, chosen, strict=True):
        room[gap] -= size
    return min(room, default=0) >= 0


def perfect(dice: Random, pieces: int, gaps: int, nbytes: int) -> tuple[list[int], list[int]]:
    """Pieces, and gaps that some assignment of them fills to the last byte."""
    cuts = [0, *sorted(dice.sample(range(1, nbytes), pieces - 1)), nbytes]
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    room = [0] * gaps
    for size in sizes:
        room[dice.randrange(gaps)] += size
    return sizes, room


@given(SIZES, GAPS)
@settings(max_examples=100, deadline=None)
def test_an_assignment_is_found_exactly_where_there_is_one(
    pieces: list[int], gaps: list[int]
) -> None:
    packing = pack(pieces, gaps)
    assert packing.ended
    assert (packing.chosen is not None) == fits_somehow(pieces, gaps)
    assert (packing.refutation is None) == (packing.chosen is not None)
    if packing.chosen is not None:
        assert fits(pieces, gaps, packing.chosen)
    if packing.refutation is not None:
        assert replays(pieces, gaps, packing.refutation)


@given(SIZES, GAPS, st.integers(0, 60), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_no_steps_prove_what_is_false(
    pieces: list[int], gaps: list[int], position: int, step: int
) -> None:
    refutation = pack(pieces, gaps).refutation or bins.Refutation(b"\0\1\2\1\1")
    steps = bytearray(refutation.steps)
    steps[position % len(steps)] = step
    if replays(pieces, gaps, bins.Refutation(bytes(steps))):
        assert not fits_somehow(pieces, gaps)


def hard_refutation() -> tuple[list[int], list[int], bins.Refutation]:
    """A refutation with every kind of step, of pieces that add up to exactly the gaps."""
    for seed in range(100):
        dice = Random(seed)
        pieces, gaps = [dice.randrange(20, 60) for _ in range(10)], [0, 0, 0]
        for size in pieces:
            gaps[dice.randrange(3)] += size
        gaps[0], gaps[1] = gaps[0] + 1, gaps[1] - 1
        refutation = pack(pieces, gaps).refutation
        if refutation is not None and set(refutation.steps) == {0, 1, 2}:
            return pieces, gaps, refutation
    raise AssertionError("no case found")


def test_a_mutated_refutation_is_refused() -> None:
    pieces, gaps, refutation = hard_refutation()
    steps = refutation.steps
    assert replays(pieces, gaps, refutation)
    assert not replays(pieces, gaps, replace(refutation, steps=steps[:-1]))
    assert not replays(pieces, gaps, replace(refutation, steps=steps + b"\1"))
    assert not replays(pieces, gaps, replace(refutation, steps=steps[1:]))
    assert not replays(pieces, gaps, replace(refutation, steps=b"\2" + steps[1:]))
    assert not replays(pieces, gaps, replace(refutation, steps=b"\1"))
    for k, step in enumerate(steps):
        if step == bins.BRANCH:
            closed = steps[:k] + b"\1" + steps[k + 1 :]
            assert not replays(pieces, gaps, replace(refutation, steps=closed))
    assert not replays(pieces, [gap + 60 for gap in gaps], refutation)


@pytest.mark.parametrize("slack", [0, 1])
def test_nearly_all_packings_without_slack_end_within_the_budget(slack: int) -> None:
    dice, undecided = Random(slack), 0
    for _ in range(60):
        pieces, gaps = perfect(
            dice, dice.randrange(8, 40), dice.randrange(2, 9), dice.choice((100, 1000, 40_000))
        )
        if slack:
            # As many bytes elsewhere: often nothing packs any more.
            gaps[0], gaps[1] = gaps[0] + gaps[1] // 3, gaps[1] - gaps[1] // 3
        packing = pack(pieces, gaps)
        undecided += not packing.ended
        assert slack or packing.refutation is None
        assert packing.chosen is None or fits(pieces, gaps, packing.chosen)
        assert packing.placements <= bins.PLACEMENTS + len(pieces) * len(gaps)
    assert undecided <= 2


def test_a_budget_that_ends_proves_nothing_and_more_of_it_changes_no_answer() -> None:
    pieces, gaps, refutation = hard_refutation()
    assert pack(pieces, gaps, placements=0) == bins.BinPacking(None, None, 0)
    ended = [pack(pieces, gaps, placements=n) for n in (10, 100, 1_000, 10_000)]
    assert [p.ended for p in ended] == sorted(p.ended for p in ended)
    assert all(p.chosen is None for p in ended) and ended[-1].refutation == refutation
    assert pack([4, 4], [10, 10], placements=0).chosen == (0, 0)


@pytest.mark.parametrize("budget", [1_000, 4_000])
def test_a_search_that_is_not_done_has_taken_the_placements_that_it_was_given(budget: int) -> None:
    pieces, gaps = perfect(Random(3), 27, 7, 40_000)
    gaps[0], gaps[1] = gaps[0] + gaps[1] // 3, gaps[1] - gaps[1] // 3
    packing = pack(pieces, gaps, placements=budget)
    assert not packing.ended and packing.placements == budget


@given(st.sets(st.integers(3, 37)))
def test_gaps_are_what_obstacles_leave(taken: set[int]) -> None:
    gaps = gaps_between([(at, 1) for at in taken], 3, 38)
    left = {at for start, size in gaps for at in range(start, start + size)}
    assert left == set(range(3, 38)) - taken
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(gaps))


def test_gaps_too_large_for_sums_count_as_wholly_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bins, "_MOST_SUMS", 0)
    packing = pack([5, 5, 5, 4], [9, 10])
    assert packing.chosen is not None
    packing = pack([6, 6, 6], [11, 11])
    assert packing.refutation is not None and not packing.refutation.by_sums
    assert replays([6, 6, 6], [11, 11], packing.refutation)
