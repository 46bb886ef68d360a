"""`choose`: a cover of little cost for a chain, with its lower bound."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.planner.residency.bound import Relaxation
from stitch.planner.residency.branching import MOST_STAYS, Search, improved_in_windows
from stitch.planner.residency.cover import CoverProblem, covered
from stitch.planner.residency.stays import Stay, StayChain

#: Covers that the local search mends, nodes of the exact one, rounds of prices for the bound.
TRIES, NODES, ROUNDS = 400, 300, 120


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
    chain: StayChain, tries: int = TRIES, nodes: int = NODES, rounds: int = ROUNDS
) -> StayChoice | None:
    """Who gives way over a chain; None where no choice makes it fit.

    `tries`, `nodes` and `rounds` bound the local search, the exact one and the bound.
    """
    problem = CoverProblem(chain)
    if not problem.need:
        return StayChoice((), 0.0, 0.0)
    away = covered(problem, tries)
    if away is None:
        return None
    seconds = problem.seconds(away)
    least, prices = Relaxation(problem).bound(seconds, rounds)
    if least < seconds * (1 - 1e-9) and len(problem.stays) <= MOST_STAYS:
        search = Search(problem, away, nodes)
        search.run(prices)
        away, seconds = search.best, search.seconds
        if search.ended:
            least = seconds
    elif least < seconds * (1 - 1e-9):
        away = improved_in_windows(problem, away, nodes // 4, prices)
        seconds = problem.seconds(away)
    stays = tuple(chain.stays[problem.stays[i]] for i in sorted(away))
    return StayChoice(stays, seconds, min(least, seconds))
