"""The order of moves inside a space, and the least staging that a cycle needs.

Moves i: source → target, sources disjoint, targets disjoint. Move i waits for move j where i's
target overlaps j's source. Order-preserving slides are acyclic and need no scratch at all; in a
cycle one granule is set aside (allocation theory: two families of disjoint intervals give at most
2n-1 edges, and a map of granules is a set of paths and cycles).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes per bank from one address to another of the same space."""

    source: int
    target: int
    size: int


#: The address that stands for the granule set aside.
STAGE = -1


def order_moves(moves: list[Move], *, spare: int) -> tuple[list[Move], int]:
    """Byte moves in an order that loses nothing, and the size of the granule they set aside.

    `spare` is the largest free region (bytes) available for staging, 0 for none. Moves of the
    result may use `STAGE` as source or target. The granule is 0 where nothing is staged; it
    exceeds `spare` only where `spare` is 0 (then it has to leave the space).

    >>> order_moves([Move(0, 10, 10), Move(10, 20, 10)], spare=0)
    ([Move(source=10, target=20, size=10), Move(source=0, target=10, size=10)], 0)
    """
    moves = [move for move in moves if move.source != move.target]
    try:
        order = TopologicalSorter(_dependencies(moves)).static_order()
        return [moves[i] for i in order], 0
    except CycleError:
        return _by_granules(moves, spare)


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


def _by_granules(moves: list[Move], spare: int) -> tuple[list[Move], int]:
    granule = math.gcd(*(n for move in moves for n in (move.source, move.target, move.size)))
    if 0 < spare < granule:
        granule = math.gcd(granule, 1 << (spare.bit_length() - 1))
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
        staged = granule
        steps.append(Move(start, STAGE, granule))
        at = start
        while comes_from[at] != start:
            source = comes_from.pop(at)
            steps.append(Move(source, at, granule))
            at = source
        del comes_from[at]
        steps.append(Move(STAGE, at, granule))
    return steps, staged
