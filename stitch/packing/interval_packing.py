"""Offline packing: offsets for buffers with known lifetimes such that the arena is small.

Deterministic. Tries several greedy orders; while the peak is above the greatest load at any moment,
which no packing can beat, a bounded local search packs each part that shares no moment with the
rest. Ordinary programs do not need it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer of `nbytes` that is live from moment `first` to `last`, both included."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The offset of each interval in the arena, and the arena's size.

    Attributes:
        bound_nbytes: A lower bound for the peak of any packing.
        placements: Placements that the search made.
    """

    offsets: tuple[int, ...]
    peak_nbytes: int
    bound_nbytes: int
    placements: int = 0


def max_load(intervals: Sequence[Interval]) -> int:
    """Return the most bytes live at one moment, a lower bound for any peak.

    >>> max_load([Interval(0, 1, 10), Interval(1, 2, 5), Interval(2, 3, 10)])
    15
    """
    events: dict[int, int] = {}
    for interval in intervals:
        events[interval.first] = events.get(interval.first, 0) + interval.nbytes
        events[interval.last + 1] = events.get(interval.last + 1, 0) - interval.nbytes
    load = most = 0
    for moment in sorted(events):
        load += events[moment]
        most = max(most, load)
    return most


def components(intervals: Sequence[Interval]) -> list[list[int]]:
    """Group the intervals, by index, into parts that share no moment.

    >>> components([Interval(0, 1, 10), Interval(2, 3, 5), Interval(1, 1, 10)])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    end = None
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        interval = intervals[i]
        if end is None or interval.first > end:
            groups.append([])
            end = interval.last
        groups[-1].append(i)
        end = max(end, interval.last)
    return [sorted(group) for group in groups]


# Skyline search

_SEED = 20
#: Changes of priorities, relative to the number of intervals: of one interval, and of others.
_FORWARD, _ASIDE = 0.5, 0.2
#: Passes without progress after which the search restarts.
_PATIENCE = 1_500
#: The height beyond the first and the last moment.
_WALL = 1 << 62

_RULES: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
    lambda i: (i.nbytes * (i.last - i.first + 1),),
    lambda i: (i.last - i.first, i.nbytes),
    lambda i: (i.nbytes, i.last - i.first),
)


def search_skyline(
    intervals: Sequence[Interval], target: int, budget: int
) -> tuple[list[int], int, int]:
    """Search priorities for skyline passes by random local changes.

    Args:
        target: The search ends at a peak of at most this.
        budget: Placements; the first passes always complete.

    Returns:
        The offsets, their peak, and the placements made.
    """
    count, chance = len(intervals), random.Random(_SEED)
    skyline, taken, peak = _Skyline(intervals), 0, _WALL
    starts = [_ranks([rule(interval) for interval in intervals]) for rule in _RULES]
    offsets, changed = [0] * count, starts[0]
    for priorities in starts:
        skyline.fill(priorities, _WALL)
        taken += skyline.steps
        if skyline.peak < peak:
            peak, offsets, changed = skyline.peak, skyline.offsets, priorities
    best, fewest, in_vain, restarts = changed, count, 0, 0
    unplaced: Sequence[int] = ()
    while taken < budget and peak > target:
        left = skyline.fill(changed, peak - 1)
        taken += skyline.steps
        in_vain = 0 if left < fewest else in_vain + 1
        if not left:
            # Retry the same priorities below the new peak.
            peak, offsets, best, fewest = skyline.peak, skyline.offsets, changed, count
            continue
        if left <= fewest:
            fewest, best, unplaced = left, changed, skyline.unplaced()
        if in_vain > _PATIENCE:
            restarts, in_vain, fewest = restarts + 1, 0, count
            start = starts[restarts % len(starts)]
            changed = [priority + chance.gauss(0, count * _ASIDE) for priority in start]
            continue
        changed = list(best)
        forward = chance.choice(unplaced if chance.random() < 0.5 else range(count))
        changed[forward] += chance.random() * count * _FORWARD
        for _ in range(chance.randrange(3)):
            changed[chance.randrange(count)] += chance.gauss(0, count * _ASIDE)
    return offsets, peak, taken


def _ranks(keys: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the rank of each key, from the smallest."""
    ranks = [0.0] * len(keys)
    for rank, (_, i) in enumerate(sorted((key, i) for i, key in enumerate(keys))):
        ranks[i] = float(rank)
    return ranks


class _Skyline:
    """Places intervals on the lowest segment of a skyline, by priorities; moments are renumbered.

    Segment k is `[_begins[k], _stops[k])` at `_heights[k]`.
    """

    __slots__ = (
        "_at", "_begins", "_ends", "_heights", "_load", "_sizes", "_slack", "_starting", "_starts",
        "_stops", "_waiting", "offsets", "peak", "steps",
    )  # fmt: skip

    def __init__(self, intervals: Sequence[Interval]) -> None:
        moments = sorted({m for i in intervals for m in (i.first, i.last + 1)})
        number = {moment: n for n, moment in enumerate(moments)}
        self._starts = [number[i.first] for i in intervals]
        self._ends = [number[i.last + 1] for i in intervals]
        self._sizes = [i.nbytes for i in intervals]
        self._load = [0] * (len(moments) - 1)
        self._starting: list[list[int]] = [[] for _ in self._load]
        self.offsets = [0] * len(intervals)
        self.peak = 0
        for i, interval in enumerate(intervals):
            for moment in range(self._starts[i], self._ends[i]):
                self._load[moment] += interval.nbytes
            self._starting[self._starts[i]].append(i)

    def fill(self, priorities: Sequence[float], limit: int) -> int:
        """Run one pass; return the number of unplaced intervals when the peak must exceed `limit`.

        If it returns 0, `offsets` and `peak` are the packing.
        """
        rank = priorities.__getitem__
        self._waiting = [sorted(starting, key=rank, reverse=True) for starting in self._starting]
        self._slack = [limit - load for load in self._load]
        self._begins, self._stops, self._heights = [0], [len(self._load)], [0]
        self.steps, left, offsets = 0, len(self._sizes), list(self.offsets)
        heights, choose = self._heights, self._choose
        while left:
            self.steps += 1
            height = min(heights)
            self._at = at = heights.index(height)
            chosen = choose(at, height, priorities)
            if chosen >= 0:
                left -= 1
                offsets[chosen] = height
                self._put(at, height, chosen)
            elif not self._raise(at, height):
                return left
        tops = (offset + size for offset, size in zip(offsets, self._sizes, strict=True))
        self.offsets, self.peak = offsets, max(tops)
        return 0

    def unplaced(self) -> Sequence[int]:
        """Return the waiting intervals that overlap the segment at which the pass stopped."""
        begin, stop = self._begins[self._at], self._stops[self._at]
        return [i for at in range(stop) for i in self._waiting[at] if self._ends[i] > begin]

    def _choose(self, at: int, height: int, priorities: Sequence[float]) -> int:
        """Return the interval to place on a segment; -1 if none fits."""
        waiting, ends, sizes = self._waiting, self._ends, self._sizes
        begin, stop, heights = self._begins[at], self._stops[at], self._heights
        lower = heights[at - 1] - height if at else _WALL
        upper = heights[at + 1] - height if at + 1 < len(heights) else _WALL
        best, most, highest = -1, -1, 0.0
        for i in waiting[begin]:
            end = ends[i]
            if end > stop:
                continue
            flush = 2 if sizes[i] == lower else 1
            if end == stop:
                flush += 2 if sizes[i] == upper else 1
            if flush > most or (flush == most and priorities[i] > highest):
                best, most, highest = i, flush, priorities[i]
        if most >= 2:
            return best  # Flush on both sides or level: no later interval is better.
        for moment in range(begin + 1, stop):
            for i in waiting[moment]:
                end = ends[i]
                if end > stop:
                    continue
                flush = 0
                if end == stop:
                    flush = 2 if sizes[i] == upper else 1
                if flush > most or (flush == most and priorities[i] > highest):
                    best, most, highest = i, flush, priorities[i]
        return best

    def _put(self, at: int, height: int, chosen: int) -> None:
        """Put an interval on segment `at`, and merge segments of equal height."""
        begins, stops, heights = self._begins, self._stops, self._heights
        begin, stop = begins[at], stops[at]
        start, end = self._starts[chosen], self._ends[chosen]
        top = height + self._sizes[chosen]
        self._waiting[start].remove(chosen)
        low, high = at, at + 1
        left, right = [start], [end]
        tops = [top]
        if start > begin:
            left, right, tops = [begin, start], [start, end], [height, top]
        elif at and heights[at - 1] == top:
            low, left[0] = at - 1, begins[at - 1]
        if end < stop:
            left.append(end)
            right.append(stop)
            tops.append(height)
        elif high < len(heights) and heights[high] == top:
            right[-1] = stops[high]
            high += 1
        begins[low:high], stops[low:high], heights[low:high] = left, right, tops

    def _raise(self, at: int, height: int) -> bool:
        """Raise segment `at` to its lowest neighbour; return False without slack."""
        begins, stops, heights = self._begins, self._stops, self._heights
        begin, stop = begins[at], stops[at]
        lower = heights[at - 1] if at else _WALL
        upper = heights[at + 1] if at + 1 < len(heights) else _WALL
        top = min(lower, upper)
        slack, wasted = self._slack, top - height
        for moment in range(begin, stop):
            slack[moment] -= wasted
        if min(slack[begin:stop]) < 0:
            return False
        low, high = at - (top == lower), at + 1 + (top == upper)
        begin, stop = begins[low], stops[high - 1]
        begins[low:high], stops[low:high], heights[low:high] = [begin], [stop], [top]
        return True


Offsets = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]

#: Buffers above which only greedy orders are tried.
SEARCH_BUFFERS = 500
#: Greedy orders that are tried one after the other, each better than the last one, before it.
REPAIRS = 16
#: Buffers live with one on average, up to which lists are faster than arrays.
MANY_OVERLAPS = 32
#: Default budget of the search: some tens of milliseconds.
SEARCH_PLACEMENTS = 5_000


def pack_intervals(
    intervals: Sequence[Interval], *, placements: int = SEARCH_PLACEMENTS
) -> Packing:
    """Pack intervals such that those live at one moment do not overlap, with a small peak.

    Args:
        placements: Budget of the search (100,000 take about 0.3 s); with 0 only greedy orders are
            tried. A larger budget never gives a higher peak.

    >>> pack_intervals([Interval(0, 1, 10), Interval(1, 2, 5), Interval(2, 3, 10)])
    Packing(offsets=(0, 10, 0), peak_nbytes=15, bound_nbytes=15, placements=0)
    """
    packer = IntervalPacker([(interval.first, interval.last) for interval in intervals])
    return packer.pack([interval.nbytes for interval in intervals], placements=placements)


class IntervalPacker:
    """Packs buffers of given lifetimes, for any sizes: which are live together is computed once.

    Args:
        lives: The first and the last moment of each buffer.
    """

    __slots__ = ("_lives", "_moments", "_overlapping", "_spans")

    def __init__(self, lives: Sequence[tuple[int, int]]) -> None:
        self._lives = lives
        moments = sorted({moment for first, last in lives for moment in (first, last + 1)})
        number = {moment: n for n, moment in enumerate(moments)}
        self._moments = len(moments)
        #: The numbers of the moments between which each buffer is live.
        self._spans = [(number[first], number[last + 1]) for first, last in lives]
        #: For each buffer those that are live with it; None if these are many.
        self._overlapping = _overlapping(lives)

    def pack(self, sizes: Sequence[int], *, placements: int = SEARCH_PLACEMENTS) -> Packing:
        """Pack the buffers at some sizes in bytes, as `pack_intervals` does."""
        if 0 in sizes:
            present = [i for i, nbytes in enumerate(sizes) if nbytes]
            packer = IntervalPacker([self._lives[i] for i in present])
            packing = packer.pack([sizes[i] for i in present], placements=placements)
            offsets = [0] * len(sizes)
            for i, offset in zip(present, packing.offsets, strict=True):
                offsets[i] = offset
            return replace(packing, offsets=tuple(offsets))
        if not sizes:
            return Packing((), 0, 0)
        changes = [0] * self._moments
        for (start, end), nbytes in zip(self._spans, sizes, strict=True):
            changes[start] += nbytes
            changes[end] -= nbytes
        loads = list(accumulate(changes))
        bound = max(loads)
        offsets_found, peak = self._greedily(sizes, bound)
        if peak == bound or placements <= 0 or len(sizes) > SEARCH_BUFFERS:
            return Packing(offsets_found, peak, bound)
        repaired, height = self._repaired(sizes, loads, bound)
        if height < peak:
            offsets_found, peak = repaired, height
        if peak == bound:
            return Packing(offsets_found, peak, bound)
        intervals = [
            Interval(*life, nbytes) for life, nbytes in zip(self._lives, sizes, strict=True)
        ]
        return _search(intervals, offsets_found, bound, placements)

    def _greedily(self, sizes: Sequence[int], bound: int) -> tuple[tuple[int, ...], int]:
        """Return the offsets and peak of the best greedy order."""
        offsets: tuple[int, ...] = ()
        peak = _WALL
        for key in _ORDERS:
            keys = [
                key(first, last, nbytes)
                for (first, last), nbytes in zip(self._lives, sizes, strict=True)
            ]
            other, height = self._place(_sorted(keys), sizes)
            if height < peak:
                offsets, peak = other, height
            if peak == bound:
                break
        return offsets, peak

    def _repaired(
        self, sizes: Sequence[int], loads: Sequence[int], bound: int
    ) -> tuple[tuple[int, ...], int]:
        """Return offsets and peak of a greedy order that is repaired a few times: buffers that end
        above the bound move forward, to half their rank."""
        # Those of the fullest moments first, of these the ones that live longest.
        order = _sorted([
            (-max(loads[start:end]), first - last, -nbytes)
            for (start, end), (first, last), nbytes
            in zip(self._spans, self._lives, sizes, strict=True)
        ])  # fmt: skip
        offsets: tuple[int, ...] = ()
        peak = _WALL
        for _ in range(REPAIRS):
            other, height = self._place(order, sizes)
            if height < peak:
                offsets, peak = other, height
            if peak == bound:
                break
            for i in [i for i in order if other[i] + sizes[i] > bound]:
                rank = order.index(i)
                order.insert(rank - max(1, rank // 2), order.pop(rank))
        return offsets, peak

    def _place(self, order: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Place the buffers in an order, each at the lowest offset that is free during its
        lifetime; return the offsets and their peak."""
        if self._overlapping is None:
            return self._place_many(order, sizes)
        overlapping, peak = self._overlapping, 0
        regions = [(0, 0)] * len(sizes)
        for i in order:
            size, offset = sizes[i], 0
            # Those that are not placed yet end at 0.
            for start, end in sorted([regions[j] for j in overlapping[i]]):
                if end > offset:
                    if start - offset >= size:
                        break
                    offset = end
            end = offset + size
            regions[i] = offset, end
            if end > peak:
                peak = end
        return tuple([start for start, _ in regions]), peak

    def _place_many(
        self, order: Sequence[int], sizes: Sequence[int]
    ) -> tuple[tuple[int, ...], int]:
        ranked = np.array(order, np.int64)
        firsts, lasts = np.array(self._lives, np.int64)[ranked].T
        held = np.array(sizes, np.int64)[ranked]
        starts = np.zeros(len(ranked), np.int64)
        ends = starts + held
        for rank in range(len(ranked)):
            size = int(held[rank])
            alive = (firsts[:rank] <= lasts[rank]) & (lasts[:rank] >= firsts[rank])
            offset = _lowest_gap(starts[:rank][alive], ends[:rank][alive], size)
            starts[rank], ends[rank] = offset, offset + size
        offsets = np.empty(len(ranked), np.int64)
        offsets[ranked] = starts
        return tuple(offsets.tolist()), int(ends.max())


def _sorted(keys: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the indices by their keys, those of equal keys in order."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def _search(
    intervals: Sequence[Interval], greedy: tuple[int, ...], bound: int, placements: int
) -> Packing:
    """Repack each part of a greedy packing whose peak is above the bound."""
    offsets, taken = list(greedy), 0
    parts = [
        part
        for part in sorted(components(intervals), key=len)
        if max(greedy[i] + intervals[i].nbytes for i in part) > bound
    ]
    waiting, budget = sum(map(len, parts)), placements
    for part in parts:
        share = budget * len(part) // waiting
        better, peak, used = search_skyline([intervals[i] for i in part], bound, share)
        if peak < max(greedy[i] + intervals[i].nbytes for i in part):
            for i, offset in zip(part, better, strict=True):
                offsets[i] = offset
        taken += used
        # Later parts get the rest of a part's share.
        waiting, budget = waiting - len(part), budget - min(used, share)
    peak = max(offset + i.nbytes for offset, i in zip(offsets, intervals, strict=True))
    return Packing(tuple(offsets), peak, bound, taken)


#: Keys of the greedy orders: by size, area, duration and start.
_ORDERS: tuple[Callable[[int, int, int], tuple[int, ...]], ...] = (
    lambda first, last, nbytes: (-nbytes, first - last),
    lambda first, last, nbytes: (-(last - first + 1) * nbytes,),
    lambda first, last, nbytes: (first - last, -nbytes),
    lambda first, last, nbytes: (first, -nbytes),
)


def _overlapping(lives: Sequence[tuple[int, int]]) -> list[list[int]] | None:
    """Return for each buffer those that share a moment with it; None if these are many."""
    found: list[list[int]] = [[] for _ in lives]
    live: list[int] = []
    count, most = 0, MANY_OVERLAPS * len(lives)
    for i in _sorted(lives):
        first, _ = lives[i]
        live = [j for j in live if lives[j][1] >= first]
        count += len(live)
        if count > most:
            return None
        for j in live:
            found[j].append(i)
        found[i] += live
        live.append(i)
    return found


def _lowest_gap(starts: Offsets, ends: Offsets, size: int) -> int:
    """Return the lowest offset at which `size` bytes overlap none of the regions."""
    if not len(starts):
        return 0
    order = np.argsort(starts)
    #: By region, the end of all regions before it; then that of all.
    floors = np.zeros(len(starts) + 1, np.int64)
    np.maximum.accumulate(ends[order], out=floors[1:])
    fits = starts[order] - floors[:-1] >= size
    gap = int(fits.argmax())
    return int(floors[gap if fits[gap] else -1])
