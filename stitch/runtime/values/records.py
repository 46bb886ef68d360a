"""The memory records of a device: buffers and values, how a plan changes them, which constants are
stored once for several programs, and how the records are rebuilt after an interrupt.

Some records are authoritative and change in one step each: the address of a buffer (its key in the
table), the instances of a value, the list of output slots, the queue. The others (users of a
buffer, idle slots, allocators) are derived from these by `Records.rebuild`.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.memory import LENT_ADDRESSES, Allocator, FreeGaps, SpaceMemory
from stitch.planner import Buffer
from stitch.program import Array, Space, TensorDesc, ValueType, dense_bytes, host_layout, same_bytes
from stitch.runtime.values.plan_effects import Effects, InstanceRef, Place
from stitch.runtime.values.state import (
    AlikeConstants,
    BufferRecord,
    ConstantRecord,
    InstanceRecord,
    OutputSlots,
    Reader,
    Status,
    ValueRecord,
)

if TYPE_CHECKING:
    from stitch.runtime.tensor_access import TensorAccess


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """Buffers (address, size, producer) and holes of a space, in bytes per bank.

    Spare output slots count as free; `leased_nbytes` is their part of the free memory.
    """

    buffers: tuple[tuple[int, int, str], ...]
    holes: tuple[tuple[int, int], ...]
    used_nbytes: int
    free_nbytes: int
    largest_hole: int
    leased_nbytes: int


#: Limits for allocating several output slots at once: count, fraction of free memory (an eighth
#: blocked plans in nearly full spaces), and bytes.
AT_ONCE = 64
PART_AT_ONCE = 256
AT_ONCE_NBYTES = 1 << 20
#: By space: disjoint (address, end) in order.
Ranges = Mapping[Space, Sequence[tuple[int, int]]]
#: Unique over all devices: a tensor of another device never matches.
_next_desc_key = itertools.count().__next__


class Records:
    """The buffers of a device by address, and the values in them."""

    def __init__(self, spaces: dict[Space, SpaceMemory]) -> None:
        self._spaces = spaces
        #: With spare output slots counted as allocated.
        self.all_allocators: dict[Space, Allocator] = {s: m.allocator for s, m in spaces.items()}
        #: The live buffers by address, including spare output slots.
        self.buffers: dict[Place, BufferRecord] = {}
        self.is_debug = any(memory.debug for memory in spaces.values())
        self._desc_keys: dict[TensorDesc, int] = {}
        #: Constants of loaded programs, by address of their bytes and by layout.
        self.constants: dict[object, ConstantRecord] = {}
        #: The same by their marks: CRC-32, or first bytes.
        self.constants_by_crc32: AlikeConstants = {}
        self.constants_by_head: AlikeConstants = {}
        #: The output slots of all executables, in order of creation.
        self.slot_sets: dict[int, OutputSlots] = {}
        #: Number of output slots whose memory was taken for something else.
        self.revocations = 0
        #: Counts allocations and releases: while it is unchanged, free ranges stay free.
        self.generation = 0
        #: The most bytes per bank in use by space, as `note_peaks` saw them.
        self.peaks: Counter[Space] = Counter()
        #: Counts changes of the constants' addresses.
        self.constants_changed = 0
        #: Whether no change is incomplete. A change of several steps clears it first; after an
        #: exception in between, the next use of the device calls `rebuild`.
        self.is_consistent = True
        #: Completes a change that has begun; called by the next use of the device. Idempotent.
        self.pending_recovery: Callable[[], object] | None = None

    @property
    def allocators(self) -> dict[Space, Allocator]:
        """The allocators with spare output slots counted as free memory."""
        spare = list(self._spare_buffers())
        if not spare:
            return self.all_allocators
        seen = {space: allocator.clone() for space, allocator in self.all_allocators.items()}
        for buffer in spare:
            assert buffer.address is not None
            seen[buffer.space].free(buffer.address)
        return seen

    def is_free(self, space: Space, address: int, size_per_bank: int) -> bool:
        """Return whether a range is unallocated, also by output slots."""
        return self.all_allocators[space].is_free(address, size_per_bank)

    # -- output slots ------------------------------------------------------------------------------

    def _spare_buffers(self) -> Iterator[BufferRecord]:
        """Yield the unused buffers of output slots, each once, those of the newest slots first."""
        seen = set()
        for slots in reversed(self.slot_sets.values()):
            for buffer in slots.buffers if slots.held < len(slots.buffers) else ():
                if buffer.is_spare and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer

    def spare_slots(self) -> list[OutputSlots]:
        """Return the output slots with unused buffers, least recently run first."""
        spare = [le for le in self.slot_sets.values() if any(b.is_spare for b in le.buffers)]
        spare.sort(key=lambda slots: slots.last_run)
        return spare

    def use(self) -> dict[Space, SpaceUse]:
        """Return the current contents of each space."""
        origins = {place: _said_of(buffer) for place, buffer in self.buffers.items()}
        spare: Counter[Space] = Counter()
        for buffer in self._spare_buffers():
            spare[buffer.space] += buffer.size_per_bank
        used = {}
        for space, allocator in self.allocators.items():
            buffers = [(at, size, origins.get((space, at), "")) for at, size in allocator.buffers()]
            used[space] = SpaceUse(
                tuple(buffers), tuple(allocator.holes()), allocator.used_nbytes,
                allocator.free_nbytes, allocator.largest_hole, spare[space],
            )  # fmt: skip
        return used

    def note_peaks(self, rise: Mapping[Space, int]) -> None:
        """Raise the peaks to the memory in use and what the next plan needs beyond that."""
        for space, allocator in self.all_allocators.items():
            excess = allocator.used_nbytes + rise.get(space, 0) - self.peaks[space]
            spare = self._spare_buffers() if excess > 0 else iter(())
            while excess > 0 and (buffer := next(spare, None)) is not None:
                excess -= buffer.size_per_bank if buffer.space is space else 0
            self.peaks[space] += max(0, excess)

    def forget_peaks(self) -> None:
        """Begin a new period: each executable notes the peaks of its next run."""
        self.peaks.clear()
        self.generation += 1

    def allocate_slots(
        self, buffers: Sequence[tuple[Buffer, int]], places: Iterable[Sequence[int]]
    ) -> list[list[BufferRecord]]:
        """Allocate buffers at the given addresses, one set per entry of `places`.

        Each buffer comes with the key of its descriptor. The records are inconsistent until
        `begin_slots`.
        """
        self.is_consistent = False
        reserved = []
        for addresses in places:
            records = []
            for (buffer, key), address in zip(buffers, addresses, strict=True):
                size = buffer.size_per_bank
                self.all_allocators[buffer.space].alloc_at(address, size)
                records.append(self._add(buffer.desc, key, size, address, buffer.origin))
            reserved.append(records)
        return reserved

    def begin_slots(self, slot_sets: Sequence[OutputSlots]) -> None:
        """Register output slots and assign their buffers, new or shared, to them."""
        for slots in slot_sets:
            for buffer in slots.buffers:
                first = buffer.slots
                if first is None:
                    buffer.slots = slots
                else:
                    first.shares = slots.shares = True
        holder, by_key = slot_sets[0].holder, {id(slots): slots for slots in slot_sets}
        # Reversed: the first is taken next.
        idle = slot_sets[::-1]
        # Atomic under the GIL: no call in between.
        self.slot_sets |= by_key
        holder.slot_sets += slot_sets
        holder.idle += idle
        self.is_consistent = True

    def end_slots(self, slots: OutputSlots, *, with_bytes: bool = True) -> None:
        """Dispose of output slots: live results keep their buffers, the others are freed.

        `with_bytes`: in debug mode, poison freed memory (False if a run has just written there).
        """
        whole, self.is_consistent = self.is_consistent, False
        self.slot_sets.pop(id(slots), None)
        spare = [buffer for buffer in slots.buffers if buffer.is_spare]
        slots.dispose()
        for buffer in spare:
            if buffer.slots is None:
                self.free(buffer, with_bytes=with_bytes)
        self.is_consistent = whole

    def end_slots_at(self, buffers: Iterable[BufferRecord], *, with_bytes: bool = True) -> None:
        """Dispose of all output slots that contain one of these buffers."""
        for buffer in buffers:
            for slots in buffer.slot_sets:
                self.end_slots(slots, with_bytes=with_bytes)

    def revoke(self, slot_sets: Sequence[OutputSlots]) -> None:
        """Dispose of output slots because their memory is needed."""
        for slots in slot_sets:
            self.revocations += 1
            self.end_slots(slots)

    def at_once(self, buffers: Sequence[Buffer]) -> int:
        """Return how many sets of such buffers may be allocated in advance; at least one."""
        sizes: Counter[Space] = Counter()
        for buffer in buffers:
            sizes[buffer.space] += max(1, buffer.size_per_bank)
        most = AT_ONCE
        for space, size in sizes.items():
            memory = self._spaces[space]
            free, banks = memory.allocator.free_nbytes, memory.shape.banks
            most = min(most, free // PART_AT_ONCE // size, AT_ONCE_NBYTES // (size * banks))
        return max(1, most)

    def outside_of(
        self, ranges: Ranges, buffers: Sequence[Buffer], count: int
    ) -> list[tuple[int, ...]]:
        """Return free addresses outside `ranges` for up to `count` sets of buffers; allocates
        nothing."""
        addresses: list[list[int]] = []
        gaps: dict[Space, FreeGaps] = {}
        most = count
        for buffer in buffers:
            space = buffer.space
            if space not in gaps:
                gaps[space] = self.all_allocators[space].gaps(ranges.get(space, ()))
            addresses.append(gaps[space].take(buffer.size_per_bank, most))
            most = len(addresses[-1])
        places: list[tuple[int, ...]] = list(zip(*addresses, strict=False)) if buffers else [()]
        if not places and count > 1:
            # Many copies of the first buffer may leave no space for the others: try one set.
            return self.outside_of(ranges, buffers, 1)
        return places

    def desc_key(self, desc: TensorDesc) -> int:
        """Return the key of a descriptor: equal descriptors, equal keys; unique to this device."""
        key = self._desc_keys.get(desc)
        # Threads may race here: the first key stays.
        return self._desc_keys.setdefault(desc, _next_desc_key()) if key is None else key

    # -- making and freeing ----------------------------------------------------------------------

    def reserve(
        self, desc: TensorDesc, size: int, address: int | None, origin: str
    ) -> BufferRecord:
        """Allocate a buffer outside any plan; the records are inconsistent until a value is
        attached.

        Raises:
            OutOfMemoryError: No free range is large enough.
            LayoutError: The given address is invalid or allocated.
        """
        while True:
            whole, self.is_consistent = self.is_consistent, False
            try:
                address = _taken(self.all_allocators[desc.layout.space], size, address)
                break
            except (LayoutError, OutOfMemoryError) as error:
                self.is_consistent = whole  # Nothing was allocated.
                spare = self.spare_slots()
                if not spare or isinstance(error, LayoutError):
                    raise
            # Take half of the spare output slots at a time, least recently run first.
            self.revoke(spare[: max(1, len(spare) // 2)])
        return self._add(desc, self.desc_key(desc), size, address, origin)

    def check_fits_alone(self, blocks: Iterable[tuple[Space, int, int | None]]) -> None:
        """Raise as `reserve` does if blocks (space, size, address) do not fit in empty spaces."""
        empty = {s: a.emptied() for s, a in self.all_allocators.items()}
        for space, size, address in blocks:
            _taken(empty[space], size, address)

    def _add(
        self, desc: TensorDesc, key: int, size: int, address: int, origin: str
    ) -> BufferRecord:
        space = desc.layout.space
        buffer = BufferRecord(space, address, size, desc, key, origin)
        self.buffers[space, address] = buffer
        self.generation += 1
        return buffer

    def outside(self, desc: TensorDesc, array: Array, origin: str) -> BufferRecord:
        """Return a buffer for a host array outside the spaces."""
        buffer = BufferRecord(Space.HOST, None, 0, desc, self.desc_key(desc), origin)
        buffer.array = array
        return buffer

    def attach(self, value: ValueRecord, buffer: BufferRecord, offset: int) -> None:
        """Make a new value ready in a buffer, at an offset; for a constant, as a copy of its
        file."""
        users = [value]
        instance = InstanceRecord(buffer, offset, value.desc, value.desc_key)
        instances = (*value.instances, instance)
        for user in buffer.users:
            user.slots = None
        if buffer.users:
            self.generation += 1
        value.status = Status.READY
        # Atomic under the GIL: no call in between.
        buffer.users += users
        value.instances = instances

    def release(self, value: ValueRecord, *, kept: int = 0) -> None:
        """Drop a value's instances after the first `kept`; release buffers that become unused."""
        value.slots = None
        whole, self.is_consistent = self.is_consistent, False
        dropped, value.instances = value.instances[kept:], value.instances[:kept]
        for instance in dropped:
            buffer = instance.buffer
            if value in buffer.users:
                buffer.users.remove(value)
                if buffer.is_unused:
                    self.unused(buffer)
                elif not buffer.users:
                    self._take_back(buffer)
        self.is_consistent = whole

    def _take_back(self, buffer: BufferRecord) -> None:
        """Forget lent bytes that no value reads."""
        if buffer.address is not None and buffer.address >= LENT_ADDRESSES:
            self._spaces[buffer.space].take_back(buffer.address)

    def forget_copies(self, value: ValueRecord) -> None:
        """Drop all but a value's primary instance, whose bytes may have changed."""
        self.generation += 1
        self.release(value, kept=1)

    def unused(self, buffer: BufferRecord) -> None:
        """Return an unused buffer to its output slots, or free it."""
        slots = buffer.slots
        if slots is None:
            self.free(buffer)
            return
        if self.is_debug:
            assert buffer.address is not None
            self._spaces[buffer.space].release(buffer.address, buffer.size_per_bank)
        slots.release_buffer()

    def free(self, buffer: BufferRecord, *, with_bytes: bool = True) -> None:
        """Free a buffer; no effect if it is free already."""
        if buffer.address is None:
            buffer.array = None
            return
        place = (buffer.space, buffer.address)
        if self.buffers.get(place) is not buffer:
            return
        whole, self.is_consistent = self.is_consistent, False
        del self.buffers[place]
        self.generation += 1
        self.all_allocators[buffer.space].free(buffer.address)
        if with_bytes:
            self._spaces[buffer.space].release(buffer.address, buffer.size_per_bank)
        self.is_consistent = whole

    def free_unused(self, places: Iterable[Place]) -> None:
        """Free the unused buffers at these addresses (their task did not run)."""
        for place in places:
            buffer = self.buffers.get(place)
            if buffer is not None and buffer.is_unused and buffer.slots is None:
                self.free(buffer)

    # -- plans -----------------------------------------------------------------------------------

    def apply(
        self,
        effects: Effects,
        value_of: Callable[[int], ValueRecord],
        note: Callable[[ValueRecord], None],
        then: Callable[[], object] | None = None,
    ) -> None:
        """Update the records after a plan has run.

        Args:
            effects: The changes.
            value_of: Returns the record of a value's number.
            note: Called for each value that is gone; may be called twice.
            then: Called last, atomically with the rest; may be called twice.
        """
        whole, self.is_consistent = self.is_consistent, False
        left = {place: self.buffers[place] for place in effects.freed}
        left |= {place: self.buffers[place] for place, _ in effects.moved}
        # Values in these buffers stay where the plan has moved them.
        self.end_slots_at(left.values())
        new = [
            BufferRecord(b.space, b.address, b.size_per_bank, b.desc, key, b.origin)
            for b, key in effects.made
        ]
        moved = [(left[place], address) for place, address in effects.moved]
        come = {(left[place].space, address): left[place] for place, address in effects.moved}
        come |= dict(zip(effects.places, new, strict=True))
        present = dict(self.buffers)
        for place in left:
            del present[place]
        present |= come
        change = _Change(present, moved)
        for number, refs in effects.changed:
            change.place(value_of(number), refs, new, self.buffers)
        gone = [value_of(number) for number in effects.gone]
        for value in gone:
            change.place(value, (), new, self.buffers)
        # From here on the change is completed, by the recovery if interrupted.
        self.pending_recovery = commit = partial(self._commit, change, gone, note, then)
        commit()
        for space, address in left:
            self.all_allocators[space].free(address)
        for (space, address), buffer in come.items():
            self.all_allocators[space].alloc_at(address, buffer.size_per_bank)
        for space, address in () if self.is_debug else effects.freed:
            self._spaces[space].release(address, left[space, address].size_per_bank)
        self.is_consistent = whole

    def _commit(
        self, change: _Change, gone: Sequence[ValueRecord], note: Callable[[ValueRecord], None],
        then: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        self.generation += 1
        self.constants_changed += change.has_constants
        self.buffers = change.present
        for buffer in change.commit():
            self._take_back(buffer)
        for value in gone:
            note(value)
        if then is not None:
            then()
        self.pending_recovery = None

    def hand_on(self, entry: ValueRecord, result: ValueRecord, ref: InstanceRef) -> None:
        """Move a donated entry's buffer to the result that has overwritten it."""
        (instance,) = entry.instances
        if instance.desc_key != ref.desc_key:
            instance = InstanceRecord(instance.buffer, 0, ref.desc, ref.desc_key)
        instance.buffer.origin = ref.origin
        instance.buffer.users = [result]
        entry.instances, result.instances = (), (instance,)
        entry.slots = result.slots = None
        result.is_exposed |= instance.buffer.shared_pins > 0
        result.status = Status.READY

    # -- after an interrupt ----------------------------------------------------------------------

    def rebuild(self, queued: Iterable[ValueRecord]) -> list[ValueRecord]:
        """Rebuild all derived records; returns the values that were dropped as unreferenced.

        `queued` are the values of the queue, which are kept. The caller sets `is_consistent`.
        """
        in_queue = {id(value) for value in queued}
        present = self.buffers
        gone: dict[int, ValueRecord] = {}
        for place, buffer in present.items():
            _, buffer.address = place
            users: list[ValueRecord] = []
            for value in dict.fromkeys(buffer.users):
                if value.status is Status.READY and (value.kept or id(value) in in_queue):
                    value.slots = None
                    users += [value for i in value.instances if i.buffer is buffer]
                elif value.status is Status.READY:
                    gone[id(value)] = value
            buffer.users = users
        for value in gone.values():
            # Also in buffers of host arrays, which have no address.
            for instance in value.instances:
                instance.buffer.users = [u for u in instance.buffer.users if u is not value]
            value.instances, value.status = (), Status.FREED
            value.by = "the last handle was dropped"
        self._rebuild_slots()
        live = {p: b for p, b in present.items() if b.slots is not None or not b.is_unused}
        self.buffers = live
        for space, allocator in self.all_allocators.items():
            allocator.become((at, b.size_per_bank) for (s, at), b in live.items() if s is space)
        for (space, address), buffer in present.items():
            if live.get((space, address)) is not buffer:
                self._spaces[space].release(address, buffer.size_per_bank)
        self.generation += 1
        return list(gone.values())

    def _rebuild_slots(self) -> None:
        """Rebuild the owners of buffers and the idle output slots from the list of slots."""
        buffers, slot_sets = self.buffers.values(), list(self.slot_sets.values())
        known = [slots for buffer in buffers for slots in buffer.slot_sets]
        ended = [slots for slots in known if id(slots) not in self.slot_sets]
        for slots in ended:
            slots.dispose()
        owners: dict[int, list[OutputSlots]] = {id(buffer): [] for buffer in buffers}
        for slots in slot_sets:
            slots.values = slots.again = None
            for buffer in slots.buffers:
                owners[id(buffer)].append(slots)
        for buffer in buffers:
            sharing = owners[id(buffer)]
            buffer.slots = sharing[-1] if sharing else None
            for slots in sharing if len(sharing) > 1 else ():
                slots.shares = True
        for slots in slot_sets:
            slots.held = sum(b.slots is slots and not b.is_spare for b in slots.buffers)
        for holder in {id(slots.holder): slots.holder for slots in (*slot_sets, *ended)}.values():
            mine = [slots for slots in slot_sets if slots.holder is holder]
            idle = sorted((slots for slots in mine if not slots.held), key=lambda le: le.last_run)
            holder.slot_sets, holder.idle = mine, idle


def _said_of(buffer: BufferRecord) -> str:
    """Return the name of a buffer in memory reports."""
    user = buffer.users[0] if buffer.users else None
    readers = list(user.readers) if isinstance(user, ConstantRecord) else []
    others = ", ".join(repr(reader.name) for reader in readers[1:])
    return f"{buffer.origin}, shared by {others}" if others else buffer.origin


def _taken(allocator: Allocator, size: int, address: int | None) -> int:
    if address is None:
        return allocator.alloc(size)
    allocator.alloc_at(address, size)
    return address


class _Change:
    """The new state of buffers and values after a plan, built aside; `commit` is idempotent."""

    def __init__(
        self, present: dict[Place, BufferRecord], moved: Sequence[tuple[BufferRecord, int]]
    ) -> None:
        self.present, self.moved = present, moved
        self._users: dict[BufferRecord, list[ValueRecord]] = {}
        self._origins: list[tuple[BufferRecord, str]] = []
        self._values: list[tuple[ValueRecord, list[InstanceRecord]]] = []
        #: Whether it changes addresses of constants.
        self.has_constants = any(buffer.holds_constant for buffer, _ in moved)

    def _users_of(self, buffer: BufferRecord) -> list[ValueRecord]:
        return self._users.setdefault(buffer, [*buffer.users])

    def place(
        self, value: ValueRecord, refs: Sequence[InstanceRef], new: Sequence[BufferRecord],
        before: Mapping[Place, BufferRecord],
    ) -> None:  # fmt: skip
        """Set the instances of a value: existing ones, in new buffers, or in resident buffers."""
        instances = []
        for ref in refs:
            if ref.kept >= 0:
                instances.append(value.instances[ref.kept])
                continue
            buffer = new[ref.made] if ref.place is None else before[ref.place]
            # A constant keeps its name, independent of the task that fetched it.
            self._origins.append((buffer, value.by if value.is_constant else ref.origin))
            self._users_of(buffer).append(value)
            instances.append(InstanceRecord(buffer, ref.offset_nbytes, ref.desc, ref.desc_key))
        for instance in value.instances:
            if instance not in instances:
                self._users_of(instance.buffer).remove(value)
        self._values.append((value, instances))
        self.has_constants |= value.is_constant

    def commit(self) -> Iterable[BufferRecord]:
        """Apply the change; return the buffers without values."""
        for buffer, address in self.moved:
            buffer.address = address
        for buffer, users in self._users.items():
            buffer.users = users
        for buffer, origin in self._origins:
            buffer.origin = origin
        for value, instances in self._values:
            value.instances, value.slots = instances, None
            value.is_exposed |= any(i.buffer.shared_pins for i in instances)
            if instances and value.status is Status.PENDING:
                value.status = Status.READY
        return [buffer for buffer, users in self._users.items() if not users]


class Lying(NamedTuple):
    """A buffer in a space; address and size are in bytes per bank, `origin` names its producer."""

    space: Space
    address: int
    size: int
    origin: str

    @property
    def place(self) -> tuple[Space, int]:
        """Its space and address."""
        return self.space, self.address


@final
class SpaceWatch:
    """Reports the buffers in the spaces, without spare output slots.

    Dropped tensors are included until the next run releases them.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._generation = -1
        self._buffers: list[tuple[Lying, BufferRecord]] = []
        self._last: tuple[Lying, ...] = ()

    def now(self) -> tuple[Lying, ...]:
        """Return the current buffers; takes no lock and runs nothing."""
        records = self._records
        if records.generation != self._generation:
            # Read the generation first: another thread may change the records meanwhile.
            self._generation = records.generation
            self._buffers = [
                (Lying(b.space, b.address, b.size_per_bank, b.origin), b)
                for b in list(records.buffers.values())
                if b.address is not None and b.address < LENT_ADDRESSES
            ]
        # `not b.is_spare`, inlined: half the time.
        lying = tuple([
            each for each, b in self._buffers if b.slots is None or b.users or b.pins
        ])  # fmt: skip
        if lying != self._last:
            self._last = lying
        return self._last


#: Bytes that discriminate arrays without a file.
_HEAD_NBYTES = 256


def hold_constant(
    device: TensorAccess, kind: ValueType, desc: TensorDesc, data: Array, crc32: int | None,
    name: str, reader: Reader, kept: list[ConstantRecord],
) -> None:  # fmt: skip
    """Append a constant's record to `kept`: a new one, or another program's with equal bytes.

    `reader` holds it until `dispose`, also if this call is interrupted. `crc32`: the checksum of
    its bytes in the file, if known.
    """
    records, form = device.records, (kind, desc)
    key = ((data.__array_interface__["data"][0], data.strides), *form)
    record = records.constants.get(key)
    by_crc32, by_head = records.constants_by_crc32, records.constants_by_head
    if record is None:
        alike: list[ConstantRecord] = []
        if by_crc32:
            total = zlib.crc32(dense_bytes(data).data) if crc32 is None else crc32
            alike += by_crc32.get((form, total), ())
        if by_head:
            alike += by_head.get((form, _head(data)), ())
        record = next((other for other in alike if same_bytes(other.host_array(), data)), None)
    if record is None:
        home = TensorDesc(desc.shape, host_layout(kind.data_type))
        file = records.outside(home, data, reader.constant(name))
        number = records.desc_key(desc.without_address())
        table = by_head if crc32 is None else by_crc32
        mark = form, _head(data) if crc32 is None else crc32
        record = ConstantRecord(device, desc, number, file, table, mark)
    kept.append(record)
    record.readers.setdefault(reader, []).append((key, data, name))
    records.constants[key] = record
    record.alike.setdefault(record.mark, {})[record] = None


def _head(data: Array) -> bytes:
    return dense_bytes(data)[:_HEAD_NBYTES].tobytes()


def dispose(records: Records, constants: Iterable[ConstantRecord], reader: Reader) -> None:
    """Drop the constants of an unloaded program that no other program reads. Idempotent."""
    for record in constants:
        # Its file may be unmapped, and other data may then have the same address.
        others = [held for who, held in record.readers.items() if who != reader]
        still = {key for held in others for key, _, _ in held}
        for key, _, _ in record.readers.get(reader, ()):
            if key not in still and records.constants.get(key) is record:
                del records.constants[key]
        record.readers.pop(reader, None)
        if record.readers:
            record.take_name()
            continue
        alike = record.alike.get(record.mark, {})
        alike.pop(record, None)
        if not alike:
            record.alike.pop(record.mark, None)
        records.release(record)
