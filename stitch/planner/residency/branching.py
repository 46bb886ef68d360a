"""The exact search where few stays are contested: branch and bound over who gives way.

At the task that lacks most, one of the stays over it gives way; the choices before it stay for
certain, so no cover is looked at twice. A node whose bound is no better than the best cover ends.
"""

from __future__ import annotations

from stitch.planner.residency.bound import Relaxation
from stitch.planner.residency.cover import CoverProblem

#: With at most so many contested stays the search is worth its time.
MOST_STAYS = 40
#: Rounds of prices at each node, from those of the node above.
ROUNDS = 6


def improved_in_windows(
    problem: CoverProblem, best: list[int], nodes: int, prices: list[float]
) -> list[int]:
    """A cover that no exact search within a few tasks makes cheaper, each of so many nodes."""
    count = len(problem.need)
    better = True
    while better:
        better = False
        end = 0
        while end < count:
            first, touched = end, set[int]()
            while end < count and len(touched | set(problem.over[end])) <= MOST_STAYS // 2:
                touched |= set(problem.over[end])
                end += 1
            end = max(end, first + 1)
            search = Search(problem, best, nodes)
            search.run_within(max(0, first - 1), end, prices)
            if search.seconds < problem.seconds(best) - 1e-12:
                best, better = search.best, True
    return best


class Search:
    """Looks for a cheaper cover than `best`; `ended` tells whether there is none for certain."""

    __slots__ = ("_nodes", "_problem", "best", "ended", "seconds")

    def __init__(self, problem: CoverProblem, best: list[int], nodes: int) -> None:
        self._problem, self._nodes = problem, nodes
        self.best, self.seconds = best, problem.seconds(best)
        self.ended = True

    def run(self, prices: list[float]) -> None:
        """Search from given prices."""
        self._visit((), frozenset(), prices)

    def run_within(self, first: int, end: int, prices: list[float]) -> None:
        """Search among the stays that touch the tight tasks `[first, end)`; the others are as in
        the best cover."""
        spans = self._problem.spans
        others = [i for i, (a, b) in enumerate(spans) if b <= first or a >= end]
        away = tuple(i for i in others if i in self.best)
        self._visit(away, frozenset(others) - frozenset(away), prices)

    def _visit(self, away: tuple[int, ...], here: frozenset[int], prices: list[float]) -> None:
        problem = self._problem
        left = problem.left(away)
        if all(n <= 0 for n in left):
            seconds = problem.seconds(away)
            if seconds < self.seconds - 1e-12:
                self.best, self.seconds = list(away), seconds
            return
        self._nodes -= 1
        if self._nodes < 0:
            self.ended = False
            return
        bound, prices = Relaxation(problem, away, here).bound(self.seconds, ROUNDS, prices)
        if bound >= self.seconds * (1 - 1e-9):
            return
        # The task with the fewest choices, then the one that lacks most.
        choices = {
            j: [i for i in problem.over[j] if i not in away and i not in here]
            for j, n in enumerate(left)
            if n > 0
        }
        if any(sum(problem.sizes[i] for i in c) < left[j] for j, c in choices.items()):
            return
        j = min(choices, key=lambda j: (len(choices[j]), -left[j]))
        for i in sorted(choices[j], key=lambda i: (problem.back[i] / problem.sizes[i], i)):
            self._visit((*away, i), here, prices)
            if not self.ended:
                return
            here |= {i}
