"""Gaps of a space, from which one place after the other is taken without any being allocated."""

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
        lowest of equal ones. By first fit from the top of the highest that fits, upwards from the
        bottom of the lowest.

        >>> FreeGaps([(4, 0), (8, 10)], 16).take(60, 2)
        [0, 224]
        """
        alignment, gaps = self._alignment, self._gaps
        need = -(-size // alignment) or 1
        places: list[int] = []
        at = bisect_left(gaps, (need, 0))
        while at < len(gaps) and len(places) < count:
            granules, start = gaps.pop(self._chosen(at))
            # What is left of it comes first again.
            if self._policy is Policy.FIRST_FIT_UPWARDS:
                taken = range(start, start + granules - need + 1, need)[: count - len(places)]
                start += len(taken) * need
            else:
                taken = range(start + granules - need, start - 1, -need)[: count - len(places)]
            places += [place * alignment for place in taken]
            left = granules - len(taken) * need
            if left:
                insort(gaps, (left, start))
                at += left < need
        return places

    def _chosen(self, at: int) -> int:
        """Which of the gaps that have room, those from `at` on, is taken from first."""
        if self._policy is Policy.BEST_FIT:
            return at
        upwards = self._policy is Policy.FIRST_FIT_UPWARDS
        room = range(at, len(self._gaps))
        return (min if upwards else max)(room, key=lambda i: self._gaps[i][1])
