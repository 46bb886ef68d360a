"""Covering: which stays give way, so that at every task enough bytes are away, at little cost.

Greedy in several orders, then what hindsight shows needless stays after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import fsum, gcd

from stitch.planner.residency.stays import StayChain

#: Bits that cost nothing: what comes earlier is preferred then.
_LEAST = 1e-18
#: A byte counts as so much of the least time that one takes: of what takes as long as something
#: else the fewest bytes go.
BYTES = 1e-11
#: What takes no more than this times something else takes as long.
EQUAL = 1 - 1e-14


class CoverProblem:
    """A chain in arrays: stays over the tasks at which something must be away, numbered anew.

    `spans[i]` is the half-open range of these tasks, `need[j]` bytes that must be away at task j.
    """

    __slots__ = (
        "back", "counts", "groups", "holder", "need", "over", "sizes", "spans", "stays", "write",
    )  # fmt: skip

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
        self.over = [tuple(index[number] for number in here) for here in sets]
        sizes = {number: stay.nbytes for number, stay in enumerate(chain.stays)}
        self.need = [
            float(least_sum(chain.excess[task], [sizes[number] for number in here]))
            for task, here in zip(tight, sets, strict=True)
        ]
        first = [len(tight)] * len(self.stays)
        last = [-1] * len(self.stays)
        for j, here_i in enumerate(self.over):
            for i in here_i:
                first[i], last[i] = min(first[i], j), j
        self.spans = [(a, b + 1) for a, b in zip(first, last, strict=True)]
        chosen = [chain.stays[number] for number in self.stays]
        self.sizes = [stay.nbytes for stay in chosen]
        #: For how much a stay counts at each task of its span: no more than what is needed.
        self.counts = [
            [float(min(size, n)) for n in self.need[a:b]]
            for size, (a, b) in zip(self.sizes, self.spans, strict=True)
        ]
        holders = {stay.holder: chain.holders[stay.holder] for stay in chosen}
        nbytes = {
            h: holder.desc.layout.data_type.nbytes(holder.desc.elements) or 1
            for h, holder in holders.items()
        }
        times = [(s.back_seconds, nbytes[s.holder]) for s in chosen]
        times += [(holder.write_seconds, nbytes[h]) for h, holder in holders.items()]
        byte = BYTES * min((seconds / n for seconds, n in times if seconds), default=0.0)
        self.back = [
            stay.back_seconds + (byte * nbytes[stay.holder] if stay.back_seconds else _LEAST)
            for stay in chosen
        ]
        #: The holder whose writing a stay asks for; -1 if it asks for none.
        self.holder = [stay.holder if stay.is_dirty else -1 for stay in chosen]
        self.write = {h: holder.write_seconds + byte * nbytes[h] for h, holder in holders.items()}
        self.groups: dict[int, list[int]] = {}
        for i, holder in enumerate(self.holder):
            if holder >= 0:
                self.groups.setdefault(holder, []).append(i)

    def seconds(self, away: Iterable[int]) -> float:
        """What it costs that these give way."""
        chosen = set(away)
        written = {self.holder[i] for i in chosen} - {-1}
        # To the last bit, in whatever order: of covers that cost the same the first is taken.
        return fsum([*(self.back[i] for i in chosen), *(self.write[h] for h in written)])

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


Rank = Callable[[int, int, list[float], float], tuple[float, ...]]


def _farthest(problem: CoverProblem) -> Rank:
    """The one whose next use is farthest; among equals the cheapest (Belady's rule)."""
    return lambda i, j, left, price: (-problem.spans[i][1], price)


def _cheapest(problem: CoverProblem) -> Rank:
    """The least price for a byte that is needed."""

    def rank(i: int, j: int, left: list[float], price: float) -> tuple[float, ...]:
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


def repaired(problem: CoverProblem, rank: Rank) -> list[int]:
    """Stays give way, in the order of tasks, until enough do; then those that need not stay after
    all."""
    chosen: dict[int, None] = {}
    left = list(problem.need)
    written = {-1}
    for j in range(len(left)):
        while left[j] > 0:
            prices = {
                i: problem.back[i]
                + (0 if problem.holder[i] in written else problem.write[problem.holder[i]])
                for i in problem.over[j]
                if i not in chosen
            }
            best = min(prices, key=lambda i: rank(i, j, left, prices[i]))
            chosen[best] = None
            written.add(problem.holder[best])
            for k in range(*problem.spans[best]):
                left[k] -= problem.sizes[best]
    return _needed(problem, list(chosen), left)


def _needed(problem: CoverProblem, chosen: Sequence[int], left: list[float]) -> list[int]:
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


def covered(problem: CoverProblem) -> list[int] | None:
    """The cheapest cover of the greedy ones; None where there is none."""
    if problem.is_hopeless():
        return None
    found = [repaired(problem, make(problem)) for make in RANKS]
    return min(found, key=problem.seconds)
