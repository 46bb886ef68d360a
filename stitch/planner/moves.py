"""The order of moves inside a space, and the least staging that a cycle needs.

Moves i: source → target, sources disjoint, targets disjoint. Move i waits for move j where i's
target overlaps j's source. Order-preserving slides are acyclic and need no scratch at all; in a
cycle one granule is set aside (allocation theory: two families of disjoint intervals give at most
2n-1 edges, and a map of granules is a set of paths and cycles). Only the moves that lie on or
between cycles are cut into granules; what comes before and after moves whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from stitch.packing import gaps_between


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes per bank from one address to another of the same space."""

    source: int
    target: int
    size: int


#: The address that stands for the granule set aside.
STAGE = -1


def order_moves(moves: list[Move], *, spare: int | None) -> tuple[list[Move], int]:
    """Byte moves in an order that loses nothing, and the size of the granule they set aside.

    `spare` is the largest free region (bytes) outside all targets, 0 for none; None says that
    staging leaves the space in any case. Moves of the result may use `STAGE` as source or target.
    The granule is 0 where nothing is staged, or where what the moves themselves leave free is
    room enough; it exceeds `spare` only where not a byte of the space is free.

    >>> order_moves([Move(0, 10, 10), Move(10, 20, 10)], spare=0)
    ([Move(source=10, target=20, size=10), Move(source=0, target=10, size=10)], 0)
    """
    moves = [move for move in moves if move.source != move.target]
    waits = _dependencies(moves)
    first = _peel(waits)
    rest = {i: [j for j in waits[i] if j not in first] for i in waits if i not in first}
    awaited: dict[int, list[int]] = {i: [] for i in rest}
    for i, blockers in rest.items():
        for j in blockers:
            awaited[j].append(i)
    last = _peel(awaited)
    core = [moves[i] for i in rest if i not in last]
    before, after = [moves[i] for i in first], [moves[i] for i in reversed(last)]
    if not core:
        return before + after, 0
    granules, staged = _by_granules(core, spare, _left_free(before + core, after))
    return before + granules + after, staged


def _peel(waits: dict[int, list[int]]) -> dict[int, None]:
    """Those that wait for no other, then those that wait only for them, and so on; in order."""
    left = {i: len(blockers) for i, blockers in waits.items()}
    waiting: dict[int, list[int]] = {i: [] for i in waits}
    for i, blockers in waits.items():
        for j in blockers:
            waiting[j].append(i)
    ready = [i for i, count in left.items() if not count]
    peeled: dict[int, None] = {}
    while ready:
        at = ready.pop()
        peeled[at] = None
        for i in waiting[at]:
            left[i] -= 1
            if not left[i]:
                ready.append(i)
    return peeled


def _left_free(done: list[Move], later: list[Move]) -> tuple[int, int]:
    """The largest (address, size) that is free when only the cycles of `done` and `later` remain.

    What moves leave behind, and the targets of later moves, less where bytes lie then.
    """
    spans = [(m.source, m.source + m.size) for m in done]
    spans += [(m.target, m.target + m.size) for m in later]
    busy = [(m.target, m.size) for m in done] + [(m.source, m.size) for m in later]
    holes = [
        hole
        for start, end in spans
        for hole in gaps_between([b for b in busy if b[0] < end and start < sum(b)], start, end)
    ]
    return max(holes, key=lambda hole: (hole[1], -hole[0]), default=(0, 0))


def _dependencies(moves: list[Move]) -> dict[int, list[int]]:
    by_source = sorted(range(len(moves)), key=lambda i: moves[i].source)
    starts = [moves[i].source for i in by_source]
    waits: dict[int, list[int]] = {}
    for i, move in enumerate(moves):
        first = bisect_left(starts, move.target)
        if first and moves[by_source[first - 1]].source + moves[by_source[first - 1]].size > (
            move.target
        ):
            first -= 1
        end = bisect_left(starts, move.target + move.size)
        waits[i] = [j for j in by_source[first:end] if j != i]
    return waits


def _by_granules(
    moves: list[Move], spare: int | None, free: tuple[int, int]
) -> tuple[list[Move], int]:
    granule = math.gcd(*(n for move in moves for n in (move.source, move.target, move.size)))
    stage = STAGE
    if spare is not None and spare < granule and (spare or free[1]):
        if free[1] > spare:
            stage = free[0]
        room = max(spare, free[1])
        granule = math.gcd(granule, 1 << (min(room, granule).bit_length() - 1))
    comes_from = {
        move.target + at: move.source + at for move in moves for at in range(0, move.size, granule)
    }
    wanted = set(comes_from.values())
    steps: list[Move] = []
    for end in [target for target in comes_from if target not in wanted]:
        at = end
        while at in comes_from:
            source = comes_from.pop(at)
            steps.append(Move(source, at, granule))
            at = source
    staged = 0
    while comes_from:
        start = next(iter(comes_from))
        if stage == STAGE:
            staged = granule
        steps.append(Move(start, stage, granule))
        at = start
        while comes_from[at] != start:
            source = comes_from.pop(at)
            steps.append(Move(source, at, granule))
            at = source
        del comes_from[at]
        steps.append(Move(stage, at, granule))
    return steps, staged
