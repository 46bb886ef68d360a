"""Skyline packing: the search for a lower peak where simple orders leave holes.

One pass keeps the height reached at every moment and always fills the lowest segment of that
skyline, with an interval that lies wholly inside it: first one that ends flush with the segment and
level with its neighbours, then the one of highest priority. Where none fits, the segment is raised
to its lower neighbour, and what it was raised over is wasted for good. Load plus waste at a moment
bounds the peak from below: a pass stops at the first moment at which it cannot stay below the best
peak so far.

The search walks over priorities. A pass that stops says how many intervals it could not place, and
where: half of the changes put forward one that would have covered that segment, the others any. A
change is kept unless more intervals are left over than before; where nothing improves for long, the
walk begins elsewhere. It counts placements, never time.

Sources: the best-fit heuristic for allocation with fixed times (Sekiyama, Imai, Negishi,
"Profile-guided memory optimization for deep neural networks", 2018), changed priorities after what
failed (Joslin, Clements, "Squeaky wheel optimization", 1999).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stitch.packing.intervals import Interval

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
