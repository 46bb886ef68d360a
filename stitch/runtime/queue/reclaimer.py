"""Reclaim what is no longer referenced, and detect what others have written.

Python may run a finalizer at any point, even while a plan is being bound, and may interrupt one
that is written in Python before its first line. So no Python code runs when an object is collected:
C code appends to a queue, and `Reclaimer.read` processes it the next time the device is used.

NumPy, torch or the owner of a borrowed array may write exported or borrowed buffers. Such writes
are not reported, so the bytes of copies are compared each time a value is used by a run.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stitch.program import Array
from stitch.runtime.backends import Agent, LocalBackend
from stitch.runtime.locks import Lock
from stitch.runtime.values import (
    BufferRecord,
    InstanceRecord,
    Records,
    Status,
    ValueRecord,
)

Key = tuple[bytes | int, ...]
_next_version = itertools.count(1).__next__


class ConstantCache:
    """The cached results of one device; `hits` and `misses` count the calls."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        #: Results, each with the handles that keep it alive.
        self._entries: dict[Key, tuple[tuple[ValueRecord, ...], object]] = {}
        self._by_version: dict[int, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, agent: Agent, inputs: Sequence[ValueRecord]) -> Key | None:
        """Return the cache key of a call; None if an input is an array or externally writable."""
        if any(value.handles == 0 or value.is_exposed for value in inputs):
            self.misses += 1
            return None
        for value in inputs:
            if value.version == 0:
                value.version = _next_version()
                value.slots = None
        return (agent.content_hash, *(value.version for value in inputs))

    def find(self, key: Key) -> tuple[ValueRecord, ...] | None:
        """Return the values of a cached result, if they still exist."""
        entry = self._entries.get(key)
        if entry is not None and all(value.is_usable for value in entry[0]):
            self.hits += 1
            return entry[0]
        self.misses += 1
        return None

    def remember(
        self, key: Key, inputs: Sequence[ValueRecord], results: tuple[ValueRecord, ...],
        handles: object,
    ) -> None:  # fmt: skip
        """Cache a result and keep it alive until an input is freed, or the result is written or
        exported."""
        self._entries[key] = results, handles
        for value in results:
            if value.version == 0:
                value.version = _next_version()
                value.slots = None
        for value in (*inputs, *results):
            self._by_version.setdefault(value.version, set()).add(key)

    def forget(self, value: ValueRecord) -> None:
        """Drop the entries that read or contain a value, which was freed or changed."""
        if value.version:
            for key in self._by_version.pop(value.version, ()):
                self._entries.pop(key, None)
            value.version = 0

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._by_version.clear()


#: The C library's memcmp: memory speed, no temporary array, stops at the first difference.
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int


def comparison_of(first: Array, second: Array) -> Callable[[], int]:
    """Return a function that tells whether two arrays of one size differ in a bit.

    Both must stay alive while it may be called. A non-contiguous first array is copied for each
    comparison.
    """
    if not first.flags.c_contiguous:
        return lambda: int(first.tobytes() != second.tobytes())
    return partial(_compare, first.ctypes.data, second.ctypes.data, first.nbytes)


def invalidate_stale_copies(records: Records, backend: LocalBackend, value: ValueRecord) -> None:
    """Drop the copies of an externally writable value unless all equal it bit by bit.

    Copies with another layout or data type cannot be compared and are dropped.
    """
    instances, comparison = value.instances, value.comparison
    are_equal = None if comparison is None else comparison(instances)
    if are_equal is None:
        value.comparison = comparison = _Comparison(backend, instances)
        are_equal = comparison(instances, is_new=True)
    if not are_equal:
        records.forget_copies(value)


class _Comparison:
    """Compares a value's copies with its primary bytes while their addresses are unchanged."""

    __slots__ = ("_calls", "_is_lasting", "_places")

    def __init__(self, backend: LocalBackend, instances: Sequence[InstanceRecord]) -> None:
        self._places = [(instance, instance.buffer.address) for instance in instances]
        original = backend.dense(instances[0])
        # Without data, only layouts are compared: arrays count as unchanged.
        has_data = backend.executor.computes
        # NumPy can reallocate an array that owns its memory (`resize`).
        self._is_lasting = original is not None and not original.flags.owndata
        #: None if a copy cannot be compared.
        self._calls: list[Callable[[], int]] | None = []
        for instance in instances[1:]:
            copy = backend.dense(instance)
            if original is None or copy is None or not _are_comparable(original, copy, has_data):
                self._calls = None
                return
            if has_data:
                self._calls.append(comparison_of(original, copy))

    def __call__(self, instances: Sequence[InstanceRecord], *, is_new: bool = False) -> bool | None:
        """Return whether all copies equal the original; None if instances or addresses changed."""
        places = self._places
        if len(instances) != len(places) or not (self._is_lasting or is_new):
            return None
        for number, (known, address) in enumerate(places):
            if instances[number] is not known or known.buffer.address != address:
                return None
        if self._calls is None:
            return False
        for differs in self._calls:  # noqa: SIM110 (each step of a generator costs a call)
            if differs():
                return False
        return True


def _are_comparable(original: Array, copy: Array, has_data: bool) -> bool:
    is_whole = original.flags.c_contiguous and copy.flags.c_contiguous
    is_alike = copy.dtype == original.dtype and copy.shape == original.shape
    return is_alike and (is_whole or not has_data)


class Note(weakref.ref[Any]):
    """A weak reference that is queued when its object is collected. (Faster than
    `weakref.finalize`.)"""

    __slots__ = ("act", "kept", "pinned")
    act: Callable[[], object] | None
    kept: object
    pinned: BufferRecord | None


# Module-level alias: an enum attribute lookup costs 40 ns.
READY = Status.READY


class Reclaimer:
    """Releases unreferenced values and unpins exported buffers of one device.

    `lock` is the queue lock. The caller of `read` holds the run lock.
    """

    def __init__(
        self,
        records: Records,
        backend: LocalBackend,
        remembered: ConstantCache,
        lock: Lock,
    ) -> None:
        self.records, self.backend = records, backend
        self._remembered, self._lock = remembered, lock
        #: Values that lost a handle, one entry per handle.
        self.dropped: deque[ValueRecord] = deque()
        #: Notes of collected objects, oldest first.
        self.ended: deque[Note] = deque()
        #: Keeps the weak references alive until their objects are collected.
        self._awaited: dict[int, Note] = {}

    def await_end(
        self,
        thing: object,
        act: Callable[[], object] | None = None,
        pinned: BufferRecord | None = None,
        kept: object = None,
    ) -> None:
        """Append a note to `ended` when `thing` is collected.

        Args:
            thing: The object.
            act: Called when the note is processed; idempotent.
            pinned: A buffer to pin until then.
            kept: An object to keep alive until then.
        """
        note = Note(thing, self.ended.append)
        note.act, note.kept, note.pinned = act, kept, pinned
        key = id(note)
        # Atomic under the GIL: no call in between.
        self._awaited[key] = note
        if pinned is not None:
            pinned.pins += 1

    def read(self, now: int) -> None:
        """Release values without handles that the queued batch, number `now`, does not read, and
        unpin ended exports."""
        # Unpin first: a buffer can return to its output slots only when nothing pins it.
        if self.ended:
            self._read_notes()
        dropped, records = self.dropped, self.records
        while dropped:
            # Remove the entry after processing it: processing twice is harmless, losing it leaks
            # memory.
            value = dropped[0]
            if value.handles == 1 and value.batch < now and value.status is READY:
                slots = value.slots
                records.is_consistent = False
                is_back = slots is not None and slots.release_value(value)
                records.is_consistent = True
                if not is_back:
                    self.free(value, "its last handle was dropped")
            value.handles -= 1
            del dropped[0]

    def _read_notes(self) -> None:
        gone, records = self.ended, self.records
        while gone:
            note = gone[0]
            self._awaited.pop(id(note), None)
            if note.act is not None:
                note.act()
            buffer = note.pinned
            if buffer is None:
                del gone[0]
                continue
            for user in buffer.users if buffer.pins == 1 else ():
                # A pinned buffer cannot be evicted; from now on it can, and only a copy may remain.
                if user.is_exposed and len(user.instances) > 1:
                    invalidate_stale_copies(records, self.backend, user)
            # Inconsistent until the unpinned buffer is released.
            records.is_consistent = False
            buffer.pins -= 1
            del gone[0]
            if not buffer.pins:
                if not buffer.users:
                    records.unused(buffer)
                elif buffer.slots is not None and len(buffer.users) == 1:
                    with self._lock:
                        buffer.slots.readmit(buffer.users[0])
            records.is_consistent = True

    def free(self, value: ValueRecord, by: str) -> None:
        """Free a value now."""
        self.records.release(value)
        value.status = Status.FREED
        value.by = by
        self._forget(value)

    def lost_all(self, value: ValueRecord) -> None:
        """Mark a value that lost its last instance in a plan."""
        if value.status is Status.READY:
            value.status = Status.LOST if value.kept else Status.FREED
        self._forget(value)

    def _forget(self, value: ValueRecord) -> None:
        """Evict the cached results of a value."""
        if value.version:
            with self._lock:
                self._remembered.forget(value)
