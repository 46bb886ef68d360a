"""The allocator beside a naive peer: pairs of free and alloc with a steady number of live buffers.

The peer keeps an address-sorted list of holes and takes the first that fits: what one writes first,
and quick while holes are few. Both replay the same random history (a random buffer goes, one of
another size comes) with 64 and 2048 live buffers; `pinned` takes every buffer back at the address
that it had (`alloc_at`), as a plan that runs again does. Rounds alternate in one process, and the
least time of each counts. Beside microseconds a pair stand the ratio to the peer, and how much of
the space its largest hole has left. `--check` exits 1 above 2.0 us a pair with 64 live buffers.
"""

from __future__ import annotations

import json
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from command_line import bench_parser, exit_code_for, from_one

from stitch.memory import Allocator

GOAL_US = 2.0
GOAL_LIVE = 64
LIVE = (64, 2048)
ALIGNMENT = 32
#: Sizes in granules: rows, tiles and shards of a few kinds, and anything between.
SIZES = (1, 2, 34, 64, 128, 256, 512)
#: A round is shorter than the scheduler's slice: the least round was not interrupted.
PAIRS = 250


class Places(Protocol):
    """What both allocators do."""

    def alloc(self, size: int) -> int: ...
    def alloc_at(self, address: int, size: int) -> object: ...
    def free(self, address: int) -> int: ...
    @property
    def largest_hole(self) -> int: ...


class FirstFitList:
    """Holes as (address, size) in a list sorted by address; the first that fits is cut."""

    def __init__(self, base: int, limit: int, alignment: int) -> None:
        self.alignment = alignment
        self.holes = [(base, limit - base)]
        self.live: dict[int, int] = {}

    def alloc(self, size: int) -> int:
        size = -(-size // self.alignment) * self.alignment
        for i, (address, room) in enumerate(self.holes):
            if room >= size:
                if room == size:
                    del self.holes[i]
                else:
                    self.holes[i] = (address + size, room - size)
                self.live[address] = size
                return address
        raise MemoryError

    def alloc_at(self, address: int, size: int) -> None:
        size = -(-size // self.alignment) * self.alignment
        i = bisect_left(self.holes, (address + 1, 0)) - 1
        start, room = self.holes[i]
        if i < 0 or address + size > start + room:
            raise MemoryError
        rest = [(start, address - start), (address + size, start + room - address - size)]
        self.holes[i : i + 1] = [hole for hole in rest if hole[1]]
        self.live[address] = size

    def free(self, address: int) -> int:
        size = given = self.live.pop(address)
        i = bisect_left(self.holes, (address, 0))
        first = last = i
        if i < len(self.holes) and self.holes[i][0] == address + size:
            size += self.holes[i][1]
            last = i + 1
        if i and sum(self.holes[i - 1]) == address:
            first = i - 1
            address, before = self.holes[first]
            size += before
        self.holes[first:last] = [(address, size)]
        return given

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self.holes), default=0)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of using both: microseconds a pair, and what is left of the free bytes in one hole.

    `ratio` above 1: that much faster than the peer.
    """

    live: int
    way: str
    pair_us: float
    peer_us: float
    ratio: float
    largest_hole: float
    peer_largest_hole: float


def filled(places: Places, live: int, dice: random.Random) -> list[int]:
    """The addresses of `live` buffers, after many others have come and gone."""
    addresses = [places.alloc(dice.choice(SIZES) * ALIGNMENT) for _ in range(live)]
    for _ in range(4 * live):
        i = dice.randrange(live)
        places.free(addresses[i])
        addresses[i] = places.alloc(dice.choice(SIZES) * ALIGNMENT)
    return addresses


def replay(places: Places, addresses: list[int], history: Sequence[tuple[int, int]]) -> float:
    """Seconds for one buffer to go and another to come, for each entry of the history."""
    alloc, free = places.alloc, places.free
    started = time.perf_counter()
    for i, size in history:
        free(addresses[i])
        addresses[i] = alloc(size)
    return time.perf_counter() - started


def replay_pinned(
    places: Places, addresses: list[int], history: Sequence[tuple[int, int]]
) -> float:
    """Seconds for one buffer to go and to come back to its address, for each entry."""
    alloc_at, free = places.alloc_at, places.free
    started = time.perf_counter()
    for i, _ in history:
        address = addresses[i]
        alloc_at(address, free(address))
    return time.perf_counter() - started


Replay = Callable[[Places, list[int], Sequence[tuple[int, int]]], float]


def measure(live: int, way: str, replayed: Replay, rounds: int) -> Row:
    """Both allocators through the same histories, in turns."""
    # Half full: full enough for many holes, and a place for the largest size is never missing.
    capacity = 2 * live * sum(SIZES) // len(SIZES) * ALIGNMENT
    both: tuple[Places, Places] = (
        Allocator(0, capacity, ALIGNMENT),
        FirstFitList(0, capacity, ALIGNMENT),
    )
    held = [filled(places, live, random.Random(1)) for places in both]
    dice, least = random.Random(2), [float("inf")] * 2
    for turn in range(rounds):
        history = [
            (dice.randrange(live), dice.choice(SIZES) * ALIGNMENT) for _ in range(PAIRS)
        ]  # fmt: skip
        for k in (0, 1) if turn % 2 else (1, 0):
            least[k] = min(least[k], replayed(both[k], held[k], history))
    holes = []
    for k in (0, 1):
        holes.append(both[k].largest_hole / capacity)
        for address in held[k]:
            both[k].free(address)
        assert both[k].largest_hole == capacity, "a buffer was lost"
    ours, theirs = (seconds / PAIRS * 1e6 for seconds in least)
    return Row(live, way, ours, theirs, theirs / ours, *holes)


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=from_one, default=400)
    options = parser.parse_args(arguments)
    ways: tuple[tuple[str, Replay], ...] = (("any", replay), ("pinned", replay_pinned))
    rows = [measure(live, way, replayed, options.rounds) for live in LIVE for way, replayed in ways]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("live  way     us/pair  peer us  times faster  largest hole  peer's")
        for row in rows:
            print(
                f"{row.live:>4}  {row.way:<6} {row.pair_us:8.2f} {row.peer_us:8.2f} "
                f"{row.ratio:13.2f} {row.largest_hole:13.2f} {row.peer_largest_hole:7.2f}"
            )
    missed = [
        f"{row.live} live, {row.way}: {row.pair_us:.2f} us a pair, not {GOAL_US}"
        for row in rows
        if row.live == GOAL_LIVE and row.pair_us > GOAL_US
    ]
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
