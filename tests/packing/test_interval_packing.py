"""Offline packing: lifetimes never share bytes, and the peak stays near the bound."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.packing import Interval, IntervalPacker, interval_packing, max_load, pack_intervals
from tests.support.benches import BENCHES
from tests.support.grids import every
from tests.support.packing_brute_force import clashes, lowest_peak

CASES = BENCHES / "minimalloc"


@st.composite
def _intervals(draw: st.DrawFn) -> list[Interval]:
    found = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, 30))
        last = first + draw(st.integers(0, 10))
        found.append(Interval(first, last, draw(st.integers(0, 64)) * 64))
    return found


@given(_intervals())
@settings(max_examples=50, deadline=None)
def test_intervals_alive_together_never_share_a_byte(intervals: list[Interval]) -> None:
    packing = pack_intervals(intervals)
    assert clashes(intervals, packing.offsets) == []


@given(_intervals())
@settings(max_examples=50, deadline=None)
def test_the_peak_is_between_the_greatest_load_and_the_sum(intervals: list[Interval]) -> None:
    packing = pack_intervals(intervals)
    assert max_load(intervals) <= packing.peak_nbytes <= sum(i.nbytes for i in intervals)
    ends = [o + i.nbytes for o, i in zip(packing.offsets, intervals, strict=True) if i.nbytes]
    assert packing.peak_nbytes == max(ends, default=0)


@given(_intervals())
@settings(max_examples=50, deadline=None)
def test_lists_and_arrays_of_overlapping_intervals_give_equal_packings(
    intervals: list[Interval],
) -> None:
    packing = pack_intervals(intervals)
    with mock.patch.object(interval_packing, "MANY_OVERLAPS", -1):
        assert pack_intervals(intervals) == packing


def test_the_search_finds_the_optimum_where_every_greedy_order_misses_it() -> None:
    intervals = [
        Interval(5, 6, 4), Interval(3, 3, 1), Interval(2, 5, 3), Interval(3, 4, 3),
        Interval(0, 2, 2), Interval(4, 6, 1), Interval(1, 1, 4),
    ]  # fmt: skip
    assert pack_intervals(intervals).peak_nbytes == max_load(intervals) == 8
    assert pack_intervals(intervals, placements=0).peak_nbytes == 9
    # Moments may be times in nanoseconds: memory depends on the number of buffers only.
    later = [Interval(i.first * 10**15, (i.last + 1) * 10**15 - 1, i.nbytes) for i in intervals]
    assert pack_intervals(later).peak_nbytes == 8


@given(_intervals(), st.lists(st.integers(0, 64), min_size=40, max_size=40))
@settings(max_examples=50, deadline=None)
def test_a_packer_packs_other_sizes_as_if_it_were_new(
    intervals: list[Interval], sizes: list[int]
) -> None:
    packer = IntervalPacker([(i.first, i.last) for i in intervals])
    for held in ([i.nbytes for i in intervals], sizes[: len(intervals)]):
        new = [Interval(i.first, i.last, n) for i, n in zip(intervals, held, strict=True)]
        assert packer.pack(held) == pack_intervals(new)


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
    assert clashes(intervals, packing.offsets) == []
    assert packing.peak_nbytes <= 1.25 * max_load(intervals)
    assert packing.peak_nbytes <= pack_intervals(intervals, placements=0).peak_nbytes


def test_the_greedy_orders_together_stay_within_12_percent_of_perfect_packings() -> None:
    peaks = [pack_intervals(_cut_rectangle(60, s), placements=0).peak_nbytes for s in range(6)]
    assert sum(peaks) / 6 <= 1.12 * 4096 * 64


@st.composite
def _few_intervals(draw: st.DrawFn) -> list[Interval]:
    count = draw(st.integers(1, 7))
    firsts = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    lasts = [first + draw(st.integers(0, 4)) for first in firsts]
    return [
        Interval(first, last, draw(st.integers(1, 6)))
        for first, last in zip(firsts, lasts, strict=True)
    ]


@given(_few_intervals())
@settings(max_examples=25, deadline=None)
def test_few_intervals_get_the_lowest_peak_of_all(intervals: list[Interval]) -> None:
    packing = pack_intervals(intervals)
    assert packing.bound_nbytes <= packing.peak_nbytes == lowest_peak(intervals)
    assert clashes(intervals, packing.offsets) == []


#: Every moment has 5 bytes, and no packing of them stays below 6.
_DEARER_THAN_ITS_LOAD = [
    Interval(0, 1, 3), Interval(2, 3, 2), Interval(4, 4, 3), Interval(2, 2, 1),
    Interval(3, 4, 2), Interval(0, 0, 2), Interval(1, 3, 1), Interval(1, 2, 1),
]  # fmt: skip


def test_a_peak_above_the_greatest_load_is_the_lowest() -> None:
    packing = pack_intervals(_DEARER_THAN_ITS_LOAD)
    assert packing.bound_nbytes == max_load(_DEARER_THAN_ITS_LOAD) == 5
    assert packing.peak_nbytes == 6 == lowest_peak(_DEARER_THAN_ITS_LOAD)


@pytest.mark.parametrize("seed", range(3))
def test_the_budget_is_kept_and_more_of_it_never_gives_a_higher_peak(seed: int) -> None:
    intervals = _cut_rectangle(90, seed)
    # A second part that shares no moment with the first.
    intervals += [replace(i, first=i.first + 1000, last=i.last + 1000) for i in intervals[:70]]
    budgets = (0, 1_000, 4_000, 16_000, 64_000)
    packings = [pack_intervals(intervals, placements=budget) for budget in budgets]
    peaks = [packing.peak_nbytes for packing in packings]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    assert packings[0].placements == 0
    for budget, packing in zip(budgets[1:], packings[1:], strict=True):
        # The first three passes of each part are always made, and a pass is never broken off.
        assert packing.placements <= budget + 4 * 3 * len(intervals)


@pytest.mark.parametrize("case", every(2, "ABCDE"))
def test_minimallocs_cases_pack_within_a_tenth_of_the_bound(case: str) -> None:
    rows = (CASES / f"{case}.csv").read_text(encoding="utf-8").splitlines()[1:]
    fields = [[int(field) for field in row.split(",")] for row in rows]
    intervals = [Interval(lower, upper - 1, size) for _, lower, upper, size in fields]
    packing = pack_intervals(intervals, placements=150_000)
    assert clashes(intervals, packing.offsets) == []
    assert packing.peak_nbytes <= 1.10 * max_load(intervals)


def test_nothing_takes_nothing() -> None:
    assert pack_intervals([]).peak_nbytes == 0
    assert max_load([]) == 0
