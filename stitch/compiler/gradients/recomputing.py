"""Recomputing: what backward computes again, as a word says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stitch.errors import UsageError
from stitch.program import MAX_ROUNDS

#: What backward computes again: nothing, what costs no more than reading it, or everything.
Recompute = Literal["none", "cheap", "all"]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What backward computes again. Of scans all rounds, but for the states before each stretch of
    `every` rounds, where that is told."""

    kind: Recompute
    every: int | None = None

    @staticmethod
    def parse(word: str) -> Recomputation:
        """What `none`, `cheap`, `all` or `every 8` says; raises `UsageError` for other words.

        >>> Recomputation.parse("every 8")
        Recomputation(kind='none', every=8)
        """
        for kind in get_args(Recompute):
            if word == kind:
                return Recomputation(kind)
        first, *rest = word.split(" ")
        if first != "every":
            raise UsageError(
                "recompute is none, cheap or all, or every and a number of rounds", got=repr(word)
            )
        number = rest[0] if len(rest) == 1 else ""
        # Python reads no number of any length.
        known = number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_ROUNDS))
        if not known or not 1 <= int(number) <= MAX_ROUNDS:
            raise UsageError(
                "a scan keeps the states before every so many rounds",
                expected=f"every and a number from 1 to {MAX_ROUNDS}, as in 'every 8'",
                got=repr(word),
            )
        return Recomputation("none", int(number))
