"""The objects of a kind that are alive, without keeping them alive.

`weakref.WeakSet` forgets an object in a function of Python, and an interrupt that comes there is
printed and swallowed. Here C forgets it, so an interrupt waits for the code that comes after.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A set of objects that are compared by identity; one that dies leaves it.

    >>> class Session: pass
    >>> first, second, live = Session(), Session(), LiveObjects()
    >>> live.add(first), live.add(second), len(list(live))
    (None, None, 2)
    >>> del first
    >>> list(live) == [second]
    True
    """

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def add(self, thing: T) -> None:
        """Hold it from now on, for as long as it lives."""
        self._references.add(weakref.ref(thing, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        """Those that are alive now."""
        things = [reference() for reference in tuple(self._references)]
        return iter([thing for thing in things if thing is not None])
