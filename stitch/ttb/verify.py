"""The verifier: walks every byte that the metadata claims, before anything is decoded.

Comes in: the metadata's bytes and the table generated from the schema. Goes out: plain records
(one tuple per table, fields in the schema's order, defaults filled in) and a list of all defects.
Must not know: programs, layouts, operators, segments' bytes.

Python's flatbuffers package has no verifier. This one cannot be made to loop, to recurse deeply or
to allocate more than the file justifies: every table, vector, string and vtable that it visits is
charged against the metadata's length, and only strings and pooled tables are remembered and free
the second time. A sound file's parts do not overlap, so they never exceed that budget; offsets
that share or overlap soon do. Depth is bounded by the schema, which has no recursive tables.

For speed a vtable is checked once per table type and becomes a plan: one `struct` that reads all
inline fields of a table at once, and the list of what to check and to follow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stitch.ttb.generated.tables import ROOT, TABLES, UNIONS
from stitch.ttb.problems import ProblemList
from stitch.ttb.table_spec import FieldSpec, TableSpec

Record = tuple[Any, ...]

#: The root table's offset is counted from here: behind the size prefix.
ROOT_OFFSET_POSITION = 4

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_ITEM_NBYTES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
_NOTHING: Mapping[str, Any] = {"strings": (), "tables": (), "scalars": (), "string": ""}


class _BudgetSpentError(Exception):
    """The parts of the metadata claim more bytes than it has."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to read a table that has one particular vtable."""

    nbytes: int
    unpack: Callable[[bytes, int], tuple[Any, ...]]
    alignment_mask: int  # position & mask must equal residue: where 8-byte fields stand
    alignment_residue: int
    template: tuple[Any, ...]
    scalars: tuple[tuple[int, int], ...]  # record index, raw index
    checks: tuple[tuple[int, FieldSpec], ...]  # raw index, field
    children: tuple[tuple[int, int, int, Callable[[int, FieldSpec], Any], FieldSpec], ...]
    unions: tuple[tuple[int, int, int, int, FieldSpec], ...]


class Verifier:
    """One walk over one file's metadata; `root` gives its records, `problems` its defects."""

    def __init__(
        self, metadata: bytes, problems: ProblemList, tables: Mapping[str, TableSpec] = TABLES
    ) -> None:
        self._data = metadata
        self._end = len(metadata)
        self._problems = problems
        self._tables = tables
        self._numbers = {name: i for i, name in enumerate(tables)}
        self._claimed = 0
        self._plans: dict[int, _Plan | None] = {}
        self._vtables: set[int] = set()
        self._strings: dict[int, str] = {}
        self._pooled: dict[int, Record | None] = {}
        self._path: list[str | int] = []
        self._readers: dict[str, Callable[[int, FieldSpec], Any]] = {
            "string": self._string,
            "table": self._child,
            "scalars": self._scalars,
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
            return self._table(start, ROOT)
        except _BudgetSpentError:
            detail = f"parts claim more than the metadata's {self._end} bytes: offsets overlap"
            self._problems.add("overlap", self._where(), detail)
            return None

    # What went wrong, and where ------------------------------------------------------------

    def _where(self) -> str:
        text = ""
        for step in self._path:
            text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
        return text or ROOT

    def _add(self, kind: str, position: int, detail: str) -> None:
        self._problems.add(kind, self._where(), f"{detail} (at byte {position})")

    def _claim(self, nbytes: int) -> None:
        self._claimed += nbytes
        if self._claimed > self._end:
            raise _BudgetSpentError

    # Tables --------------------------------------------------------------------------------

    def _child(self, position: int, field: FieldSpec) -> Record | None:
        if not field.pooled:
            return self._table(position, field.of)
        key = position * 64 + self._numbers[field.of]
        if key not in self._pooled:
            self._pooled[key] = self._table(position, field.of)
        return self._pooled[key]

    def _table(self, position: int, name: str) -> Record | None:
        if position & 3 or position + 4 > self._end:
            self._add("bounds", position, f"table {name} is outside the metadata or misaligned")
            return None
        vtable = position - _I32.unpack_from(self._data, position)[0]
        key = vtable * 64 + self._numbers[name]
        try:
            plan = self._plans[key]
        except KeyError:
            plan = self._plans[key] = self._plan(vtable, self._tables[name])
        if plan is None:
            return None
        self._claimed += plan.nbytes
        if self._claimed > self._end:
            raise _BudgetSpentError
        if position + plan.nbytes > self._end:
            self._add("bounds", position, f"table {name} ends outside the metadata")
            return None
        if position & plan.alignment_mask != plan.alignment_residue:
            self._add("alignment", position, f"table {name} has a misaligned 8-byte field")
            return None
        return self._record(position, plan)

    def _record(self, position: int, plan: _Plan) -> Record:
        raw = plan.unpack(self._data, position)
        record = list(plan.template)
        for at, index in plan.scalars:
            record[at] = raw[index]
        for index, field in plan.checks:
            self._check_scalar(position, field, raw[index])
        path = self._path
        for at, index, offset, read, field in plan.children:
            path.append(field.name)
            if raw[index] == 0:
                self._add("offset", position + offset, "an offset of zero points nowhere")
            else:
                record[at] = read(position + offset + raw[index], field)
            path.pop()
        for at, type_index, index, offset, field in plan.unions:
            path.append(field.name)
            record[at] = self._union(position + offset, raw[type_index], raw[index], field)
            path.pop()
        return tuple(record)

    def _check_scalar(self, position: int, field: FieldSpec, value: int) -> None:
        if field.maximum is not None and value > field.maximum:
            self._add(
                "enum", position, f"{field.name} is {value}, {field.of} ends at {field.maximum}"
            )
        if field.minimum is not None and value < field.minimum:
            self._add("range", position, f"{field.name} is {value}, less than {field.minimum}")

    def _union(self, position: int, code: int, offset: int, field: FieldSpec) -> Record | None:
        members = UNIONS[field.of]
        if not 1 <= code <= len(members):
            self._add("union", position, f"{field.of} has no member {code}")
            return None
        if offset == 0:
            self._add("offset", position, "an offset of zero points nowhere")
            return None
        return (code, self._table(position + offset, members[code - 1]))

    # Vtables -------------------------------------------------------------------------------

    def _plan(self, vtable: int, spec: TableSpec) -> _Plan | None:
        """The plan for a table with a vtable; None, and the defects recorded, if it is unsound."""
        where = f"vtable of {spec.name}"
        if vtable & 1 or vtable < ROOT_OFFSET_POSITION or vtable + 4 > self._end:
            self._add("bounds", vtable, f"{where} is outside the metadata or misaligned")
            return None
        vtable_nbytes, nbytes = struct.unpack_from("<HH", self._data, vtable)
        if vtable_nbytes < 4 or vtable_nbytes & 1 or vtable + vtable_nbytes > self._end:
            self._add("bounds", vtable, f"{where} claims {vtable_nbytes} bytes")
            return None
        if vtable not in self._vtables:
            self._vtables.add(vtable)
            self._claim(vtable_nbytes)
        entries = struct.unpack_from(f"<{(vtable_nbytes - 4) // 2}H", self._data, vtable + 4)
        before = self._problems.count
        if nbytes < 4:
            self._add("bounds", vtable, f"{where} claims a table of {nbytes} bytes")
        inline = self._inline_fields(vtable, entries, nbytes, spec)
        return None if self._problems.count > before else self._assemble(inline, nbytes, spec)

    def _inline_fields(
        self, vtable: int, entries: tuple[int, ...], nbytes: int, spec: TableSpec
    ) -> list[tuple[int, str, int, str]]:
        """Present fields as (offset, struct letter, record index, part), checked, by offset."""
        found: list[tuple[int, str, int, str]] = []
        known = 0
        for at, field in enumerate(spec.fields):
            union = field.kind == "union"
            known = max(known, field.slot + (2 if union else 1))
            offset = entries[field.slot] if field.slot < len(entries) else 0
            second = entries[field.slot + 1] if union and field.slot + 1 < len(entries) else 0
            if field.required and offset == 0:
                self._add("missing", vtable, f"{spec.name}.{field.name} is required")
            if union and (offset == 0) != (second == 0):
                self._add("union", vtable, f"{spec.name}.{field.name}: type and value go together")
            elif union and offset:
                found += [(offset, "B", at, "type"), (second, "I", at, "value")]
            elif offset:
                code = field.code if field.kind == "scalar" else "I"
                found.append((offset, code, at, "scalar" if field.kind == "scalar" else "child"))
        if self._tables is TABLES and any(entries[known:]):
            self._add("unknown_field", vtable, f"{spec.name} has fields that the schema lacks")
        found.sort()
        self._check_inline(vtable, found, nbytes, spec)
        return found

    def _check_inline(
        self, vtable: int, fields: list[tuple[int, str, int, str]], nbytes: int, spec: TableSpec
    ) -> None:
        end, residues = 4, set()
        for offset, code, at, _ in fields:
            name, item = f"{spec.name}.{spec.fields[at].name}", _ITEM_NBYTES[code]
            if offset < end:
                self._add("overlap", vtable, f"{name} overlaps what stands before it")
            if offset + item > nbytes:
                self._add("bounds", vtable, f"{name} ends outside its table of {nbytes} bytes")
            if offset % min(item, 4):
                self._add("alignment", vtable, f"{name} is misaligned")
            if item == 8:
                residues.add(offset % 8)
            end = offset + item
        if len(residues) > 1:
            self._add("alignment", vtable, f"the 8-byte fields of {spec.name} cannot be aligned")

    def _assemble(
        self, inline: list[tuple[int, str, int, str]], nbytes: int, spec: TableSpec
    ) -> _Plan:
        layout, end, residue, wide = "<", 0, 0, False
        scalars, checks, children, unions = [], [], [], []
        codes: dict[int, int] = {}
        for index, (offset, code, at, part) in enumerate(inline):
            layout += f"{offset - end}x{code}"
            end = offset + _ITEM_NBYTES[code]
            if _ITEM_NBYTES[code] == 8:
                wide, residue = True, -offset % 8
            field = spec.fields[at]
            if part == "scalar":
                scalars.append((at, index))
                if field.minimum is not None or field.maximum is not None:
                    checks.append((index, field))
            elif part == "child":
                children.append((at, index, offset, self._readers[field.kind], field))
            elif part == "type":
                codes[at] = index
        for index, (offset, _, at, part) in enumerate(inline):
            if part == "value":
                unions.append((at, codes[at], index, offset, spec.fields[at]))
        template = tuple(
            f.default if f.kind == "scalar" else _NOTHING.get(f.kind) for f in spec.fields
        )
        return _Plan(
            nbytes, struct.Struct(layout).unpack_from, 7 if wide else 0, residue if wide else 0,
            template, tuple(scalars), tuple(checks), tuple(children), tuple(unions),
        )  # fmt: skip

    # Strings and vectors -------------------------------------------------------------------

    def _string(self, position: int, field: FieldSpec) -> str:
        found = self._strings.get(position)
        if found is None:
            found = self._strings[position] = self._read_string(position)
        limit = field.limit
        # A character takes one to four bytes: most strings need not be measured.
        if (
            limit is not None
            and field.kind == "string"
            and len(found) > limit // 4
            and (len(found) > limit or len(found.encode()) > limit)
        ):
            self._add("limit", position, f"a string is longer than {limit} bytes")
        return found

    def _read_string(self, position: int) -> str:
        nbytes = self._count(position, 1, None)
        if nbytes is None:
            return ""
        start = position + 4
        self._claim(1)
        if start + nbytes >= self._end or self._data[start + nbytes]:
            self._add("string", position, "a string does not end with a zero")
            return ""
        try:
            return str(self._data[start : start + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            self._add("utf8", start + error.start, f"not UTF-8: {error.reason}")
            return ""

    def _count(self, position: int, item_nbytes: int, limit: int | None) -> int | None:
        """The length of a vector that lies inside the metadata; None where it does not."""
        if position & 3 or position + 4 > self._end:
            self._add("bounds", position, "a vector is outside the metadata or misaligned")
            return None
        count: int = _U32.unpack_from(self._data, position)[0]
        if count * item_nbytes > self._end - position - 4:
            self._add("bounds", position, f"{count} elements of {item_nbytes} bytes do not fit")
            return None
        if item_nbytes == 8 and count and position & 7 != 4:
            self._add("alignment", position, "a vector of 8-byte elements is misaligned")
            return None
        if limit is not None and count > limit:
            self._add("limit", position, f"{count} elements; most is {limit}")
            return None
        self._claim(4 + count * item_nbytes)
        return count

    def _scalars(self, position: int, field: FieldSpec) -> tuple[Any, ...]:
        count = self._count(position, _ITEM_NBYTES[field.code], field.limit)
        if not count:
            return ()
        values = struct.unpack_from(f"<{count}{field.code}", self._data, position + 4)
        if field.minimum is not None and min(values) < field.minimum:
            self._add("range", position, f"{min(values)} is less than {field.minimum}")
        return values

    def _offsets(self, position: int, field: FieldSpec) -> list[int]:
        """Where the elements of a vector of offsets stand; 0 for an offset of zero."""
        count = self._count(position, 4, field.limit)
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
        path, name, read, found = self._path, field.of, self._table, []
        path.append(0)
        for i, at in enumerate(positions):
            path[-1] = i
            found.append(read(at, name))
        path.pop()
        return tuple(found)
