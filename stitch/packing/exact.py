"""Exact packing of few intervals: all packings in which each rests on another, or on the floor.

Any packing can be pushed down into such a one without a higher peak. At the lowest segment of the
skyline either some interval lies on it, and then one of these is leftmost, or none does, and the
segment is as good as its lower neighbour. Branches whose load plus waste exceeds the limit end.

Source: canonical solutions (Moffitt, "MiniMalloc: a lightweight memory allocator for hardware-
accelerated machine learning", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.packing.intervals import Interval

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
