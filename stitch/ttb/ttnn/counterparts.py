"""What of a foreign binary has no counterpart here: named once, with the places where it is."""

from __future__ import annotations

#: Places that are listed of one line; the rest are counted.
MOST_PLACES = 3


class Counterparts:
    """Collects what is shown otherwise than the file has it.

    >>> lacking = Counterparts()
    >>> for place in ("a", "b", "b", "c", "d"):
    ...     lacking.add("rings are shown as lines", place)
    >>> lacking.lines()
    ('rings are shown as lines: a, b, c and 1 more',)
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[str, None]] = {}

    def add(self, what: str, where: str) -> None:
        """Note something, and a place where it is."""
        self._places.setdefault(what, {})[where] = None

    def lines(self) -> tuple[str, ...]:
        """Each thing with its places, in the order in which they were met."""
        return tuple(f"{what}: {_listed(list(places))}" for what, places in self._places.items())


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
