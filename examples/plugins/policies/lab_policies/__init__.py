"""An allocator, worst fit, and an eviction rule, least recently used.

Stitch keeps the books and checks every plan, so a policy is one pure function. Worst fit leaves
the largest possible rest of a hole (Knuth, "The Art of Computer Programming" 1, 2.5); the planner's
own rules know the next uses and beat a rule that looks back, which is what an experiment shows.
"""

from collections.abc import Sequence

from stitch.planner import EvictionCandidate


def worst_fit(holes: Sequence[tuple[int, int]], nbytes: int) -> int | None:
    """Return the start of the largest hole (address, size), the lowest of equal ones."""
    address, size = max(holes, key=lambda hole: (hole[1], -hole[0]))
    return address if size >= nbytes else None


def least_recent(candidate: EvictionCandidate) -> float:
    """Return the price of evicting a buffer: the one idle longest is the cheapest."""
    return -float(candidate.idle)
