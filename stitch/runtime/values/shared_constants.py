"""Shared constants: equal bytes lie once on a device, however many programs and files they are of.

What lies at one place in the host's memory, as a segment does, is the same unread. Of what lies
elsewhere nothing is read unless it has the form of another, and what tells most of them apart: the
CRC-32 that a file says; where none does, as that would take reading all, how the bytes begin. Then
the bytes decide. Programs read their own files' bytes all the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from stitch.program import Array, TensorDesc, ValueType, dense_bytes, host_layout, same_bytes
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import ConstantRecord, Mark, Reader, Store

#: What tells arrays of one form apart that are no file's.
_HEAD_NBYTES = 256


def hold_constant(
    records: Records, device: Store, kind: ValueType, desc: TensorDesc, data: Array,
    crc32: int | None, name: str, reader: Reader, kept: list[ConstantRecord],
) -> None:  # fmt: skip
    """Add a constant's record to `kept`, that of another program where it has the same bytes in the
    same layout; `reader` holds it until `dispose`, which may interrupt this anywhere. `crc32`: of
    its bytes, as its file has it."""
    form = (kind, desc)
    key = ((data.__array_interface__["data"][0], data.strides), *form)
    record = records.constants.get(key)
    if record is None:
        alike = records.constants_by_form.get(form, {})
        record = next((r for r in _candidates(alike, data, crc32)
                       if same_bytes(r.host_array(), data)), None)  # fmt: skip
    if record is None:
        home = TensorDesc(desc.shape, host_layout(kind.data_type))
        file = records.outside(home, data, reader.constant(name))
        number = records.desc_key(desc.without_address())
        mark: Mark = ("head", _head(data)) if crc32 is None else ("crc32", crc32)
        record = ConstantRecord(device, desc, number, file, form, mark)
    kept.append(record)
    record.readers.setdefault(reader, []).append((key, data, name))
    records.constants[key] = record
    alike = records.constants_by_form.setdefault(record.form, {})
    alike.setdefault(record.mark[0], {}).setdefault(record.mark, {})[record] = None


def _candidates(
    alike: dict[str, dict[Mark, dict[ConstantRecord, None]]], data: Array, crc32: int | None
) -> Iterator[ConstantRecord]:
    """The records of one form that may have these bytes."""
    if "crc32" in alike:
        total = zlib.crc32(dense_bytes(data).data) if crc32 is None else crc32
        yield from alike["crc32"].get(("crc32", total), ())
    if "head" in alike:
        yield from alike["head"].get(("head", _head(data)), ())


def _head(data: Array) -> bytes:
    return dense_bytes(data)[:_HEAD_NBYTES].tobytes()


def dispose(records: Records, constants: Iterable[ConstantRecord], reader: Reader) -> None:
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
        _forget(records, record)
        records.release(record)


def _forget(records: Records, record: ConstantRecord) -> None:
    """It is nobody's like; what is empty then goes."""
    alike = records.constants_by_form.get(record.form, {})
    marked = alike.get(record.mark[0], {})
    marked.get(record.mark, {}).pop(record, None)
    if not marked.get(record.mark):
        marked.pop(record.mark, None)
    if not marked:
        alike.pop(record.mark[0], None)
    if not alike:
        records.constants_by_form.pop(record.form, None)
