"""Intervals: buffers with known lifetimes, what a packing of them is, and the bound below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
