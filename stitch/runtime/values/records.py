"""The records of a device: which buffers and values there are, and how a plan changes them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.memory import Allocator, FreeGaps, SpaceMemory
from stitch.planner import Buffer
from stitch.program import Array, Space, TensorDesc
from stitch.runtime.values.effects import Effects, InstanceRef, Place
from stitch.runtime.values.leases import AnyLease
from stitch.runtime.values.space_use import SpaceUse
from stitch.runtime.values.state import (
    BufferRecord,
    ConstantRecord,
    InstanceRecord,
    Mark,
    PlaceOwner,
    Status,
    ValueRecord,
)

#: Of places that are taken at once: how many, of what part of free memory (of an eighth, plans near
#: a full space found their way barred by places that nobody used yet), and of how many bytes.
AT_ONCE = 64
PART_AT_ONCE = 256
AT_ONCE_NBYTES = 1 << 20
#: By space: (address, end), in order and apart.
Ranges = Mapping[Space, Sequence[tuple[int, int]]]
#: Over all devices: a tensor of another device never passes for one of this.
_next_desc_key = itertools.count().__next__


class Records:
    """Buffers by place, and the values that lie in them."""

    def __init__(self, spaces: dict[Space, SpaceMemory]) -> None:
        self._spaces = spaces
        self._allocators: dict[Space, Allocator] = {s: m.allocator for s, m in spaces.items()}
        self._buffers: dict[Place, BufferRecord] = {}
        self.is_debug = any(memory.debug for memory in spaces.values())
        self._desc_keys: dict[TensorDesc, int] = {}
        #: Those of loaded programs, by where bytes of theirs lie, and their form.
        self.constants: dict[object, ConstantRecord] = {}
        #: The same by their form, by what kind of mark they have, and by that.
        self.constants_by_form: dict[object, dict[str, dict[Mark, dict[ConstantRecord, None]]]] = {}
        #: Those of all recordings, in the order in which they were made.
        self.leases: dict[int, AnyLease] = {}
        #: How many leases had to give their memory to somebody else.
        self.revocations = 0
        #: Counts what the allocators were told: while it stands still, what was free is free.
        self.generation = 0
        #: Counts the changes in which constants came, left or moved.
        self.constants_changed = 0
        #: Whether no change is half done. A change of several steps clears it first; after an
        #: exception in between, the next use of the device calls `rebuild_bookkeeping`.
        self.is_consistent = True
        #: What has begun and will be done, by whoever is next: once more does no harm.
        self.pending_recovery: Callable[[], object] | None = None

    @property
    def allocators(self) -> dict[Space, Allocator]:
        """The allocators as if what leases have to spare were free: what anybody may have."""
        spare = self._spare_buffers()
        if not spare:
            return self._allocators
        seen = {space: allocator.clone() for space, allocator in self._allocators.items()}
        for buffer in spare:
            assert buffer.address is not None
            seen[buffer.space].free(buffer.address)
        return seen

    @property
    def buffers(self) -> dict[Place, BufferRecord]:
        """The live buffers by place, without what leases have to spare."""
        return {place: b for place, b in self._buffers.items() if not b.is_spare}

    def all_buffers(self) -> dict[Place, BufferRecord]:
        """The live buffers by place, those among them that leases have to spare."""
        return self._buffers

    def all_allocators(self) -> Mapping[Space, Allocator]:
        """The allocators as they are: what leases have to spare is taken."""
        return self._allocators

    def is_free(self, space: Space, address: int, size_per_bank: int) -> bool:
        """Whether nothing is allocated there, no lease either."""
        return self._allocators[space].is_free(address, size_per_bank)

    # -- leases ----------------------------------------------------------------------------------

    def _spare_buffers(self) -> list[BufferRecord]:
        """What leases have to spare, each buffer once."""
        buffers = {id(b): b for lease in self.leases.values() for b in lease.buffers if b.is_spare}
        return list(buffers.values())

    def spare_leases(self) -> list[AnyLease]:
        """The leases with something to spare, least recently run first."""
        spare = [le for le in self.leases.values() if any(b.is_spare for b in le.buffers)]
        spare.sort(key=lambda lease: lease.last_run)
        return spare

    def spare_bytes(self, space: Space) -> int:
        """What leases have to spare in a space, in bytes per bank."""
        return sum(b.size_per_bank for b in self._spare_buffers() if b.space is space)

    def use(self) -> dict[Space, SpaceUse]:
        """What each space holds now."""
        origins = {place: _said_of(buffer) for place, buffer in self._buffers.items()}
        used = {}
        for space, allocator in self.allocators.items():
            buffers = [(at, size, origins.get((space, at), "")) for at, size in allocator.buffers()]
            used[space] = SpaceUse(
                tuple(buffers), tuple(allocator.holes()), allocator.used_nbytes,
                allocator.free_nbytes, allocator.largest_hole, self.spare_bytes(space),
            )  # fmt: skip
        return used

    def lease(
        self, buffers: Sequence[tuple[Buffer, int]], places: Iterable[Sequence[int]]
    ) -> list[list[BufferRecord]]:
        """Take free places for buffers, which come with the keys of their descriptors, as often as
        there are addresses for them.

        Until they are leases' (`begin_leases`) the records are not whole.
        """
        self.is_consistent = False
        leased = []
        for addresses in places:
            records = []
            for (buffer, key), address in zip(buffers, addresses, strict=True):
                size = buffer.size_per_bank
                self._allocators[buffer.space].alloc_at(address, size)
                records.append(self._add(buffer.desc, key, size, address, buffer.origin))
            leased.append(records)
        return leased

    def begin_leases(self, leases: Sequence[AnyLease]) -> None:
        """Their buffers, which come from `lease` or are another's too, are the holder's own."""
        for lease in leases:
            for buffer in lease.buffers:
                first = buffer.lease
                if first is None:
                    buffer.lease = lease
                else:
                    buffer.sharers |= {first: None, lease: None}
                    first.shares = lease.shares = True
        holder, by_key = leases[0].holder, {id(lease): lease for lease in leases}
        # The first is the next to be taken.
        idle = leases[::-1]
        # Atomic under the GIL: no call in between.
        self.leases |= by_key
        holder.leases += leases
        holder.idle += idle
        self.is_consistent = True

    def end_lease(self, lease: PlaceOwner, *, with_bytes: bool = True) -> None:
        """What lies in its places stays there as it would in any others; the rest is free.

        `with_bytes`: debug mode poisons what was spare. Else a run has just written there.
        """
        whole, self.is_consistent = self.is_consistent, False
        self.leases.pop(id(lease), None)
        spare = [buffer for buffer in lease.buffers if buffer.is_spare]
        lease.dispose()
        for buffer in spare:
            if buffer.lease is None:
                self.free(buffer, with_bytes=with_bytes)
        self.is_consistent = whole

    def end_leases_at(self, buffers: Iterable[BufferRecord], *, with_bytes: bool = True) -> None:
        """No lease has any of these as its place any more."""
        for buffer in buffers:
            for lease in buffer.leases:
                self.end_lease(lease, with_bytes=with_bytes)

    def revoke(self, leases: Sequence[AnyLease]) -> None:
        """Somebody needs the memory that leases have to spare."""
        for lease in leases:
            self.revocations += 1
            self.end_lease(lease)

    def at_once(self, buffers: Sequence[Buffer]) -> int:
        """How many sets of such buffers may be taken before there is any use for all of them: a
        small part of what is free, and of the host's memory; one at least."""
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
        """Free addresses for so many sets of buffers, or fewer, outside of ranges. Nothing has
        changed afterwards."""
        addresses: list[list[int]] = []
        gaps: dict[Space, FreeGaps] = {}
        most = count
        for buffer in buffers:
            space = buffer.space
            if space not in gaps:
                gaps[space] = self._allocators[space].gaps(ranges.get(space, ()))
            addresses.append(gaps[space].take(buffer.size_per_bank, most))
            most = len(addresses[-1])
        places: list[tuple[int, ...]] = list(zip(*addresses, strict=False)) if buffers else [()]
        if not places and count > 1:
            # As often as that the first may leave no room for the others.
            return self.outside_of(ranges, buffers, 1)
        return places

    def pinned(self) -> list[BufferRecord]:
        """The live buffers whose bytes somebody outside holds."""
        return [buffer for buffer in self.buffers.values() if buffer.pins]

    def touch(self) -> None:
        """Something that runs rest on has changed."""
        self.generation += 1

    def desc_key(self, desc: TensorDesc) -> int:
        """A number for a descriptor: the same for equal ones, never that of another device."""
        key = self._desc_keys.get(desc)
        # Several threads may ask at once: the first one's stays.
        return self._desc_keys.setdefault(desc, _next_desc_key()) if key is None else key

    # -- making and freeing ----------------------------------------------------------------------

    def reserve(
        self, desc: TensorDesc, size: int, address: int | None, origin: str
    ) -> BufferRecord:
        """A buffer outside any plan; raises `OutOfMemoryError`, or `LayoutError` for an address.

        Until something lies in it the records are not whole.
        """
        while True:
            whole, self.is_consistent = self.is_consistent, False
            try:
                address = _taken(self._allocators[desc.layout.space], size, address)
                break
            except (LayoutError, OutOfMemoryError) as error:
                self.is_consistent = whole  # Nothing was taken.
                spare = self.spare_leases()
                if not spare or isinstance(error, LayoutError):
                    raise
            # The least recently run first, half of them at a time.
            self.revoke(spare[: max(1, len(spare) // 2)])
        return self._add(desc, self.desc_key(desc), size, address, origin)

    def check_fits_alone(self, blocks: Iterable[tuple[Space, int, int | None]]) -> None:
        """Raise as `reserve` does where blocks (space, size, address) do not fit empty spaces."""
        empty = {s: a.emptied() for s, a in self._allocators.items()}
        for space, size, address in blocks:
            _taken(empty[space], size, address)

    def _add(
        self, desc: TensorDesc, key: int, size: int, address: int, origin: str
    ) -> BufferRecord:
        space = desc.layout.space
        buffer = BufferRecord(space, address, size, desc, key, origin)
        self._buffers[space, address] = buffer
        self.generation += 1
        return buffer

    def outside(self, desc: TensorDesc, array: Array, origin: str) -> BufferRecord:
        """A host array outside the spaces, as a buffer."""
        buffer = BufferRecord(Space.HOST, None, 0, desc, self.desc_key(desc), origin)
        buffer.array = array
        return buffer

    def attach(self, value: ValueRecord, buffer: BufferRecord, offset: int) -> None:
        """A value that nobody knows yet lies in a buffer, and is ready; a constant in its file as
        well."""
        users = [value]
        instance = InstanceRecord(buffer, offset, value.desc, value.desc_key)
        instances = (*value.instances, instance)
        for user in buffer.users:
            user.lease = None
        if buffer.users:
            self.generation += 1
        value.status = Status.READY
        # Both at once: nothing can come in between these.
        buffer.users += users
        value.instances = instances

    def release(self, value: ValueRecord) -> None:
        """Forget a value's instances, and let go of the buffers that nobody else uses."""
        value.lease = None
        whole, self.is_consistent = self.is_consistent, False
        instances, value.instances = value.instances, ()
        for instance in instances:
            self.leave(value, instance.buffer)
        self.is_consistent = whole

    def forget_copies(self, value: ValueRecord) -> None:
        """Keep a value's primary instance alone: its bytes have changed, or may have."""
        self.generation += 1
        whole, self.is_consistent = self.is_consistent, False
        copies, value.instances = value.instances[1:], value.instances[:1]
        for instance in copies:
            self.leave(value, instance.buffer)
        self.is_consistent = whole

    def leave(self, value: ValueRecord, buffer: BufferRecord) -> None:
        """A value lies in a buffer no more."""
        users = buffer.users
        if value in users:
            users.remove(value)
            if not users and not buffer.pins:
                self.unused(buffer)

    def unused(self, buffer: BufferRecord) -> None:
        """Nobody uses a buffer any more: its lease has it back, or it is free."""
        lease = buffer.lease
        if lease is None:
            self.free(buffer)
            return
        if self.is_debug:
            assert buffer.address is not None
            self._spaces[buffer.space].release(buffer.address, buffer.size_per_bank)
        lease.release_buffer(buffer)

    def free(self, buffer: BufferRecord, *, with_bytes: bool = True) -> None:
        """Give a buffer's region back; a buffer that is free already stays so."""
        if buffer.address is None:
            buffer.array = None
            return
        place = (buffer.space, buffer.address)
        if self._buffers.get(place) is not buffer:
            return
        whole, self.is_consistent = self.is_consistent, False
        del self._buffers[place]
        self.generation += 1
        self._allocators[buffer.space].free(buffer.address)
        if with_bytes:
            self._spaces[buffer.space].release(buffer.address, buffer.size_per_bank)
        self.is_consistent = whole

    def keep_only(self, live: dict[Place, BufferRecord]) -> None:
        """These buffers are there and no others, whatever the allocators say."""
        gone = [(place, b) for place, b in self._buffers.items() if live.get(place) is not b]
        self._buffers = live
        for space, allocator in self._allocators.items():
            allocator.become((at, b.size_per_bank) for (s, at), b in live.items() if s is space)
        for (space, address), buffer in gone:
            self._spaces[space].release(address, buffer.size_per_bank)
        self.touch()

    def free_unused(self, places: Iterable[Place]) -> None:
        """Give back the buffers among these in which nothing lies (their task never ran)."""
        for place in places:
            buffer = self._buffers.get(place)
            if buffer is not None and buffer.is_unused and buffer.lease is None:
                self.free(buffer)

    # -- plans -----------------------------------------------------------------------------------

    def apply(
        self,
        effects: Effects,
        value_of: Callable[[int], ValueRecord],
        note: Callable[[ValueRecord], None],
        then: Callable[[], object] | None = None,
    ) -> None:
        """Change the records as a plan that has just run says.

        `value_of` finds the record of a value's number; `note` hears of values that are gone, and
        `then` belongs to it: both may be called twice, and change no more than values.
        """
        whole, self.is_consistent = self.is_consistent, False
        left = {place: self._buffers[place] for place in effects.freed}
        left |= {place: self._buffers[place] for place, _ in effects.moved}
        # What lies there stays where the plan has brought it.
        self.end_leases_at(left.values())
        new = [
            BufferRecord(b.space, b.address, b.size_per_bank, b.desc, key, b.origin)
            for b, key in effects.made
        ]
        moved = [(left[place], address) for place, address in effects.moved]
        come = {(left[place].space, address): left[place] for place, address in effects.moved}
        come |= dict(zip(effects.places, new, strict=True))
        present = dict(self._buffers)
        for place in left:
            del present[place]
        present |= come
        change = _Change(present, moved)
        for number, refs in effects.changed:
            change.place(value_of(number), refs, new, self._buffers)
        gone = [value_of(number) for number in effects.gone]
        for value in gone:
            change.place(value, (), new, self._buffers)
        # From here on it will happen: who mends the records does what an interrupt leaves.
        self.pending_recovery = commit = partial(self._commit, change, gone, note, then)
        commit()
        for space, address in left:
            self._allocators[space].free(address)
        for (space, address), buffer in come.items():
            self._allocators[space].alloc_at(address, buffer.size_per_bank)
        for space, address in () if self.is_debug else effects.freed:
            self._spaces[space].release(address, left[space, address].size_per_bank)
        self.is_consistent = whole

    def _commit(
        self, change: _Change, gone: Sequence[ValueRecord], note: Callable[[ValueRecord], None],
        then: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        self.generation += 1
        self.constants_changed += change.has_constants
        self._buffers = change.present
        change.commit()
        for value in gone:
            note(value)
        if then is not None:
            then()
        self.pending_recovery = None

    def hand_on(self, entry: ValueRecord, result: ValueRecord, ref: InstanceRef) -> None:
        """A result has overwritten a donated entry, and lies in its buffer now."""
        (instance,) = entry.instances
        if instance.desc_key != ref.desc_key:
            instance = InstanceRecord(instance.buffer, 0, ref.desc, ref.desc_key)
        instance.buffer.origin = ref.origin
        instance.buffer.users = [result]
        entry.instances, result.instances = (), (instance,)
        entry.lease = result.lease = None
        result.is_exposed |= instance.buffer.shared_pins > 0
        result.status = Status.READY


def _said_of(buffer: BufferRecord) -> str:
    """What a buffer is called where memory is looked at."""
    user = buffer.users[0] if buffer.users else None
    return user.name_and_readers() if isinstance(user, ConstantRecord) else buffer.origin


def _taken(allocator: Allocator, size: int, address: int | None) -> int:
    if address is None:
        return allocator.alloc(size)
    allocator.alloc_at(address, size)
    return address


class _Change:
    """Where buffers and values are once a plan has run, made aside; it may be committed twice."""

    def __init__(
        self, present: dict[Place, BufferRecord], moved: Sequence[tuple[BufferRecord, int]]
    ) -> None:
        self.present, self.moved = present, moved
        self._users: dict[BufferRecord, list[ValueRecord]] = {}
        self._origins: list[tuple[BufferRecord, str]] = []
        self._values: list[tuple[ValueRecord, list[InstanceRecord]]] = []
        #: Whether it places constants, or moves them.
        self.has_constants = any(buffer.holds_constant for buffer, _ in moved)

    def _users_of(self, buffer: BufferRecord) -> list[ValueRecord]:
        return self._users.setdefault(buffer, [*buffer.users])

    def place(
        self, value: ValueRecord, refs: Sequence[InstanceRef], new: Sequence[BufferRecord],
        before: Mapping[Place, BufferRecord],
    ) -> None:  # fmt: skip
        """A value has these instances now: some that it had, in new buffers, or in those that were
        there before."""
        instances = []
        for ref in refs:
            if ref.kept >= 0:
                instances.append(value.instances[ref.kept])
                continue
            buffer = new[ref.made] if ref.place is None else before[ref.place]
            # A constant keeps its name, whichever task it came back for.
            self._origins.append((buffer, value.by if value.is_constant else ref.origin))
            self._users_of(buffer).append(value)
            instances.append(InstanceRecord(buffer, ref.offset_nbytes, ref.desc, ref.desc_key))
        for instance in value.instances:
            if instance not in instances:
                self._users_of(instance.buffer).remove(value)
        self._values.append((value, instances))
        self.has_constants |= value.is_constant

    def commit(self) -> None:
        """It is so."""
        for buffer, address in self.moved:
            buffer.address = address
        for buffer, users in self._users.items():
            buffer.users = users
        for buffer, origin in self._origins:
            buffer.origin = origin
        for value, instances in self._values:
            value.instances, value.lease = instances, None
            value.is_exposed |= any(i.buffer.shared_pins for i in instances)
            if instances and value.status is Status.PENDING:
                value.status = Status.READY
