"""Offline packing: lifetimes never share bytes, and the peak stays near the bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.packing import Interval, max_load, pack_intervals


@st.composite
def _intervals(draw: st.DrawFn) -> list[Interval]:
    found = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, 30))
        last = first + draw(st.integers(0, 10))
        found.append(Interval(first, last, draw(st.integers(0, 64)) * 64))
    return found


def _clashes(intervals: list[Interval], offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, a in enumerate(intervals)
        for j, b in enumerate(intervals[:i])
        if a.first <= b.last
        and b.first <= a.last
        and offsets[i] < offsets[j] + b.nbytes
        and offsets[j] < offsets[i] + a.nbytes
        and a.nbytes
        and b.nbytes
    ]


@given(_intervals())
@settings(max_examples=150, deadline=None)
def test_intervals_alive_together_never_share_a_byte(intervals: list[Interval]) -> None:
    packing = pack_intervals(intervals)
    assert _clashes(intervals, packing.offsets) == []


@given(_intervals())
@settings(max_examples=150, deadline=None)
def test_the_peak_is_between_the_greatest_load_and_the_sum(intervals: list[Interval]) -> None:
    packing = pack_intervals(intervals)
    assert max_load(intervals) <= packing.peak_nbytes <= sum(i.nbytes for i in intervals)
    ends = [o + i.nbytes for o, i in zip(packing.offsets, intervals, strict=True) if i.nbytes]
    assert packing.peak_nbytes == max(ends, default=0)


@given(_intervals())
@settings(max_examples=40, deadline=None)
def test_packing_the_same_intervals_twice_gives_the_same_offsets(
    intervals: list[Interval],
) -> None:
    assert pack_intervals(intervals) == pack_intervals(list(intervals))


def test_a_chain_needs_two_buffers_at_most() -> None:
    chain = [Interval(i, i + 1, 64) for i in range(50)]
    assert pack_intervals(chain).peak_nbytes == 128


def test_the_search_finds_the_optimum_where_every_greedy_order_misses_it() -> None:
    intervals = [
        Interval(5, 6, 4), Interval(3, 3, 1), Interval(2, 5, 3), Interval(3, 4, 3),
        Interval(0, 2, 2), Interval(4, 6, 1), Interval(1, 1, 4),
    ]  # fmt: skip
    assert pack_intervals(intervals).peak_nbytes == max_load(intervals) == 8
    assert pack_intervals(intervals, placements=0).peak_nbytes == 9


def _cut_rectangle(pieces: int, seed: int) -> list[Interval]:
    """A rectangle of moments and bytes, cut into pieces: they fill it without slack."""
    chance = random.Random(seed)
    rectangles = [(0, 400, 0, 4096)]
    while len(rectangles) < pieces:
        first, last, low, high = rectangles.pop(chance.randrange(len(rectangles)))
        if chance.random() < 0.5 and last - first > 1:
            cut = chance.randint(first + 1, last - 1)
            rectangles += [(first, cut, low, high), (cut, last, low, high)]
        elif high - low > 1:
            cut = chance.randint(low + 1, high - 1)
            rectangles += [(first, last, low, cut), (first, last, cut, high)]
        else:
            rectangles.append((first, last, low, high))
    return [Interval(first, last - 1, (high - low) * 64) for first, last, low, high in rectangles]


@pytest.mark.parametrize("seed", range(4))
def test_sets_without_slack_are_packed_within_a_quarter_of_the_bound(seed: int) -> None:
    intervals = _cut_rectangle(120, seed)
    packing = pack_intervals(intervals)
    assert _clashes(intervals, packing.offsets) == []
    assert packing.peak_nbytes <= 1.25 * max_load(intervals)
    assert packing.peak_nbytes <= pack_intervals(intervals, placements=0).peak_nbytes


def test_nothing_takes_nothing() -> None:
    assert pack_intervals([]).peak_nbytes == 0
    assert max_load([]) == 0
