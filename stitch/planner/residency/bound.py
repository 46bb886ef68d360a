"""Prices: what a byte away is worth at each task, by Lagrange multipliers, and the lower bound.

Each need is priced; then every holder decides by itself which of its stays give way, and the sum is
a bound for any prices. Prices follow the subgradient. A stay counts for no more than what a task
needs, so a large tensor in the way of a small need has to leave as a whole.

Source: Held, Wolfe, Crowder, "Validation of subgradient optimization", 1974.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.planner.residency.cover import EQUAL, CoverProblem

#: Rounds without a better bound after which the step is halved; the least step.
PATIENCE = 4
LEAST_SCALE = 1e-2


def prices_of(problem: CoverProblem, upper: float, rounds: int) -> tuple[float, list[float]]:
    """(seconds that any cover costs at least, a price for each tight task), after so many rounds;
    a bound of `upper` is enough."""
    prices = [0.0] * len(problem.need)
    best, best_prices = 0.0, prices
    scale, waited = 1.0, 0
    for _ in range(rounds):
        value, slack = _at(problem, prices)
        if value > best:
            best, best_prices, waited = value, prices, 0
        else:
            waited += 1
        if best >= upper * EQUAL:
            break
        if waited > PATIENCE:
            scale, waited = scale / 2, 0
            if scale < LEAST_SCALE:
                break
            _, slack = _at(problem, best_prices)
            prices, value = best_prices, best
        # What is not needed and has no price pulls at nothing.
        slack = [0 if s < 0 and not p else s for s, p in zip(slack, prices, strict=True)]
        norm = sum(s * s for s in slack)
        if not norm:
            break
        step = scale * max(upper - value, upper * LEAST_SCALE) / norm
        prices = [max(0.0, p + step * s) for p, s in zip(prices, slack, strict=True)]
    return best, best_prices


def reduced(problem: CoverProblem, prices: Sequence[float]) -> list[float]:
    """What each stay costs less the price of the needs that it meets."""
    return [
        back - sum(map(float.__mul__, prices[a:b], counts))
        for back, (a, b), counts in zip(problem.back, problem.spans, problem.counts, strict=True)
    ]


def _at(problem: CoverProblem, prices: Sequence[float]) -> tuple[float, list[float]]:
    """The least cost at given prices, and what is still needed then at each task."""
    value = sum(map(float.__mul__, prices, problem.need))
    less = reduced(problem, prices)
    chosen: list[int] = []
    for i, holder in enumerate(problem.holder):
        if holder < 0 and less[i] < 0:
            value += less[i]
            chosen.append(i)
    for holder, group in problem.groups.items():
        wanting = [i for i in group if less[i] < 0]
        total = problem.write[holder] + sum(less[i] for i in wanting)
        if total < 0:
            value += total
            chosen += wanting
    slack = list(problem.need)
    for i in chosen:
        for j, count in enumerate(problem.counts[i], problem.spans[i][0]):
            slack[j] -= count
    return value, slack
