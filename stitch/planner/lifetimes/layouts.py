"""Layouts of a space from moment to moment in which fewer bytes move.

A run goes through the moments, forwards or backwards (what moves costs the same either way), and
puts whatever comes into a hole: beside a neighbour that goes about when it does, in one that it
fills. Where no hole is free, the mover makes one. How much each of this counts is drawn for every
run. Each run begins at a moment of the best layouts so far, near one at which something moves, and
replaces all that comes after (before) it, unless that costs more. Work is counted, never time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from stitch.planner.lifetimes.lives import Layout, Lives
from stitch.planner.mover import SpaceProblem, arrange

_SEED = 3
#: Work for each life: to put one somewhere is one, to have the mover make room is more.
EFFORT, ARRANGING = 200, 25
#: How much of its usual work the mover takes each time: what it misses another run may find.
_SHARE = 0.3
#: Runs over all moments with which the search begins.
STARTS = 8
#: How many moments before (behind) one at which something moves a run begins.
_BEFORE = (0, 1, 2, 4, 8, 16, 32)
#: What is drawn for a run: how much the rest of a hole counts, and by how much all may vary.
_WEIGHTS, _CHANCES, _DISORDER = (10.0, 20.0, 40.0, 80.0), (0.3, 0.8), (0.0, 0.3, 1.0)
#: A wall is a neighbour that goes so much later or sooner, in hundredths of all moments; a hole
#: that is filled counts as so many.
_WALL, _FILLED = 3.0, 30.0

#: Start, end, and whose: a life, or -1.
_Taken = tuple[int, int, int]


def search(lives: Lives, effort: int = EFFORT) -> tuple[Layout, ...] | None:
    """Layouts that cost less than those of the plan, None where none were found.

    A tensor that moves costs its bytes and those that take as long as it takes to start a move.
    """
    found = _Search(lives, effort * len(lives.lives))
    least = found.costs
    found.improve()
    return tuple(found.layouts) if sum(found.costs) < sum(least) else None


class _Search:
    """The best layouts so far, what moving before each moment costs, and the work that is left."""

    def __init__(self, lives: Lives, work: int) -> None:
        self.problem, self.work = lives, work
        self.layouts: list[Layout] = [*lives.layouts]
        self._chance = Random(_SEED)
        self._count = count = len(lives.begins)
        self._sizes = [life.size for life in lives.lives]
        self._costs = [size + lives.operation_size for size in self._sizes]
        self._firsts = [life.first for life in lives.lives]
        self._lasts = [life.last for life in lives.lives]
        self._before = {i: life.before for i, life in enumerate(lives.lives)
                        if life.before is not None and not life.first}  # fmt: skip
        self._coming: list[list[int]] = [[] for _ in range(count + 1)]
        self._going: list[list[int]] = [[] for _ in range(count + 1)]
        for i, life in enumerate(lives.lives):
            self._coming[life.first].append(i)
            self._going[life.last + 1].append(i)
        self._later: list[list[_Taken] | None] = [None] * len(lives.lives)
        sides = [self._before, *lives.layouts]
        self.costs = [self._moving(*pair) for pair in zip(sides, lives.layouts, strict=False)]

    def improve(self) -> None:
        """Runs until the work is done, or nothing moves any more."""
        chance, last = self._chance, self._count
        for start in range(STARTS):
            self._try(last if start % 2 else -1, start % 2 == 1, sum(self.costs))
        while self.work > 0 and any(self.costs):
            costly = [at for at, cost in enumerate(self.costs) if cost]
            at, far = chance.choice(costly), chance.choice(_BEFORE)
            if chance.random() < 0.5:
                begin = min(last, at + far)
                self._try(begin, True, sum(self.costs[: begin + 1]))
            else:
                begin = max(-1, at - 1 - far)
                self._try(begin, False, sum(self.costs[begin + 1 :]))

    def _try(self, begin: int, backwards: bool, most: int) -> None:
        """One run from a moment on; what it finds is kept if it costs at most so much."""
        made = self._run(begin, backwards, most)
        if made is None:
            return
        layouts = [made.get(at, layout) for at, layout in enumerate(self.layouts)]
        sides = [self._before, *layouts]
        costs = [self._moving(*pair) for pair in zip(sides, layouts, strict=False)]
        if sum(costs) <= sum(self.costs):
            self.layouts, self.costs = layouts, costs

    def _moving(self, before: Layout, after: Layout) -> int:
        """What it costs to come from one layout to the next."""
        costs, get = self._costs, before.get
        return sum([costs[i] for i, at in after.items() if get(i, at) != at])

    def _run(self, begin: int, backwards: bool, most: int) -> dict[int, Layout] | None:
        """Layouts of all moments after (before) one; None where they cost too much, or do not
        exist."""
        self._weight = self._chance.choice(_WEIGHTS)
        self._vary, disorder = self._chance.choice(_CHANCES), self._chance.choice(_DISORDER)
        self._ends = self._firsts if backwards else self._lasts
        lying: dict[int, int] = {}
        if 0 <= begin < self._count:
            lying = dict(self.layouts[begin])
        elif begin < 0:
            lying = dict(self._before)
        made: dict[int, Layout] = {}
        moments = range(begin - 1, -1, -1) if backwards else range(begin + 1, self._count)
        for at in moments:
            before = dict(lying)
            coming = self._going[at + 1] if backwards else self._coming[at]
            for i in self._coming[at + 1] if backwards else self._going[at]:
                lying.pop(i, None)
            order = [
                (-self._sizes[i] * (1 + disorder * self._chance.random()), i)
                for i in coming
                if i not in lying
            ]
            if not self._put(at, lying, [i for _, i in sorted(order)]):
                return None
            most -= self._moving(before, lying)
            if most < 0 or self.work <= 0:
                return None
            made[at] = dict(lying)
        return made

    def _put(self, at: int, lying: dict[int, int], coming: Sequence[int]) -> bool:
        """Gives all that comes at a moment a place; whether there is one for each."""
        obstacles, sizes = self.problem.obstacles[at], self._sizes
        taken = self._taken(at, lying)
        displaced = obstacles and any(a[1] > b[0] for a, b in pairwise(taken))
        if displaced:
            if not self._arrange(at, lying, None):
                return False
            taken = self._taken(at, lying)
        for i in coming:
            self.work -= 1
            size = sizes[i]
            address = self._hole(i, taken)
            if address is None:
                if not self._arrange(at, lying, i):
                    return False
                taken = self._taken(at, lying)
            else:
                lying[i] = address
                insort(taken, (address, address + size, i))
        return True

    def _taken(self, at: int, lying: Layout) -> list[_Taken]:
        sizes = self._sizes
        taken = [(address, address + sizes[i], i) for i, address in lying.items()]
        taken += [(address, address + size, -1) for address, size in self.problem.obstacles[at]]
        return sorted(taken)

    def _hole(self, i: int, taken: list[_Taken]) -> int | None:
        """Where a life had best begin among what is taken; None where no hole is free."""
        later = self._named(i)
        if later:
            apart = self._best_hole(i, sorted([*taken, *later]))
            if apart is not None:
                return apart
        return self._best_hole(i, taken)

    def _named(self, i: int) -> list[_Taken]:
        """What is taken by what lies where it must while a life lasts."""
        later = self._later[i]
        if later is None:
            regions = self.problem.obstacles[self._firsts[i] : self._lasts[i] + 1]
            later = [(a, a + n, -1) for a, n in {r for those in regions for r in those}]
            self._later[i] = later
        return later

    def _best_hole(self, i: int, taken: Sequence[_Taken]) -> int | None:
        problem, size, ends = self.problem, self._sizes[i], self._ends
        scale, mine = 100 / self._count, ends[i]
        room = self._weight / (problem.limit - problem.base)
        draw, vary = self._chance.random, self._vary
        best, least = None, 0.0
        at, beside = problem.base, -1
        for start, end, other in (*taken, (problem.limit, problem.limit, -1)):
            rest = start - at - size
            if rest >= 0:
                for address, neighbour in ((at, beside), (start - size, other)):
                    apart = abs(ends[neighbour] - mine) * scale if neighbour >= 0 else _WALL
                    price = rest * room + apart * (1 + vary * (2 * draw() - 1))
                    price -= 0 if rest else _FILLED
                    if best is None or price < least:
                        best, least = address, price
            if end >= at:
                at, beside = end, other
        return best

    def _arrange(self, at: int, lying: dict[int, int], coming: int | None) -> bool:
        """Has the mover make room for what comes, and for what lies where something else must;
        whether there is any."""
        problem, sizes = self.problem, self._sizes
        obstacles = problem.obstacles[at]
        self.work -= ARRANGING
        movable: list[tuple[int, int, int]] = []
        displaced: list[tuple[int, int, int]] = []
        for i, address in lying.items():
            end = address + sizes[i]
            is_clear = all(end <= a or a + n <= address for a, n in obstacles)
            (movable if is_clear else displaced).append((i, address, sizes[i]))
        pieces = () if coming is None else (sizes[coming],)
        try:
            found = arrange(SpaceProblem(
                problem.base, problem.limit, problem.alignment, tuple(movable), tuple(displaced),
                obstacles, pieces, problem.operation_size,
            ), _SHARE)  # fmt: skip
        except TimeoutError:
            return False
        if found is None:
            return False
        lying.update(found.moves)
        if coming is not None:
            lying[coming] = found.pieces[0]
        return True
