"""What is known of a schema: one `TableSpec` per table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
