"""`choose`: a cover of little cost for a chain, with its lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from stitch.planner.residency.bound import prices_of, reduced
from stitch.planner.residency.cover import EQUAL, CoverProblem, covered
from stitch.planner.residency.stays import Stay, StayChain

# --------------------------------------------------------------------------------------------------
# The sweep: covers built task by task, the most promising kept; exact where none is left out.

#: Stays that are away, as a chain of pairs: the last one first.
_Trail: TypeAlias = "tuple[int, _Trail] | None"
#: Seconds at least, bytes away that count at this task, stays away.
_Way: TypeAlias = tuple[float, float, _Trail]


def swept(
    problem: CoverProblem, prices: Sequence[float], upper: float, width: int
) -> tuple[list[int] | None, float]:
    """(A cover cheaper than `upper`, seconds that any such cover costs at least); None where there
    is none among those looked at, `upper` where there is none at all."""
    least, here, away = _steps(problem, prices)
    tasks = len(problem.need)
    starting, bit_of, going_on = _bits(problem.spans, tasks)
    # A holder is asked whether it is written from its first stay's start to its last one's.
    starts = [[problem.spans[i][0] for i in group] for group in problem.groups.values()]
    _, bits, asked_again = _bits([(min(s), max(s) + 1) for s in starts], tasks)
    written_bits = dict(zip(problem.groups, bits, strict=True))
    written_bit = [written_bits.get(h, 0) for h in problem.holder]
    enough, left_out = upper * EQUAL, upper
    dear: _Way = enough, 0.0, None
    ways: dict[tuple[int, int], _Way] = {(0, 0): (least, 0.0, None)}
    for j, need in enumerate(problem.need):
        over, alive = going_on[j], asked_again[j]
        # What is away counts no more once its stay is over, and else as much as is needed now.
        changes = [
            (bit_of[i], change)
            for i in (problem.over[j - 1] if j else ())
            if (change := _count(problem, i, j) - _count(problem, i, j - 1))
        ]
        merged: dict[tuple[int, int], _Way] = {}
        for (gone, written), (seconds, n, trail) in ways.items():
            key = gone & over, written & alive
            if key not in merged or seconds < merged[key][0]:
                n += sum([change for bit, change in changes if gone & bit])
                merged[key] = seconds, n, trail
        ways = merged
        rest = sum(problem.counts[i][0] for i in starting[j])
        for i in starting[j]:
            count, bit = problem.counts[i][0], written_bit[i]
            rest -= count
            branched: dict[tuple[int, int], _Way] = {}
            for (gone, written), (seconds, n, trail) in ways.items():
                first = 1 if bit and not written & bit else 0
                stays, leaves = seconds + here[first][i], seconds + away[first][i]
                if stays < enough and n + rest >= need:
                    branched[gone, written] = stays, n, trail
                key = gone | bit_of[i], written | bit
                # One that has written the holder before may have come to the same.
                if leaves < branched.get(key, dear)[0] and n + count + rest >= need:
                    branched[key] = leaves, n + count, (i, trail)
            ways, left_out = _kept(branched, width, left_out)
        ways = {
            key: (total, n, trail)
            for key, (seconds, n, trail) in ways.items()
            if n >= need and (total := seconds + prices[j] * (n - need)) < enough
        }
    best = min(ways.values(), key=lambda way: way[0], default=None)
    if best is None:
        return None, left_out
    cover, trail = [], best[2]
    while trail is not None:
        cover.append(trail[0])
        trail = trail[1]
    return cover[::-1], min(left_out, best[0])


def _count(problem: CoverProblem, i: int, j: int) -> float:
    """For how much a stay that begins no later counts at a task: nothing once it is over."""
    first, end = problem.spans[i]
    return problem.counts[i][j - first] if j < end else 0.0


def _bits(
    spans: Sequence[tuple[int, int]], tasks: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Half-open spans by the task at which they start; a bit for each, that no span has which it
    meets, so keys stay short however long the chain is; the bits of those that go on, by task."""
    starting: list[list[int]] = [[] for _ in range(tasks)]
    ending: list[list[int]] = [[] for _ in range(tasks + 1)]
    for i, (first, end) in enumerate(spans):
        starting[first].append(i)
        ending[end].append(i)
    bits, free, on = [0] * len(spans), [1], 0
    going_on = []
    for j in range(tasks):
        for i in ending[j]:
            on ^= bits[i]
            free.append(bits[i])
        going_on.append(on)
        for i in starting[j]:
            bits[i] = free.pop()
            on ^= bits[i]
            free = free or [1 << on.bit_length()]
    return starting, bits, going_on


def _kept(
    ways: dict[tuple[int, int], _Way], width: int, left_out: float
) -> tuple[dict[tuple[int, int], _Way], float]:
    """The `width` ways that cost least, and what the cheapest costs that was left out so far."""
    if len(ways) <= width:
        return ways, left_out
    ranked = sorted(ways.items(), key=lambda item: item[1][0])
    return dict(ranked[:width]), min(left_out, ranked[width][1][0])


def _steps(
    problem: CoverProblem, prices: Sequence[float]
) -> tuple[float, tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """(The bound before anything is chosen; by how much it rises where a stay is kept, and where it
    gives way: each once its holder is written, and before)."""
    less = reduced(problem, prices)
    here = [max(0.0, -n) for n in less], [0.0] * len(less)
    away = [max(0.0, n) for n in less], [0.0] * len(less)
    least = sum(map(float.__mul__, prices, problem.need))
    least += sum(min(0.0, less[i]) for i, holder in enumerate(problem.holder) if holder < 0)
    for holder, group in problem.groups.items():
        later, bound = problem.write[holder], 0.0
        for i in sorted(group, key=lambda i: problem.spans[i], reverse=True):
            now = min(0.0, later + min(0.0, less[i]))
            here[1][i], away[1][i] = bound - now, less[i] + later - now
            later, bound = later + min(0.0, less[i]), now
        least += bound
    return least, here, away


#: Rounds of prices, and states that the sweep keeps.
ROUNDS, WIDTH = 40, 100


@dataclass(frozen=True, slots=True)
class StayChoice:
    """Stays that give way, what that costs in simulated seconds, and what any choice costs at
    least. `is_best`: there is none that costs less."""

    away: tuple[Stay, ...]
    seconds: float
    least_seconds: float

    @property
    def is_best(self) -> bool:
        """Whether the bound proves that no choice is better."""
        return self.seconds <= self.least_seconds * (1 + 1e-9)


def choose(
    chain: StayChain, rounds: int = ROUNDS, width: int = WIDTH, looks: float = inf
) -> StayChoice | None:
    """Who gives way over a chain; None where no choice makes it fit.

    `rounds` bounds the search for prices, `width` the sweep, and `looks` both together, in stays
    looked at over a task: what is more than that is left to the greedy covers.
    """
    problem = CoverProblem(chain)
    if not problem.need:
        return StayChoice((), 0.0, 0.0)
    share = looks / max(1, (rounds + width) * sum(map(len, problem.counts)))
    if share < 1:
        rounds, width = int(rounds * share), max(1, int(width * share))
    away = covered(problem)
    if away is None:
        return None
    seconds = problem.seconds(away)
    least, prices = prices_of(problem, seconds, rounds)
    if least < seconds * EQUAL:
        cheaper, swept_least = swept(problem, prices, seconds, width)
        least = max(least, swept_least)
        if cheaper is not None:
            away, seconds = cheaper, problem.seconds(cheaper)
    stays = tuple(chain.stays[problem.stays[i]] for i in sorted(away))
    return StayChoice(stays, seconds, min(least, seconds))
