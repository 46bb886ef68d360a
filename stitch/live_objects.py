"""A set of living objects that does not keep them alive.

`weakref.WeakSet` removes an object in Python code, where an interrupt would be swallowed. Here the
removal runs in C, so the interrupt is raised later, in ordinary code.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A set of weakly referenced objects, compared by identity.

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
        self._references.add(weakref.ref(thing, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        things = [reference() for reference in tuple(self._references)]
        return iter([thing for thing in things if thing is not None])
