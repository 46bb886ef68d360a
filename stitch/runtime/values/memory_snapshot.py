"""A frozen snapshot of the memory records for planning, with numbers instead of records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stitch.planner import Buffer, Instance, Resident
from stitch.program import Space
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import BufferRecord, ConstantRecord, OutputSlots, ValueRecord


class MemorySnapshot:
    """A frozen snapshot of the memory records for a plan request.

    Values of the batch keep their numbers; other values in memory follow. Constants are values only
    if they may be evicted (`constants`); otherwise their addresses are reserved. A snapshot may be
    limited to some spaces; it then includes contents of other spaces only for values that are also
    in these, or share a buffer with a source.
    """

    def __init__(
        self, records: Records, sources: Sequence[tuple[int, ValueRecord]], first_free: int,
        now: int, without: Collection[OutputSlots], staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None, others: Iterable[ValueRecord] = (),
    ) -> None:  # fmt: skip
        """Take a snapshot.

        Args:
            records: The memory records.
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
        present = {
            place: buffer
            for place, buffer in records.all_buffers().items()
            if (spaces is None or place[0] in spaces)
            and not (buffer.is_spare and all(lease in without for lease in buffer.leases))
        }
        for _, buffer in sorted(present.items(), key=lambda b: (b[0][0].value, b[0][1])):
            self._number(buffer)
        known = {value for _, value in of_tasks}
        users = dict.fromkeys([u for b in present.values() for u in b.users])
        if spaces is not None:
            live, found = records.all_buffers(), [*users, *[v for _, v in of_tasks], *others]
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
