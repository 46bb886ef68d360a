"""Ranges of bytes that were ever written: which there are, and what others would add.

Comes in: half-open ranges. Goes out: bytes. Ranges are widened to whole pages of the system, as
those are what it commits. Must not know: spaces, buffers.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
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
        new = [r for r in ranges if not self.covers(*r)]
        if not new:
            return 0
        return ByteRanges([*self, *new]).nbytes - self.nbytes

    def update(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add all bytes of these ranges."""
        new = [_pages(*r) for r in ranges if not self.covers(*r)]
        if not new:
            return
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in sorted([*self, *new]):
            if stops and start <= stops[-1]:
                stops[-1] = max(stops[-1], stop)
            else:
                starts.append(start)
                stops.append(stop)
        self._starts, self._stops = starts, stops
        self.nbytes = sum(stops) - sum(starts)


def _pages(start: int, stop: int) -> tuple[int, int]:
    if start >= stop:
        return start, start
    page = mmap.PAGESIZE
    return start // page * page, -(-stop // page) * page
