"""The schema as flatc understands it, and tables written and read with flatbuffers' own library.

`tools/generate_schema` writes `program.bfbs`, which is flatc's binary form of the schema (see
reflection.fbs of flatbuffers) behind one line of text. Nothing here comes from Stitch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbuffers import number_types
from flatbuffers.table import Table

SCHEMA = Path(__file__).with_name("program.bfbs")
#: The types of fields, in the order of reflection.fbs; None for what an offset points at.
BASE_TYPES = (
    None, "Uint8", "Bool", "Int8", "Uint8", "Int16", "Uint16", "Int32", "Uint32", "Int64", "Uint64",
    "Float32", "Float64", None, None, None, None,
)  # fmt: skip
STRING, VECTOR, UNION = 13, 14, 16


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table; `refers_to` is the table, enum or union that it is of, if any."""

    name: str
    id: int
    base: int
    element: int
    refers_to: str
    default: float


def _scalar(table: Table, slot: int, kind: str, default: Any = 0) -> Any:
    offset = table.Offset(4 + 2 * slot)
    return (
        table.Get(getattr(number_types, f"{kind}Flags"), offset + table.Pos) if offset else default
    )


def _inner(table: Table, slot: int) -> Table:
    return Table(table.Bytes, table.Indirect(table.Offset(4 + 2 * slot) + table.Pos))


def _elements(table: Table, offset: int) -> Iterator[Table]:
    for index in range(table.VectorLen(offset)):
        yield Table(table.Bytes, table.Indirect(table.Vector(offset) + 4 * index))


def _name(table: Table) -> str:
    return str(table.String(table.Offset(4) + table.Pos).decode()).rpartition(".")[2]


def _read_schema() -> tuple[dict[str, dict[str, Field]], dict[str, dict[str, int]]]:
    data = SCHEMA.read_bytes().partition(b"\n")[2]
    root = Table(data, int.from_bytes(data[:4], "little"))
    objects, enums = (list(_elements(root, root.Offset(offset))) for offset in (4, 6))

    def field_of(field: Table) -> Field:
        kind = _inner(field, 1)
        base, element = _scalar(kind, 0, "Int8"), _scalar(kind, 1, "Int8")
        index = _scalar(kind, 2, "Int32", -1)
        held = element if base == VECTOR else base
        others = objects if BASE_TYPES[held] is None and held != UNION else enums
        name = _name(others[index]) if index >= 0 else ""
        real = BASE_TYPES[base] in ("Float32", "Float64")
        default = _scalar(field, 5, "Float64", 0.0) if real else _scalar(field, 4, "Int64")
        return Field(_name(field), _scalar(field, 2, "Uint16"), base, element, name, default)

    tables = {}
    for one in objects:
        fields = sorted(map(field_of, _elements(one, one.Offset(6))), key=lambda field: field.id)
        tables[_name(one)] = {field.name: field for field in fields}
    return tables, {
        _name(enum): {_name(v): _scalar(v, 1, "Int64") for v in _elements(enum, enum.Offset(6))}
        for enum in enums
    }


TABLES, ENUMS = _read_schema()


def add_table(builder: Any, table: str, /, **values: Any) -> int:
    """Write a table with these fields, in this order, as flatc's code does; return its offset."""
    fields = TABLES[table]
    builder.StartObject(len(fields))
    for key, value in values.items():
        field = fields[key]
        kind = BASE_TYPES[field.base]
        add = getattr(builder, f"Prepend{kind or 'UOffsetTRelative'}Slot")
        add(field.id, value, field.default if kind else 0)
    return int(builder.EndObject())


def read_file(data: bytes) -> dict[str, Any]:
    """Return all that the metadata of a file holds."""
    assert data[8:12] == b"STCH"
    return _read(Table(data, 4 + int.from_bytes(data[4:8], "little")), "Binary")


def _read(table: Table, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in TABLES[name].values():
        offset = table.Offset(4 + 2 * field.id)
        kind = BASE_TYPES[field.base]
        if kind is not None:
            found[field.name] = _scalar(table, field.id, kind, field.default)
        elif not offset:
            found[field.name] = [] if field.base == VECTOR else None
        elif field.base == STRING:
            found[field.name] = table.String(offset + table.Pos).decode()
        elif field.base == VECTOR:
            found[field.name] = _read_vector(table, offset, field)
        else:
            member = field.refers_to
            if field.base == UNION:
                codes = {code: name for name, code in ENUMS[member].items()}
                member = codes[found[f"{field.name}_type"]]
            found[field.name] = _read(_inner(table, field.id), member)
    return found


def _read_vector(table: Table, offset: int, field: Field) -> list[Any]:
    kind = BASE_TYPES[field.element]
    if kind is not None:
        array = table.GetVectorAsNumpy(getattr(number_types, f"{kind}Flags"), offset)
        return list(array.tolist())
    if field.element == STRING:
        start, count = table.Vector(offset), table.VectorLen(offset)
        return [table.String(start + 4 * index).decode() for index in range(count)]
    return [_read(one, field.refers_to) for one in _elements(table, offset)]
