"""Names of which no two are alike: what is asked for where it is free, else numbered.

Takes constant time for each.
"""

from __future__ import annotations

from collections.abc import Iterable


class FreeNames:
    """Names that were given, and how far those of one stem are numbered.

    >>> names = FreeNames()
    >>> [names.free("x") for _ in range(3)]
    ['x', 'x.2', 'x.3']
    """

    __slots__ = ("_before", "_mark", "_numbers", "_taken")

    def __init__(self, taken: Iterable[str] = (), mark: str = ".", first: int = 2) -> None:
        """`taken`: names that are never given; `mark`: what stands before a number; `first`: the
        number of the second of a name."""
        self._taken = set(taken)
        self._mark, self._before = mark, first - 1
        self._numbers: dict[str, int] = {}

    def free(self, name: str, prefix: str = "") -> str:
        """The name itself, else with the prefix before it, else numbered; taken now."""
        free = f"{prefix}.{name}" if prefix and name in self._taken else name
        if free in self._taken:
            longer, number = free, self._numbers.get(free, self._before)
            while free in self._taken:
                number += 1
                free = f"{longer}{self._mark}{number}"
            self._numbers[longer] = number
        self._taken.add(free)
        return free
