"""Notes of collected objects, left by the interpreter and processed when the device is next used.

A finalizer written in Python may be interrupted before its first line, and the event would be lost.
So no Python code runs when an object is collected: its weak reference is appended to a queue.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from stitch.runtime.values.state import BufferRecord


class Note(weakref.ref[Any]):
    """A weak reference that is queued when its object is collected. (Faster than
    `weakref.finalize`.)"""

    __slots__ = ("act", "kept", "pinned")
    #: Called by the device afterwards; idempotent.
    act: Callable[[], object] | None
    #: Kept alive as long as the object.
    kept: object
    #: Pinned as long as the object lives.
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
        #: Keeps the weak references alive until their objects are collected.
        self._awaited: dict[int, Note] = {}
        self.left: deque[Note] = deque()

    def await_end(
        self,
        thing: object,
        act: Callable[[], object] | None = None,
        pinned: BufferRecord | None = None,
        kept: object = None,
    ) -> None:
        """Queue a note when `thing` is collected.

        Args:
            thing: The object.
            act: Called when the note is processed.
            pinned: A buffer to pin until then.
            kept: An object to keep alive until then.
        """
        note = Note(thing, self.left.append)
        note.act, note.kept, note.pinned = act, kept, pinned
        key = id(note)
        # Atomic under the GIL: no call in between.
        self._awaited[key] = note
        if pinned is not None:
            pinned.pins += 1

    def first(self) -> Note:
        """Return the oldest queued note and stop keeping its weak reference."""
        note = self.left[0]
        self._awaited.pop(id(note), None)
        return note
