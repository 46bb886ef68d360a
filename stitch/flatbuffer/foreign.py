"""Files of other projects, each one flatbuffer, read by the version that wrote them.

Such a file has no envelope: a size prefix, then the flatbuffer, and no data after it. Projects move
fields between versions, so the version is read first: it is the first field of the root, a struct,
in every version.

To read a kind of file, write down its tables as a `Schema` (unused fields may be left out; a struct
within a table is one field with its letters written out), one `FieldOrder` for each range of
versions, and a `ForeignFormat`; then call `read_foreign(file, where, format)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stitch.errors import FormatError, IncompatibleError
from stitch.flatbuffer.verify import FieldSpec, ProblemList, Record, Schema, TableSpec, Verifier

#: The size prefix, the root's offset, the identifier.
_HEAD_NBYTES = 12
_REMEDY = "copy the file again from where it was made; it is damaged"
_PEEK = Schema(
    "root",
    {"root": TableSpec("root", (FieldSpec(0, "version", "struct", "HHI", required=True),))},
    {},
)


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """The version of a foreign file; text form `major.minor.release`."""

    major: int
    minor: int
    release: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.release}"


@dataclass(frozen=True, slots=True)
class FieldOrder:
    """The tables as versions from `first` to `last`, both included, have them."""

    first: Release
    last: Release
    schema: Schema


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A kind of file: what messages call it, its identifier at byte 8, the orders that we know.

    Each order begins where the one before ends.
    """

    name: str
    identifier: bytes
    orders: tuple[FieldOrder, ...]


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """What a file says: the root's record, by the tables of its version."""

    version: Release
    schema: Schema
    root: Record

    def named(self, table: str, record: Record) -> dict[str, Any]:
        """A record of a table by the names of its fields."""
        return self.schema.named(table, record)


def is_foreign(head: bytes, kind: ForeignFormat) -> bool:
    """Whether a file that begins so is of a kind.

    >>> is_foreign(b"....    TTSY", ForeignFormat("a descriptor", b"TTSY", ()))
    True
    """
    return head[8:_HEAD_NBYTES] == kind.identifier


def read_foreign(file: memoryview, where: str, kind: ForeignFormat) -> ForeignFile:
    """Verify a whole file and give its records; `where` is its name for errors.

    Raises `FormatError` with every defect found, `IncompatibleError` for a version whose order of
    fields is not known, which names those that are; whatever the bytes, nothing else.
    """
    data = whole_file(file, where, kind)
    version = Release(*verified(data, where, _PEEK, kind)[0])
    for order in kind.orders:
        if order.first <= version <= order.last:
            root = verified(data, where, order.schema, kind)
            return ForeignFile(version, order.schema, root)
    known = f"version {kind.orders[0].first} to {kind.orders[-1].last}"
    raise unknown_order(kind, where, str(version), known)


def whole_file(file: memoryview, where: str, kind: ForeignFormat) -> bytes:
    """The bytes of a file of a kind, neither cut off nor followed by others; else `FormatError`."""
    data = bytes(file)
    if data[8:_HEAD_NBYTES] != kind.identifier:
        raise FormatError(
            f"not {kind.name}",
            where=where,
            expected=f"the identifier {kind.identifier.decode()!r} at byte 8",
            got=f"{data[8:_HEAD_NBYTES]!r} there",
        )
    end = 4 + int.from_bytes(data[:4], "little")
    if end != len(data):
        raise FormatError(
            f"{kind.name} is cut off" if end > len(data) else f"bytes follow {kind.name}",
            where=where,
            expected=f"{end} bytes, as its first four say",
            got=f"{len(data)} bytes",
            remedy=_REMEDY,
        )
    return data


def unknown_order(
    kind: ForeignFormat, where: str, version: str, known: str
) -> IncompatibleError:  # fmt: skip
    """What is to be raised for a version whose order of fields is not known."""
    return IncompatibleError(
        f"{kind.name} of version {version}: the order of its fields is not known",
        where=where,
        expected=known,
        got=version,
        remedy="make the file again with one of these versions, or install a newer Stitch",
    )


def verified(data: bytes, where: str, schema: Schema, kind: ForeignFormat) -> Record:
    """The root's record, by the tables of a schema; raises `FormatError` with every defect."""
    problems = ProblemList()
    root = Verifier(data, problems, schema).root()
    problems.raise_if_any(f"{kind.name} is not sound", where=where, remedy=_REMEDY)
    assert root is not None, "the verifier gave neither a record nor a problem"
    return root
