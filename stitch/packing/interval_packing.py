"""Offline packing: buffers with known lifetimes get offsets such that the arena stays small.

Comes in: sizes and inclusive lifetimes. Goes out: an offset for each buffer and the peak. The same
input gives the same output, on any machine. Must not know: values, programs, spaces.

Method: several greedy orders; then, while the peak is above the greatest load at any moment (no
packing can be lower), a bounded search (see `skyline`). Ordinary programs never get that far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.packing.intervals import Interval, Packing, max_load
from stitch.packing.skyline import search_skyline

Offsets = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]

#: Buffers above which only the greedy orders are tried.
SEARCH_BUFFERS = 500
#: Placements that the search may make by default: some tens of milliseconds.
SEARCH_PLACEMENTS = 5_000


def pack_intervals(
    intervals: Sequence[Interval], *, placements: int = SEARCH_PLACEMENTS
) -> Packing:
    """Offsets such that intervals alive at one moment never share a byte, with a small peak.

    `placements` bounds the search: more of them may find a lower peak (100,000 take about 0.6 s).

    >>> pack_intervals([Interval(0, 1, 10), Interval(1, 2, 5), Interval(2, 3, 10)])
    Packing(offsets=(0, 10, 0), peak_nbytes=15)
    """
    present = [i for i, interval in enumerate(intervals) if interval.nbytes]
    packing = _pack([intervals[i] for i in present], placements)
    offsets = [0] * len(intervals)
    for i, offset in zip(present, packing.offsets, strict=True):
        offsets[i] = offset
    return Packing(tuple(offsets), packing.peak_nbytes)


def _pack(intervals: Sequence[Interval], placements: int) -> Packing:
    if not intervals:
        return Packing((), 0)
    bound = max_load(intervals)
    placer = _Placer(intervals)
    best: Packing | None = None
    for key in _ORDERS:
        order = [i for _, i in sorted((key(x), i) for i, x in enumerate(intervals))]
        packing = placer.place(order)
        if best is None or packing.peak_nbytes < best.peak_nbytes:
            best = packing
        if best.peak_nbytes == bound:
            return best
    assert best is not None
    if placements <= 0 or len(intervals) > SEARCH_BUFFERS:
        return best
    searched = search_skyline(intervals, placements)
    return searched if searched.peak_nbytes < best.peak_nbytes else best


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

    __slots__ = ("_firsts", "_lasts", "_sizes")

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._firsts = np.array([i.first for i in intervals], np.int64)
        self._lasts = np.array([i.last for i in intervals], np.int64)
        self._sizes = np.array([i.nbytes for i in intervals], np.int64)

    def place(self, order: Sequence[int]) -> Packing:
        """The packing that an order gives."""
        ranked = np.array(order, np.int64)
        firsts, lasts = self._firsts[ranked], self._lasts[ranked]
        sizes = self._sizes[ranked]
        starts = np.zeros(len(ranked), np.int64)
        ends = np.zeros(len(ranked), np.int64)
        peak = 0
        for rank in range(len(ranked)):
            size = int(sizes[rank])
            alive = (firsts[:rank] <= lasts[rank]) & (lasts[:rank] >= firsts[rank])
            offset = _lowest_gap(starts[:rank][alive], ends[:rank][alive], size)
            starts[rank], ends[rank] = offset, offset + size
            peak = max(peak, offset + size)
        offsets = np.empty(len(ranked), np.int64)
        offsets[ranked] = starts
        return Packing(tuple(offsets.tolist()), peak)


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
