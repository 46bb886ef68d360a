"""The sweep: covers built task by task, the most promising kept; exact where none is left out.

A state is which stays over the task are away, and which holders have been written. It costs at
least what it has cost and what prices say of the rest, so one that cannot beat the best cover ends,
and of two alike only the cheaper goes on. Where more than `width` are left the dearest are left
out, and the least of these is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from stitch.planner.residency.bound import reduced
from stitch.planner.residency.cover import EQUAL, CoverProblem

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
    starting: list[list[int]] = [[] for _ in problem.need]
    for i, (a, _) in enumerate(problem.spans):
        starting[a].append(i)
    last_start = {h: max(problem.spans[i][0] for i in g) for h, g in problem.groups.items()}
    bit_of = {h: 1 << k for k, h in enumerate(problem.groups)}
    written_bit = [bit_of.get(h, 0) for h in problem.holder]
    enough, left_out = upper * EQUAL, upper
    dear: _Way = enough, 0.0, None
    ways: dict[tuple[int, int], _Way] = {(0, 0): (least, 0.0, None)}
    for j, need in enumerate(problem.need):
        counts = [(1 << i, problem.counts[i][j - problem.spans[i][0]]) for i in problem.over[j]]
        over = sum(bit for bit, _ in counts)
        alive = sum(bit for h, bit in bit_of.items() if last_start[h] >= j)
        merged: dict[tuple[int, int], _Way] = {}
        for (gone, written), (seconds, _, trail) in ways.items():
            key = gone & over, written & alive
            if key not in merged or seconds < merged[key][0]:
                merged[key] = seconds, sum(n for bit, n in counts if gone & bit), trail
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
                key = gone | 1 << i, written | bit
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
