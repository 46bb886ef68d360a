"""What packing is, in a few lines that share nothing with `stitch.packing`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from stitch.packing import Interval, Refutation


def clashes(intervals: Sequence[Interval], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of intervals that share a byte at a moment."""
    return [
        (i, j)
        for i, a in enumerate(intervals)
        for j, b in enumerate(intervals[:i])
        if a.first <= b.last
        and b.first <= a.last
        and offsets[i] < offsets[j] + b.nbytes
        and offsets[j] < offsets[i] + a.nbytes
        and a.nbytes
        and b.nbytes
    ]


def lowest_peak(intervals: Sequence[Interval]) -> int:
    """By first fit in every order: one of them gives a lowest packing, bottom up."""
    lowest = sum(i.nbytes for i in intervals)
    for order in itertools.permutations(range(len(intervals))):
        lying: list[tuple[Interval, int]] = []
        for i in order:
            me = intervals[i]
            near = [
                (o, o + x.nbytes) for x, o in lying if x.first <= me.last and me.first <= x.last
            ]
            at = 0
            for start, end in sorted(near):
                if start - at >= me.nbytes:
                    break
                at = max(at, end)
            lying.append((me, at))
        lowest = min(lowest, max((o + x.nbytes for x, o in lying), default=0))
    return lowest


def fits_somehow(pieces: Sequence[int], gaps: Sequence[int]) -> bool:
    """By trying every assignment."""
    for chosen in itertools.product(range(len(gaps)), repeat=len(pieces)):
        room = list(gaps)
        for size, gap in zip(pieces, chosen, strict=True):
            room[gap] -= size
        if min(room, default=0) >= 0:
            return True
    return False


def replays(pieces: Sequence[int], gaps: Sequence[int], refutation: Refutation) -> bool:
    """Whether the steps prove that the pieces do not fit into the gaps."""
    steps, known = iter(refutation.steps), set[tuple[int, ...]]()

    def refuted(left: list[int], room: list[int]) -> bool:
        sums = {0}
        for size in left:
            sums |= {total + size for total in sums}
        if not refutation.by_sums:
            sums = {0, *range(math.gcd(*pieces), max(room, default=0) + 1, math.gcd(*pieces))}
            sums = {total for total in sums if not total or total >= left[-1]}
        held = [max(total for total in sums if total <= space) for space in room]
        state = (len(left), *sorted(held))
        match next(steps, None):
            case 0 if left:
                size, *rest = left
                into = {size} if size in held else {space for space in held if space > size}
                for space in sorted(into):
                    gap = held.index(space)
                    if not refuted(rest, [*held[:gap], space - size, *held[gap + 1 :]]):
                        return False
            case 1 if sum(held) < sum(left):
                pass
            case 2 if state in known:
                pass
            case _:
                return False
        known.add(state)
        return True

    return refuted(sorted(pieces, reverse=True), list(gaps)) and next(steps, None) is None
