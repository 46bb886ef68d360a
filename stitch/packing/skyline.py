"""Skyline packing: the search for a lower peak where simple orders leave holes.

Comes in: intervals, a budget. Goes out: the best packing that was found. Must not know: values,
programs, spaces.

One pass keeps the height reached at every moment and always fills the lowest segment of that
skyline, with an interval that lies wholly inside it: first one that ends flush with the segment and
level with its neighbours, then the one of highest priority. Where none fits, the segment is raised
to its lower neighbour, and what it was raised over is wasted for good: load plus waste at a moment
bounds the peak from below, so a pass that cannot beat the best ends early. The search repeats
passes with the priorities changed at the peak. It counts placements, never time.

Source: the best-fit heuristic for allocation with fixed times (Sekiyama, Imai, Negishi,
"Profile-guided memory optimization for deep neural networks", 2018).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stitch.packing.intervals import Interval, Packing, max_load

_SEED = 20


def search_skyline(intervals: Sequence[Interval], budget: int) -> Packing:
    """The best packing of one or more intervals that `budget` placements find."""
    count, bound = len(intervals), max_load(intervals)
    skyline = _Skyline(intervals)
    chance = random.Random(_SEED)
    starts: list[tuple[int, int, Packing, list[float]]] = []
    for rule in _RULES:
        priorities = [0.0] * count
        ranked = sorted((rule(interval), i) for i, interval in enumerate(intervals))
        for rank, (_, i) in enumerate(ranked):
            priorities[i] = float(rank)
        packing = skyline.run(priorities, None)
        assert packing is not None, "a pass without a limit always ends"
        starts.append((packing.peak_nbytes, len(starts), packing, priorities))
    _, _, current, priorities = min(starts)
    while skyline.placements < budget and current.peak_nbytes > bound:
        changed = list(priorities)
        tops = [
            i
            for i, offset in enumerate(current.offsets)
            if offset + intervals[i].nbytes == current.peak_nbytes
        ]
        changed[chance.choice(tops)] += chance.random() * count / 2
        for _ in range(chance.randrange(3)):
            changed[chance.randrange(count)] += chance.gauss(0, count / 5)
        # Equals are taken too: the way down leads over plateaus.
        better = skyline.run(changed, current.peak_nbytes)
        if better is not None:
            current, priorities = better, changed
    return current


_RULES: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
    lambda i: (i.nbytes * (i.last - i.first + 1),),
    lambda i: (i.last - i.first, i.nbytes),
    lambda i: (i.nbytes, i.last - i.first),
)


class _Skyline:
    """Runs passes over one set of intervals; moments are numbered without gaps."""

    __slots__ = ("_count", "_ends", "_load", "_sizes", "_starting", "_starts", "placements")

    def __init__(self, intervals: Sequence[Interval]) -> None:
        moments = sorted({m for i in intervals for m in (i.first, i.last + 1)})
        number = {moment: n for n, moment in enumerate(moments)}
        self._count = len(intervals)
        self._starts = [number[i.first] for i in intervals]
        self._ends = [number[i.last + 1] for i in intervals]
        self._sizes = [i.nbytes for i in intervals]
        self._load = [0] * (len(moments) - 1)
        self._starting: list[list[int]] = [[] for _ in moments]
        for i, interval in enumerate(intervals):
            self._starting[self._starts[i]].append(i)
            for moment in range(self._starts[i], self._ends[i]):
                self._load[moment] += interval.nbytes
        self.placements = 0

    def run(self, priorities: Sequence[float], limit: int | None) -> Packing | None:
        """The packing that priorities give; None as soon as its peak must exceed `limit`."""
        waiting = [sorted(starting, key=lambda i: -priorities[i]) for starting in self._starting]
        offsets, needed = [0] * self._count, list(self._load)
        # Segments (start, end, height) from left to right; the walls are infinitely high.
        segments = [(0, len(needed), 0)]
        left = self._count
        while left:
            at = min(range(len(segments)), key=lambda k: segments[k][2])
            start, end, height = segments[at]
            lower = segments[at - 1][2] if at else -1
            upper = segments[at + 1][2] if at + 1 < len(segments) else -1
            chosen = self._choose(waiting, segments[at], lower, upper, priorities)
            self.placements += 1
            if chosen < 0:
                raised = min(h for h in (lower, upper) if h >= 0)
                for moment in range(start, end):
                    needed[moment] += raised - height
                if limit is not None and max(needed[start:end]) > limit:
                    return None
                _replace(segments, at, [(start, end, raised)])
                continue
            left -= 1
            offsets[chosen] = height
            first, last = self._starts[chosen], self._ends[chosen]
            pieces = [
                (start, first, height),
                (first, last, height + self._sizes[chosen]),
                (last, end, height),
            ]
            _replace(segments, at, [piece for piece in pieces if piece[0] < piece[1]])
        ends = [offset + size for offset, size in zip(offsets, self._sizes, strict=True)]
        return Packing(tuple(offsets), max(ends))

    def _choose(
        self,
        waiting: list[list[int]],
        segment: tuple[int, int, int],
        lower: int,
        upper: int,
        priorities: Sequence[float],
    ) -> int:
        """The interval to place on a segment, taken off the waiting lists; -1 if none fits."""
        start, end, height = segment
        best, best_score = -1, (-1, 0.0)
        for moment in range(start, end):
            for i in waiting[moment]:
                if self._ends[i] > end:
                    continue
                top = height + self._sizes[i]
                flush = 0
                if moment == start:
                    flush += 1 + (top == lower)
                if self._ends[i] == end:
                    flush += 1 + (top == upper)
                score = (flush, priorities[i])
                if score > best_score:
                    best, best_score = i, score
        if best >= 0:
            waiting[self._starts[best]].remove(best)
        return best


def _replace(
    segments: list[tuple[int, int, int]], at: int, pieces: list[tuple[int, int, int]]
) -> None:
    """Puts pieces in place of a segment, joined with neighbours of the same height."""
    low, high = at, at + 1
    if at and segments[at - 1][2] == pieces[0][2]:
        low = at - 1
        pieces[0] = (segments[low][0], pieces[0][1], pieces[0][2])
    if high < len(segments) and segments[high][2] == pieces[-1][2]:
        pieces[-1] = (pieces[-1][0], segments[high][1], pieces[-1][2])
        high += 1
    segments[low:high] = pieces
