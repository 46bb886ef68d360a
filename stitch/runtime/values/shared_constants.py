"""Shared constants: equal bytes lie once on a device, however many programs and files they are of.

Comes in: constants of programs that are being loaded. Goes out: their records, one for the same
bytes in the same form. What lies at one place in the host's memory, as a segment does, is the same
unread. Of what lies elsewhere nothing is read unless it has the form of another and, where files
say so, its CRC-32; then the bytes decide. Programs read their own files' bytes all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from stitch.program import Array, TensorDesc, ValueType, host_layout, same_bytes
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import ConstantRecord, Reader, Store


def hold_constant(
    records: Records, device: Store, kind: ValueType, desc: TensorDesc, data: Array,
    crc32: int | None, name: str, reader: Reader, kept: list[ConstantRecord],
) -> None:  # fmt: skip
    """Add a constant's record to `kept`, that of another program where it has the same bytes in the
    same form; `reader` holds it until `let_go`, which may follow at any line of this. `crc32`: what
    its file says of its bytes."""
    place = data.__array_interface__["data"][0], data.strides
    key = (place, kind, desc)
    record = records.constants.get(key) or _alike(records, kind, desc, data, crc32)
    if record is None:
        home = TensorDesc(desc.shape, host_layout(kind.data_type))
        file = records.outside(home, data, reader.constant(name))
        number = records.desc_key(desc.without_address())
        record = ConstantRecord(device, desc, number, file, (kind, desc), crc32)
    kept.append(record)
    record.readers.setdefault(reader, []).append((key, data, name))
    records.constants[key] = record
    records.constants_by_form.setdefault(record.form, {})[record] = None


def _alike(
    records: Records, kind: ValueType, desc: TensorDesc, data: Array, crc32: int | None
) -> ConstantRecord | None:
    """The record of the same bytes from elsewhere, if there is one."""
    for record in records.constants_by_form.get((kind, desc), ()):
        may_be = crc32 == record.crc32 or crc32 is None or record.crc32 is None
        if may_be and same_bytes(record.host_array(), data):
            return record
    return None


def let_go(records: Records, constants: Iterable[ConstantRecord], reader: Reader) -> None:
    """A program is gone: what nobody else holds has no place any more. Once more does no harm."""
    for record in constants:
        # Its file's bytes may go with it, and others come to lie there.
        others = [held for who, held in record.readers.items() if who != reader]
        still = {key for held in others for key, _, _ in held}
        for key, _, _ in record.readers.get(reader, ()):
            if key not in still and records.constants.get(key) is record:
                del records.constants[key]
        record.readers.pop(reader, None)
        if record.readers:
            record.take_name()
            continue
        alike = records.constants_by_form.get(record.form, {})
        alike.pop(record, None)
        if not alike:
            records.constants_by_form.pop(record.form, None)
        records.release(record)
