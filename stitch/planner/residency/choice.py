"""`choose`: a cover of little cost for a chain, with its lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from stitch.planner.residency.bound import prices_of
from stitch.planner.residency.cover import EQUAL, CoverProblem, covered
from stitch.planner.residency.stays import Stay, StayChain
from stitch.planner.residency.sweep import swept

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
