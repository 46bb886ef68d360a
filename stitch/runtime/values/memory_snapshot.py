"""The picture of the records that a plan is made in: frozen, and with numbers for names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stitch.planner import Buffer, Instance, Resident
from stitch.program import Space
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import BufferRecord, ConstantRecord, PlaceOwner, ValueRecord


class MemorySnapshot:
    """The frozen picture of the records that a plan request needs, and the way back from numbers.

    Values of the window keep their numbers; the others that lie in some buffer follow. Constants
    are values only where they may leave (`constants`); else their places are taken for good. It may
    tell of some spaces only: then of the others it has what lies in these as well, or beside a
    source.
    """

    def __init__(
        self, records: Records, sources: Sequence[tuple[int, ValueRecord]], first_free: int,
        now: int, without: Collection[PlaceOwner], staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None, others: Iterable[ValueRecord] = (),
    ) -> None:  # fmt: skip
        """`sources`: with their numbers; `without`: leases whose spare memory the plan may take;
        `staying`: values that stay where they are; `constants`: those that the tasks read, where
        all constants may leave; `spaces`: those that it tells of in whole (None: all);
        `others`: what it tells of wherever that lies."""
        self._constants_stay = constants is None
        #: Those that the tasks read, by number: these follow the window's.
        self.constants = dict(enumerate(constants or (), first_free))
        self._staying = {
            id(i.buffer)
            for number, value in sources
            if number in staying
            for i in value.instances
            if i.buffer.address is not None
        }
        #: Whether any does that could leave.
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
            # Exported bytes in which no value lies any more are taken for good.
            pinned = pinned or (not buffer.users and buffer.address is not None)
            pinned = pinned or (self._constants_stay and buffer.holds_constant)
            place = buffer.space, buffer.address, buffer.size_per_bank
            known = (*place, buffer.desc, buffer.origin, pinned, pinned and buffer.is_shared)
            self.buffers.append(Buffer(number, *known))
        return number
