"""`HandleTable`: what the handles of C programs stand for.

A handle is a number: the slot of a table in its lower half, in its upper half how many objects the
slot had before and a 1. A handle that was destroyed, was never created, or is of another kind is
therefore an error.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from stitch.errors import StitchError

_SLOT_BITS = 32
_MAX_GENERATION = 2**32 - 1


class InvalidHandleError(StitchError):
    """A handle of a C program is zero, destroyed, or of another kind: code 7."""

    exit_code = 7


class HandleTable:
    """Objects by handle and kind.

    >>> table = HandleTable()
    >>> handle = table.add("device", "an object")
    >>> table.get("device", handle), table.remove("device", handle)
    ('an object', 'an object')
    >>> table.get("device", handle)
    Traceback (most recent call last):
    stitch.c_interface.handles.InvalidHandleError: this device was destroyed before
    """

    def __init__(self) -> None:
        #: By slot: the current or the next handle, its kind (None: free), and the object.
        self._entries: list[tuple[int, str | None, Any]] = []
        self._free: list[int] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries) - len(self._free)

    def add(self, kind: str, value: Any) -> int:
        """Store an object; return its handle."""
        with self._lock:
            if self._free:
                slot = self._free.pop()
                handle = self._entries[slot][0]
                self._entries[slot] = handle, kind, value
            else:
                handle = 1 << _SLOT_BITS | len(self._entries)
                self._entries.append((handle, kind, value))
        return handle

    def get(self, kind: str, handle: int) -> Any:
        """Return the object of a handle; raise `InvalidHandleError`."""
        slot = handle & 0xFFFFFFFF
        # Reading one element is atomic: no lock.
        if slot < len(self._entries):
            entry = self._entries[slot]
            if entry[0] == handle and entry[1] == kind:
                return entry[2]
        raise self._error(kind, handle)

    def remove(self, kind: str, handle: int) -> Any:
        """Invalidate a handle and return its object; raise `InvalidHandleError`."""
        with self._lock:
            value, slot = self.get(kind, handle), handle & 0xFFFFFFFF
            generation = (handle >> _SLOT_BITS) + 1
            # A slot whose generations are used up stays empty, so that no handle comes again.
            self._entries[slot] = generation << _SLOT_BITS | slot, None, None
            if generation < _MAX_GENERATION:
                self._free.append(slot)
        return value

    def _error(self, kind: str, handle: int) -> InvalidHandleError:
        slot = handle & 0xFFFFFFFF
        if not handle:
            return InvalidHandleError(
                f"this {kind} is zero",
                remedy="check the error of the call that should have created it",
            )
        if slot < len(self._entries) and handle >> _SLOT_BITS:
            current, other, _ = self._entries[slot]
            if handle == current and other is not None:
                return InvalidHandleError("a handle of another kind", expected=kind, got=other)
            if handle < current:
                return InvalidHandleError(f"this {kind} was destroyed before")
        return InvalidHandleError(f"this is no {kind} of Stitch", got=hex(handle))
