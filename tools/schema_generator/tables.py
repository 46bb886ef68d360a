"""The table that `ttb` runs on, as Python source: one `TableSpec` for each table of the schema."""

from __future__ import annotations

import hashlib

from schema_generator.parser import SCALARS, Declaration, Field, Schema

_HEAD = '''"""Generated from schema/program.fbs by tools/generate_schema. Do not edit.

The one table that drives encoding, verifying, decoding and docs/format.md.
"""

from stitch.flatbuffer import FieldSpec, Schema, TableSpec

'''


def schema_hash(text: str) -> str:
    """The hash that ties generated code to the schema it was made from."""
    return hashlib.sha256(text.encode()).hexdigest()


def field_arguments(schema: Schema, table: Declaration) -> list[dict[str, object]]:
    """For each field of a table the arguments of its `FieldSpec`; a union takes two slots."""
    slot, found = 0, []
    for item in table.fields:
        arguments = {"slot": slot, "name": item.name, **_kind(schema, item)}
        arguments |= {
            key: int(item.attributes[key]) for key in ("minimum", "limit") if key in item.attributes
        }
        arguments |= {key: True for key in ("required", "pooled") if key in item.attributes}
        found.append(arguments)
        slot += 2 if arguments["kind"] == "union" else 1
    return found


def _kind(schema: Schema, item: Field) -> dict[str, object]:
    plural = "s" if item.vector else ""
    declared = schema.declarations.get(item.type)
    if item.type == "string":
        return {"kind": "string" + plural}
    if declared is None:
        code = {"kind": "scalar" + plural, "code": SCALARS[item.type]}
        if item.vector:
            return dict(code)
        number = float if item.type in ("float", "double") else int
        return {**code, "default": number(item.default or 0)}
    if declared.kind == "enum":
        default = declared.members.index(item.default) if item.default else 0
        most = len(declared.members) - 1
        enum = {"kind": "scalar", "code": "B", "of": item.type}
        return {**enum, "default": default, "maximum": most}
    return {"kind": declared.kind + plural, "of": item.type}


def tables_source(schema: Schema, text: str) -> str:
    """The source of `stitch/ttb/generated.py`."""
    lines = [
        f'SCHEMA_SHA256 = "{schema_hash(text)}"',
        f'FILE_IDENTIFIER = b"{schema.identifier}"',
        f'ROOT = "{schema.root}"',
        "",
        "ENUMS: dict[str, tuple[str, ...]] = {",
        *(f"    {d.name!r}: {d.members!r}," for d in schema.of_kind("enum")),
        "}",
        "",
        "#: The tables of each union; type codes count from 1.",
        "UNIONS: dict[str, tuple[str, ...]] = {",
        *(f"    {d.name!r}: {d.members!r}," for d in schema.of_kind("union")),
        "}",
        "",
        "TABLES: dict[str, TableSpec] = {",
    ]
    for table in schema.of_kind("table"):
        lines.append(f"    {table.name!r}: TableSpec({table.name!r}, (")
        for arguments in field_arguments(schema, table):
            listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            lines.append(f"        FieldSpec({listed}),")
        lines.append("    )),")
    lines += ["}", "", "SCHEMA = Schema(ROOT, TABLES, UNIONS, whole=True)"]
    return _HEAD + "\n".join(lines) + "\n"
