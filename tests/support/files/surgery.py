"""A knife for `.ttb` files: finds a field by its name, changes its bytes, mends the checksum."""

from __future__ import annotations

import struct
import zlib

from stitch.flatbuffer import FieldSpec
from stitch.ttb.generated import ROOT, TABLES, UNIONS

Path = tuple[str | int, ...]


class Surgery:
    """One sound file being damaged on purpose; positions are absolute."""

    def __init__(self, file: bytes) -> None:
        self.bytes = bytearray(file)
        self.metadata_nbytes = 4 + self.u32(0)

    def u32(self, position: int) -> int:
        found: int = struct.unpack_from("<I", self.bytes, position)[0]
        return found

    def put(self, position: int, code: str, value: float) -> None:
        """Write one scalar, struct letter `code`, at a position."""
        struct.pack_into("<" + code, self.bytes, position, value)

    def follow(self, position: int) -> int:
        """Where the offset at a position points."""
        return position + self.u32(position)

    def vtable(self, table: int) -> int:
        """Where a table's vtable stands."""
        offset: int = struct.unpack_from("<i", self.bytes, table)[0]
        return table - offset

    def entry(self, table: int, slot: int) -> int:
        """Where a table's vtable entry for a slot stands."""
        return self.vtable(table) + 4 + 2 * slot

    def table(self, path: Path) -> int:
        """The position of the table at a path such as `("programs", 0, "operations", 1)`."""
        return self._walk(path)[1]

    def _walk(self, path: Path) -> tuple[str, int]:
        name, position = ROOT, self.follow(4)
        steps = iter(path)
        for step in steps:
            field = self._field(name, step)
            if field.kind == "union":
                code = self.bytes[self._inline(position, field.slot)]
                position = self.follow(self._inline(position, field.slot + 1))
                name = UNIONS[field.of][code - 1]
                continue
            position, name = self.follow(self._inline(position, field.slot)), field.of
            if field.kind == "tables":
                position = self.follow(position + 4 + 4 * int(next(steps)))
        return name, position

    def _field(self, table: str, wanted: str | int) -> FieldSpec:
        return next(field for field in TABLES[table].fields if field.name == wanted)

    def _inline(self, table: int, slot: int) -> int:
        offset: int = struct.unpack_from("<H", self.bytes, self.entry(table, slot))[0]
        assert offset, "the specimen lacks this field"
        return table + offset

    def place(self, path: Path) -> int:
        """Where the inline bytes of a field stand: `("programs", 0, "role")`."""
        name, table = self._walk(path[:-1])
        return self._inline(table, self._field(name, path[-1]).slot)

    def file(self) -> bytes:
        """The file with the metadata's CRC-32 mended."""
        end = self.metadata_nbytes
        self.put(end, "I", zlib.crc32(self.bytes[:end]))
        return bytes(self.bytes)
