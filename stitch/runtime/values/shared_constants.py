"""Shared constants: equal bytes are stored once per device, for all programs and files.

Constants at the same host address, as segments of one file are, are equal without reading them.
Others are compared only if type, layout and a cheap discriminator match: the CRC-32 of the file or,
without one, the first bytes. Each program still reads its own file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stitch.program import Array, TensorDesc, ValueType, dense_bytes, host_layout, same_bytes
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import ConstantRecord, Mark, Reader

if TYPE_CHECKING:
    from stitch.runtime.tensor_access import TensorAccess

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
    """Yield the records with this type and layout that may have these bytes."""
    if "crc32" in alike:
        total = zlib.crc32(dense_bytes(data).data) if crc32 is None else crc32
        yield from alike["crc32"].get(("crc32", total), ())
    if "head" in alike:
        yield from alike["head"].get(("head", _head(data)), ())


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
        _forget(records, record)
        records.release(record)


def _forget(records: Records, record: ConstantRecord) -> None:
    """Remove a record from the lookup tables."""
    alike = records.constants_by_form.get(record.form, {})
    marked = alike.get(record.mark[0], {})
    marked.get(record.mark, {}).pop(record, None)
    if not marked.get(record.mark):
        marked.pop(record.mark, None)
    if not marked:
        alike.pop(record.mark[0], None)
    if not alike:
        records.constants_by_form.pop(record.form, None)
