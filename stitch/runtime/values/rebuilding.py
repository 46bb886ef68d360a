"""Rebuild the memory records after an interrupt left them inconsistent.

Some records are authoritative and change in one step each: a buffer's address (its key in the
table), a value's instances, the list of output slots, the queue. The others (users of a buffer,
idle slots, allocators) are derived from them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stitch.runtime.values.records import Records
from stitch.runtime.values.state import BufferRecord, OutputSlots, Status, ValueRecord


def rebuild_bookkeeping(records: Records, queued: Iterable[ValueRecord]) -> list[ValueRecord]:
    """Rebuild all derived records; returns the values that were dropped as unreferenced.

    `queued` are the values of the queue, which are kept.
    """
    in_queue = {id(value) for value in queued}
    present = records.all_buffers()
    gone: dict[int, ValueRecord] = {}
    for place, buffer in present.items():
        _, buffer.address = place
        users: list[ValueRecord] = []
        for value in dict.fromkeys(buffer.users):
            if value.status is Status.READY and (value.kept or id(value) in in_queue):
                value.lease = None
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
    _mend_leases(records, present.values())
    live = {p: b for p, b in present.items() if b.lease is not None or not b.is_unused}
    records.keep_only(live)
    return list(gone.values())


def _mend_leases(records: Records, buffers: Collection[BufferRecord]) -> None:
    """Rebuild the owners of buffers and the idle output slots from the list of slots."""
    leases = list(records.leases.values())
    listed = {id(lease) for lease in leases}
    known = [lease for buffer in buffers for lease in buffer.leases]
    ended = [slots for slots in known if id(slots) not in listed]
    for lease in ended:
        lease.dispose()
    owners: dict[int, list[OutputSlots]] = {id(buffer): [] for buffer in buffers}
    for lease in leases:
        lease.values = lease.again = None
        for buffer in lease.buffers:
            owners[id(buffer)].append(lease)
    for buffer in buffers:
        sharing = owners[id(buffer)]
        buffer.lease = sharing[-1] if sharing else None
        buffer.sharers = dict.fromkeys(sharing) if len(sharing) > 1 else {}
        for lease in sharing[1:] and sharing:
            lease.shares = True
    for lease in leases:
        lease.held = sum(b.lease is lease and not b.is_spare for b in lease.buffers)
    for holder in {id(lease.holder): lease.holder for lease in (*leases, *ended)}.values():
        mine = [lease for lease in leases if lease.holder is holder]
        idle = sorted((lease for lease in mine if not lease.held), key=lambda le: le.last_run)
        holder.leases, holder.idle = mine, idle
