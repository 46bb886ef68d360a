"""Pack pieces into gaps, exactly: a packing, or a refutation that can be checked.

Depth-first search, the largest piece first, into the tightest gap first. A gap can hold at most the
largest sum of remaining pieces that fits; a branch ends if these sums are too small, gaps with
equal sums are tried once, and refuted states are cached. A long search is interrupted to fill gap
after gap with such sums.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Default budget of `pack`.
PLACEMENTS = 20_000
#: The first search takes this fraction of the budget; then gaps are filled by sums.
_FIRST_SHARE = 10
#: Bits of sums over all depths above which gaps count as wholly usable.
_MOST_SUMS = 1 << 27
_SEED = 20


@dataclass(frozen=True, slots=True)
class Refutation:
    """A proof that pieces do not fit the gaps: the branches of a search, in order.

    Pieces are placed largest first. Each step concerns the remaining pieces and the largest sum of
    them that fits each gap. `FULL`: the sums are less than the pieces. `KNOWN`: the same pieces and
    sums were refuted before. `BRANCH`: the following steps refute the next piece in each gap that
    can hold it, one gap per sum, smallest first; if the piece alone is a gap's sum, only there, as
    anything else in that gap could be exchanged with the piece. Without `by_sums` (there would be
    too many) a gap holds its size in multiples of the pieces' divisor, or 0 if no piece fits.
    """

    steps: bytes
    by_sums: bool = True


BRANCH, FULL, KNOWN = range(3)


@dataclass(frozen=True, slots=True)
class BinPacking:
    """The gap of each piece, or a refutation, or neither if the budget ended."""

    chosen: tuple[int, ...] | None
    refutation: Refutation | None
    placements: int

    @property
    def ended(self) -> bool:
        return self.chosen is not None or self.refutation is not None


def gaps_between(
    obstacles: Sequence[tuple[int, int]], base: int, limit: int
) -> tuple[tuple[int, int], ...]:
    """Return the (address, size) gaps of `[base, limit)` between disjoint obstacles.

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
    """Assign each piece to a gap such that all fit, or prove that this is impossible.

    Returns neither if the budget of `placements` does not suffice.

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
    """Searches for one packing, in granules that divide every piece."""

    def __init__(self, pieces: Sequence[int], gaps: Sequence[int]) -> None:
        granule = math.gcd(*pieces) or 1
        self._order = sorted(range(len(pieces)), key=lambda i: -pieces[i])
        self._sizes = [pieces[i] // granule for i in self._order]
        self._gaps = [gap // granule for gap in gaps]
        #: By depth the granules of the remaining pieces.
        self._left = [*itertools.accumulate(reversed(self._sizes), initial=0)][::-1]
        self._held: dict[tuple[int, int], int] = {}
        self.chosen = [0] * len(pieces)
        self.steps = bytearray()
        self.placements = 0

    def fit_tightly(self) -> bool:
        """Place the largest pieces first, each into the tightest gap; return whether all fit."""
        free = list(self._gaps)
        for piece, size in zip(self._order, self._sizes, strict=True):
            fitting = [gap for gap in range(len(free)) if free[gap] >= size]
            if not fitting:
                return False
            self.chosen[piece] = gap = min(fitting, key=free.__getitem__)
            free[gap] -= size
        return True

    @property
    def by_sums(self) -> bool:
        return bool(self._sums)

    @functools.cached_property
    def _sums(self) -> list[int]:
        """By depth the possible sums of remaining pieces, as bits; empty if there are too many."""
        most = min(self._left[0], max(self._gaps, default=0)) + 1
        if most * len(self._left) > _MOST_SUMS:
            return []
        sums = [1]
        for size in reversed(self._sizes):
            sums.append((sums[-1] | sums[-1] << size) & ((1 << most) - 1))
        return sums[::-1]

    def _capacity(self, depth: int, free: int) -> int:
        """Return the most granules of the remaining pieces that fit into `free` granules."""
        held = self._held.get((depth, free))
        if held is None:
            if self._sums:
                held = (self._sums[depth] & ((1 << free + 1) - 1)).bit_length() - 1
            else:
                held = free if free >= self._sizes[-1] else 0
            self._held[depth, free] = held
        return held

    def branch(self, budget: int) -> bool | None:
        """Try every gap for every piece; return whether all fit, or None if the budget ended."""
        self.steps.clear()
        refuted: set[tuple[int, ...]] = set()
        free, states = list(self._gaps), []
        #: By depth the gaps still to be tried, the first one last.
        untried: list[list[int]] = []
        while True:
            depth = len(untried)
            if depth == len(self._sizes):
                return True
            held = [self._capacity(depth, size) for size in free]
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
                options = self._options(self._sizes[depth], free, held)
            untried.append(options)
            states.append(state)
            while not untried[-1]:
                refuted.add(states.pop())
                untried.pop()
                if not untried:
                    return False
                free[self.chosen[self._order[len(untried) - 1]]] += self._sizes[len(untried) - 1]
            gap = untried[-1].pop()
            self.chosen[self._order[len(untried) - 1]] = gap
            free[gap] -= self._sizes[len(untried) - 1]

    def _options(self, size: int, free: list[int], held: list[int]) -> list[int]:
        """Return the gaps worth trying for a piece, the tightest last, one for each capacity."""
        options: dict[int, int] = {}
        for gap in sorted(range(len(free)), key=free.__getitem__):
            if held[gap] == size:
                return [gap]  # Anything else in this gap could be exchanged with the piece.
            if held[gap] > size:
                options.setdefault(held[gap], gap)
        return [*options.values()][::-1]

    def fill_gaps(self, budget: int) -> bool:
        """Fill each gap with the largest sum that fits, in random orders; return if all fit."""
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


def largest_sum(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the indices, descending, of sizes whose sum is the largest up to `limit`.

    Prefers the first sizes.

    >>> largest_sum([5, 4, 3], 8)
    [2, 0]
    """
    sums = [1]
    for size in sizes:
        sums.append((sums[-1] | sums[-1] << size) & ((1 << limit + 1) - 1))
    rest, taken = sums[-1].bit_length() - 1, []
    for k in reversed(range(len(sizes))):
        if not sums[k] >> rest & 1:
            taken.append(k)
            rest -= sizes[k]
    return taken


#: (start, end) of addresses, the end not included.
Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same addresses as sorted, disjoint spans.

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
    """Return the addresses of sorted spans outside sorted, disjoint ones.

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
