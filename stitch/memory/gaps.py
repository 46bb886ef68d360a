"""Gaps of a space, from which one place after the other is taken without any being allocated.

Comes in: the gaps, and sizes in bytes per bank. Goes out: addresses. Must not know: the allocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from stitch.machine import Policy


class FreeGaps:
    """Gaps as (granules, first granule), the smallest first; what is taken is no longer there."""

    __slots__ = ("_alignment", "_gaps", "_policy")

    def __init__(
        self,
        gaps: Iterable[tuple[int, int]],
        alignment: int,
        policy: Policy = Policy.BEST_FIT,
    ) -> None:
        self._gaps, self._alignment, self._policy = sorted(gaps), alignment, policy

    def take(self, size: int, count: int = 1) -> list[int]:
        """Places for `size` bytes, at most so many: from the top of the smallest gap that fits, the
        lowest of equal ones; of the highest that fits, where the policy is first fit.

        >>> FreeGaps([(4, 0), (8, 10)], 16).take(60, 2)
        [0, 224]
        """
        alignment, gaps = self._alignment, self._gaps
        need = -(-size // alignment) or 1
        places: list[int] = []
        at = bisect_left(gaps, (need, 0))
        while at < len(gaps) and len(places) < count:
            highest = self._policy is Policy.FIRST_FIT
            chosen = max(range(at, len(gaps)), key=lambda i: gaps[i][1]) if highest else at
            granules, start = gaps.pop(chosen)
            # What is left of it is the smallest, too.
            tops = range(start + granules - need, start - 1, -need)[: count - len(places)]
            places += [top * alignment for top in tops]
            left = granules - len(tops) * need
            if left:
                insort(gaps, (left, start))
                at += left < need
        return places
