"""Offline packing: buffers with known lifetimes get offsets such that the arena stays small.

The same input gives the same output, on any machine.

Method: several greedy orders; then, while the peak is above the greatest load at any moment (no
packing can be lower), bounded searches of each part that shares no moment with the rest (see
`skyline` and, for few buffers, `exact`). Ordinary programs never get that far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.packing.intervals import Interval, Packing, components, max_load
from stitch.packing.skyline import search_skyline

# --------------------------------------------------------------------------------------------------
# Exact packing of few intervals: all packings in which each rests on another, or on the floor.

_WALL = 1 << 62


class ExactSearch:
    """Looks for a packing of one or more intervals below `peak`, down to `target`.

    `offsets` and `peak` are those of the best; `ended` tells that none is lower or that the target
    is reached. `placements` stays within the budget. No interval may be fixed.
    """

    __slots__ = (
        "_budget", "_ends", "_lying", "_rest", "_sizes", "_starts", "_target", "ended", "offsets",
        "peak", "placements",
    )  # fmt: skip

    def __init__(self, intervals: Sequence[Interval], peak: int, target: int, budget: int) -> None:
        moments = sorted({m for i in intervals for m in (i.first, i.last + 1)})
        number = {moment: n for n, moment in enumerate(moments)}
        self._starts = [number[i.first] for i in intervals]
        self._ends = [number[i.last + 1] for i in intervals]
        self._sizes = [i.nbytes for i in intervals]
        #: By moment the bytes that still have to be placed.
        self._rest = [0] * (len(moments) - 1)
        for i in range(len(intervals)):
            for moment in range(self._starts[i], self._ends[i]):
                self._rest[moment] += self._sizes[i]
        self._lying: list[int | None] = [None] * len(intervals)
        self.offsets: tuple[int, ...] | None = None
        self.peak, self._target, self._budget = peak, target, budget
        self.placements = 0
        self.ended = peak <= target or self._fill([0] * len(self._rest))

    def _fill(self, heights: list[int]) -> bool:
        """Tries everything above a skyline; False where the budget ended first."""
        if None not in self._lying:
            self.offsets = tuple(offset or 0 for offset in self._lying)
            self.peak = max(heights)
            return True
        if self.placements >= self._budget:
            return False
        self.placements += 1
        height = min(heights)
        begin = heights.index(height)
        stop = begin
        while stop < len(heights) and heights[stop] == height:
            stop += 1
        lower = heights[begin - 1] if begin else _WALL
        upper = heights[stop] if stop < len(heights) else _WALL
        for i in self._candidates(begin, stop):
            start, end, size = self._starts[i], self._ends[i], self._sizes[i]
            raised = list(heights)
            raised[start:end] = [height + size] * (end - start)
            raised[begin:start] = [min(lower, height + size)] * (start - begin)
            if not self._place(i, height, raised):
                return False
            if self.peak <= self._target:
                return True
        top = min(lower, upper)
        if top == _WALL:
            return True
        raised = list(heights)
        raised[begin:stop] = [top] * (stop - begin)
        return self._too_high(raised) or self._fill(raised)

    def _candidates(self, begin: int, stop: int) -> list[int]:
        """The intervals that lie inside a segment, largest first, one of each kind."""
        kinds: dict[tuple[int, int, int], int] = {}
        for i, lying in enumerate(self._lying):
            if lying is None and self._starts[i] >= begin and self._ends[i] <= stop:
                kinds.setdefault((-self._sizes[i], self._starts[i], self._ends[i]), i)
        return [i for _, i in sorted(kinds.items())]

    def _place(self, i: int, height: int, raised: list[int]) -> bool:
        """What follows from one placement; False where the budget ended first."""
        over = range(self._starts[i], self._ends[i])
        self._lying[i] = height
        for moment in over:
            self._rest[moment] -= self._sizes[i]
        ended = self._too_high(raised) or self._fill(raised)
        for moment in over:
            self._rest[moment] += self._sizes[i]
        self._lying[i] = None
        return ended

    def _too_high(self, heights: list[int]) -> bool:
        return max(map(sum, zip(heights, self._rest, strict=True))) >= self.peak


Offsets = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]

#: Buffers above which only the greedy orders are tried.
SEARCH_BUFFERS = 500
#: Buffers up to which a search of all packings usually ends within the budget.
EXACT_BUFFERS = 12
#: Placements that the search may make by default: some tens of milliseconds.
SEARCH_PLACEMENTS = 5_000


def pack_intervals(
    intervals: Sequence[Interval], *, placements: int = SEARCH_PLACEMENTS
) -> Packing:
    """Offsets such that intervals alive at one moment never share a byte, with a small peak.

    `placements` bounds the search, but for its first passes: more of them may find a lower peak
    (100,000 take about 0.3 s), never a higher one; with 0 only greedy orders are tried. Raises
    `UsageError` where two fixed intervals share bytes.

    >>> pack_intervals([Interval(0, 1, 10), Interval(1, 2, 5), Interval(2, 3, 10)])
    Packing(offsets=(0, 10, 0), peak_nbytes=15, bound_nbytes=15, placements=0)
    """
    _check_fixed(intervals)
    present = [i for i, interval in enumerate(intervals) if interval.nbytes]
    packing = _pack([intervals[i] for i in present], placements)
    offsets = [interval.offset or 0 for interval in intervals]
    for i, offset in zip(present, packing.offsets, strict=True):
        offsets[i] = offset
    return replace(packing, offsets=tuple(offsets))


def _check_fixed(intervals: Sequence[Interval]) -> None:
    fixed = [(i, x, x.offset) for i, x in enumerate(intervals) if x.offset is not None and x.nbytes]
    for (i, a, low), (j, b, other) in combinations(fixed, 2):
        together = a.first <= b.last and b.first <= a.last
        if together and low < other + b.nbytes and other < low + a.nbytes:
            raise UsageError(
                f"intervals {i} and {j} are fixed on the same bytes at the same moment",
                got=f"{a} and {b}",
                remedy="give one of them another offset, or none",
            )


def _pack(intervals: Sequence[Interval], placements: int) -> Packing:
    if not intervals:
        return Packing((), 0, 0)
    ends = [i.offset + i.nbytes for i in intervals if i.offset is not None]
    bound = max(max_load(intervals), *ends) if ends else max_load(intervals)
    offsets, peak = _greedily(intervals, bound)
    if peak == bound or placements <= 0 or len(intervals) > SEARCH_BUFFERS:
        return Packing(offsets, peak, bound)
    return _search(intervals, offsets, bound, placements)


def _greedily(intervals: Sequence[Interval], bound: int) -> tuple[tuple[int, ...], int]:
    """Offsets and their peak by the best of the orders, the first that reaches the bound."""
    placer = _Placer(intervals)
    offsets: tuple[int, ...] = ()
    peak = None
    for key in _ORDERS:
        order = [i for _, i in sorted((key(x), i) for i, x in enumerate(intervals))]
        other, height = placer.place(order)
        if peak is None or height < peak:
            offsets, peak = other, height
        if peak == bound:
            break
    assert peak is not None
    return offsets, peak


def _search(
    intervals: Sequence[Interval], greedy: tuple[int, ...], bound: int, placements: int
) -> Packing:
    """The greedy offsets with each part above the bound packed anew."""
    offsets, proved, taken = list(greedy), bound, 0
    parts = [
        part
        for part in sorted(components(intervals), key=len)
        if max(greedy[i] + intervals[i].nbytes for i in part) > bound
    ]
    waiting, budget = sum(map(len, parts)), placements
    for part in parts:
        members = [intervals[i] for i in part]
        peak = max(offsets[i] + intervals[i].nbytes for i in part)
        share = budget * len(part) // waiting
        few = len(part) <= EXACT_BUFFERS and all(i.offset is None for i in members)
        better, height, used = search_skyline(members, bound, share // 2 if few else share)
        if height < peak:
            peak = height
            for i, offset in zip(part, better, strict=True):
                offsets[i] = offset
        if few:
            exact = ExactSearch(members, peak, bound, share // 2)
            used += exact.placements
            for i, offset in zip(part, exact.offsets or (), strict=False):
                offsets[i] = offset
            if exact.ended:
                proved = max(proved, exact.peak)
        taken += used
        # What a part leaves of its share is for those after it.
        waiting, budget = waiting - len(part), budget - min(used, share)
    peak = max(offset + i.nbytes for offset, i in zip(offsets, intervals, strict=True))
    return Packing(tuple(offsets), peak, proved, taken)


def _by_size(i: Interval) -> tuple[int, ...]:
    return (-i.nbytes, i.first - i.last)


def _by_duration(i: Interval) -> tuple[int, ...]:
    return (i.first - i.last, -i.nbytes)


def _by_area(i: Interval) -> tuple[int, ...]:
    return (-(i.last - i.first + 1) * i.nbytes,)


def _by_start(i: Interval) -> tuple[int, ...]:
    return (i.first, -i.nbytes)


_ORDERS: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
    _by_size,
    _by_area,
    _by_duration,
    _by_start,
)


class _Placer:
    """Places buffers one after the other, each at the lowest offset that is free for its life."""

    __slots__ = ("_firsts", "_fixed", "_lasts", "_sizes")

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._firsts = np.array([i.first for i in intervals], np.int64)
        self._lasts = np.array([i.last for i in intervals], np.int64)
        self._sizes = np.array([i.nbytes for i in intervals], np.int64)
        self._fixed = {k: i.offset for k, i in enumerate(intervals) if i.offset is not None}

    def place(self, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The offsets that an order gives, fixed buffers before all others, and their peak."""
        fixed = self._fixed
        ranked = np.array([*fixed, *(i for i in order if i not in fixed)], np.int64)
        firsts, lasts = self._firsts[ranked], self._lasts[ranked]
        sizes = self._sizes[ranked]
        starts = np.zeros(len(ranked), np.int64)
        starts[: len(fixed)] = list(fixed.values())
        ends = starts + sizes
        for rank in range(len(fixed), len(ranked)):
            size = int(sizes[rank])
            alive = (firsts[:rank] <= lasts[rank]) & (lasts[:rank] >= firsts[rank])
            offset = _lowest_gap(starts[:rank][alive], ends[:rank][alive], size)
            starts[rank], ends[rank] = offset, offset + size
        offsets = np.empty(len(ranked), np.int64)
        offsets[ranked] = starts
        return tuple(offsets.tolist()), int(ends.max())


def _lowest_gap(starts: Offsets, ends: Offsets, size: int) -> int:
    """The lowest offset at which `size` bytes miss all of the given regions."""
    if size == 0 or not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    at = 0
    for start, end in zip(starts[order].tolist(), ends[order].tolist(), strict=True):
        if start - at >= size:
            return at
        at = max(at, end)
    return at
