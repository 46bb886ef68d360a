"""Spans: ranges `[start, end)` of addresses, joined and taken from each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

#: (start, end), the end not included.
Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same addresses as spans in order and apart.

    >>> union([(8, 16), (0, 8), (32, 40)])
    [(0, 16), (32, 40)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def minus(spans: Iterable[Span], without: Sequence[Span]) -> list[Span]:
    """What is left of sorted spans outside of others, which are sorted and apart.

    >>> minus([(0, 16), (32, 40)], [(8, 36)])
    [(0, 8), (36, 40)]
    """
    left: list[Span] = []
    starts = [start for start, _ in without]
    count = len(starts)
    for start, end in spans:
        i = bisect_right(starts, start)
        i -= i > 0
        while i < count and starts[i] < end:
            a, b = without[i]
            if a > start:
                left.append((start, a))
            if b > start:
                start = b
            i += 1
        if start < end:
            left.append((start, end))
    return left
