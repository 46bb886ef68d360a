"""The records of a device: which buffers and values there are, and how a plan changes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from stitch.memory import Allocator, SpaceMemory
from stitch.planner import Buffer, Instance, Resident
from stitch.program import Array, Space, TensorDesc
from stitch.runtime.effects import Effects, InstanceRef, Place
from stitch.runtime.state import BufferRecord, InstanceRecord, Status, ValueRecord

#: Over all devices: a tensor of another device never passes for one of this.
_next_desc_key = itertools.count().__next__


class Records:
    """Buffers by place, and the values that lie in them."""

    def __init__(self, spaces: dict[Space, SpaceMemory]) -> None:
        self._spaces = spaces
        self._allocators: dict[Space, Allocator] = {s: m.allocator for s, m in spaces.items()}
        self._buffers: dict[Place, BufferRecord] = {}
        #: Buffers that nobody uses and that are not given back yet: a plan that runs again takes
        #: the buffers of its last run as they are. Whoever looks sees them given back.
        self.parked: dict[Place, BufferRecord] = {}
        #: Counts what the allocators were told.
        self.changes = 0
        # In debug mode what is freed is poisoned at once.
        self._parks = not any(memory.debug for memory in spaces.values())
        self._desc_keys: dict[TensorDesc, int] = {}
        #: Counts every change of the records: while it stands still, so does what they say.
        self.epoch = 0

    @property
    def allocators(self) -> dict[Space, Allocator]:
        """The allocators, with everything given back that nobody uses."""
        if self.parked:
            self.sweep()
        return self._allocators

    @property
    def buffers(self) -> dict[Place, BufferRecord]:
        """The live buffers by place."""
        if self.parked:
            self.sweep()
        return self._buffers

    def sweep(self) -> None:
        """Give the parked buffers back."""
        parked, self.parked = self.parked, {}
        for buffer in parked.values():
            self.free(buffer)

    def pinned(self) -> list[BufferRecord]:
        """The live buffers whose bytes somebody outside holds."""
        return [buffer for buffer in self.buffers.values() if buffer.pins]

    def touch(self) -> None:
        """Something that runs rest on has changed."""
        self.epoch += 1

    def desc_key(self, desc: TensorDesc) -> int:
        """A number for a descriptor: the same for equal ones, never that of another device."""
        found = self._desc_keys.get(desc)
        if found is None:
            found = self._desc_keys[desc] = _next_desc_key()
        return found

    # -- making and freeing ----------------------------------------------------------------------

    def reserve(
        self, desc: TensorDesc, size: int, address: int | None, origin: str
    ) -> BufferRecord:
        """A buffer outside any plan (a constant's address); raises `OutOfMemoryError`."""
        allocator = self.allocators[desc.layout.space]
        if address is None:
            address = allocator.alloc(size)
        else:
            allocator.alloc_at(address, size)
        self.epoch += 1
        return self._add(desc, self.desc_key(desc), size, address, origin)

    def _add(
        self, desc: TensorDesc, key: int, size: int, address: int, origin: str
    ) -> BufferRecord:
        space = desc.layout.space
        buffer = BufferRecord(space, address, size, desc, key, origin)
        self._buffers[space, address] = buffer
        self.changes += 1
        return buffer

    def outside(self, desc: TensorDesc, key: int, array: Array, origin: str) -> BufferRecord:
        """A host array outside the spaces, as a buffer; `key` is its descriptor's."""
        buffer = BufferRecord(Space.HOST, None, 0, desc, key, origin)
        buffer.array = array
        return buffer

    def attach(
        self, value: ValueRecord, buffer: BufferRecord, offset: int, desc: TensorDesc, key: int
    ) -> None:
        """A value now lies in a buffer (as well)."""
        self.epoch += 1
        value.instances.append(InstanceRecord(buffer, offset, desc, key))
        buffer.users.append(value)

    def release(self, value: ValueRecord) -> None:
        """Forget a value's instances, and free the buffers that nobody else uses."""
        self.epoch += 1
        for instance in value.instances:
            buffer = instance.buffer
            users = buffer.users
            users.remove(value)
            if not users and not buffer.pins:
                if self._parks and buffer.address is not None:
                    self.parked[buffer.space, buffer.address] = buffer
                else:
                    self.free(buffer)
        value.instances = []

    def forget_copies(self, value: ValueRecord) -> None:
        """Keep a value's primary instance alone: its bytes have changed, or may have."""
        self.epoch += 1
        for instance in value.instances[1:]:
            buffer = instance.buffer
            buffer.users.remove(value)
            if not buffer.users and not buffer.pins:
                self.free(buffer)
        del value.instances[1:]

    def free(self, buffer: BufferRecord) -> None:
        """Give a buffer's region back; a buffer that is free already stays so."""
        self.epoch += 1
        if buffer.address is None:
            buffer.array = None
            return
        if self._buffers.pop((buffer.space, buffer.address), None) is None:
            return
        self.changes += 1
        self.parked.pop((buffer.space, buffer.address), None)
        self._allocators[buffer.space].free(buffer.address)
        self._spaces[buffer.space].release(buffer.address, buffer.size_per_bank)

    def free_unused(self, places: Iterable[Place]) -> None:
        """Give back the buffers among these in which nothing lies (their task never ran)."""
        for place in places:
            buffer = self._buffers.get(place)
            if buffer is not None and not buffer.users and not buffer.pins:
                self.free(buffer)

    # -- plans -----------------------------------------------------------------------------------

    def apply(
        self,
        effects: Effects,
        value_of: Callable[[int], ValueRecord],
        note: Callable[[ValueRecord], None],
    ) -> None:
        """Change the records as a plan that has just run says.

        `value_of` finds the record of a value's number; `note` hears of values that are gone.
        """
        self.epoch += 1
        if effects.is_simple:
            made = self._make_again(effects) if self.parked else self._make(effects.made)
            for number, refs in effects.changed:
                self._settle(value_of(number), refs, made)
            return
        if self.parked:
            # After a failure: what the failed run had taken for itself is taken anew below.
            self.sweep()
        changed = [(value_of(v), refs, self._found(refs)) for v, refs in effects.changed]
        gone = [value_of(v) for v in effects.gone]
        for space, address in effects.freed:
            self._allocators[space].free(address)
            self.changes += 1
            record = self._buffers.pop((space, address))
            if not self._spaces[space].debug:
                self._spaces[space].release(address, record.size_per_bank)
        self.move(effects.moved)
        made = self._make(effects.made)
        for value, refs, residents in changed:
            self._change(value, refs, residents, made)
        for value in gone:
            for instance in value.instances:
                instance.buffer.users.remove(value)
            value.instances = []
            note(value)

    def _make(self, buffers: tuple[tuple[Buffer, int], ...]) -> list[BufferRecord]:
        made = []
        for buffer, key in buffers:
            at, size = buffer.address, buffer.size_per_bank
            assert at is not None
            self._allocators[buffer.space].alloc_at(at, size)
            made.append(self._add(buffer.desc, key, size, at, buffer.origin))
        return made

    def _make_again(self, effects: Effects) -> list[BufferRecord]:
        """The buffers of the last run, where they are parked (`ReadyPlan.repeats` has looked)."""
        parked = self.parked
        if all(place in parked for place in effects.places):
            return [parked.pop(place) for place in effects.places]
        self.sweep()
        return self._make(effects.made)

    def _settle(
        self, value: ValueRecord, refs: tuple[InstanceRef, ...], made: list[BufferRecord]
    ) -> None:
        """A value that did not exist before now lies in new buffers."""
        for ref in refs:
            buffer = made[ref.made]
            buffer.users.append(value)
            value.instances.append(
                InstanceRecord(buffer, ref.offset_nbytes, ref.desc, ref.desc_key)
            )
        value.status = Status.READY

    def _found(self, refs: tuple[InstanceRef, ...]) -> list[BufferRecord | None]:
        return [None if ref.place is None else self._buffers[ref.place] for ref in refs]

    def move(self, moved: Sequence[tuple[Place, int]]) -> None:
        """Buffers lie at new addresses of their spaces now; their bytes have been moved."""
        self.epoch += 1
        self.changes += 1
        taken = []
        for (space, address), target in moved:
            self._allocators[space].free(address)
            taken.append((self._buffers.pop((space, address)), target))
        for buffer, target in taken:
            self._allocators[buffer.space].alloc_at(target, buffer.size_per_bank)
            buffer.address = target
            self._buffers[buffer.space, target] = buffer

    def _change(
        self,
        value: ValueRecord,
        refs: tuple[InstanceRef, ...],
        residents: list[BufferRecord | None],
        made: list[BufferRecord],
    ) -> None:
        before = value.instances
        after = []
        for ref, resident in zip(refs, residents, strict=True):
            if ref.kept >= 0:
                after.append(before[ref.kept])
                continue
            buffer = made[ref.made] if resident is None else resident
            buffer.origin = ref.origin
            buffer.users.append(value)
            after.append(InstanceRecord(buffer, ref.offset_nbytes, ref.desc, ref.desc_key))
        for instance in before:
            if instance not in after:
                instance.buffer.users.remove(value)
        value.instances = after
        if value.status is Status.PENDING:
            value.status = Status.READY


class Picture:
    """The frozen picture of the records that a plan request needs, and the way back from numbers.

    Values of the window keep their numbers; the others that lie in some buffer follow.
    """

    def __init__(self, records: Records, sources: Sequence[ValueRecord], first_free: int,
                 now: int) -> None:  # fmt: skip
        self._numbers: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        self.residents: list[Resident] = []
        self.bystanders: dict[int, ValueRecord] = {}
        self.kept: set[int] = set()
        for value in sources:
            for instance in value.instances:
                self._number(instance.buffer)
        for _, buffer in sorted(records.buffers.items(), key=lambda b: (b[0][0].value, b[0][1])):
            self._number(buffer)
        self._add_values(records, sources, first_free, now)

    def _number(self, buffer: BufferRecord) -> int:
        number = self._numbers.get(id(buffer))
        if number is None:
            number = self._numbers[id(buffer)] = len(self.buffers)
            # A buffer without users is reserved for good: constants, exported bytes.
            pinned = buffer.pins > 0 or (not buffer.users and buffer.address is not None)
            self.buffers.append(
                Buffer(
                    number,
                    buffer.space,
                    buffer.address,
                    buffer.size_per_bank,
                    buffer.desc,
                    buffer.origin,
                    pinned,
                )
            )
        return number

    def _add_values(
        self, records: Records, sources: Sequence[ValueRecord], first_free: int, now: int
    ) -> None:
        seen = {id(value) for value in sources}
        for value in sources:
            self._resident(value.number, value, now)
        number = first_free
        for buffer in list(records.buffers.values()):
            for value in buffer.users:
                if id(value) not in seen:
                    seen.add(id(value))
                    self.bystanders[number] = value
                    self.kept.add(number)
                    self._resident(number, value, now)
                    number += 1

    def _resident(self, number: int, value: ValueRecord, now: int) -> None:
        instances = tuple(
            Instance(self._number(i.buffer), i.offset_nbytes, i.desc) for i in value.instances
        )
        self.residents.append(Resident(number, instances, max(0, now - value.last_used)))
