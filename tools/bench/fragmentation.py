"""Fragmentation: buffers come and go in one space, and where no hole fits the mover opens one.

Each FILE.csv holds buffers (columns id,lower,upper,size; alive from lower to before upper). Its
allocations and frees pass, in order, through the allocator and the mover in a space of the greatest
load times one plus the slack; beside it through first fit, best fit and TLSF, which never move
anything and fail instead. A row per file: what failed, bytes moved; those over the certified bound
(the bytes in the cheapest window of the size asked for) and over the best slide (neighbours pushed
together until the hole is there), how often a call moved more than the best slide; bytes through
DRAM, with and without a certificate; the longest call. `--known` also gives the mover the lifetimes;
bytes are compared with those of the run without. `--check` exits 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from stitch.memory import Allocator
from stitch.planner.mover.arrange import arrange
from stitch.planner.mover.holes import SpaceProblem

#: Slack from which the bound on moved bytes is tight, and the goal there.
BOUND_SLACK, BOUND_GOAL = 0.1, 1.03
CALL_GOAL_MS, CALL_LIVE = 5.0, 200


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer: alive in [lower, upper), `size` bytes."""

    number: int
    lower: int
    upper: int
    size: int


def read_buffers(path: Path) -> list[Buffer]:
    """The buffers of a CSV; raises `ValueError` naming the line that is wrong."""
    buffers: list[Buffer] = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                lower, upper, size = (int(row[name]) for name in ("lower", "upper", "size"))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{line}: wants whole numbers lower,upper,size") from error
            if lower >= upper or size <= 0:
                raise ValueError(f"{path}:{line}: an empty lifetime or size")
            buffers.append(Buffer(len(buffers), lower, upper, size))
    return buffers


def events_of(buffers: Sequence[Buffer]) -> list[tuple[bool, Buffer]]:
    """(comes, buffer) in order; at one moment buffers go before others come."""
    moments = [(b.lower, True, b.number) for b in buffers]
    moments += [(b.upper, False, b.number) for b in buffers]
    return [(comes, buffers[number]) for _, comes, number in sorted(moments)]


def max_load(buffers: Sequence[Buffer]) -> int:
    """The most bytes alive at one moment."""
    load = most = 0
    for comes, buffer in events_of(buffers):
        load += buffer.size if comes else -buffer.size
        most = max(most, load)
    return most


# -- bounds -------------------------------------------------------------------------------------


def window_bound(live: Sequence[tuple[int, int]], capacity: int, size: int) -> int:
    """The least bytes of buffers that touch a window of `size`; `live` by address."""
    starts = {0, capacity - size}
    starts |= {min(address + length, capacity - size) for address, length in live}
    least = capacity
    for start in starts:
        touched = sum(n for a, n in live if a < start + size and start < a + n)
        least = min(least, touched)
    return least


def best_slide(live: Sequence[tuple[int, int]], capacity: int, size: int) -> int | None:
    """The least bytes to push together until `size` bytes are in one hole; None if never."""
    edges = [0, *(x for a, n in live for x in (a, a + n)), capacity]
    holes = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
    least, first, room = None, 0, 0
    moved = 0
    for last, hole in enumerate(holes):
        room += hole
        moved += live[last - 1][1] if last > first else 0
        while room - holes[first] >= size and first < last:
            room -= holes[first]
            moved -= live[first][1]
            first += 1
        if room >= size:
            # Neighbours without a hole at the ends need not move.
            least = moved if least is None else min(least, moved)
    return least


# -- peers that move nothing -----------------------------------------------------------------------


class FirstFit:
    """Holes by address, the first that fits (tt-metal's way)."""

    def __init__(self, capacity: int) -> None:
        self.holes = [(0, capacity)]

    def pick(self, size: int) -> int | None:
        return next((i for i, (_, room) in enumerate(self.holes) if room >= size), None)

    def alloc(self, size: int) -> int | None:
        i = self.pick(size)
        if i is None:
            return None
        address, room = self.holes[i]
        self.holes[i : i + 1] = [(address + size, room - size)] if room > size else []
        return address

    def free(self, address: int, size: int) -> None:
        insort(self.holes, (address, size))
        i = max(0, bisect_left(self.holes, (address, size)) - 1)
        joined = [self.holes[i]]
        for start, room in self.holes[i + 1 : i + 3]:
            if sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((start, room))
        self.holes[i : i + 3] = joined


class BestFit(FirstFit):
    """The smallest hole that fits."""

    def pick(self, size: int) -> int | None:
        fitting = [(room, i) for i, (_, room) in enumerate(self.holes) if room >= size]
        return min(fitting)[1] if fitting else None


class Tlsf(FirstFit):
    """Two-level segregated fit: the first hole of the first size class that surely fits."""

    @staticmethod
    def size_class(size: int) -> int:
        first = size.bit_length()
        return first * 16 + (size >> max(0, first - 5)) % 16

    def pick(self, size: int) -> int | None:
        wanted = self.size_class(size + (1 << max(0, size.bit_length() - 5)) - 1)
        classes = [(self.size_class(room), i) for i, (_, room) in enumerate(self.holes)]
        fitting = [entry for entry in classes if entry[0] >= wanted]
        return min(fitting)[1] if fitting else None


def failures_of(peer: FirstFit, buffers: Sequence[Buffer]) -> int:
    """How many allocations find no hole; what failed is left out."""
    places: dict[int, int] = {}
    failed = 0
    for comes, buffer in events_of(buffers):
        if comes:
            address = peer.alloc(buffer.size)
            if address is None:
                failed += 1
            else:
                places[buffer.number] = address
        elif buffer.number in places:
            peer.free(places.pop(buffer.number), buffer.size)
    return failed


# -- ours ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What a run through the allocator and the mover did."""

    failures: int = 0
    moving_calls: int = 0
    moved: int = 0
    bound: int = 0
    slide: int = 0
    above_slide: int = 0
    worst_seconds: float = 0.0
    worst_live: int = 0
    dram: int = 0
    seconds: list[float] = field(default_factory=list)


def run(buffers: Sequence[Buffer], capacity: int) -> Tally:
    """Every allocation of the file; moves where no hole fits."""
    tally = Tally()
    allocator = Allocator(0, capacity, 1)
    places: dict[int, int] = {}
    for comes, buffer in events_of(buffers):
        if not comes:
            if buffer.number in places:
                allocator.free(places.pop(buffer.number))
            continue
        started = time.thread_time()
        address = allocator.try_alloc(buffer.size)
        if address is None:
            address = _open(buffers, places, allocator, capacity, buffer.size, tally)
            taken = time.thread_time() - started
            if taken > tally.worst_seconds:
                tally.worst_seconds, tally.worst_live = taken, len(places)
        if address is None:
            tally.failures += 1
        else:
            places[buffer.number] = address
    return tally


def _open(
    buffers: Sequence[Buffer],
    places: dict[int, int],
    allocator: Allocator,
    capacity: int,
    size: int,
    tally: Tally,
) -> int | None:
    movable = tuple((n, a, buffers[n].size) for n, a in places.items())
    found = arrange(SpaceProblem(0, capacity, 1, movable, (), (), (size,)))
    if found is None:
        return None
    live = sorted((a, n) for _, a, n in movable)
    tally.moving_calls += 1
    tally.moved += found.moved_nbytes
    tally.bound += window_bound(live, capacity, size)
    slide = best_slide(live, capacity, size)
    assert slide is not None
    tally.slide += slide
    tally.above_slide += found.moved_nbytes > slide
    for number, _ in found.moves:
        allocator.free(places[number])
    for number, address in found.moves:
        allocator.alloc_at(address, buffers[number].size)
        places[number] = address
    (address,) = found.pieces
    allocator.alloc_at(address, size)
    return address
