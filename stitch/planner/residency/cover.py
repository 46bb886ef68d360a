"""Covering: which stays give way, so that at every task enough bytes are away, at little cost.

Comes in: a chain. Goes out: a `Cover`. Greedy in several orders, then what hindsight shows needless
stays after all, then every choice is left out once and mended. Counts what it tries, never time.
Must not know: tasks, descriptors, steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from stitch.planner.residency.stays import StayChain

#: Bits that cost nothing: what comes earlier is preferred then.
_LEAST = 1e-15


@dataclass(frozen=True, slots=True)
class Cover:
    """Stays that give way (numbers, sorted), and the simulated seconds that this costs."""

    away: tuple[int, ...]
    seconds: float


class CoverProblem:
    """A chain in arrays: stays over the tasks at which something must be away, numbered anew.

    `spans[i]` is the half-open range of these tasks, `need[j]` bytes that must be away at task j.
    """

    __slots__ = ("back", "groups", "holder", "need", "over", "sizes", "spans", "stays", "write")

    def __init__(self, chain: StayChain) -> None:
        over = chain.spanning()
        tight: list[int] = []
        sets: list[tuple[int, ...]] = []
        for task in sorted(over):
            here = tuple(over[task])
            if sets and sets[-1] == here:
                # The same stays as at the task before: only the larger need counts.
                if chain.excess[task] > chain.excess[tight[-1]]:
                    tight[-1] = task
                continue
            tight.append(task)
            sets.append(here)
        #: The numbers in the chain of the stays that are looked at.
        self.stays = sorted({number for here in sets for number in here})
        index = {number: i for i, number in enumerate(self.stays)}
        self.need = [chain.excess[task] for task in tight]
        self.over = [tuple(index[number] for number in here) for here in sets]
        sizes = {number: stay.nbytes for number, stay in enumerate(chain.stays)}
        self.need = [
            least_sum(n, [sizes[number] for number in here])
            for n, here in zip(self.need, sets, strict=True)
        ]
        first = [len(tight)] * len(self.stays)
        last = [-1] * len(self.stays)
        for j, here_i in enumerate(self.over):
            for i in here_i:
                first[i], last[i] = min(first[i], j), j
        self.spans = [(a, b + 1) for a, b in zip(first, last, strict=True)]
        chosen = [chain.stays[number] for number in self.stays]
        self.sizes = [stay.nbytes for stay in chosen]
        self.back = [stay.back_seconds + _LEAST for stay in chosen]
        #: The holder whose writing a stay asks for; -1 if it asks for none.
        self.holder = [stay.holder if stay.is_dirty else -1 for stay in chosen]
        self.write = {stay.holder: chain.holders[stay.holder].write_seconds for stay in chosen}
        self.groups: dict[int, list[int]] = {}
        for i, holder in enumerate(self.holder):
            if holder >= 0:
                self.groups.setdefault(holder, []).append(i)

    def seconds(self, away: Iterable[int]) -> float:
        """What it costs that these give way."""
        chosen = set(away)
        written = {self.holder[i] for i in chosen} - {-1}
        return sum(self.back[i] for i in chosen) + sum(self.write[h] for h in written)

    def left(self, away: Iterable[int]) -> list[int]:
        """The bytes that are still to give way at each task."""
        left = list(self.need)
        for i in away:
            for j in range(*self.spans[i]):
                left[j] -= self.sizes[i]
        return left

    def is_hopeless(self) -> bool:
        """Whether at some task not enough can give way: then the chain does not fit at all."""
        return any(sum(self.sizes[i] for i in here) < n
                   for here, n in zip(self.over, self.need, strict=True))  # fmt: skip


def least_sum(least: int, sizes: Sequence[int]) -> int:
    """The least sum of some of the sizes that is not below `least`; `least` where there is none.

    >>> least_sum(5, [2, 4, 4]), least_sum(5, [2, 2])
    (6, 5)
    """
    if not sizes:
        return least
    unit = gcd(*sizes)
    sums = 1
    for size in sizes:
        sums |= sums << size // unit
    above = sums >> -(-least // unit)
    return -(-least // unit) * unit + ((above & -above).bit_length() - 1) * unit if above else least


Rank = Callable[[int, int, list[int], float], tuple[float, ...]]


def _farthest(problem: CoverProblem) -> Rank:
    """The one whose next use is farthest; among equals the cheapest (Belady's rule)."""
    return lambda i, j, left, price: (-problem.spans[i][1], price)


def _cheapest(problem: CoverProblem) -> Rank:
    """The least price for a byte that is needed."""

    def rank(i: int, j: int, left: list[int], price: float) -> tuple[float, ...]:
        size = problem.sizes[i]
        useful = sum(min(size, n) for n in left[slice(*problem.spans[i])] if n > 0)
        return (price / max(1, useful),)

    return rank


def _sufficient(problem: CoverProblem) -> Rank:
    """The cheapest that is enough by itself; else the largest."""
    return lambda i, j, left, price: (
        problem.sizes[i] < left[j], price if problem.sizes[i] >= left[j] else -problem.sizes[i],
    )  # fmt: skip


RANKS = (_farthest, _cheapest, _sufficient)


def repaired(
    problem: CoverProblem, away: Iterable[int], rank: Rank, forbidden: frozenset[int] = frozenset()
) -> list[int] | None:
    """More stays give way, in the order of tasks, until enough do; then those that need not stay
    after all. None where that cannot be without the forbidden ones."""
    chosen = dict.fromkeys(away)
    left = problem.left(chosen)
    written = {problem.holder[i] for i in chosen}
    for j in range(len(left)):
        while left[j] > 0:
            best = -1
            best_rank: tuple[float, ...] = ()
            for i in problem.over[j]:
                if i in chosen or i in forbidden:
                    continue
                holder = problem.holder[i]
                price = problem.back[i]
                if holder >= 0 and holder not in written:
                    price += problem.write[holder]
                here = rank(i, j, left, price)
                if best < 0 or here < best_rank:
                    best, best_rank = i, here
            if best < 0:
                return None
            chosen[best] = None
            written.add(problem.holder[best])
            for k in range(*problem.spans[best]):
                left[k] -= problem.sizes[best]
    return _needed(problem, list(chosen), left)


def _needed(problem: CoverProblem, chosen: Sequence[int], left: list[int]) -> list[int]:
    """Those of the chosen that must give way; the dearest are asked first."""
    stay: set[int] = set()
    for i in sorted(chosen, key=lambda i: (-problem.back[i], problem.sizes[i], i)):
        size = problem.sizes[i]
        span = range(*problem.spans[i])
        if all(left[j] + size <= 0 for j in span):
            stay.add(i)
            for j in span:
                left[j] += size
    return [i for i in chosen if i not in stay]


def covered(problem: CoverProblem, tries: int) -> list[int] | None:
    """A cover of little cost, after so many tries of mending; None where there is none."""
    if problem.is_hopeless():
        return None
    ranks = [make(problem) for make in RANKS]
    best: list[int] | None = None
    for rank in ranks:
        found = repaired(problem, (), rank)
        if found is not None and (best is None or _less(problem, found, best)):
            best = found
    return None if best is None else improved(problem, best, ranks, tries)


def improved(
    problem: CoverProblem, best: list[int], ranks: Sequence[Rank], tries: int
) -> list[int]:
    """Local search: each one that gives way is kept once, and what then lacks is mended."""
    again = True
    while again and tries > 0:
        again = False
        for i in sorted(best, key=lambda i: (-problem.back[i], i)):
            for rank in ranks[1:]:
                tries -= 1
                others = [k for k in best if k != i]
                other = repaired(problem, others, rank, frozenset({i}))
                if other is not None and _less(problem, other, best):
                    best, again = other, True
                    break
            if again or tries <= 0:
                break
        if again:
            continue
        for group in problem.groups.values():
            # All stays of what has to be written at once: one by one they share its price.
            mine = frozenset(group)
            if not mine.intersection(best) or tries <= 0:
                continue
            tries -= 1
            others = [k for k in best if k not in mine]
            other = repaired(problem, others, ranks[1], mine)
            if other is not None and _less(problem, other, best):
                best, again = other, True
                break
    return best


def _less(problem: CoverProblem, a: list[int], b: list[int]) -> bool:
    return problem.seconds(a) < problem.seconds(b) - 1e-12
