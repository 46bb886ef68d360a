"""Notes of what has died: left by the interpreter itself, read by the device when it comes to it.

A finalizer written in Python may be interrupted before its first line; then its exception is
swallowed, and nobody ever hears of the death. So no line of Python runs when something dies: its
weak reference goes into a queue as it is.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from stitch.runtime.values.state import BufferRecord


class Note(weakref.ref[Any]):
    """Sees the end of one thing. (A finalizer of `weakref` takes as long as a small program.)"""

    __slots__ = ("act", "kept", "pinned")
    #: What is called then, by the device; it does no harm when it is called twice.
    act: Callable[[], object] | None
    #: What lives as long as the thing does.
    kept: object
    #: What is pinned as long as the thing lives.
    pinned: BufferRecord | None


class Notes:
    """The ends that one device waits for, and those that it has not seen to yet (`left`).

    >>> notes = Notes()
    >>> thing = set("ab")
    >>> notes.await_end(thing)
    >>> del thing
    >>> len(notes.left)
    1
    """

    __slots__ = ("_awaited", "left")

    def __init__(self) -> None:
        #: A weak reference that dies before its thing would say nothing.
        self._awaited: dict[int, Note] = {}
        self.left: deque[Note] = deque()

    def await_end(
        self,
        thing: object,
        act: Callable[[], object] | None = None,
        pinned: BufferRecord | None = None,
        kept: object = None,
    ) -> None:
        """Leave a note when a thing has died; until it is seen to, a buffer is pinned, and
        something is kept."""
        note = Note(thing, self.left.append)
        note.act, note.kept, note.pinned = act, kept, pinned
        key = id(note)
        # Atomic under the GIL: no call in between.
        self._awaited[key] = note
        if pinned is not None:
            pinned.pins += 1

    def first(self) -> Note:
        """The oldest of those that are left, which is not awaited any more."""
        note = self.left[0]
        self._awaited.pop(id(note), None)
        return note
