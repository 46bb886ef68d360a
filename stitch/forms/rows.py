"""One reader of forms: what people write becomes a frozen dataclass, by a row for each field.

A form is data: which keys there are, of what kind each value is, what it is if left out. ::

    CHECKPOINTS = Schema(
        "checkpoints",
        CheckpointEntry,
        Field("folder", RelativePath()),
        Field("every", EVERY, default=Every(1, "epoch")),
        Field("keep", Whole(1, MAX_COUNT), default=3),
    )
    entry = CHECKPOINTS.read(node, reading.root)

A new key is one row. Kinds and rows say all that they check, so a form can also be printed (as JSON
Schema, say); what no row can say (that two fields fit each other) is the form's `check`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from stitch.forms.kinds import FieldType
from stitch.forms.nodes import Node
from stitch.forms.places import ParseContext, SourceLocation

T = TypeVar("T")
#: Attributes that no row need fill.
_KNOWN = frozenset({"name", "line", "lines", "place", "file", "folder"})


@dataclass(eq=False, repr=False)
class Field:
    """A field of a form: its key, the kind of its value, and what it is where the key is absent.

    `into` is the attribute that takes it, if that is not called as the key is. A `default` that is
    a function is called with the `ParseContext`. `needed_without` names keys, with spaces between
    them, of which one may stand in its place, `only_with` those of which it belongs to one.
    """

    key: str
    kind: FieldType[Any]
    default: Any = None
    into: str = ""
    needed: bool = False
    needed_without: str = ""
    only_with: str = ""

    def otherwise(self, reading: ParseContext) -> Any:
        """What the value is where the key is absent."""
        return self.default(reading) if callable(self.default) else self.default

    @property
    def attribute(self) -> str:
        """The attribute that takes the value."""
        return self.into or self.key

    def read(self, mapping: SourceLocation) -> Any:
        """The value in a mapping; the default where there is none, or a defective one was noted."""
        place, node = mapping.at(self.key), mapping.nodes.get(self.key)
        if node is not None:
            node = place.bare(node)
        if node is None or node.data is None:
            if self.needed or (self.needed_without and not _has_one(mapping, self.needed_without)):
                place.wrong(None, self.kind.wanted)
            return self.otherwise(mapping.reading)
        if self.only_with and not _has_one(mapping, self.only_with):
            words = " or ".join(f"`{key}`" for key in self.only_with.split())
            place.wrong(node, f"left out: it belongs to {words}", "misplaced_key")
            return self.otherwise(mapping.reading)
        value = self.kind.read(node, place)
        return self.otherwise(mapping.reading) if value is None else value


def _has_one(mapping: SourceLocation, keys: str) -> bool:
    nodes = [mapping.nodes.get(key) for key in keys.split()]
    return any(node is not None and node.data is not None for node in nodes)


@dataclass(eq=False, repr=False)
class FormValues:
    """What the rows of a form gave, by attribute; `sound` if no defect was noted meanwhile."""

    place: SourceLocation
    values: Mapping[str, Any]
    sound: bool


def as_written(**values: Any) -> dict[str, Any]:
    """The values by key: what makes something of them at once needs no dataclass."""
    return values


class Schema(FieldType[T]):
    """A mapping of fields, each a row. `make` takes their values by name; `what` is what messages
    call it, where `{}` is the mapping around it (nothing: as its key is called).

    Attributes of `make` that no row fills may be `name`, the name of the entry, where the mapping
    is one of several by name; `line`, on which it begins, `lines`, of its keys, and `place`, to
    note what does not fit it; `file` and `folder`, where all is read.
    `word` is the key whose value may stand alone: `encoder.ttb` for `{file: encoder.ttb}`. `check`
    notes what rows cannot say, of a form that is sound by itself. `suffix` tells items of a list
    apart where places are dotted.
    """

    def __init__(
        self,
        what: str,
        make: Callable[..., T],
        *rows: Field,
        word: str = "",
        check: Callable[[T, SourceLocation], None] | None = None,
        suffix: Callable[[Node], str] | None = None,
        wanted: str = "a mapping",
    ) -> None:
        self.what, self.make, self.rows = what, make, rows
        self.word, self.check, self.suffix = word, check, suffix
        self.wanted = wanted
        parameters = inspect.signature(make).parameters
        filled = {row.attribute for row in rows}
        self._free = _KNOWN & (parameters.keys() - filled)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        assert takes_all or filled <= parameters.keys(), f"{filled - parameters.keys()} of {what}"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that have a meaning."""
        return tuple(row.key for row in self.rows)

    def row(self, key: str) -> Field:
        """The row of a key."""
        return next(row for row in self.rows if row.key == key)

    def value(self, node: Node, place: SourceLocation) -> T | None:
        """The dataclass; None where a defect was noted."""
        return self.build(self.fields(node, place))

    def build(self, fields: FormValues) -> T | None:
        """The dataclass out of its values, checked; None where they are not sound."""
        if not fields.sound:
            return None
        value, log = self.make(**fields.values), fields.place.reading.log
        noted = log.noted
        if self.check is not None:
            self.check(value, fields.place)
        return value if log.noted == noted else None

    def fields(self, node: Node, place: SourceLocation) -> FormValues:
        """The values of all rows, also where some are defective: those have their defaults."""
        log = place.reading.log
        before = log.noted
        if self.word and not isinstance(node.data, tuple | Mapping) and node.raw:
            node = dataclasses.replace(node, data={self.word: node})
        inner = self.place(node, place)
        if not isinstance(node.data, Mapping):
            is_told_by_itself = not place.is_dotted and (place.is_item or not place.key)
            (inner if is_told_by_itself else place).wrong(node, self.wanted)
            values = {row.attribute: row.otherwise(place.reading) for row in self.rows}
            return FormValues(inner, values, False)
        inner.only(self.keys)
        inner.keep_source(inner.nodes.get("source"))
        values = {row.attribute: row.read(inner) for row in self.rows}
        known: Mapping[str, Any] = {
            "name": place.name, "line": node.line, "place": inner, "file": log.file,
            "folder": place.reading.folder,
            "lines": {key: item.key_line or item.line for key, item in inner.nodes.items()},
        }  # fmt: skip
        values.update((attribute, known[attribute]) for attribute in self._free)
        return FormValues(inner, values, log.noted == before)

    def place(self, node: Node, place: SourceLocation) -> SourceLocation:
        """The mapping itself, as a place."""
        return place.inside(node, self._title(node, place), place.name)

    def _title(self, node: Node, place: SourceLocation) -> str:
        if place.is_dotted:
            return place.path + (self.suffix(node) if self.suffix is not None else "")
        what = self.what.replace("{}", place.what) or place.key
        return f"{what} {place.name!r}" if place.name else what
