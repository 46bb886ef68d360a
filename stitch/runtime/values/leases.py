"""Leases: the places of a recording's results, its own for as long as it lives.

A result that nobody refers to any more gives its place back to its lease, not to the allocator, so
the next run of the same work finds it as it was. A lease is free memory that is taken last: who
needs it takes it before anything is moved, evicted or refused (`Records.revoke`).
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from stitch.runtime.values.state import BufferRecord, InstanceRecord, Places, Status, ValueRecord

READY, FREED = Status.READY, Status.FREED


class Bound(Protocol):
    """What a lease keeps to run again: work that is bound to its places."""

    def drop(self) -> None:
        """It will not run again."""


B = TypeVar("B", bound=Bound)


class LeaseHolder(Generic[B]):
    """Who has leases: `leases` are all that it has, `idle` those none of whose results is held.

    The last one that was given back is the next to be taken: what was touched last is in caches.
    """

    def __init__(self) -> None:
        self.leases: list[OutputSlots[B]] = []
        self.idle: list[OutputSlots[B]] = []
        #: Whether it alternates with other work, which once took memory from its leases. The next
        #: ones lie outside of where any works: they would else take the same bytes from each other
        #: for ever.
        self.makes_way = False

    def ready(self) -> OutputSlots[B] | None:
        """The idle one that is next to be taken; None where there is none, or it is blocked."""
        if not self.idle or (self.idle[-1].shares and self.idle[-1].is_blocked):
            return None
        return self.idle[-1]


class OutputSlots(Generic[B]):
    """One set of places. `instances`: for each result where its value lies, all of its instances.

    `held`: in how many of its buffers results of its own are; at 0 it is idle. Leases of one holder
    share buffers: where one result of a run is held, only that one's place is another in the next.
    What is shared belongs to the one whose result is there, or was there last (`buffer.lease`); the
    others are told nothing, and look (`is_blocked`) when their turn comes.
    """

    __slots__ = (
        "again", "bindings", "buffers", "claim", "held", "holder", "instances", "is_lasting",
        "is_single", "last_run", "shares", "values",
    )  # fmt: skip

    def __init__(
        self,
        holder: LeaseHolder[B],
        buffers: tuple[BufferRecord, ...],
        instances: tuple[tuple[InstanceRecord, ...], ...],
        claim: object = None,
        *,
        is_lasting: bool = True,
    ) -> None:
        """`claim`: what was taken of the host's memory for it, and perhaps others; `is_lasting`:
        values are handed out again (not in debug mode, where what is free is poisoned)."""
        self.holder = holder
        self.buffers = buffers
        self.instances = instances
        self.claim = claim
        #: Whether it is the place of one result with one instance.
        self.is_single = len(instances) == 1 and len(instances[0]) == 1
        self.is_lasting = is_lasting
        #: Whether another has, or had, one of its buffers too.
        self.shares = False
        self.held = 0
        #: The values of its last run, as `instances`, while each is as that run left it.
        self.values: list[ValueRecord] | None = None
        #: What whoever ran it last remembers, to run it once more while all is as it was.
        self.again: Any = None
        #: When it was last taken, on the device's clock of runs.
        self.last_run = 0
        #: By the places of what a run reads, the first one made first.
        self.bindings: dict[Places, B] = {}

    def take(self, values: list[ValueRecord], now: int) -> None:
        """The results of a run lie here now; `values` as `instances`."""
        self.last_run = now
        buffers = self.buffers
        if buffers:
            idle = self.holder.idle
            if idle and idle[-1] is self:
                idle.pop()
            else:
                self._leave_idle()
        self.held = len(buffers)
        for buffer in buffers:
            if buffer.users:
                buffer.users = []
            buffer.lease = self
        for number, instances in enumerate(self.instances):
            value = values[number]
            for instance in instances:
                instance.buffer.users.append(value)
            # All at once: it is ready, and lies where it is known to, or it is neither.
            value.instances = instances
            value.status = READY
            value.last_used = now
            # While it was computed it may have been remembered, retained or given away.
            touched = value.version or value.retain or value.consumed
            value.lease = self if self.is_lasting and not touched else None
        # With nothing of its own it is always idle.
        self.values = values if buffers else None
        self.again = None

    @property
    def is_blocked(self) -> bool:
        """Whether something lies in a place that it shares, though it is idle itself."""
        return self.shares and any(buffer.users or buffer.pins for buffer in self.buffers)

    def _leave_idle(self) -> None:
        idle = self.holder.idle
        if idle and idle[-1] is self:
            idle.pop()
        elif self in idle:
            idle.remove(self)

    def reuse(self, now: int) -> list[ValueRecord] | None:
        """As `take`, with the values of the last run, where they can serve once more."""
        values = self.values
        if values is None or self.held:
            return None
        self._leave_idle()
        self.held = len(self.buffers)
        self.last_run = now
        for value in values:
            value.status = READY
            value.last_used = now
            buffer = value.instances[0].buffer
            buffer.lease = self
            buffer.users.append(value)
        return values

    def release_value(self, value: ValueRecord) -> bool:
        """A result without handles gives its place back, and stays what it is, for the next run.

        `value.lease` is this one; False where it ended or another of its results did not stay.
        """
        instances = value.instances
        if self.values is None or len(instances) != 1:
            return False
        value.status = FREED
        instances[0].buffer.users.clear()
        self.held -= 1
        if not self.held:
            self.holder.idle.append(self)
        return True

    def readmit(self, value: ValueRecord) -> None:
        """The last export of a value's bytes has ended, and no other value lies in them: a result
        that is as its run left it gives its place back with its last handle, as if never exported.
        """
        values = self.values
        if (
            self.is_lasting
            and values is not None
            and value in values
            and len(value.instances) == 1
            and not (value.version or value.retain or value.consumed)
        ):
            value.is_exposed = False
            value.lease = self

    def release_buffer(self, buffer: BufferRecord) -> None:
        """One of its buffers has lost its last user."""
        self.values = self.again = None
        self.held -= 1
        if not self.held:
            self.holder.idle.append(self)

    def inherit(self, buffer: BufferRecord) -> None:
        """What it shares with one that has ended is given back to it."""
        buffer.lease = self
        if not buffer.is_spare:
            self._leave_idle()
            self.held += 1

    def dispose(self) -> None:
        """It is a lease no more: buffers of its own are like any others (the caller frees the
        unused)."""
        if self in self.holder.leases:
            self.holder.leases.remove(self)
        self._leave_idle()
        self.values = self.again = self.claim = None
        for buffer in self.buffers:
            buffer.sharers.pop(self, None)
            if buffer.lease is self:
                buffer.lease = None
                if buffer.sharers:
                    next(reversed(buffer.sharers)).inherit(buffer)
        for binding in self.bindings.values():
            binding.drop()
        self.bindings.clear()


#: One whose bindings are nobody's business.
AnyLease: TypeAlias = OutputSlots[Any]
