"""A list of defects that stays short however broken a file is."""

from __future__ import annotations

from stitch.errors import FormatError, Problem

#: Defects that are listed; the rest are only counted.
MOST_LISTED = 64


class ProblemList:
    """Collects defects, the first `MOST_LISTED` in full, and turns them into one error."""

    __slots__ = ("count", "listed")

    def __init__(self) -> None:
        self.listed: list[Problem] = []
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether further defects are only counted."""
        return len(self.listed) >= MOST_LISTED

    def add(self, kind: str, where: str, detail: str) -> None:
        """Record one defect."""
        self.count += 1
        if len(self.listed) < MOST_LISTED:
            self.listed.append(Problem(kind, where, detail))

    def raise_if_any(self, what: str, *, where: str | None = None, remedy: str) -> None:
        """Raise `FormatError` with every defect recorded so far, if there is one."""
        if not self.count:
            return
        listed = tuple(self.listed)
        unlisted = self.count - len(listed)
        if unlisted:
            listed += (Problem("more", "file", f"{unlisted} more defects are not listed"),)
        raise FormatError(what, where=where, problems=listed, remedy=remedy)
