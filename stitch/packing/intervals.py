"""Intervals: buffers with known lifetimes, what a packing of them is, and the bound below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer of `nbytes` that is alive from moment `first` to moment `last`, both included."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The offset of each interval, in bytes from the start of the arena, and the arena's size."""

    offsets: tuple[int, ...]
    peak_nbytes: int


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
