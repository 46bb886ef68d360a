"""What this room knows of the schema: one `TableSpec` per table, filled by generated code.

Comes in: nothing. Goes out: the types in which `generated.py` is written. Must not know:
programs, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["scalar", "string", "table", "union", "scalars", "strings", "tables"]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a table.

    `slot` is its index in the vtable (a union's type; its value stands in the next slot). `code`
    is the struct letter of a scalar or of a vector's elements; `of` names the table, union or
    enum. `minimum` and `maximum` bound a scalar or each element; `limit` bounds a string's bytes
    or a vector's elements. `pooled` tables may be pointed at from several places.
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


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of the schema: its fields in the order of their declaration."""

    name: str
    fields: tuple[FieldSpec, ...]
