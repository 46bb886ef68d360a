"""Exports: arrays on a tensor's own bytes that others hold; until they let go its place is pinned.

Comes in: arrays over the bytes of buffers. Goes out: a note for the device when such an array dies,
wherever and on whatever thread that is. Must not know who holds it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from stitch.program import Array
from stitch.runtime.values.state import BufferRecord


class _Export(weakref.ref[Array]):
    """Sees the end of one array. (A finalizer of `weakref` takes as long as a small program.)"""

    __slots__ = ("buffer", "ended", "kept")
    buffer: BufferRecord
    #: What lives as long as the array does.
    kept: object
    ended: Callable[[], object] | None


class Exports:
    """The arrays of one device that others hold; `unpinned`: the buffers that were let go of."""

    def __init__(self) -> None:
        self.unpinned: deque[Any] = deque()
        self._live: dict[int, _Export] = {}

    def add(
        self,
        array: Array,
        buffer: BufferRecord,
        kept: object = None,
        ended: Callable[[], object] | None = None,
    ) -> None:
        """Pin a buffer for as long as an array on it lives, and keep something for as long; then
        `ended` is called: anywhere, so it leaves notes at most."""
        export = _Export(array, self._ended)
        export.buffer, export.kept, export.ended = buffer, kept, ended
        self._live[id(export)] = export
        buffer.pins += 1

    def _ended(self, export: weakref.ref[Array]) -> None:
        """Runs wherever the last reference dies, so it only leaves notes; see `Device.drain`."""
        self._live.pop(id(export), None)
        assert isinstance(export, _Export)
        if export.ended is not None:
            export.ended()
        # The note of the pin comes before that of the handle: then the place is free at once.
        self.unpinned.append(export.buffer)
        export.kept = None
