"""The lower bound: what any cover costs at least, by Lagrange multipliers.

Each need is priced; then every holder decides by itself which of its stays give way, and the sum is
a bound for any prices. Prices follow the subgradient. A need is a knapsack that must be covered: if
certain stays were away, no other could count for more than what is still needed then, so a large
tensor in the way of a small need has to leave as a whole. Such needs are added where the mean of
the choices so far falls short of them.

Source: Held, Wolfe, Crowder, "Validation of subgradient optimization", 1974; Carr, Fleischer,
Leung, Phillips, "Strengthening integrality gaps for capacitated network design", 2000.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stitch.planner.residency.cover import CoverProblem

#: Rounds without a better bound after which the step is halved; the least step.
PATIENCE = 8
LEAST_SCALE = 1e-3
#: Rounds after which needs are looked for that the mean of the choices does not meet.
CUT_ROUNDS = 15
#: The share of a new choice in the mean; from which share on a stay counts as away.
SHARE = 0.1
AWAY = (0.45, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class _Need:
    """At least `nbytes`, of stays that count for so much each."""

    nbytes: int
    counts: Mapping[int, int]


class Relaxation:
    """A problem in which some stays give way for certain (`away`) and others do not (`here`)."""

    __slots__ = ("_free", "_left", "_mean", "_needs", "_paid", "_problem", "_seen",
                 "_written")  # fmt: skip

    def __init__(
        self, problem: CoverProblem, away: Collection[int] = (), here: Collection[int] = ()
    ) -> None:
        self._problem = problem
        self._left = problem.left(away)
        self._free = [i for i in range(len(problem.spans)) if i not in away and i not in here]
        self._paid = problem.seconds(away)
        self._written = {problem.holder[i] for i in away}
        free = set(self._free)
        self._needs: list[_Need] = []
        self._seen: set[tuple[int, frozenset[int]]] = set()
        self._mean: dict[int, float] = {}
        for j, n in enumerate(self._left):
            counts = {i: min(problem.sizes[i], n) for i in problem.over[j] if i in free}
            # Empty where nothing is needed any more, so that prices keep their places.
            self._needs.append(_Need(max(0, n), counts if n > 0 else {}))

    def bound(
        self, upper: float, rounds: int, start: Sequence[float] = ()
    ) -> tuple[float, list[float]]:
        """(seconds that any cover costs at least, prices of the tasks' needs), after so many
        rounds; a bound of `upper` is enough."""
        prices = [*start, *[0.0] * (len(self._needs) - len(start))]
        best, best_prices = self._paid, list(prices)
        scale, waited = 1.0, 0
        for round in range(rounds):
            value, chosen = self._at(prices)
            if value > best:
                best, best_prices, waited = value, list(prices), 0
            else:
                waited += 1
            if best >= upper * (1 - 1e-9):
                break
            for i in self._mean:
                self._mean[i] *= 1 - SHARE
            for i in chosen:
                self._mean[i] = self._mean.get(i, 0.0) + SHARE
            if round % CUT_ROUNDS == CUT_ROUNDS - 1 and self._cut():
                scale, waited = max(scale, 0.5), 0
                more = [0.0] * (len(self._needs) - len(prices))
                prices, best_prices = best_prices + more, best_prices + more
                continue
            if waited > PATIENCE:
                scale, waited, prices = scale / 2, 0, list(best_prices)
                if scale < LEAST_SCALE:
                    break
                continue
            away = set(chosen)
            slack = [
                need.nbytes - sum(n for i, n in need.counts.items() if i in away)
                for need in self._needs
            ]
            # What is not needed and has no price pulls at nothing.
            slack = [0 if s < 0 and not p else s for s, p in zip(slack, prices, strict=True)]
            norm = sum(s * s for s in slack)
            if not norm:
                break
            step = scale * max(upper - value, upper * LEAST_SCALE) / norm
            prices = [max(0.0, p + step * s) for p, s in zip(prices, slack, strict=True)]
        return best, best_prices[: len(self._left)]

    def _at(self, prices: Sequence[float]) -> tuple[float, list[int]]:
        """The least cost at given prices, and who gives way then."""
        problem, value = self._problem, self._paid
        gain = [0.0] * len(problem.spans)
        for price, need in zip(prices, self._needs, strict=True):
            if price:
                value += price * need.nbytes
                for i, n in need.counts.items():
                    gain[i] += price * n
        chosen: list[int] = []
        gains: dict[int, float] = {}
        wanting: dict[int, list[int]] = {}
        for i in self._free:
            reduced = problem.back[i] - gain[i]
            if reduced >= 0:
                continue
            holder = problem.holder[i]
            if holder < 0 or holder in self._written:
                value += reduced
                chosen.append(i)
            else:
                gains[holder] = gains.get(holder, 0.0) + reduced
                wanting.setdefault(holder, []).append(i)
        for holder, total in gains.items():
            if total + problem.write[holder] < 0:
                value += total + problem.write[holder]
                chosen += wanting[holder]
        return value, chosen

    def _cut(self) -> bool:
        """Add needs that the mean falls short of; whether there were any."""
        problem, mean, added = self._problem, self._mean, False
        for j, n in enumerate(self._left):
            if n <= 0:
                continue
            free = list(self._needs[j].counts)
            worst: tuple[float, frozenset[int], _Need] | None = None
            for share in AWAY:
                gone = frozenset(i for i in free if mean.get(i, 0.0) >= share)
                left = n - sum(problem.sizes[i] for i in gone)
                if left <= 0 or not gone or (j, gone) in self._seen:
                    continue
                counts = {i: min(problem.sizes[i], left) for i in free if i not in gone}
                met = sum(c * mean.get(i, 0.0) for i, c in counts.items())
                if met < left * 0.98 and (worst is None or met / left < worst[0]):
                    worst = met / left, gone, _Need(left, counts)
            if worst is not None:
                self._seen.add((j, worst[1]))
                self._needs.append(worst[2])
                added = True
        return added
