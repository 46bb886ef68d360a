"""Tables to bytes: one flatbuffer being built, driven by the table that verifies it.

Comes in: a table's name and its values by slot, children first. Goes out: offsets of what was
written, and at the end the size-prefixed flatbuffer. Must not know: programs, segments.

Only this file knows the flatbuffers package. What flatc would generate for each field is a row
here: which `Prepend` of the builder writes it, and the default that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
import numpy as np

from stitch.errors import StitchError
from stitch.flatbuffer import FieldSpec, TableSpec
from stitch.ttb.generated import FILE_IDENTIFIER, TABLES

#: Writes one value into the table that a builder has begun.
Prepend = Callable[[Any, Any], None]
#: A slot, what writes it, and the default that is not written.
Row = tuple[int, Prepend, int | float | None]

_PREPENDS: dict[str, Prepend] = {
    "b": flatbuffers.Builder.PrependInt8, "B": flatbuffers.Builder.PrependUint8,
    "h": flatbuffers.Builder.PrependInt16, "H": flatbuffers.Builder.PrependUint16,
    "i": flatbuffers.Builder.PrependInt32, "I": flatbuffers.Builder.PrependUint32,
    "q": flatbuffers.Builder.PrependInt64, "Q": flatbuffers.Builder.PrependUint64,
    "f": flatbuffers.Builder.PrependFloat32, "d": flatbuffers.Builder.PrependFloat64,
}  # fmt: skip
_OFFSET: tuple[Prepend, int] = (flatbuffers.Builder.PrependUOffsetTRelative, 0)
_INITIAL_NBYTES = 1 << 16


def _rows(spec: TableSpec) -> tuple[Row, ...]:
    """The rows of a table, in the order of its slots."""
    rows: list[Row] = []
    for field in spec.fields:
        if field.kind == "union":
            rows += [(field.slot, _PREPENDS["B"], 0), (field.slot + 1, *_OFFSET)]
        elif field.kind == "scalar":
            # A float is written whatever it is, or the sign of -0.0 would be lost.
            default = None if field.code in "fd" else field.default
            rows.append((field.slot, _PREPENDS[field.code], default))
        else:
            rows.append((field.slot, *_OFFSET))
    return tuple(rows)


_ROWS = {name: _rows(spec) for name, spec in TABLES.items()}
_FIELDS: dict[tuple[str, str], FieldSpec] = {
    (table.name, field.name): field for table in TABLES.values() for field in table.fields
}


class TableWriter:
    """One flatbuffer; every method but `finish` returns the offset of what it has written.

    An offset of 0 stands for a field that is absent.
    """

    def __init__(self) -> None:
        self._builder = flatbuffers.Builder(_INITIAL_NBYTES)
        self._strings: dict[str, int] = {}

    def table(self, name: str, *values: int | float) -> int:
        """A table, its values in the order of its slots: a union has two, type and value."""
        builder = self._builder
        builder.StartObject(len(values))
        for (slot, prepend, default), value in zip(_ROWS[name], values, strict=True):
            if value != default:
                prepend(builder, value)
                builder.Slot(slot)
        offset: int = builder.EndObject()
        return offset

    def vector(self, offsets: Sequence[int]) -> int:
        """A vector of offsets; absent where there are none."""
        if not offsets:
            return 0
        builder = self._builder
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        end: int = builder.EndVector()
        return end

    def scalars(self, table: str, field: str, values: Sequence[int] | Sequence[float]) -> int:
        """A field that is a vector of scalars; absent where there are none."""
        if not values:
            return 0
        array = np.array(values, f"<{_FIELDS[table, field].code}")
        offset: int = self._builder.CreateNumpyVector(array)
        return offset

    def string(self, table: str, field: str, text: str) -> int:
        """A field whose bytes are limited: equal texts are written once."""
        limit = _FIELDS[table, field].limit
        if limit is not None and len(text.encode("utf-8", "replace")) > limit:
            raise StitchError(
                f"a {table.lower()}'s {field} is too long for a .ttb file",
                expected=f"at most {limit} bytes",
                got=f"{text[:40]!r}...",
                remedy="shorten it",
            )
        if text not in self._strings:
            self._strings[text] = self.text(text, f"{table.lower()}'s {field}")
        return self._strings[text]

    def text(self, text: str, what: str) -> int:
        """A string of its own: readers charge those without a limit each time they are used."""
        try:
            offset: int = self._builder.CreateString(text)
        except UnicodeEncodeError as error:
            raise StitchError(f"the {what} {text!r} is not valid Unicode") from error
        return offset

    def finish(self, root: int) -> bytes:
        """The size-prefixed flatbuffer around its root table."""
        self._builder.FinishSizePrefixed(root, file_identifier=FILE_IDENTIFIER)
        return bytes(self._builder.Output())
