"""What is set aside inside a space: where it is put, and how moves find it again."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

from stitch.packing import Span
from stitch.planner.mover.cost import ASIDE
from stitch.planner.mover.order import Move


def places_for(
    parts: Iterable[Span], free: Sequence[Span], more: Sequence[Span] = ()
) -> list[tuple[int, int, int]]:
    """(source, place, size) of spans laid into free regions of the space.

    Each part, the largest first, lies in the largest region left, and is cut only where that is too
    small. `more` regions are used when those are full.
    """
    places: list[tuple[int, int, int]] = []
    regions = [sorted((end - at, -at) for at, end in spans) for spans in (free, more)]
    for size, start in sorted(((start - end, start) for start, end in parts)):
        size = -size
        while size:
            rooms = regions[0] or regions[1]
            room, at = rooms.pop()
            taken = min(size, room)
            places.append((start, -at, taken))
            if taken < room:
                insort(rooms, (room - taken, at - taken))
            start, size = start + taken, size - taken
    return sorted(places)


def laid(moves: Iterable[Move], places: Sequence[tuple[int, int, int]]) -> list[Move]:
    """The same moves with what is set aside coming from its places."""
    starts = [start for start, _, _ in places]
    done: list[Move] = []
    for move in moves:
        source, end = move.source - ASIDE, move.source - ASIDE + move.size
        if source < 0:
            done.append(move)
            continue
        i = bisect_right(starts, source) - 1
        while source < end:
            start, place, size = places[i]
            taken = min(end, start + size) - source
            target = move.target + move.size - (end - source)
            done.append(Move(place + source - start, target, taken))
            source, i = source + taken, i + 1
    return done


def outgoing(places: Iterable[tuple[int, int, int]]) -> list[Move]:
    """The moves that set parts aside: those that continue each other are one."""
    joined: list[Move] = []
    for source, target, size in places:
        before = joined[-1] if joined else Move(0, 0, -1)
        if (before.source + before.size, before.target + before.size) == (source, target):
            joined[-1] = Move(before.source, before.target, before.size + size)
        else:
            joined.append(Move(source, target, size))
    return joined


def spans_of(moves: Iterable[Move], end: str) -> list[Span]:
    starts = ((getattr(move, end), move.size) for move in moves)
    return [(start, start + size) for start, size in starts]


def nbytes_of(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
