"""Output slots: preallocated buffers for the results of an executable.

The buffer of an unreferenced result returns to its output slots, not to the allocator, so the next
run of the same work reuses it. Idle output slots count as free memory: they are revoked before
anything is relocated, evicted or refused (`Records.revoke`).
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from stitch.runtime.values.state import BufferRecord, InstanceRecord, Places, Status, ValueRecord

READY, FREED = Status.READY, Status.FREED


class Bound(Protocol):
    """A binding, as output slots keep it for replay."""

    def drop(self) -> None:
        """Mark the binding as never run again."""


B = TypeVar("B", bound=Bound)


class LeaseHolder(Generic[B]):
    """Owner of output slots: `leases` are all, `idle` those without live results.

    `idle` is a stack: the slots released last are used next, since they may still be cached.
    """

    def __init__(self) -> None:
        self.leases: list[OutputSlots[B]] = []
        self.idle: list[OutputSlots[B]] = []
        #: Whether this work alternates with other work that revoked its slots. New slots are then
        #: placed outside all working regions, or both would revoke each other forever.
        self.makes_way = False

    def ready(self) -> OutputSlots[B] | None:
        """Return the idle slots to use next; None if there are none or they are blocked."""
        if not self.idle or (self.idle[-1].shares and self.idle[-1].is_blocked):
            return None
        return self.idle[-1]


class OutputSlots(Generic[B]):
    """One set of result buffers. `instances`: for each result its instances.

    `held`: number of its buffers with live results of its own; it is idle at 0. Slots of one holder
    may share buffers: if a caller keeps one result of a run, only that one's buffer differs in the
    next. A shared buffer belongs to the slots that used it last (`buffer.lease`); the others check
    with `is_blocked` when they are next.
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
        """Initialize.

        Args:
            holder: The owner.
            buffers: The buffers, perhaps shared with other slots.
            instances: For each result its instances.
            claim: Reserved host memory, perhaps shared with other slots.
            is_lasting: Whether values are reused (not in debug mode, which poisons free memory).
        """
        self.holder = holder
        self.buffers = buffers
        self.instances = instances
        self.claim = claim
        #: Whether it is for one result with one instance.
        self.is_single = len(instances) == 1 and len(instances[0]) == 1
        self.is_lasting = is_lasting
        #: Whether it shares, or shared, a buffer with other slots.
        self.shares = False
        self.held = 0
        #: The values of its last run in the order of `instances`, while they are unchanged.
        self.values: list[ValueRecord] | None = None
        #: Replay data of the last run; valid while nothing has changed.
        self.again: Any = None
        #: Task number of its last use.
        self.last_run = 0
        #: By the addresses of a run's sources, oldest first.
        self.bindings: dict[Places, B] = {}

    def take(self, values: list[ValueRecord], now: int) -> None:
        """Store the results of a run in these slots; `values` in the order of `instances`."""
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
            # Atomic under the GIL: ready and with its instances.
            value.instances = instances
            value.status = READY
            value.last_used = now
            # It may have been cached, retained or donated while it was computed.
            touched = value.version or value.retain or value.consumed
            value.lease = self if self.is_lasting and not touched else None
        # Without buffers it is always idle.
        self.values = values if buffers else None
        self.again = None

    @property
    def is_blocked(self) -> bool:
        """Whether a shared buffer is in use although these slots are idle."""
        return self.shares and any(buffer.users or buffer.pins for buffer in self.buffers)

    def _leave_idle(self) -> None:
        idle = self.holder.idle
        if idle and idle[-1] is self:
            idle.pop()
        elif self in idle:
            idle.remove(self)

    def reuse(self, now: int) -> list[ValueRecord] | None:
        """As `take`, with the value records of the last run; None if they cannot be reused."""
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
        """Release the buffer of an unreferenced result for the next run.

        Returns False if the slots were disposed of, or another result of the run did not stay in
        them.
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
        """Make an exported result releasable again, after its last export has ended.

        Only if it is unchanged and the only value in its buffer.
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
        """Handle a buffer that lost its last user."""
        self.values = self.again = None
        self.held -= 1
        if not self.held:
            self.holder.idle.append(self)

    def inherit(self, buffer: BufferRecord) -> None:
        """Take over a shared buffer from slots that were disposed of."""
        buffer.lease = self
        if not buffer.is_spare:
            self._leave_idle()
            self.held += 1

    def dispose(self) -> None:
        """Dispose of the slots: live results keep their buffers; the caller frees the unused
        ones."""
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


#: Output slots with any type of binding.
AnyLease: TypeAlias = OutputSlots[Any]
