"""The verifier of flatbuffers: checks every byte that the metadata refers to, before decoding.

Python's flatbuffers package has no verifier. A hostile file cannot make this one loop, recurse
deeply or allocate more than the file justifies: every table, vector, string and vtable visited is
charged against the metadata's length. Only strings of limited length and pooled tables, which are
small, are free the second time. The parts of a valid file do not overlap, so they never exceed this
limit; shared or overlapping offsets soon do. Depth is bounded by the schema, which has no recursive
tables. For speed a vtable is checked once per table type and becomes a `TableShape`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stitch.errors import FormatError, Problem

# Defects: a list of bounded length.

#: Defects that are listed; the rest are only counted.
MOST_LISTED = 64


class ProblemList:
    """Collects defects, the first `MOST_LISTED` in full, and turns them into one error."""

    __slots__ = ("count", "listed")

    def __init__(self) -> None:
        self.listed: list[Problem] = []
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether further defects are only counted."""
        return len(self.listed) >= MOST_LISTED

    def add(self, kind: str, where: str, detail: str) -> None:
        """Record one defect."""
        self.count += 1
        if len(self.listed) < MOST_LISTED:
            self.listed.append(Problem(kind, where, detail))

    def raise_if_any(self, what: str, *, where: str | None = None, remedy: str) -> None:
        """Raise `FormatError` with every defect recorded so far, if there is one."""
        if not self.count:
            return
        listed = tuple(self.listed)
        unlisted = self.count - len(listed)
        if unlisted:
            listed += (Problem("more", "file", f"{unlisted} more defects are not listed"),)
        raise FormatError(what, where=where, problems=listed, remedy=remedy)


# Schemas.

FieldKind = Literal[
    "scalar", "struct", "string", "table", "union", "scalars", "structs", "strings", "tables"
]
#: Bytes of one scalar, by its struct letter.
ITEM_NBYTES = {
    "b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a table.

    `slot` is its index in the vtable (a union's type; its value stands in the next slot). `code`
    is the struct letter of a scalar or of a vector's elements, the letters of a struct (one within
    it is written out; `x` for bytes between); `of` names the table, union or enum. `minimum` and
    `maximum` bound a scalar or each element; `limit` bounds a string's bytes or a vector's
    elements. `pooled` tables may be pointed at from several places.
    """

    slot: int
    name: str
    kind: FieldKind
    code: str = ""
    of: str = ""
    default: int | float | None = None
    required: bool = False
    pooled: bool = False
    minimum: int | None = None
    maximum: int | None = None
    limit: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the scalar or struct, or of one element of the vector."""
        return sum(ITEM_NBYTES.get(letter, 1) for letter in self.code)

    @property
    def alignment(self) -> int:
        """Where it, or an element, may stand: the bytes of its longest scalar."""
        return max((ITEM_NBYTES.get(letter, 1) for letter in self.code), default=4)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of the schema: its fields in the order of their declaration."""

    name: str
    fields: tuple[FieldSpec, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one kind of file, as they stand in one version of it.

    A union lists its members' tables; type codes count from 1. A schema that is not `whole` names
    only what is read of a file: fields that it lacks are passed over, and so is a member of a union
    without a table here.
    """

    root: str
    tables: Mapping[str, TableSpec]
    unions: Mapping[str, tuple[str, ...]]
    whole: bool = False

    def named(self, table: str, record: tuple[Any, ...]) -> dict[str, Any]:
        """A record of a table by the names of its fields.

        >>> fields = (FieldSpec(0, "y", "scalar", "i"), FieldSpec(2, "x", "scalar", "i"))
        >>> Schema("Point", {"Point": TableSpec("Point", fields)}, {}).named("Point", (3, 4))
        {'y': 3, 'x': 4}
        """
        names = [field.name for field in self.tables[table].fields]
        return dict(zip(names, record, strict=True))


# Vtables.

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


Record = tuple[Any, ...]

#: The root table's offset is counted from here: behind the size prefix.
ROOT_OFFSET_POSITION = 4

_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
#: Readers of short vectors, by the letter and the number of their elements.
_SHORT = {
    code: tuple(struct.Struct(f"<{count}{code}").unpack_from for count in range(16))
    for code in ITEM_NBYTES
}


class _BudgetSpentError(Exception):
    """The parts of the metadata claim more bytes than it has."""


class _TableShapes(dict[int, TableShape | None]):
    """The shapes of one type of table by the position of the vtable, made when first needed."""

    def __init__(
        self, spec: TableSpec, make: Callable[[int, TableSpec], TableShape | None]
    ) -> None:
        super().__init__()
        self.spec = spec
        self._make = make

    def __missing__(self, vtable: int) -> TableShape | None:
        shape = self[vtable] = self._make(vtable, self.spec)
        return shape


class Verifier:
    """One walk over one file's metadata: `root` gives its records, `problems` its defects."""

    def __init__(self, metadata: bytes, problems: ProblemList, schema: Schema) -> None:
        self._data = metadata
        self._end = len(metadata)
        self._problems = problems
        self._schema = schema
        self._spent = 0
        self._vtables: set[int] = set()
        self._shapes = {
            name: _TableShapes(spec, self._shape) for name, spec in schema.tables.items()
        }
        self._strings: dict[int, str] = {}
        self._pooled: dict[tuple[str, int], Record | None] = {}
        self._path: list[str | int] = []
        self._readers: dict[str, Callable[[int, FieldSpec], Any]] = {
            "string": self._string,
            "table": self._child,
            "structs": self._vector_of_structs,
            "strings": self._vector_of_strings,
            "tables": self._vector_of_tables,
        }

    def root(self) -> Record | None:
        """The root table's record; None where even that cannot be read."""
        if self._end < ROOT_OFFSET_POSITION + 8:
            self._add("bounds", ROOT_OFFSET_POSITION, "there is no room for a root table")
            return None
        start = ROOT_OFFSET_POSITION + _U32.unpack_from(self._data, ROOT_OFFSET_POSITION)[0]
        try:
            return self._table(start, self._shapes[self._schema.root])
        except _BudgetSpentError:
            detail = f"parts claim more than the metadata's {self._end} bytes: offsets overlap"
            self._problems.add("overlap", self._where(), detail)
            return None

    # What went wrong, and where ------------------------------------------------------------

    def _where(self) -> str:
        text = ""
        for step in self._path:
            text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
        return text or self._schema.root

    def _add(self, kind: str, position: int, detail: str) -> None:
        if self._problems.is_full:
            self._problems.count += 1  # Not listed: no need to spell out where.
        else:
            self._problems.add(kind, self._where(), f"{detail} (at byte {position})")

    def _spend(self, nbytes: int) -> None:
        self._spent += nbytes
        if self._spent > self._end:
            raise _BudgetSpentError

    # Tables --------------------------------------------------------------------------------

    def _table(self, position: int, shapes: _TableShapes) -> Record | None:
        if position & 3 or position + 4 > self._end:
            name = shapes.spec.name
            self._add("bounds", position, f"table {name} is outside the metadata or misaligned")
            return None
        shape = shapes[position - _I32.unpack_from(self._data, position)[0]]
        if shape is None:
            return None
        self._spent += shape.nbytes
        if self._spent > self._end:
            raise _BudgetSpentError
        if position + shape.nbytes > self._end:
            self._add("bounds", position, f"table {shapes.spec.name} ends outside the metadata")
            return None
        if position & shape.alignment_mask != shape.alignment_residue:
            self._add("alignment", position, f"table {shapes.spec.name} misaligns an 8-byte field")
            return None
        raw = shape.unpack(self._data, position)
        if shape.is_plain:
            return raw
        record = list(shape.template)
        for at, index in shape.scalars:
            record[at] = raw[index]
        for at, index, unpack in shape.structs:
            record[at] = unpack(raw[index])
        for index, field in shape.checks:
            value = raw[index]
            if field.maximum is not None and value > field.maximum:
                self._add("enum", position, f"{field.name} is {value}: {field.of} lacks it")
            if field.minimum is not None and value < field.minimum:
                self._add("range", position, f"{field.name} is {value}, less than {field.minimum}")
        if shape.strings:
            self._read_strings(position, shape, raw, record)
        for at, index, offset, field in shape.vectors:
            record[at] = self._scalars(position + offset, raw[index], field)
        for at, index, offset, field in shape.others:
            record[at] = self._follow(position + offset, raw[index], field)
        for at, type_index, index, offset, field in shape.unions:
            record[at] = self._union(position + offset, raw[type_index], raw[index], field)
        return tuple(record)

    def _read_strings(
        self, position: int, shape: TableShape, raw: tuple[Any, ...], record: list[Any]
    ) -> None:
        strings = self._strings
        for at, index, offset, safe_length, field in shape.strings:
            text = strings.get(position + offset + raw[index])
            if text is None or len(text) > safe_length or not raw[index]:
                text = self._follow(position + offset, raw[index], field)
            record[at] = text

    def _follow(self, position: int, offset: int, field: FieldSpec) -> Any:
        """What an offset field points at, read as its kind says."""
        if not offset:
            self._add("offset", position, f"{field.name}: an offset of zero points nowhere")
            return None
        self._path.append(field.name)
        value = self._readers[field.kind](position + offset, field)
        self._path.pop()
        return value

    def _child(self, position: int, field: FieldSpec) -> Record | None:
        if not field.pooled:
            return self._table(position, self._shapes[field.of])
        return self._pooled_table(position, field)

    def _pooled_table(self, position: int, field: FieldSpec) -> Record | None:
        key = (field.of, position)
        if key not in self._pooled:
            self._pooled[key] = self._table(position, self._shapes[field.of])
        return self._pooled[key]

    def _union(self, position: int, code: int, offset: int, field: FieldSpec) -> Record | None:
        members = self._schema.unions[field.of]
        if not 1 <= code <= len(members):
            self._add("union", position, f"{field.name}: {field.of} has no member {code}")
            return None
        if not offset:
            self._add("offset", position, f"{field.name}: an offset of zero points nowhere")
            return None
        shapes = self._shapes.get(members[code - 1])
        if shapes is None:
            assert not self._schema.whole, f"{members[code - 1]} has no table"
            return (code, None)
        self._path.append(field.name)
        member = (code, self._table(position + offset, shapes))
        self._path.pop()
        return member

    def _shape(self, vtable: int, spec: TableSpec) -> TableShape | None:
        nbytes = vtable_nbytes(self._data, vtable, ROOT_OFFSET_POSITION)
        if nbytes is None:
            self._add("bounds", vtable, f"the vtable of {spec.name} is outside or misaligned")
            return None
        if vtable not in self._vtables:
            self._vtables.add(vtable)
            self._spend(nbytes)
        return read_shape(self._data, vtable, spec, self._add, tolerant=not self._schema.whole)

    # Strings and vectors -------------------------------------------------------------------

    def _string(self, position: int, field: FieldSpec) -> str:
        text = self._strings.get(position)
        if text is None:
            text = self._strings[position] = self._read_string(position, field)
        elif field.limit is None:
            self._spend(5 + len(text))
        if field.kind == "string" and field.limit is not None and len(text) * 4 > field.limit:
            too_long = len(text) > field.limit or len(text.encode()) > field.limit
            if too_long:
                self._add("limit", position, f"a string is longer than {field.limit} bytes")
        return text

    def _read_string(self, position: int, field: FieldSpec) -> str:
        nbytes = self._count(position, 1, field)
        if nbytes is None:
            return ""
        start = position + 4
        self._spend(1)
        if start + nbytes >= self._end or self._data[start + nbytes]:
            self._add("string", position, "a string does not end with a zero")
            return ""
        try:
            return str(self._data[start : start + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            self._add("utf8", start + error.start, f"not UTF-8: {error.reason}")
            return ""

    def _count(self, position: int, item_nbytes: int, field: FieldSpec) -> int | None:
        """The length of a vector that lies inside the metadata; None where it does not."""
        if position & 3 or position + 4 > self._end:
            self._add("bounds", position, f"{field.name} is outside the metadata or misaligned")
            return None
        count: int = _U32.unpack_from(self._data, position)[0]
        if count * item_nbytes > self._end - position - 4:
            detail = f"{field.name}: {count} elements of {item_nbytes} bytes do not fit"
            self._add("bounds", position, detail)
            return None
        is_long = count and not item_nbytes & 7 and field.alignment == 8
        if is_long and position & 7 != 4:
            self._add("alignment", position, f"{field.name} has misaligned 8-byte elements")
            return None
        if field.limit is not None and count > field.limit and item_nbytes > 1:
            self._add("limit", position, f"{field.name}: {count} elements, at most {field.limit}")
            return None
        self._spent += 4 + count * item_nbytes
        if self._spent > self._end:
            raise _BudgetSpentError
        return count

    def _scalars(self, position: int, offset: int, field: FieldSpec) -> tuple[Any, ...]:
        if not offset:
            self._add("offset", position, f"{field.name}: an offset of zero points nowhere")
            return ()
        position += offset
        count = self._count(position, ITEM_NBYTES[field.code], field)
        if not count:
            return ()
        values: tuple[Any, ...]
        if count < 16:
            values = _SHORT[field.code][count](self._data, position + 4)
        else:
            values = struct.unpack_from(f"<{count}{field.code}", self._data, position + 4)
        least = field.minimum
        if least is not None and (values[0] if count == 1 else min(values)) < least:
            self._add("range", position, f"{field.name} holds {min(values)}, less than {least}")
        return values

    def _vector_of_structs(self, position: int, field: FieldSpec) -> tuple[tuple[Any, ...], ...]:
        nbytes = field.nbytes
        count = self._count(position, nbytes, field)
        if not count:
            return ()
        held = memoryview(self._data)[position + 4 : position + 4 + count * nbytes]
        return tuple(struct.iter_unpack(f"<{field.code}", held))

    def _offsets(self, position: int, field: FieldSpec) -> list[int]:
        """Where the elements of a vector of offsets stand; 0 for an offset of zero."""
        count = self._count(position, 4, field)
        if not count:
            return []
        start = position + 4
        raw = struct.unpack_from(f"<{count}I", self._data, start)
        if 0 in raw:
            self._add("offset", position, "an offset of zero points nowhere")
            return []
        return [start + 4 * i + offset for i, offset in enumerate(raw)]

    def _vector_of_strings(self, position: int, field: FieldSpec) -> tuple[str, ...]:
        return tuple([self._string(p, field) for p in self._offsets(position, field)])

    def _vector_of_tables(self, position: int, field: FieldSpec) -> tuple[Record | None, ...]:
        positions = self._offsets(position, field)
        path, shapes, read = self._path, self._shapes[field.of], self._table
        tables: list[Record | None] = []
        path.append(0)
        for i, at in enumerate(positions):
            path[-1] = i
            tables.append(self._pooled_table(at, field) if field.pooled else read(at, shapes))
        path.pop()
        return tuple(tables)
