"""Offline packing: buffers with known lifetimes get offsets such that the arena stays small.

The same input gives the same output, on any machine.

Method: several greedy orders; then, while the peak is above the greatest load at any moment (no
packing can be lower), bounded searches of each part that shares no moment with the rest (see
`skyline` and, for few buffers, `exact`). Ordinary programs never get that far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from stitch.errors import UsageError

# Intervals ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer of `nbytes` that is alive from moment `first` to moment `last`, both included.

    With an `offset` it lies there, whatever else happens.
    """

    first: int
    last: int
    nbytes: int
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """The offset of each interval, in bytes from the start of the arena, and the arena's size.

    No packing has a peak below `bound_nbytes`; `ended`: nothing is left to search for, as the
    peak is that bound. `placements`: what the search took of its budget.
    """

    offsets: tuple[int, ...]
    peak_nbytes: int
    bound_nbytes: int
    placements: int = 0

    @property
    def ended(self) -> bool:
        return self.peak_nbytes == self.bound_nbytes


def max_load(intervals: Sequence[Interval]) -> int:
    """The most bytes alive at one moment: no packing can have a lower peak.

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
    """The intervals by index, in groups that share no moment: each may be packed for itself.

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


# Skyline search -----------------------------------------------------------------------------------

_SEED = 20
#: How far a change puts an interval forward, at most, and others, in the mean, as shares of all.
_FORWARD, _ASIDE = 0.5, 0.2
#: Passes in which no fewer intervals were left over, after which the walk begins elsewhere.
_PATIENCE = 1_500
#: Higher than any skyline: what stands left of the first moment and right of the last.
_WALL = 1 << 62

_RULES: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
    lambda i: (i.nbytes * (i.last - i.first + 1),),
    lambda i: (i.last - i.first, i.nbytes),
    lambda i: (i.nbytes, i.last - i.first),
)


def search_skyline(
    intervals: Sequence[Interval], target: int, budget: int
) -> tuple[list[int], int, int]:
    """Offsets, their peak, and the placements taken: at most about a pass above `budget`.

    The first passes always run to their end. Ends early at a peak of at most `target`.
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
    kept, fewest, in_vain, restarts = changed, count, 0, 0
    culprits: Sequence[int] = ()
    while taken < budget and peak > target:
        left = skyline.fill(changed, peak - 1)
        taken += skyline.steps
        in_vain = 0 if left < fewest else in_vain + 1
        if not left:
            # The same priorities are asked again: where do they fail below the new peak?
            peak, offsets, kept, fewest = skyline.peak, skyline.offsets, changed, count
            continue
        if left <= fewest:
            fewest, kept, culprits = left, changed, skyline.left_over()
        if in_vain > _PATIENCE:
            restarts, in_vain, fewest = restarts + 1, 0, count
            start = starts[restarts % len(starts)]
            changed = [priority + chance.gauss(0, count * _ASIDE) for priority in start]
            continue
        changed = list(kept)
        forward = chance.choice(culprits if chance.random() < 0.5 else range(count))
        changed[forward] += chance.random() * count * _FORWARD
        for _ in range(chance.randrange(3)):
            changed[chance.randrange(count)] += chance.gauss(0, count * _ASIDE)
    return offsets, peak, taken


def _ranks(keys: Sequence[tuple[int, ...]]) -> list[float]:
    """The place of each key among all, from the smallest."""
    ranks = [0.0] * len(keys)
    for rank, (_, i) in enumerate(sorted((key, i) for i, key in enumerate(keys))):
        ranks[i] = float(rank)
    return ranks


class _Skyline:
    """Runs passes over one set of intervals; moments are numbered without gaps.

    Segment k of the skyline is `[_begins[k], _stops[k])`, at `_heights[k]`. Fixed intervals are
    ceilings until the skyline has risen to them.
    """

    __slots__ = (
        "_all_ceilings", "_at", "_begins", "_ceilings", "_count", "_ends", "_heights", "_load",
        "_sizes", "_slack", "_starting", "_starts", "_stops", "_waiting", "offsets", "peak",
        "steps",
    )  # fmt: skip

    def __init__(self, intervals: Sequence[Interval]) -> None:
        moments = sorted({m for i in intervals for m in (i.first, i.last + 1)})
        number = {moment: n for n, moment in enumerate(moments)}
        self._starts = [number[i.first] for i in intervals]
        self._ends = [number[i.last + 1] for i in intervals]
        self._sizes = [i.nbytes for i in intervals]
        self._load = [0] * (len(moments) - 1)
        self._starting: list[list[int]] = [[] for _ in self._load]
        #: By moment the fixed intervals (offset, end), highest first; none at all where none is.
        self._all_ceilings: list[list[tuple[int, int]]] = []
        fixed = [i for i, interval in enumerate(intervals) if interval.offset is not None]
        if fixed:
            self._all_ceilings = [[] for _ in self._load]
        self.offsets = [interval.offset or 0 for interval in intervals]
        self.peak = 0
        for i, interval in enumerate(intervals):
            for moment in range(self._starts[i], self._ends[i]):
                self._load[moment] += interval.nbytes
                if interval.offset is not None:
                    span = (interval.offset, interval.offset + interval.nbytes)
                    self._all_ceilings[moment].append(span)
            if interval.offset is None:
                self._starting[self._starts[i]].append(i)
        for spans in self._all_ceilings:
            spans.sort(reverse=True)
        self._count = len(intervals) - len(fixed)

    def fill(self, priorities: Sequence[float], limit: int) -> int:
        """One pass: how many intervals are left over where the peak must exceed `limit`, else 0.

        After 0, `offsets` and `peak` are the packing's.
        """
        rank = priorities.__getitem__
        self._waiting = [sorted(starting, key=rank, reverse=True) for starting in self._starting]
        self._slack = [limit - load for load in self._load]
        self._ceilings = [list(spans) for spans in self._all_ceilings]
        self._begins, self._stops, self._heights = [0], [len(self._load)], [0]
        self.steps, left, offsets = 0, self._count, list(self.offsets)
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

    def left_over(self) -> Sequence[int]:
        """The intervals that wait for the segment at which a pass has stopped, over some of it."""
        begin, stop = self._begins[self._at], self._stops[self._at]
        return [i for at in range(stop) for i in self._waiting[at] if self._ends[i] > begin]

    def _choose(self, at: int, height: int, priorities: Sequence[float]) -> int:
        """The interval to place on a segment; -1 if none fits."""
        waiting, ends, sizes = self._waiting, self._ends, self._sizes
        begin, stop, heights = self._begins[at], self._stops[at], self._heights
        lower = heights[at - 1] - height if at else _WALL
        upper = heights[at + 1] - height if at + 1 < len(heights) else _WALL
        ceilings = self._ceilings
        best, most, highest = -1, -1, 0.0
        for i in waiting[begin]:
            end = ends[i]
            if end > stop or (ceilings and self._ceiling(begin, end) < height + sizes[i]):
                continue
            flush = 2 if sizes[i] == lower else 1
            if end == stop:
                flush += 2 if sizes[i] == upper else 1
            if flush > most or (flush == most and priorities[i] > highest):
                best, most, highest = i, flush, priorities[i]
        if most >= 2:
            return best  # flush on both sides or level: none that begins later comes before it
        for moment in range(begin + 1, stop):
            for i in waiting[moment]:
                end = ends[i]
                if end > stop or (ceilings and self._ceiling(moment, end) < height + sizes[i]):
                    continue
                flush = 0
                if end == stop:
                    flush = 2 if sizes[i] == upper else 1
                if flush > most or (flush == most and priorities[i] > highest):
                    best, most, highest = i, flush, priorities[i]
        return best

    def _put(self, at: int, height: int, chosen: int) -> None:
        """Puts an interval on segment `at`, and joins it to neighbours that it is level with."""
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
        """Raises segment `at` to what bounds it next; False where a moment has no slack left."""
        begins, stops, heights = self._begins, self._stops, self._heights
        begin, stop = begins[at], stops[at]
        lower = heights[at - 1] if at else _WALL
        upper = heights[at + 1] if at + 1 < len(heights) else _WALL
        top = min(lower, upper)
        if self._ceilings:
            top = min(top, self._ceiling(begin, stop))
        slack, wasted = self._slack, top - height
        for moment in range(begin, stop):
            slack[moment] -= wasted
        if min(slack[begin:stop]) < 0:
            return False
        heights[at] = top
        if self._ceilings:
            self._pass_ceilings(at, top)
            return True
        low, high = at - (top == lower), at + 1 + (top == upper)
        begin, stop = begins[low], stops[high - 1]
        begins[low:high], stops[low:high], heights[low:high] = [begin], [stop], [top]
        return True

    def _ceiling(self, begin: int, stop: int) -> int:
        """The offset of the lowest fixed interval over any of these moments."""
        return min((spans[-1][0] for spans in self._ceilings[begin:stop] if spans), default=_WALL)

    def _pass_ceilings(self, at: int, top: int) -> None:
        """Puts segment `at`, as high as `top`, on the fixed intervals that lie there."""
        by_moment = []
        for k, height in enumerate(self._heights):
            by_moment += [height] * (self._stops[k] - self._begins[k])
        for moment in range(self._begins[at], self._stops[at]):
            spans = self._ceilings[moment]
            while spans and spans[-1][0] == by_moment[moment]:
                by_moment[moment] = spans.pop()[1]
        edges = [m for m, h in enumerate(by_moment) if not m or h != by_moment[m - 1]]
        self._begins[:], self._stops[:] = edges, [*edges[1:], len(by_moment)]
        self._heights[:] = [by_moment[m] for m in edges]


# Exact search -------------------------------------------------------------------------------------


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
