"""Exact and heuristic placement of pieces in the gaps between regions that cannot move."""

from __future__ import annotations

from collections.abc import Sequence

#: Search nodes after which an exact packing gives up and says so.
NODE_LIMIT = 200_000


def gaps_between(
    obstacles: Sequence[tuple[int, int]], base: int, limit: int
) -> tuple[tuple[int, int], ...]:
    """The (address, size) regions of `[base, limit)` outside disjoint (address, size) obstacles.

    >>> gaps_between([(16, 16)], 0, 64)
    ((0, 16), (32, 32))
    """
    gaps, at = [], base
    for address, size in sorted(obstacles):
        if address > at:
            gaps.append((at, address - at))
        at = max(at, address + size)
    if at < limit:
        gaps.append((at, limit - at))
    return tuple(gaps)


def pack(
    pieces: Sequence[int], gaps: Sequence[int], *, node_limit: int | None = None
) -> tuple[int, ...] | None:
    """The gap for each piece such that all fit, or None where provably no assignment exists.

    Depth first, largest piece first, equal gaps tried once. Raises `TimeoutError` past
    `node_limit` nodes (`NODE_LIMIT` unless given): then nothing is proved either way.

    >>> pack([4, 3, 3], [6, 4]), pack([3, 3, 3], [5, 5])
    ((1, 0, 0), None)
    """
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i])
    room = list(gaps)
    chosen = [0] * len(pieces)
    remaining = [0] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        remaining[depth] = remaining[depth + 1] + pieces[order[depth]]
    nodes, most = 0, NODE_LIMIT if node_limit is None else node_limit

    def place(depth: int) -> bool:
        nonlocal nodes
        if depth == len(order):
            return True
        nodes += 1
        if nodes > most:
            raise TimeoutError
        size = pieces[order[depth]]
        smallest = pieces[order[-1]]
        if remaining[depth] > sum(r for r in room if r >= smallest):
            return False
        tried: set[int] = set()
        # Tightest first: exact fits close a gap without wasting another.
        for gap in sorted(range(len(room)), key=room.__getitem__):
            if room[gap] < size or room[gap] in tried:
                continue
            tried.add(room[gap])
            room[gap] -= size
            chosen[order[depth]] = gap
            if place(depth + 1):
                return True
            room[gap] += size
        return False

    return tuple(chosen) if place(0) else None
