"""Ranges of bytes that were ever written: which there are, and what others would add.

Ranges are widened to whole pages of the system, as those are what it commits.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class ByteRanges:
    """A set of bytes, kept as sorted ranges that neither overlap nor touch.

    >>> ranges = ByteRanges([(0, 4096), (8192, 8193)])
    >>> ranges.added([(4096, 8192), (8192, 12288)]), ranges.nbytes
    (4096, 8192)
    """

    __slots__ = ("_starts", "_stops", "nbytes")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.nbytes = 0
        self.update(ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes of a range are there."""
        start, stop = _pages(start, stop)
        where = bisect_left(self._stops, stop)
        return start >= stop or (where < len(self._starts) and self._starts[where] <= start)

    def added(self, ranges: Iterable[tuple[int, int]]) -> int:
        """How many bytes these ranges would add."""
        new = [_pages(*r) for r in ranges if not self.covers(*r)]
        if len(new) == 1:
            return self._missing(*new[0])
        return sum(self._missing(*r) for r in ByteRanges(new)) if new else 0

    def _missing(self, start: int, stop: int) -> int:
        """How many bytes of a range are not there."""
        starts, stops = self._starts, self._stops
        missing, at = stop - start, bisect_right(stops, start)
        while at < len(starts) and starts[at] < stop:
            missing -= min(stop, stops[at]) - max(start, starts[at])
            at += 1
        return missing

    def update(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add all bytes of these ranges."""
        starts, stops = self._starts, self._stops
        for given in ranges:
            start, stop = _pages(*given)
            if start >= stop:
                continue
            # What it overlaps or touches becomes one with it.
            first, last = bisect_left(stops, start), bisect_right(starts, stop)
            if first < last:
                start, stop = min(start, starts[first]), max(stop, stops[last - 1])
            self.nbytes += stop - start - (sum(stops[first:last]) - sum(starts[first:last]))
            starts[first:last], stops[first:last] = [start], [stop]


def _pages(start: int, stop: int) -> tuple[int, int]:
    if start >= stop:
        return start, start
    page = mmap.PAGESIZE
    return start // page * page, -(-stop // page) * page
