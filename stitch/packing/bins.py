"""Exact and heuristic placement of pieces in the gaps between regions that cannot move.

Depth first, the largest piece first, into the tightest gap first. Each gap holds at most the
largest sum of pieces left over that it has room for: a branch ends where these sums add up to too
little, and gaps that hold the same are tried once. What was refuted once is not searched again. A
search that takes long is interrupted to fill gap after gap by such sums.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Placements that a packing may take unless told otherwise.
PLACEMENTS = 20_000
#: Placements of the first search; then gaps are filled by sums, then the search begins anew.
_FIRST_SHARE = 10
#: Sums of pieces, over all sets of pieces left over, above which gaps count as wholly usable.
_MOST_SUMS = 1 << 27
_SEED = 20


@dataclass(frozen=True, slots=True)
class Refutation:
    """Why no assignment of pieces to gaps exists: the branches of a search, as they were met.

    Pieces go in, largest first. Each step is about the pieces left over and what each gap can still
    hold: the largest sum of such pieces up to its room. `FULL`: these sums add up to less than the
    pieces. `KNOWN`: the same pieces and sums were refuted before. `BRANCH`: the steps that follow
    refute the next piece in each gap that holds it, one of every sum, smallest first; where the
    piece alone is the sum, only there, as whatever else lay there could lie where the piece lies.
    Without `by_sums` (they would be too many) a gap holds its room, in multiples of what divides
    all pieces, or nothing where no piece fits.
    """

    steps: bytes
    by_sums: bool = True


BRANCH, FULL, KNOWN = range(3)


@dataclass(frozen=True, slots=True)
class BinPacking:
    """What a search ended with: the gap of each piece, or a refutation, or (budget) neither."""

    chosen: tuple[int, ...] | None
    refutation: Refutation | None
    placements: int

    @property
    def ended(self) -> bool:
        return self.chosen is not None or self.refutation is not None


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


def pack(pieces: Sequence[int], gaps: Sequence[int], *, placements: int = PLACEMENTS) -> BinPacking:
    """A gap for each piece such that all fit, or the proof that there is none.

    Neither where `placements` did not suffice; what needs no search is found with 0 as well.

    >>> pack([4, 3, 3], [6, 4]).chosen, pack([3, 3, 3], [5, 5]).refutation.by_sums
    ((1, 0, 0), True)
    """
    search = _Search(pieces, gaps)
    found: bool | None = search.fit_tightly() or None
    if found is None:
        found = search.branch(placements // _FIRST_SHARE)
    if found is None:
        found = search.fill_gaps(placements // 2) or None
    if found is None:
        found = search.branch(placements)
    return BinPacking(
        tuple(search.chosen) if found else None,
        Refutation(bytes(search.steps), search.by_sums) if found is False else None,
        search.placements,
    )


class _Search:
    """Searches for one packing. Sizes are counted in granules, which divide every piece."""

    def __init__(self, pieces: Sequence[int], gaps: Sequence[int]) -> None:
        granule = math.gcd(*pieces) or 1
        self._order = sorted(range(len(pieces)), key=lambda i: -pieces[i])
        self._sizes = [pieces[i] // granule for i in self._order]
        self._gaps = [gap // granule for gap in gaps]
        #: By depth the granules of the pieces left over.
        self._left = [*itertools.accumulate(reversed(self._sizes), initial=0)][::-1]
        self._held: dict[tuple[int, int], int] = {}
        self.chosen = [0] * len(pieces)
        self.steps = bytearray()
        self.placements = 0

    def fit_tightly(self) -> bool:
        """Whether every piece fits where the largest go first, each into the tightest gap."""
        room = list(self._gaps)
        for piece, size in zip(self._order, self._sizes, strict=True):
            fitting = [gap for gap in range(len(room)) if room[gap] >= size]
            if not fitting:
                return False
            self.chosen[piece] = gap = min(fitting, key=room.__getitem__)
            room[gap] -= size
        return True

    @property
    def by_sums(self) -> bool:
        return bool(self._sums)

    @functools.cached_property
    def _sums(self) -> list[int]:
        """By depth the sums of pieces left over, as bits; nothing where they would be too many."""
        most = min(self._left[0], max(self._gaps, default=0)) + 1
        if most * len(self._left) > _MOST_SUMS:
            return []
        sums = [1]
        for size in reversed(self._sizes):
            sums.append((sums[-1] | sums[-1] << size) & ((1 << most) - 1))
        return sums[::-1]

    def _hold(self, depth: int, room: int) -> int:
        """The most granules of the pieces left over that this room can hold."""
        held = self._held.get((depth, room))
        if held is None:
            if self._sums:
                held = (self._sums[depth] & ((1 << room + 1) - 1)).bit_length() - 1
            else:
                held = room if room >= self._sizes[-1] else 0
            self._held[depth, room] = held
        return held

    def branch(self, budget: int) -> bool | None:
        """Whether all fit, by trying every gap for every piece; None where the budget ended."""
        self.steps.clear()
        refuted: set[tuple[int, ...]] = set()
        room, states = list(self._gaps), []
        #: By depth the gaps that are still to be tried, the first one last.
        untried: list[list[int]] = []
        while True:
            depth = len(untried)
            if depth == len(self._sizes):
                return True
            held = [self._hold(depth, space) for space in room]
            state = (depth, *sorted(held))
            options: list[int] = []
            if sum(held) < self._left[depth]:
                self.steps.append(FULL)
            elif state in refuted:
                self.steps.append(KNOWN)
            elif self.placements >= budget:
                return None
            else:
                self.placements += 1
                self.steps.append(BRANCH)
                options = self._options(self._sizes[depth], room, held)
            untried.append(options)
            states.append(state)
            while not untried[-1]:
                refuted.add(states.pop())
                untried.pop()
                if not untried:
                    return False
                room[self.chosen[self._order[len(untried) - 1]]] += self._sizes[len(untried) - 1]
            gap = untried[-1].pop()
            self.chosen[self._order[len(untried) - 1]] = gap
            room[gap] -= self._sizes[len(untried) - 1]

    def _options(self, size: int, room: list[int], held: list[int]) -> list[int]:
        """The gaps worth trying for a piece, the tightest last; one of each that holds as much."""
        options: dict[int, int] = {}
        for gap in sorted(range(len(room)), key=room.__getitem__):
            if held[gap] == size:
                return [gap]  # whatever else lay here could lie where the piece lies
            if held[gap] > size:
                options.setdefault(held[gap], gap)
        return [*options.values()][::-1]

    def fill_gaps(self, budget: int) -> bool:
        """Whether all fit where one gap after the other takes the largest sum that it holds.

        The order of gaps and pieces is drawn again and again.
        """
        chance = random.Random(_SEED)
        gaps, pieces = sorted(range(len(self._gaps)), key=self._gaps.__getitem__), self._order[:]
        size_of = dict(zip(self._order, self._sizes, strict=True))
        while self._sums and self.placements < budget:
            left = list(pieces)
            for gap in gaps:
                self.placements += len(left)
                for piece in largest_sum([size_of[i] for i in left], self._gaps[gap]):
                    self.chosen[left[piece]] = gap
                    left[piece] = -1
                left = [i for i in left if i >= 0]
            if not left:
                return True
            chance.shuffle(gaps)
            chance.shuffle(pieces)
        return False


def largest_sum(sizes: Sequence[int], room: int) -> list[int]:
    """The positions of sizes whose sum is the largest up to `room`, the first ones preferred, from
    the last to the first.

    >>> largest_sum([5, 4, 3], 8)
    [2, 0]
    """
    sums = [1]
    for size in sizes:
        sums.append((sums[-1] | sums[-1] << size) & ((1 << room + 1) - 1))
    rest, taken = sums[-1].bit_length() - 1, []
    for k in reversed(range(len(sizes))):
        if not sums[k] >> rest & 1:
            taken.append(k)
            rest -= sizes[k]
    return taken


# Spans of addresses -------------------------------------------------------------------------------

#: (start, end), the end not included.
Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same addresses as spans in order and apart.

    >>> union([(8, 16), (0, 8), (32, 40)])
    [(0, 16), (32, 40)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def minus(spans: Iterable[Span], without: Sequence[Span]) -> list[Span]:
    """What is left of sorted spans outside of others, which are sorted and apart.

    >>> minus([(0, 16), (32, 40)], [(8, 36)])
    [(0, 8), (36, 40)]
    """
    left: list[Span] = []
    starts = [start for start, _ in without]
    count = len(starts)
    for start, end in spans:
        i = bisect_right(starts, start)
        i -= i > 0
        while i < count and starts[i] < end:
            a, b = without[i]
            if a > start:
                left.append((start, a))
            if b > start:
                start = b
            i += 1
        if start < end:
            left.append((start, end))
    return left
