"""Reclaim device memory of tensors whose last handle was dropped.

Python may run a finalizer at any point, even while a plan is being bound, so finalizers only append
to a queue. `Reclaimer.read` processes it the next time the device is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from stitch.runtime.backends import InstanceBytes
from stitch.runtime.locks import Lock
from stitch.runtime.queue.exposure import ConstantCache, invalidate_stale_copies
from stitch.runtime.values import Notes, Records, Status, ValueRecord, rebuild_bookkeeping

# Module-level alias: an enum attribute lookup costs 40 ns.
READY = Status.READY


class Reclaimer:
    """Releases unreferenced values and unpins exported buffers of one device.

    `lock` is the queue lock. The caller of `read` holds the run lock.
    """

    def __init__(
        self,
        records: Records,
        contents: InstanceBytes,
        remembered: ConstantCache,
        lock: Lock,
    ) -> None:
        self.records, self.contents = records, contents
        self._remembered, self._lock = remembered, lock
        #: Values that lost a handle, one entry per handle; and notes of other finalizers.
        self.dropped: deque[ValueRecord] = deque()
        self.notes = Notes()
        #: Each appends unreferenced values, whose producer would reuse the buffers, to `dropped`.
        self.resting: list[Callable[[deque[ValueRecord]], object]] = []

    def read(self, now: int, *, resting: bool) -> None:
        """Release values without handles that batch `now` does not read, and unpin ended exports.

        Args:
            now: Number of the queued batch.
            resting: Also release values kept for reuse by loop stages.
        """
        for release in self.resting if resting else ():
            release(self.dropped)
        # Unpin first: a buffer can return to its output slots only when nothing pins it.
        if self.notes.left:
            self._read_notes()
        dropped, records = self.dropped, self.records
        while dropped:
            # Remove the entry after processing it: processing twice is harmless, losing it leaks
            # memory.
            value = dropped[0]
            if value.handles == 1 and value.window < now and value.status is READY:
                lease = value.lease
                records.is_consistent = False
                is_back = lease is not None and lease.release_value(value)
                records.is_consistent = True
                if not is_back:
                    self.free(value, "its last handle was dropped")
            value.handles -= 1
            del dropped[0]

    def _read_notes(self) -> None:
        gone, records = self.notes.left, self.records
        while gone:
            note = self.notes.first()
            if note.act is not None:
                note.act()
            buffer = note.pinned
            if buffer is None:
                del gone[0]
                continue
            for user in buffer.users if buffer.pins == 1 else ():
                # A pinned buffer cannot be evicted; from now on it can, and only a copy may remain.
                if user.is_exposed and len(user.instances) > 1:
                    invalidate_stale_copies(records, self.contents, user)
            # Inconsistent until the unpinned buffer is released.
            records.is_consistent = False
            buffer.pins -= 1
            del gone[0]
            if not buffer.pins:
                if not buffer.users:
                    records.unused(buffer)
                elif buffer.lease is not None and len(buffer.users) == 1:
                    with self._lock:
                        buffer.lease.readmit(buffer.users[0])
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

    def rebuild_bookkeeping(self, queued: Iterable[ValueRecord]) -> None:
        """Make the records consistent after an interrupt.

        `queued` are the values of the queue, whose lock is held.
        """
        for value in rebuild_bookkeeping(self.records, queued):
            self._forget(value)
        self.records.is_consistent = True

    def _forget(self, value: ValueRecord) -> None:
        """Evict the cached results of a value."""
        if value.version:
            with self._lock:
                self._remembered.forget(value)
