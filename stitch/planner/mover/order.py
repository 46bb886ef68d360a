"""The order of moves inside a space: who waits for whom, and what lies on cycles.

Moves i: source → target, sources disjoint, targets disjoint. Move i waits for move j where i's
target overlaps j's source; two families of disjoint intervals give at most 2n-1 such pairs.
Order-preserving slides never form a cycle; a move that overlaps itself is memmove's to solve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes per bank from one address to another of the same space."""

    source: int
    target: int
    size: int


def order_moves(moves: Sequence[Move]) -> tuple[list[Move], list[Move], list[Move]]:
    """Moves that go first, those on or between cycles, and those that go last.

    The first and the last run whole, as listed; those between need a part set aside.

    >>> order_moves([Move(0, 10, 10), Move(10, 20, 10)])[0]
    [Move(source=10, target=20, size=10), Move(source=0, target=10, size=10)]
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
    return [moves[i] for i in first], core, [moves[i] for i in reversed(last)]


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


def _dependencies(moves: list[Move]) -> dict[int, list[int]]:
    by_source = sorted(range(len(moves)), key=lambda i: moves[i].source)
    starts = [moves[i].source for i in by_source]
    waits: dict[int, list[int]] = {}
    for i, move in enumerate(moves):
        first = bisect_left(starts, move.target)
        if first:
            before = moves[by_source[first - 1]]
            first -= before.source + before.size > move.target
        end = bisect_left(starts, move.target + move.size)
        waits[i] = [j for j in by_source[first:end] if j != i]
    return waits
