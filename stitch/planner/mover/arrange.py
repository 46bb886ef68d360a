"""Find the cheapest arrangement of one space in which everything fits.

Candidate sets of buffers are tried by the cost of moving them: first those of the shortest runs
whose bytes hold what does not fit; if members of a set do not fit elsewhere, the set grows by
another run. All other buffers stay. A set is feasible if its members and the new pieces pack into
the remaining holes: best fit first, then hole by hole with the fullest choice (subset sums, as bits
of a number). The result is then reduced. The best slide is always a candidate; small numbers of
buffers are searched exhaustively; the last resort is to repack the space. Effort is counted, never
timed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from stitch.packing import gaps_between, largest_sum, pack


@dataclass(frozen=True, slots=True)
class SpaceProblem:
    """One space at one moment; sizes and addresses in bytes per bank.

    `movable`: (number, address, size). `displaced`: buffers that must get another address.
    `obstacles`: fixed or reserved regions (address, size). `pieces`: sizes to allocate.
    `operation_size`: bytes that take as long to move as starting a move takes.
    """

    base: int
    limit: int
    alignment: int
    movable: tuple[tuple[int, int, int], ...]
    displaced: tuple[tuple[int, int, int], ...]
    obstacles: tuple[tuple[int, int], ...]
    pieces: tuple[int, ...]
    operation_size: int = 0

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        return gaps_between(self.obstacles, self.base, self.limit)

    def without(self, numbers: Collection[int]) -> SpaceProblem:
        """Return the problem once these buffers have left the space."""
        movable = tuple([b for b in self.movable if b[0] not in numbers])
        displaced = tuple([b for b in self.displaced if b[0] not in numbers])
        return replace(self, movable=movable, displaced=displaced)

    @property
    def all_pieces(self) -> tuple[int, ...]:
        """The sizes of everything to place in the gaps."""
        buffers = (*self.displaced, *self.movable)
        return (*(size for _, _, size in buffers), *self.pieces)


#: A hole as one number, size above address, so that a sorted list can be searched by size.
SHIFT = 48
ADDRESS = (1 << SHIFT) - 1


class Holes:
    """Movable buffers by address, the holes between them, and the holes without some of them.

    Buffers are named by their rank; a set of them is a bit mask.
    """

    def __init__(self, problem: SpaceProblem) -> None:
        buffers = sorted(problem.movable, key=lambda buffer: buffer[1])
        self.buffers = buffers
        self.starts = [address for _, address, _ in buffers]
        self.sizes = [size for _, _, size in buffers]
        #: The cost of moving a buffer, in bytes.
        self.costs = [size + problem.operation_size for size in self.sizes]
        #: Start and end of the free bytes around each buffer.
        self._before: list[int] = []
        self._after: list[int] = []
        gaps: list[int] = []
        rank = 0
        for gap, size in problem.gaps:
            at, end = gap, gap + size
            while rank < len(buffers) and (start := self.starts[rank]) < end:
                if at > gap:
                    self._after.append(start)
                self._before.append(at)
                if at < start:
                    gaps.append(start - at << SHIFT | at)
                at = start + self.sizes[rank]
                rank += 1
            if at > gap:
                self._after.append(end)
            if at < end:
                gaps.append(end - at << SHIFT | at)
        gaps.sort()
        self._gaps = gaps
        self._windows: dict[tuple[int, bool], list[tuple[int, int]]] = {}

    def gaps(self, mask: int) -> list[int]:
        """Return the holes (size above address), sorted, once the buffers of a set are removed."""
        gaps = list(self._gaps)
        start = at = after = -1
        for rank in members(mask):
            before, address = self._before[rank], self.starts[rank]
            if before != at:
                # A new hole begins unless the buffer before is removed too.
                if start >= 0:
                    insort(gaps, after - start << SHIFT | start)
                start = before
                if before < address:
                    _remove(gaps, before, address)
            at, after = address + self.sizes[rank], self._after[rank]
            if at < after:
                _remove(gaps, at, after)
        if start >= 0:
            insort(gaps, after - start << SHIFT | start)
        return gaps

    def windows(self, size: int, *, keeps: bool = False) -> list[tuple[int, int]]:
        """Return (cost, set) of the shortest runs of neighbours that free `size` bytes, cheapest
        first.

        The run is moved away, or (`keeps`) pushed together. Every window of that size touches all
        of one run.
        """
        known = self._windows.get((size, keeps))
        if known is None:
            known = self._windows[size, keeps] = self._runs(size, keeps=keeps)
        return known

    def _runs(self, size: int, *, keeps: bool) -> list[tuple[int, int]]:
        sizes, costs, befores = self.sizes, self.costs, self._before
        runs: list[tuple[int, int]] = []
        first = cost = kept = 0
        for last, end in enumerate(self._after):
            if last and befores[last] != self.starts[last - 1] + sizes[last - 1]:
                first, cost, kept = last, 0, 0
            cost += costs[last]
            kept += sizes[last] if keeps else 0
            if end - befores[first] - kept < size:
                continue
            while first < last:
                less = kept - sizes[first] if keeps else 0
                if end - befores[first + 1] - less < size:
                    break
                cost, kept = cost - costs[first], less
                first += 1
            runs.append((cost, (1 << last + 1) - (1 << first)))
        runs.sort()
        return runs


def _remove(gaps: list[int], start: int, end: int) -> None:
    del gaps[bisect_left(gaps, end - start << SHIFT | start)]


def members(mask: int) -> list[int]:
    """Return the ranks of a set, ascending.

    >>> members(0b1011)
    [0, 1, 3]
    """
    ranks = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return ranks


#: Exhaustive search with at most so many movable buffers.
EXACT_BUFFERS = 8
#: Work limits of the search and of the reduction; a unit is about a microsecond.
SEARCH_WORK = 1_500
THINNING_WORK = 1_000
#: Number of runs tried to extend an infeasible set.
RUNS_ADDED = 6
#: Work limit, and number of sets, of the greedy extension if the search was not finished.
DIVING_WORK = 1_300
DIVES = 8


@dataclass(frozen=True, slots=True)
class Repacking:
    """New addresses of buffers (by number), and addresses of the pieces (by position)."""

    moves: tuple[tuple[int, int], ...]
    pieces: tuple[int, ...]
    moved_nbytes: int


def arrange(
    problem: SpaceProblem, share: float = 1.0, *, in_order: bool = False
) -> Repacking | None:
    """Return the cheapest arrangement found, None if there is provably none.

    Args:
        problem: The space.
        share: Share of the usual work limit.
        in_order: Buffers keep their order, so that their moves form no cycle; requires that nothing
            is displaced.

    Raises:
        TimeoutError: The exact search reached its limit.
    """
    if sum(problem.all_pieces) > sum(size for _, size in problem.gaps):
        return None
    return _Search(problem, share, in_order=in_order).best()


#: The start of its hole, by position of an item.
_Fit = tuple[int, ...]


class _Search:
    """One problem, and the cheapest set of buffers so far."""

    def __init__(self, problem: SpaceProblem, share: float, *, in_order: bool) -> None:
        self.problem, self.share, self.in_order = problem, share, in_order
        self.holes = Holes(problem)
        #: Sizes of the displaced buffers and the pieces.
        wanted = [*(size for _, _, size in problem.displaced), *problem.pieces]
        self.wanted = wanted
        self.least = float("inf")
        self.set = -1
        self.fit: _Fit = ()
        self.work = 0

    def best(self) -> Repacking | None:
        holes, problem = self.holes, self.problem
        if len(self.wanted) == 1 and (slides := holes.windows(self.wanted[0], keeps=True)):
            self._slide(*slides[0])
        self._by_runs()
        if len(problem.movable) <= EXACT_BUFFERS:
            gaps = [size for _, size in problem.gaps]
            if self.set < 0 and pack(problem.all_pieces, gaps).refutation is not None:
                return None
            self._by_all_choices()
        elif self.set >= 0 and not self.in_order:
            self._thin_out()
        if self.set < 0:
            everything = (1 << len(problem.movable)) - 1
            fit = self._exactly(everything)
            if fit is None:
                return None
            self.set, self.fit = everything, fit
        return self._arrangement()

    def _slide(self, cost: int, mask: int) -> None:
        ranks = members(mask)
        first = self.holes.gaps(mask)
        start = next(
            r & ADDRESS
            for r in first
            if r & ADDRESS <= self.holes.starts[ranks[0]] < (r & ADDRESS) + (r >> SHIFT)
        )
        self._take(cost, mask, tuple([start] * (1 + len(ranks))))

    def _take(self, cost: float, mask: int, fit: _Fit) -> None:
        if cost < self.least:
            self.least, self.set, self.fit = cost, mask, fit

    def _by_runs(self) -> None:
        """Find the cheapest feasible set of runs; after the work limit, any."""
        queue: list[tuple[float, int]] = [(0, 0)]
        seen = {0}
        limit = self.work + SEARCH_WORK * self.share
        while queue and self.work < limit:
            cost, mask = heappop(queue)
            if cost >= self.least or not self._try(cost, mask, seen, queue):
                return
        limit = self.work + DIVING_WORK * self.share
        for cost, mask in sorted(queue)[:DIVES]:
            dive = [(cost, mask)]
            while dive and self.work < limit:
                cost, mask = dive[0]
                dive = []
                if cost >= self.least or not self._try(cost, mask, set(), dive):
                    break

    def _try(self, cost: float, mask: int, seen: set[int], queue: list[tuple[float, int]]) -> bool:
        """Test a set; if infeasible, queue its extensions by one run and return True."""
        fit, stuck = self._fits(mask)
        if fit is not None:
            self._take(cost, mask, fit)
            return False
        for more, with_run in self._added(mask, stuck):
            if with_run not in seen:
                seen.add(with_run)
                heappush(queue, (cost + more, with_run))
        return True

    def _added(self, mask: int, size: int) -> list[tuple[int, int]]:
        """Return (further cost, set) of the cheapest extensions by a run of `size` bytes."""
        runs, costs = self.holes.windows(size, keeps=self.in_order), self.holes.costs
        self.work += len(runs) // 4
        if not mask:
            return runs
        added = []
        for cost, run in runs:
            if run & mask:
                cost = sum(costs[rank] for rank in members(run & ~mask))
            if cost:
                added.append((cost, mask | run))
        added.sort()
        return added[:RUNS_ADDED]

    def _by_all_choices(self) -> None:
        """Try every set that costs less than the best so far, cheapest first."""
        costs = self.holes.costs
        choices = [(0, 0)]
        for rank, cost in enumerate(costs):
            choices += [(c + cost, mask | 1 << rank) for c, mask in choices]
        for cost, mask in sorted(choice for choice in choices if choice[0] < self.least):
            gaps, _ = self._gaps(mask)
            if max(self.wanted, default=0) > (gaps[-1] >> SHIFT if gaps else 0):
                continue
            try:
                fit = self._exactly(mask)
            except TimeoutError:
                return
            if fit is not None:
                self._take(cost, mask, fit)
                return

    def _thin_out(self) -> None:
        """Remove buffers that need not move, or replace them by smaller ones."""
        costs, limit = self.holes.costs, self.work + THINNING_WORK * self.share
        improved = True
        while improved:
            improved = False
            inside = members(self.set)
            others = [r for r in range(len(costs)) if not self.set >> r & 1]
            others.sort(key=costs.__getitem__)
            for rank in sorted(inside, key=lambda r: -costs[r]):
                without = self.set ^ 1 << rank
                for other in (None, *others):
                    more = 0 if other is None else costs[other]
                    if more >= costs[rank]:
                        break
                    if self.work >= limit:
                        return
                    mask = without if other is None else without | 1 << other
                    fit = self._fits(mask)[0]
                    if fit is not None:
                        self._take(self.least - costs[rank] + more, mask, fit)
                        improved = True
                        break
                if improved:
                    break

    def _items(self, mask: int) -> list[int]:
        if self.in_order:
            return self.wanted
        return [*self.wanted, *(self.holes.sizes[rank] for rank in members(mask))]

    def _gaps(self, mask: int) -> tuple[list[int], _Fit]:
        """Return the holes without a set (`in_order`: less its members), and the members' holes."""
        gaps = self.holes.gaps(mask)
        if not self.in_order:
            return gaps, ()
        sizes = {gap & ADDRESS: gap >> SHIFT for gap in gaps}
        starts = sorted(sizes)
        homes = []
        for rank in members(mask):
            home = starts[bisect_right(starts, self.holes.starts[rank]) - 1]
            sizes[home] -= self.holes.sizes[rank]
            homes.append(home)
        return sorted(size << SHIFT | at for at, size in sizes.items() if size), tuple(homes)

    def _fits(self, mask: int) -> tuple[_Fit | None, int]:
        """Return the hole of each item, or None and the size of an item that does not fit."""
        gaps, homes = self._gaps(mask)
        items = self._items(mask)
        self.work += 5 + 2 * len(items) + len(gaps) // 16
        order = sorted(range(len(items)), key=lambda i: -items[i])
        if not gaps or items[order[0]] > gaps[-1] >> SHIFT:
            return None, items[order[0]]
        fit, stuck = _best_fit(gaps, items, order)
        if fit is None:
            self.work += len(items) * len(gaps) // 4
            fit = _fullest(gaps, items)
        return fit if fit is None else (*fit, *homes), stuck

    def _exactly(self, mask: int) -> _Fit | None:
        (gaps, homes), items = self._gaps(mask), self._items(mask)
        packing = pack(items, [gap >> SHIFT for gap in gaps])
        if not packing.ended:
            raise TimeoutError
        chosen = packing.chosen
        return None if chosen is None else (*(gaps[i] & ADDRESS for i in chosen), *homes)

    def _arrangement(self) -> Repacking:
        """Fill holes from below; buffers keep their order, so those that stay only slide."""
        problem, holes = self.problem, self.holes
        buffers = [*problem.displaced, *(holes.buffers[rank] for rank in members(self.set))]
        displaced, count = len(problem.displaced), len(problem.pieces)
        of_pieces = self.fit[displaced : displaced + count]
        of_buffers = (*self.fit[:displaced], *self.fit[displaced + count :])
        free = {gap: gap for gap in self.fit}
        moves, moved = {}, 0
        placed = zip(of_buffers, buffers, strict=True)
        for gap, (number, address, size) in sorted(placed, key=lambda item: item[1][1]):
            if free[gap] != address:
                moves[number] = free[gap]
                moved += size
            free[gap] += size
        pieces = []
        for gap, size in zip(of_pieces, problem.pieces, strict=True):
            pieces.append(free[gap])
            free[gap] += size
        return Repacking(tuple(sorted(moves.items())), tuple(pieces), moved)


def _best_fit(gaps: list[int], items: list[int], order: list[int]) -> tuple[_Fit | None, int]:
    """Place each item, the largest first, in the smallest hole; or return None and its size."""
    gaps = list(gaps)
    chosen = [0] * len(items)
    for i in order:
        size = items[i]
        at = bisect_left(gaps, size << SHIFT)
        if at == len(gaps):
            return None, size
        gap = gaps.pop(at)
        chosen[i] = gap & ADDRESS
        left = (gap >> SHIFT) - size
        if left:
            insort(gaps, left << SHIFT | gap & ADDRESS)
    return tuple(chosen), 0


def _fullest(gaps: list[int], items: list[int]) -> _Fit | None:
    """Fill each hole, the smallest first, with the largest subset sum of the remaining items."""
    unit = math.gcd(*items)
    smallest = min(items)
    left = sorted(range(len(items)), key=lambda i: -items[i])
    chosen = [0] * len(items)
    spare = sum(gap >> SHIFT for gap in gaps) - sum(items)
    for gap in gaps:
        size = gap >> SHIFT
        if size < smallest:
            spare -= size
        else:
            taken = largest_sum([items[i] // unit for i in left], size // unit)
            spare -= size - sum(items[left[k]] for k in taken)
            for k in taken:
                chosen[left.pop(k)] = gap & ADDRESS
            if not left:
                return tuple(chosen)
        if spare < 0:
            return None
    return None
