"""Offline packing: buffers with known lifetimes get offsets such that the arena stays small.

Comes in: sizes and inclusive lifetimes. Goes out: an offset for each buffer and the peak. The same
input gives the same output, on any machine. Must not know: values, programs, spaces.

Method: several greedy orders; then, while the peak is above the greatest load at any moment (no
packing can be lower), a bounded search moves the buffers that stand at the peak to the front of the
order. The search counts its rounds, never the clock: results do not depend on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]

#: Buffers above which only the greedy orders are tried (each round costs O(n^2) simple steps).
SEARCH_BUFFERS = 200
#: Rounds of the search; a round places every buffer once.
SEARCH_ROUNDS = 60
_SEED = 20


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


def pack_intervals(intervals: Sequence[Interval]) -> Packing:
    """Offsets such that intervals alive at one moment never share a byte, with a small peak.

    >>> pack_intervals([Interval(0, 1, 10), Interval(1, 2, 5), Interval(2, 3, 10)])
    Packing(offsets=(0, 10, 0), peak_nbytes=15)
    """
    if not intervals:
        return Packing((), 0)
    bound = max_load(intervals)
    placer = _Placer(intervals)
    best: Packing | None = None
    best_order: list[int] = []
    for key in _ORDERS:
        order = [i for _, i in sorted((key(x), i) for i, x in enumerate(intervals))]
        packing = placer.place(order)
        if best is None or packing.peak_nbytes < best.peak_nbytes:
            best, best_order = packing, order
        if best.peak_nbytes == bound:
            return best
    assert best is not None
    if len(intervals) > SEARCH_BUFFERS:
        return best
    return _search(intervals, placer, best, best_order, bound)


def _search(
    intervals: Sequence[Interval], placer: _Placer, best: Packing, order: list[int], bound: int
) -> Packing:
    """Moves a buffer at the peak forward in the order; keeps what is no worse."""
    chance = random.Random(_SEED)
    current = best
    for _ in range(SEARCH_ROUNDS):
        tops = [
            at
            for at, i in enumerate(order)
            if current.offsets[i] + intervals[i].nbytes == current.peak_nbytes
        ]
        at = chance.choice(tops)
        changed = list(order)
        changed.insert(chance.randrange(at + 1), changed.pop(at))
        packing = placer.place(changed)
        if packing.peak_nbytes <= current.peak_nbytes:
            current, order = packing, changed
        if current.peak_nbytes < best.peak_nbytes:
            best = current
        if best.peak_nbytes == bound:
            break
    return best


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
