"""What a plan knows of the memory records, and what it changes in them.

A `MemorySnapshot` numbers the buffers and values for a plan request. `Effects`, computed once when
the plan is bound, turn the numbers into addresses and references that are valid for all tensors on
which the plan is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from stitch.memory import LENT_ADDRESSES
from stitch.planner import Buffer, Instance, Plan, Resident, after_steps
from stitch.program import Space, TensorDesc
from stitch.runtime.values.state import BufferRecord, ConstantRecord, OutputSlots, ValueRecord

Place = tuple[Space, int]


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """An instance after the run.

    `kept` ≥ 0: the value's previous instance at that position. Otherwise it is in the new buffer
    `made` ≥ 0, or in the resident buffer at `place`.
    """

    kept: int
    made: int
    place: Place | None
    offset_nbytes: int
    desc: TensorDesc
    desc_key: int
    origin: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A result in the buffer of a donated entry, which is gone; numbers of both."""

    result: int
    entry: int
    ref: InstanceRef


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """The difference between the records before and after a run.

    `freed`: addresses of freed buffers. `moved`: (old place, new address). `made`: new buffers, in
    order, with the keys of their descriptors. `changed`: value → its instances, where they differ.
    `gone`: values without instances.
    """

    freed: tuple[Place, ...]
    moved: tuple[tuple[Place, int], ...]
    made: tuple[tuple[Buffer, int], ...]
    changed: tuple[tuple[int, tuple[InstanceRef, ...]], ...]
    gone: tuple[int, ...]
    #: Of `changed`: new values in new buffers, and in buffers of entries that are gone.
    own: tuple[tuple[int, tuple[InstanceRef, ...]], ...]
    carried: tuple[Carried, ...]
    #: Whether nothing else changes (the steady state): no moves and no other releases.
    is_simple: bool
    #: Addresses of the new buffers.
    places: tuple[Place, ...]


def _holding(instances: Iterable[Iterable[Instance]]) -> set[int]:
    """Return the buffers of these instances."""
    return {instance.buffer for some in instances for instance in some}


def effects_of(
    plan: Plan, key_of: Callable[[TensorDesc], int], steps_done: int | None = None
) -> Effects:
    """Return the effects of a plan, or of its first `steps_done` steps after a failure.

    `key_of` returns the device's key of a descriptor.
    """
    if steps_done is None:
        buffers: Mapping[int, Buffer] = {b.number: b for b in plan.final_buffers}
        values = {r.value: r.instances for r in plan.final_values}
    else:
        there, listed = after_steps(plan, steps_done)
        values = {value: tuple(instances) for value, instances in listed.items()}
        # Buffers evicted but not yet freed when the plan stopped: free them here.
        left = _holding(r.instances for r in plan.request.residents) - _holding(values.values())
        buffers = {n: b for n, b in there.items() if n not in left or b.pinned}
    before = {b.number: b for b in plan.request.buffers}
    freed: list[Place] = []
    moved: list[tuple[Place, int]] = []
    for number, buffer in before.items():
        if buffer.address is None:
            continue
        after = buffers.get(number)
        if after is None:
            freed.append((buffer.space, buffer.address))
        elif after.address != buffer.address and after.address is not None:
            moved.append(((buffer.space, buffer.address), after.address))
    new = [buffer for number, buffer in sorted(buffers.items()) if number not in before]
    keyed = tuple((buffer, key_of(buffer.desc)) for buffer in new)
    position = {buffer.number: i for i, buffer in enumerate(new)}
    earlier = {r.value: r.instances for r in plan.request.residents}
    changed = []
    for value, instances in sorted(values.items()):
        old = earlier.get(value, ())
        if old != instances:
            refs = tuple(_reference(i, old, position, before, buffers, key_of) for i in instances)
            changed.append((value, refs))
    # A value in a buffer that the plan must not free (a host array, or pinned) is released when it
    # is unreferenced. Shared buffers may be overwritten.
    others = {
        number for number, buffer in before.items()
        if buffer.address is None or (buffer.pinned and not buffer.shared)
    }  # fmt: skip
    gone = tuple(
        sorted(
            value
            for value, instances in earlier.items()
            if value not in values
            and not (value not in plan.request.kept and all(i.buffer in others for i in instances))
        )
    )
    own = tuple(
        (value, refs)
        for value, refs in changed
        if value not in earlier and all(ref.made >= 0 for ref in refs)
    )
    carried = _carried(changed, values, earlier, set(gone))
    simple = not (freed or moved) and len(own) + len(carried) == len(changed)
    simple = simple and {c.entry for c in carried} == set(gone)
    places = tuple((b.space, b.address) for b in new if b.address is not None)
    return Effects(
        tuple(freed), tuple(moved), keyed, tuple(changed), gone, own, carried, simple, places
    )


def _carried(
    changed: list[tuple[int, tuple[InstanceRef, ...]]],
    values: Mapping[int, tuple[Instance, ...]],
    earlier: Mapping[int, tuple[Instance, ...]],
    gone: set[int],
) -> tuple[Carried, ...]:
    """Return the new values that are alone in the buffer of a single value that is gone."""
    entries: dict[int, list[int]] = {}
    for value, instances in earlier.items():
        for instance in instances:
            entries.setdefault(instance.buffer, []).append(value)
    carried = []
    for value, refs in changed:
        if value in earlier or len(refs) != 1 or refs[0].place is None or refs[0].offset_nbytes:
            continue
        before = entries[values[value][0].buffer]
        if len(before) == 1 and before[0] in gone and len(earlier[before[0]]) == 1:
            carried.append(Carried(value, before[0], refs[0]))
    return tuple(carried)


def _reference(
    instance: Instance,
    old: tuple[Instance, ...],
    position: Mapping[int, int],
    before: Mapping[int, Buffer],
    after: Mapping[int, Buffer],
    key_of: Callable[[TensorDesc], int],
) -> InstanceRef:
    kept = old.index(instance) if instance in old else -1
    position_in_new = position.get(instance.buffer, -1)
    place: Place | None = None
    origin = after[instance.buffer].origin
    if kept < 0 and position_in_new < 0:
        buffer = before[instance.buffer]
        assert buffer.address is not None
        place = (buffer.space, buffer.address)
    desc, offset = instance.desc, instance.offset_nbytes
    return InstanceRef(kept, position_in_new, place, offset, desc, key_of(desc), origin)


class MemorySnapshot:
    """A frozen snapshot of the memory records for a plan request.

    Values of the batch keep their numbers; other values in memory follow. Constants are values only
    if they may be evicted (`constants`); otherwise their addresses are reserved. A snapshot may be
    limited to some spaces; it then includes contents of other spaces only for values that are also
    in these, or share a buffer with a source.
    """

    def __init__(
        self, live: Mapping[Place, BufferRecord], sources: Sequence[tuple[int, ValueRecord]],
        first_free: int, now: int, without: Collection[OutputSlots], staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None, others: Iterable[ValueRecord] = (),
    ) -> None:  # fmt: skip
        """Take a snapshot.

        Args:
            live: The buffers of the device by address.
            sources: Sources of the batch with their numbers.
            first_free: First number for other values.
            now: Current task number.
            without: Output slots whose spare memory the plan may use.
            staying: Values that must not move.
            constants: Constants that the tasks read, if all constants may be evicted.
            spaces: Spaces to include completely (None: all).
            others: Values to include in any space.
        """
        self._constants_stay = constants is None
        #: Constants that the tasks read, by number: they follow the batch's values.
        self.constants = dict(enumerate(constants or (), first_free))
        self._staying = {
            id(i.buffer)
            for number, value in sources
            if number in staying
            for i in value.instances
            if i.buffer.address is not None
        }
        #: Whether a value that could be evicted must stay.
        self.keeps_some = bool(self._staying)
        self._numbers: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        of_tasks = (*sources, *self.constants.items())
        for _, value in of_tasks:
            for instance in value.instances:
                self._number(instance.buffer)
        present: dict[Space, list[tuple[int, BufferRecord]]] = {}
        users: dict[ValueRecord, None] = {}
        for (space, address), buffer in live.items():
            if spaces is not None and space not in spaces:
                continue
            slots = buffer.slots
            # Of most buffers a look at their slots is enough: there are thousands.
            if (
                slots is not None
                and (without or slots.shares)
                and buffer.is_spare
                and all(each in without for each in buffer.slot_sets)
            ):
                continue
            present.setdefault(space, []).append((address, buffer))
            if buffer.users:
                users.update(dict.fromkeys(buffer.users))
        #: Adjacent buffers, such as the slots and constants of many programs: the first, its
        #: address, the last, and where that ends. One buffer stands for them.
        reserved: list[tuple[BufferRecord, int, BufferRecord, int]] = []
        for space in sorted(present, key=attrgetter("value")):
            for address, buffer in sorted(present[space], key=itemgetter(0)):
                if not self._is_reserved(buffer):
                    self._number(buffer)
                    continue
                end = address + buffer.size_per_bank
                first, start, _, reached = reserved[-1] if reserved else (buffer, 0, buffer, -1)
                if reached == address and first.space is space:
                    reserved[-1] = first, start, buffer, end
                else:
                    reserved.append((buffer, address, buffer, end))
        for first, start, last, end in reserved:
            origin = first.origin
            if last is not first:
                origin = f"the buffers from {origin} to {last.origin}"
            what = (first.space, start, end - start, first.desc, origin)
            self.buffers.append(Buffer(len(self.buffers), *what, pinned=True))
        known = {value for _, value in of_tasks}
        if spaces is not None:
            found = [*users, *[v for _, v in of_tasks], *others]
            for value in found:
                lying = [i.buffer for i in value.instances]
                here = [b for b in lying if live.get((b.space, b.address or 0)) is b]
                beside = [u for b in here for u in b.users if u not in users]
                users |= dict.fromkeys(beside)
                found += dict.fromkeys(beside)
        stays = self._constants_stay
        bystanders = [u for u in users if u not in known and not (u.is_constant and stays)]
        self.bystanders = dict(enumerate(bystanders, first_free + len(self.constants)))
        self.kept = {*self.constants, *self.bystanders}
        self.residents = [
            Resident(
                number,
                tuple([Instance(self._number(i.buffer), i.offset_nbytes, i.desc)
                       for i in value.instances]),
                max(0, now - value.last_used),
            )
            for number, value in (*of_tasks, *self.bystanders.items())
        ]  # fmt: skip

    def _is_reserved(self, buffer: BufferRecord) -> bool:
        """Whether a plan must keep off a buffer, and does nothing else with it."""
        users, address = buffer.users, buffer.address
        return (
            (not users or (self._constants_stay and users[0].is_constant))
            and address is not None and address < LENT_ADDRESSES
            and id(buffer) not in self._numbers
        )  # fmt: skip

    def _number(self, buffer: BufferRecord) -> int:
        number = self._numbers.get(id(buffer))
        if number is None:
            number = self._numbers[id(buffer)] = len(self.buffers)
            pinned = buffer.pins > 0 or id(buffer) in self._staying
            # Exported buffers without values are reserved.
            pinned = pinned or (not buffer.users and buffer.address is not None)
            pinned = pinned or (self._constants_stay and buffer.holds_constant)
            place = buffer.space, buffer.address, buffer.size_per_bank
            known = (*place, buffer.desc, buffer.origin, pinned, pinned and buffer.is_shared)
            self.buffers.append(Buffer(number, *known))
        return number
