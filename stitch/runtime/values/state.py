"""The mutable records of a device: buffers (allocations), values (what handles refer to), output
slots (buffers for the results of an executable), and input ports of loaded programs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stitch.errors import TaskError
from stitch.program import Array, Space, TensorDesc, ValueType, host_layout

if TYPE_CHECKING:
    from stitch.runtime.execution import Binding, Executable
    from stitch.runtime.tensor_access import TensorAccess


SMALL_NBYTES = 16384


class InputPort:
    """An input slot for calls: the type that arrays must have, and the tensors that match."""

    __slots__ = (
        "accepted", "desc", "dtype", "host_desc", "host_key", "is_small", "name", "origin",
        "shape", "signature", "type",
    )  # fmt: skip

    def __init__(self, who: str, name: str, kind: ValueType, desc: TensorDesc, key: int) -> None:
        self.name = name
        self.origin = f"input {name!r} of {who!r}"
        self.type = kind
        self.desc = desc
        self.shape = kind.shape
        self.dtype = kind.data_type.dtype
        self.host_desc = TensorDesc(kind.shape, host_layout(kind.data_type))
        self.host_key = key
        #: Whether copying an array is cheaper than checking who may write to it.
        self.is_small = self.host_desc.elements * self.dtype.itemsize <= SMALL_NBYTES
        #: The `InstanceRecord.signature` of a host array in this slot.
        self.signature = (Space.HOST, 0, key, 0, key)
        #: Keys of descriptors known to match this slot.
        self.accepted: set[int] = set()


#: Addresses of a batch's sources: value numbers, and the addresses of all instances.
Places = tuple[tuple[int, tuple[int | None, ...]], ...]
#: What a plan depends on in its sources, except addresses; see `ValueRecord.signature`.
Forms = tuple[tuple[object, ...], ...]
#: Type and layout of a constant, and a cheap discriminator of its bytes.
Mark = tuple[object, int | bytes]
AlikeConstants = dict[Mark, dict["ConstantRecord", None]]


class Status(enum.IntEnum):
    """The state of a value. Up to READY it can be used."""

    PENDING = 0
    READY = 1
    FREED = 2
    LOST = 3
    FAILED = 4


# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY, FREED = Status.PENDING, Status.READY, Status.FREED


class BufferRecord:
    """One allocation: in a space at an address, or a host array outside the spaces (`array`)."""

    __slots__ = (
        "address",
        "array",
        "desc",
        "desc_key",
        "origin",
        "pins",
        "shared_pins",
        "size_per_bank",
        "slots",
        "space",
        "users",
    )  # fmt: skip

    def __init__(
        self,
        space: Space,
        address: int | None,
        size_per_bank: int,
        desc: TensorDesc,
        desc_key: int,
        origin: str,
    ) -> None:
        self.space = space
        self.address = address
        self.size_per_bank = size_per_bank
        self.desc = desc
        self.desc_key = desc_key
        self.origin = origin
        self.array: Array | None = None
        self.pins = 0
        #: Number of pins whose owners expect the bytes to be overwritten.
        self.shared_pins = 0
        #: The output slots that own the buffer (if shared, the ones that used it last): it returns
        #: to them, not to the allocator.
        self.slots: OutputSlots | None = None
        #: The values in it, in order of attachment.
        self.users: list[ValueRecord] = []

    @property
    def is_spare(self) -> bool:
        """Whether it belongs to output slots and is unused: counts as free memory."""
        return self.slots is not None and not self.users and not self.pins

    @property
    def slot_sets(self) -> tuple[OutputSlots, ...]:
        """All output slots that contain it."""
        slots = self.slots
        if slots is None or not slots.shares:
            return () if slots is None else (slots,)
        return tuple([other for other in slots.holder.slot_sets if self in other.buffers])

    @property
    def holds_constant(self) -> bool:
        """Whether it contains a constant of a loaded program, and so nothing else."""
        return bool(self.users) and self.users[0].is_constant

    @property
    def is_open(self) -> bool:
        """Whether a result may overwrite a donated value in it."""
        return self.pins <= self.shared_pins

    @property
    def is_shared(self) -> bool:
        """Whether it is pinned, and all pins expect it to be overwritten."""
        return 0 < self.shared_pins >= self.pins

    @property
    def is_unused(self) -> bool:
        """Whether it has no values and no pins."""
        return not (self.users or self.pins)


class InstanceRecord:
    """A copy of a value: buffer, byte offset in its footprint, descriptor without address."""

    __slots__ = (
        "buffer", "desc", "desc_key", "offset_nbytes", "reads", "signature", "view", "viewed_at",
    )  # fmt: skip

    def __init__(
        self, buffer: BufferRecord, offset_nbytes: int, desc: TensorDesc, desc_key: int
    ) -> None:
        self.buffer = buffer
        self.offset_nbytes = offset_nbytes
        self.desc = desc
        self.desc_key = desc_key

        #: What a plan depends on, except address and pins.
        self.signature = (buffer.space, buffer.size_per_bank, buffer.desc_key, offset_nbytes,
                          desc_key)  # fmt: skip
        #: A cached dense array over its bytes, and the address for which it is valid.
        self.view: Array | None = None
        self.viewed_at: int | None = None
        #: The counter of reads of such tensors, once its small view was read.
        self.reads: list[int] | None = None


class ValueRecord:
    """One value: pending, ready or gone; all handles on it share this record."""

    # Instance slots: class attributes are slower to look up.
    __slots__ = (
        "batch",
        "by",
        "comparison",
        "consumed",
        "desc",
        "desc_key",
        "device",
        "handles",
        "instances",
        "is_exposed",
        "last_used",
        "number",
        "retain",
        "slots",
        "status",
        "version",
    )  # fmt: skip

    #: Whether it is a host array of one call; no handle refers to it.
    is_array = False
    #: Whether it is a constant of a loaded program.
    is_constant = False

    def __init__(
        self, device: TensorAccess, desc: TensorDesc, desc_key: int, by: str = "",
        number: int = -1, batch: int = -1,
    ) -> None:  # fmt: skip
        self.device = device
        self.desc = desc
        self.desc_key = desc_key
        self.by = by
        self.status = PENDING
        self.handles = self.last_used = self.version = 0
        #: Its number in the batch that last used it.
        self.number, self.batch = number, batch
        #: `is_exposed`: its bytes may be written from outside at any time, without notice.
        self.retain = self.consumed = self.is_exposed = False
        #: The output slots in which it was computed, while it is only read: they may reuse it once
        #: it has no handles.
        self.slots: OutputSlots | None = None
        #: Compares its copies with the primary instance; returns None if instances or addresses
        #: have changed (see `exposure`).
        self.comparison: Callable[[Sequence[InstanceRecord]], bool | None] | None = None
        #: Its instances, the primary one first.
        self.instances: Sequence[InstanceRecord] = ()

    @property
    def kept(self) -> bool:
        """Whether a handle can still read it."""
        return self.handles > 0 and not self.consumed

    @property
    def is_usable(self) -> bool:
        """Whether it is pending or ready: not freed, donated, lost or failed."""
        return self.status <= Status.READY and not self.consumed

    def check_usable(self) -> None:
        """Raise `TaskError` if it was freed, donated, lost or failed, naming the task."""
        if self.status <= READY and not self.consumed:
            return
        words = {
            Status.FREED: "was freed",
            Status.LOST: "was lost in a failure while it was being overwritten",
            Status.FAILED: "was never made",
        }
        state = words.get(self.status, "was given away or freed")
        remedy = (
            "copy what is used again before it is given away: copy.deepcopy(tensor); from submit "
            "and to_layout(retain=False) tensor.retain = True keeps it"
        )
        if self.status in (Status.FAILED, Status.LOST):
            remedy = "look at the error that was raised when the queue ran"
        if self.status is Status.LOST:
            remedy += (
                "; write it anew, or make it again: a training goes on from a checkpoint "
                "(load_state_dict), or is started again"
            )
        raise TaskError(
            f"this tensor ({self.desc.text()}) {state}", where=self.by or None, remedy=remedy
        )

    def signature(self) -> tuple[object, ...]:
        """Return what a plan that uses this value depends on, except addresses."""
        instances = self.instances
        if len(instances) == 1 and not instances[0].buffer.pins:
            return instances[0].signature
        return tuple([(i.signature, i.buffer.pins > 0, i.buffer.is_shared) for i in instances])

    def places(self) -> tuple[int | None, ...]:
        """Return the addresses of its instances."""
        instances = self.instances
        if len(instances) == 1:
            return (instances[0].buffer.address,)
        return tuple([instance.buffer.address for instance in instances])

    def place(self) -> None:
        """Create the record of its first instance if it does not exist yet."""

    def host_array(self) -> Array:
        """Return the host array that is its primary instance."""
        array = self.instances[0].buffer.array
        assert array is not None
        return array


class ArgumentRecord(ValueRecord):
    """A host array of one call, to which no handle refers.

    Its first instance, outside the spaces, gets a record only when a plan is made or changes it:
    see `place`. It has others only after a run failed and left copies.
    """

    __slots__ = ("array", "port")

    is_array = True

    def __init__(self, device: TensorAccess, array: Array, port: InputPort) -> None:
        # As `ValueRecord.__init__`, whose call would double the cost.
        self.device, self.array, self.port, self.status = device, array, port, READY
        self.desc, self.desc_key, self.by = port.host_desc, port.host_key, port.origin
        self.handles = self.last_used = self.version = 0
        self.number = self.batch = -1
        self.retain = self.consumed = self.is_exposed = False
        self.slots = self.comparison = None
        self.instances = ()

    def place(self) -> None:
        """Create the record of its first instance."""
        if self.status is READY and not self.instances:
            key, desc = self.desc_key, self.desc
            buffer = BufferRecord(Space.HOST, None, 0, desc, key, self.by)
            buffer.array = self.array
            buffer.users.append(self)
            self.instances = (InstanceRecord(buffer, 0, desc, key),)

    def host_array(self) -> Array:
        """Return the array."""
        return self.array


@dataclass(frozen=True, slots=True)
class Reader:
    """A loaded program that reads a constant: the key of its transformation, and its name."""

    key: int
    name: str

    def constant(self, name: str) -> str:
        """Return the display name of one of its constants."""
        return f"constant {name!r} of {self.name!r}"


class ConstantRecord(ValueRecord):
    """A constant of loaded programs, which keep it alive.

    Its primary instance is in a file; while memory is free it also has a copy in the space for
    which it was compiled. Each program reads the bytes of its own file.
    """

    __slots__ = ("address", "alike", "is_filled", "mark", "readers")

    is_constant = True

    def __init__(
        self, device: TensorAccess, desc: TensorDesc, desc_key: int, home: BufferRecord,
        alike: AlikeConstants, mark: Mark,
    ) -> None:  # fmt: skip
        """Initialize.

        Args:
            device: The device.
            desc: Layout for which it was compiled.
            desc_key: Key of that without address.
            home: The bytes of the file.
            alike: The table of constants with marks of this kind.
            mark: Type, layout, and a cheap discriminator of contents.
        """
        ValueRecord.__init__(self, device, desc.without_address(), desc_key, home.origin)
        #: The address that the program requires, or None.
        self.address = desc.layout.address
        self.alike, self.mark = alike, mark
        #: Whether its copy has its bytes: an executor that reads the file does not need them.
        self.is_filled = False
        #: The programs that read it, with the keys, bytes and names of their constants.
        self.readers: dict[Reader, list[tuple[object, Array, str]]] = {}
        self.handles, self.status = 1, READY
        home.users.append(self)
        self.instances = (InstanceRecord(home, 0, home.desc, home.desc_key),)

    @property
    def placed(self) -> InstanceRecord | None:
        """Its copy in the layout for which it was compiled, or None."""
        for instance in self.instances[1:]:
            if instance.desc_key == self.desc_key and self.address in (
                None, instance.buffer.address
            ):  # fmt: skip
                return instance
        return None

    @property
    def is_placed(self) -> bool:
        """Whether it has a copy in the layout for which it was compiled."""
        return self.placed is not None

    def take_name(self) -> None:
        """Name it after the first program that reads it."""
        first, held = next(iter(self.readers.items()))
        self.by = first.constant(held[0][2])
        for instance in self.instances:
            instance.buffer.origin = self.by


# Output slots: preallocated buffers for the results of an executable.
#
# The buffer of an unreferenced result returns to its output slots, not to the allocator, so the
# next run of the same work reuses it. Idle output slots count as free memory: they are revoked
# before anything is relocated, evicted or refused (`Records.revoke`).


class OutputSlots:
    """One set of result buffers. `instances`: for each result its instances.

    `held`: number of its buffers with live results of its own; it is idle at 0. Slots of one holder
    may share buffers: if a caller keeps one result of a run, only that one's buffer differs in the
    next. A shared buffer belongs to the slots that used it last (`buffer.slots`); the others check
    with `is_blocked` when they are next.
    """

    __slots__ = (
        "again", "bindings", "buffers", "claim", "held", "holder", "instances", "is_lasting",
        "is_single", "last_run", "shares", "values",
    )  # fmt: skip

    def __init__(
        self,
        holder: Executable,
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
        self.bindings: dict[Places, Binding] = {}

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
            buffer.slots = self
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
            value.slots = self if self.is_lasting and not touched else None
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
            buffer.slots = self
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
            value.slots = self

    def release_buffer(self) -> None:
        """Handle a buffer that lost its last user."""
        self.values = self.again = None
        self.held -= 1
        if not self.held:
            self.holder.idle.append(self)

    def dispose(self) -> None:
        """Dispose of the slots: live results keep their buffers; the caller frees the unused
        ones."""
        if self in self.holder.slot_sets:
            self.holder.slot_sets.remove(self)
        self._leave_idle()
        self.values = self.again = self.claim = None
        for buffer in self.buffers:
            if buffer.slots is self:
                heirs = buffer.slot_sets if self.shares else ()
                buffer.slots = heirs[-1] if heirs else None
                if heirs and not buffer.is_spare:
                    heirs[-1]._leave_idle()
                    heirs[-1].held += 1
        for binding in self.bindings.values():
            binding.drop()
        self.bindings.clear()
