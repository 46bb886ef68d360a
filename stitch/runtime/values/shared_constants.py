"""Shared constants: the bytes of a file lie once on a device, however many programs read them.

Comes in: constants of programs that are being loaded. Goes out: their records, one for the same
bytes in the same form. Bytes are the same where they lie at the same place in the host's memory,
as those of one segment do: nothing of a file is read to find out.
"""

from __future__ import annotations

from collections.abc import Iterable

from stitch.program import Array, TensorDesc, ValueType, host_layout
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import ConstantRecord, Store


def hold_constant(
    records: Records, device: Store, kind: ValueType, desc: TensorDesc, data: Array,
    origin: str, holder: int, kept: list[ConstantRecord],
) -> None:  # fmt: skip
    """Add a constant's record to `kept`, that of another program where it has the same bytes in the
    same form; `holder` holds it until `let_go`, which may follow at any line of this."""
    place = data.__array_interface__["data"][0], data.strides
    key = (place, kind, desc)
    record = records.constants.get(key)
    if record is None:
        home = TensorDesc(desc.shape, host_layout(kind.data_type))
        file = records.outside(home, data, origin)
        number = records.desc_key(desc.without_address())
        record = ConstantRecord(device, desc, number, file, key)
    kept.append(record)
    record.holders.add(holder)
    records.constants[key] = record


def let_go(records: Records, constants: Iterable[ConstantRecord], holder: int) -> None:
    """A program is gone: what nobody else holds has no place any more. Once more does no harm."""
    for record in constants:
        record.holders.discard(holder)
        if not record.holders:
            if records.constants.get(record.key) is record:
                del records.constants[record.key]
            records.release(record)
