"""Vtables: checked once per table type, then turned into a shape that reads tables fast.

Comes in: the metadata's bytes, the position of a vtable, the table's `TableSpec`. Goes out: a
`TableShape` (one `struct` that reads all inline fields at once, and what to check and to follow),
or None and the defects reported. Must not know: what stands behind an offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stitch.flatbuffer.table_spec import ITEM_NBYTES, FieldSpec, TableSpec

#: Called with the kind of a defect, its position and its description.
Report = Callable[[str, int, str], None]

_PARTS = {"string": "string", "scalars": "vector"}
_EMPTY: Mapping[str, Any] = {
    "strings": (), "tables": (), "scalars": (), "structs": (), "string": ""
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableShape:
    """How to read the tables that have one particular vtable.

    `at` is an index into the table's record, `raw` one into what `unpack` gives, `offset` a field's
    place in the table. A position is well aligned for 8-byte fields where
    `position & alignment_mask == alignment_residue`. In a plain table, what `unpack` gives is the
    record, with nothing to check.
    """

    nbytes: int
    unpack: Callable[[bytes, int], tuple[Any, ...]]
    alignment_mask: int
    alignment_residue: int
    is_plain: bool
    template: tuple[Any, ...]
    scalars: tuple[tuple[int, int], ...]  # at, raw
    structs: tuple[tuple[int, int, Callable[[bytes], tuple[Any, ...]]], ...]  # at, raw, unpack
    checks: tuple[tuple[int, FieldSpec], ...]  # raw, field
    strings: tuple[tuple[int, int, int, int, FieldSpec], ...]  # at, raw, offset, safe length, field
    vectors: tuple[tuple[int, int, int, FieldSpec], ...]  # of scalars: at, raw, offset, field
    others: tuple[tuple[int, int, int, FieldSpec], ...]  # at, raw, offset, field
    unions: tuple[tuple[int, int, int, int, FieldSpec], ...]  # at, raw of type, raw, offset, field


@dataclass(frozen=True, slots=True, order=True)
class _Inline:
    """One inline part of a table: a scalar, a struct, an offset, or a union's type or value."""

    offset: int
    code: str
    at: int
    part: str
    nbytes: int
    alignment: int


def vtable_nbytes(data: bytes, vtable: int, first: int) -> int | None:
    """The length of a vtable that lies, aligned, in the metadata from `first`; None otherwise."""
    if vtable & 1 or vtable < first or vtable + 4 > len(data):
        return None
    nbytes: int = struct.unpack_from("<H", data, vtable)[0]
    if nbytes < 4 or nbytes & 1 or vtable + nbytes > len(data):
        return None
    return nbytes


def read_shape(
    data: bytes, vtable: int, spec: TableSpec, report: Report, *, tolerant: bool
) -> TableShape | None:
    """The shape of a vtable inside the metadata; None, and every defect reported, if unsound.

    `tolerant` passes over fields that `spec` lacks.
    """
    before: list[str] = []

    def note(kind: str, detail: str) -> None:
        before.append(kind)
        report(kind, vtable, detail)

    length, nbytes = struct.unpack_from("<HH", data, vtable)
    entries = struct.unpack_from(f"<{(length - 4) // 2}H", data, vtable + 4)
    if nbytes < 4:
        note("bounds", f"vtable of {spec.name} claims a table of {nbytes} bytes")
    inline = _inline_parts(entries, spec, note, tolerant)
    _check_inline(inline, nbytes, spec, note)
    return None if before else _assemble(inline, nbytes, spec)


def _inline_parts(
    entries: tuple[int, ...], spec: TableSpec, note: Callable[[str, str], None], tolerant: bool
) -> list[_Inline]:
    parts: list[_Inline] = []
    known = 0
    for at, field in enumerate(spec.fields):
        union = field.kind == "union"
        known = max(known, field.slot + (2 if union else 1))
        offset = entries[field.slot] if field.slot < len(entries) else 0
        second = entries[field.slot + 1] if union and field.slot + 1 < len(entries) else 0
        if field.required and offset == 0:
            note("missing", f"{spec.name}.{field.name} is required")
        if union and (offset == 0) != (second == 0):
            note("union", f"{spec.name}.{field.name}: type and value go together")
        elif union and offset:
            parts += [
                _Inline(offset, "B", at, "type", 1, 1),
                _Inline(second, "I", at, "value", 4, 4),
            ]
        elif offset and field.kind == "scalar":
            nbytes = ITEM_NBYTES[field.code]
            parts.append(_Inline(offset, field.code, at, "scalar", nbytes, nbytes))
        elif offset and field.kind == "struct":
            code = f"{field.nbytes}s"
            parts.append(_Inline(offset, code, at, "struct", field.nbytes, field.alignment))
        elif offset:
            parts.append(_Inline(offset, "I", at, _PARTS.get(field.kind, "other"), 4, 4))
    if not tolerant and any(entries[known:]):
        note("unknown_field", f"{spec.name} has fields that the schema lacks")
    return sorted(parts)


def _check_inline(
    inline: list[_Inline], nbytes: int, spec: TableSpec, note: Callable[[str, str], None]
) -> None:
    end, residues = 4, set()
    for item in inline:
        name = f"{spec.name}.{spec.fields[item.at].name}"
        if item.offset < end:
            note("overlap", f"{name} overlaps what stands before it")
        if item.offset + item.nbytes > nbytes:
            note("bounds", f"{name} ends outside its table of {nbytes} bytes")
        if item.offset % min(item.alignment, 4):
            note("alignment", f"{name} is misaligned")
        if item.alignment == 8:
            residues.add(item.offset % 8)
        end = item.offset + item.nbytes
    if len(residues) > 1:
        note("alignment", f"the 8-byte fields of {spec.name} cannot all be aligned")


def _assemble(inline: list[_Inline], nbytes: int, spec: TableSpec) -> TableShape:
    layout, end = "<", 0
    for item in inline:
        layout += f"{item.offset - end}x{item.code}"
        end = item.offset + item.nbytes
    numbered = [(raw, item, spec.fields[item.at]) for raw, item in enumerate(inline)]
    types = {item.at: raw for raw, item, _ in numbered if item.part == "type"}
    residue = next((-item.offset % 8 for item in inline if item.alignment == 8), None)
    return TableShape(
        nbytes=nbytes,
        unpack=struct.Struct(layout).unpack_from,
        alignment_mask=0 if residue is None else 7,
        alignment_residue=residue or 0,
        is_plain=[item.at for item in inline] == list(range(len(spec.fields)))
        and all(
            item.part == "scalar" and (f.minimum, f.maximum) == (None, None)
            for _, item, f in numbered
        ),
        template=tuple(
            f.default if f.kind == "scalar" else _EMPTY.get(f.kind) for f in spec.fields
        ),
        scalars=tuple((item.at, raw) for raw, item, _ in numbered if item.part == "scalar"),
        structs=tuple(
            (item.at, raw, struct.Struct(f"<{field.code}").unpack)
            for raw, item, field in numbered
            if item.part == "struct"
        ),
        checks=tuple(
            (raw, field)
            for raw, item, field in numbered
            if item.part == "scalar" and (field.minimum, field.maximum) != (None, None)
        ),
        strings=tuple(
            # A character takes four bytes at most: shorter strings need not be measured. Those
            # without a limit are charged each time.
            (item.at, raw, item.offset, -1 if f.limit is None else f.limit // 4, f)
            for raw, item, f in numbered
            if item.part == "string"
        ),
        vectors=tuple(
            (item.at, raw, item.offset, f) for raw, item, f in numbered if item.part == "vector"
        ),
        others=tuple(
            (item.at, raw, item.offset, f) for raw, item, f in numbered if item.part == "other"
        ),
        unions=tuple(
            (item.at, types[item.at], raw, item.offset, f)
            for raw, item, f in numbered
            if item.part == "value"
        ),
    )
