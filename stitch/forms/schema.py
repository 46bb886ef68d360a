"""Schemas of YAML documents: field types that turn a document into a frozen dataclass.

A schema lists its keys, the type of each value, and its default::

    MODULE = Schema(ModuleEntry, Field("file", RelativePath(), needed=True),
                    Field("program", Word()))
    entry = MODULE.read(node, context.root)

Constraints between fields are the schema's `check`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from stitch.errors import LayoutError, closest
from stitch.forms.json_schema import WORD, JsonType, SchemaWriter, mapping_of
from stitch.forms.nodes import Node, ParseContext, SourceLocation
from stitch.program import MAX_RANK, DataType

# Field types.

T_co = TypeVar("T_co", covariant=True)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class FieldType(ABC, Generic[T_co]):
    """The type of a value; `wanted` describes it after `must be`."""

    __slots__ = ()
    wanted: str

    def read(self, node: Node, place: SourceLocation) -> T_co | None:
        """Return the value of a node, or None after noting a defect."""
        noted = place.reading.log.noted
        value = self.value(node, place)
        if value is None and place.reading.log.noted == noted:
            place.wrong(node, self.wanted)
        return value

    @abstractmethod
    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        """Return the value; None if it is not as `wanted`, or another defect was noted."""

    def json_type(self, writer: SchemaWriter) -> JsonType:
        """Return the JSON Schema of the value; by default that of a word."""
        return {**WORD, "description": self.wanted}


def is_word(node: Node) -> bool:
    """Return whether a node is a scalar; numbers count as words."""
    return not isinstance(node.data, tuple | Mapping) and bool(node.raw)


@dataclass(eq=False, repr=False)
class Word(FieldType[str]):
    """A word; `is_text` refuses numbers."""

    wanted: str = "a word"
    is_text: bool = False
    may_be_empty: bool = False

    def value(self, node: Node, place: SourceLocation) -> str | None:
        is_text = isinstance(node.data, str) and bool(node.raw.strip())
        is_empty = node.data == "" and self.may_be_empty
        return node.raw if is_text or is_empty or (is_word(node) and not self.is_text) else None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "string"} if self.is_text else WORD


@dataclass(eq=False, repr=False)
class AsWritten(FieldType[Node]):
    """Any value, for another reader, which reads it as `form` if that is given."""

    wanted: str = "a value"
    form: FieldType[Any] | None = None

    def value(self, node: Node, place: SourceLocation) -> Node | None:
        return node

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {} if self.form is None else self.form.json_type(writer)


class Name(FieldType[str]):
    """A word of letters, digits and `_`."""

    wanted = "a name"

    def value(self, node: Node, place: SourceLocation) -> str | None:
        return node.raw if is_word(node) and is_name(node.raw, node.line, place) else None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {**WORD, "pattern": f"^{NAME.pattern}$"}


def is_name(word: str, line: int, place: SourceLocation) -> bool:
    """Return whether a word can be a name; note a defect otherwise."""
    if NAME.fullmatch(word) is None:
        detail = f"{word!r} is no name: letters, digits and _ only"
        place.reading.log.note("bad_name", line, detail)
        return False
    return True


@dataclass(eq=False, repr=False)
class Choice(FieldType[str]):
    """One of several words."""

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        self.wanted = f"one of {', '.join(self.words)}"

    def value(self, node: Node, place: SourceLocation) -> str | None:
        if is_word(node) and node.raw in self.words:
            return node.raw
        place.unknown_word(node, self.words)
        return None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"enum": list(self.words)}


class Flag(FieldType[bool]):
    """True or false."""

    wanted = "true or false"

    def value(self, node: Node, place: SourceLocation) -> bool | None:
        return node.data if isinstance(node.data, bool) else None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "boolean"}


@dataclass(eq=False, repr=False)
class Whole(FieldType[int]):
    """An integer from `least` to `most` (None: unbounded)."""

    least: int = 0
    most: int | None = 2**63 - 1

    def __post_init__(self) -> None:
        bounds = f"from {self.least}" if self.least else "that is not negative"
        if self.most is not None and self.most < 2**63 - 1:
            bounds = f"from {self.least} to {self.most}"
        self.wanted = f"a whole number {bounds}"

    def value(self, node: Node, place: SourceLocation) -> int | None:
        if not isinstance(node.data, int) or isinstance(node.data, bool):
            return None
        if node.data < self.least or (self.most is not None and node.data > self.most):
            place.wrong(node, self.wanted, "out_of_range")
            return None
        return node.data

    def json_type(self, writer: SchemaWriter) -> JsonType:
        most = {} if self.most is None else {"maximum": self.most}
        return {"type": "integer", "minimum": self.least, **most}


@dataclass(eq=False, repr=False)
class Number(FieldType[float]):
    """A number from `least` to `most`, and strictly between `above` and `below`.

    An integer stays one unless `is_float`. `wanted` replaces the description of the bounds.
    """

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    is_finite: bool = True
    is_float: bool = False
    wanted: str = ""

    def __post_init__(self) -> None:
        kind = "a finite number" if self.is_finite else "a number"
        bounds = (("from", self.least), ("above", self.above), ("below", self.below),
                  ("at most", self.most))  # fmt: skip
        words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
        self.wanted = self.wanted or " ".join([kind, " and ".join(words)]).strip()

    def value(self, node: Node, place: SourceLocation) -> float | None:
        number = node.data
        if isinstance(number, bool) or not isinstance(number, int | float):
            return None
        if self._is_within(number):
            return float(number) if self.is_float else number
        place.wrong(node, self.wanted, "out_of_range")
        return None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        bounds = {"minimum": self.least, "exclusiveMinimum": self.above,
                  "exclusiveMaximum": self.below, "maximum": self.most}  # fmt: skip
        return {"type": "number", **{key: n for key, n in bounds.items() if n is not None}}

    def _is_within(self, number: float) -> bool:
        return (
            (abs(number) < float("inf") or not self.is_finite)
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.most is None or number <= self.most)
        )


@dataclass(eq=False, repr=False)
class RelativePath(FieldType[Path]):
    """A path relative to the file."""

    wanted: str = "a path"

    def value(self, node: Node, place: SourceLocation) -> Path | None:
        if not is_word(node) or "\0" in node.raw:
            return None
        return place.reading.folder / node.raw


@dataclass(eq=False, repr=False)
class NameOrPath(FieldType[str]):
    """A name, or a path with one of the `endings`, relative to the file."""

    wanted: str
    endings: tuple[str, ...] = (".yaml", ".yml", ".ttsys")

    def value(self, node: Node, place: SourceLocation) -> str | None:
        if not is_word(node) or "\0" in node.raw:
            return None
        # A part of the file may follow a colon.
        parts = node.raw, node.raw.rpartition(":")[0]
        is_path = any(part.endswith(self.endings) for part in parts)
        return str(place.reading.folder / node.raw) if is_path else node.raw


class Shape(FieldType[tuple[int, ...]]):
    """A list of dimensions, or a single one."""

    wanted = "a list of dimensions, such as [64, 64]"

    def value(self, node: Node, place: SourceLocation) -> tuple[int, ...] | None:
        parts = node.data if isinstance(node.data, tuple) else (node,)
        wanted = f"a list of at most {MAX_RANK} whole numbers that are not negative"
        if len(parts) > MAX_RANK or (parts == (node,) and not _is_dimension(node.data)):
            place.wrong(node, wanted)
            return None
        for index, part in enumerate(parts):
            if not _is_dimension(part.data):
                size = " or beyond 2^40" if isinstance(part.data, int) and part.data > 0 else ""
                detail = f"must be {wanted}{size}, and its element {index} is {part.describe()}"
                place.note("out_of_range", detail, part.line)
                return None
        return tuple(part.data for part in parts if isinstance(part.data, int))

    def json_type(self, writer: SchemaWriter) -> JsonType:
        size = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**40}
        return {"anyOf": [{"type": "array", "items": size, "maxItems": MAX_RANK}, size]}


def _is_dimension(data: object) -> bool:
    return isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 2**40


class ElementType(FieldType[DataType]):
    """The name of a data type, except block formats."""

    wanted = "a data type, such as float32"

    def value(self, node: Node, place: SourceLocation) -> DataType | None:
        if not is_word(node):
            return None
        try:
            data_type = DataType.parse(node.raw)
        except LayoutError as error:
            near = closest(node.raw, (t.value for t in DataType), "; ")
            place.note("unknown_word", f"{error.what}; allowed: {error.expected}{near}")
            return None
        if data_type.is_block:
            place.wrong(node, "a type of single elements, not a block format")
            return None
        return data_type

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "string", "examples": [t.value for t in DataType if not t.is_block]}


# Schemas.

T = TypeVar("T")
#: Attributes that `Schema` fills without a field.
_AUTOMATIC = frozenset({"name", "line", "place", "file", "folder"})


@dataclass(eq=False, repr=False)
class Field:
    """A field of a schema.

    Args:
        key: Its key.
        kind: The type of its value.
        default: The value without the key, or a function of the `ParseContext`.
        into: The attribute of its value, if it has another name than the key.
        needed: The key is required.
        needed_without: The key is required unless one of these keys (separated by spaces) exists.
        only_with: The key is refused unless one of these keys exists.
    """

    key: str
    kind: FieldType[Any]
    default: Any = None
    into: str = ""
    needed: bool = False
    needed_without: str = ""
    only_with: str = ""

    def default_value(self, reading: ParseContext) -> Any:
        """Return the value without the key."""
        return self.default(reading) if callable(self.default) else self.default

    @property
    def attribute(self) -> str:
        """Return the attribute of the value."""
        return self.into or self.key

    def read(self, mapping: SourceLocation) -> Any:
        """Return the value in a mapping; the default if there is none, or a defect was noted."""
        place, node = mapping.at(self.key), mapping.nodes.get(self.key)
        if node is not None:
            node = place.bare(node)
        if node is None or node.data is None:
            if self.needed or (self.needed_without and not _has_one(mapping, self.needed_without)):
                place.wrong(None, self.kind.wanted)
            return self.default_value(mapping.reading)
        if self.only_with and not _has_one(mapping, self.only_with):
            words = " or ".join(f"`{key}`" for key in self.only_with.split())
            place.wrong(node, f"left out: it belongs to {words}", "misplaced_key")
            return self.default_value(mapping.reading)
        value = self.kind.read(node, place)
        return self.default_value(mapping.reading) if value is None else value


def _has_one(mapping: SourceLocation, keys: str) -> bool:
    nodes = [mapping.nodes.get(key) for key in keys.split()]
    return any(node is not None and node.data is not None for node in nodes)


@dataclass(eq=False, repr=False)
class FormValues:
    """The values of a schema's fields by attribute; `sound` if none is defective."""

    place: SourceLocation
    values: Mapping[str, Any]
    sound: bool


def as_written(**values: Any) -> dict[str, Any]:
    """Return the values by attribute, for schemas without a dataclass."""
    return values


class Schema(FieldType[T]):
    """A mapping of fields.

    Args:
        make: Called with the values by attribute. It may also have the parameters `name` (of the
            entry), `line`, `place` (to note defects), `file` and `folder`.
        rows: The fields.
        word: The key whose value may replace the mapping: `a.ttb` for `{file: a.ttb}`.
        check: Notes defects between fields, of a value whose fields are sound.
        wanted: As of `FieldType`.
    """

    def __init__(
        self,
        make: Callable[..., T],
        *rows: Field,
        word: str = "",
        check: Callable[[T, SourceLocation], None] | None = None,
        wanted: str = "a mapping",
    ) -> None:
        self.make, self.rows, self.word, self.check = make, rows, word, check
        self.wanted = wanted
        parameters = inspect.signature(make).parameters
        filled = {row.attribute for row in rows}
        self._automatic = _AUTOMATIC & (parameters.keys() - filled)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        assert takes_all or filled <= parameters.keys(), f"{filled - parameters.keys()}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the fields."""
        return tuple(row.key for row in self.rows)

    def row(self, key: str) -> Field:
        """Return the field of a key."""
        return next(row for row in self.rows if row.key == key)

    def json_type(self, writer: SchemaWriter) -> JsonType:
        """Return the JSON Schema of the mapping: its keys, and which are required."""
        properties = {
            row.key: writer.value(row.kind.json_type(writer), row.needed) for row in self.rows
        }
        if writer.has_sources:
            properties.setdefault("source", {"type": "string"})
        alternatives = [
            {"anyOf": [{"required": [key]} for key in (row.key, *row.needed_without.split())]}
            for row in self.rows
            if row.needed_without
        ]
        mapping: JsonType = {
            "type": "object", "properties": properties, "additionalProperties": False,
            "required": [row.key for row in self.rows if row.needed],
        }  # fmt: skip
        if alternatives:
            mapping["allOf"] = alternatives
        others = {
            row.key: {"anyOf": [{"required": [key]} for key in row.only_with.split()]}
            for row in self.rows
            if row.only_with
        }
        if others:
            mapping["dependentSchemas"] = others
        if not self.word:
            return mapping
        word = self.row(self.word).kind.json_type(writer)
        return {"anyOf": [word, mapping]}

    def value(self, node: Node, place: SourceLocation) -> T | None:
        """Return the value of `make`, or None after noting a defect."""
        return self.build(self.fields(node, place))

    def build(self, fields: FormValues) -> T | None:
        """Call `make` and `check`; return None for a defect."""
        if not fields.sound:
            return None
        value, log = self.make(**fields.values), fields.place.reading.log
        noted = log.noted
        if self.check is not None:
            self.check(value, fields.place)
        return value if log.noted == noted else None

    def fields(self, node: Node, place: SourceLocation) -> FormValues:
        """Return the values of all fields; defective ones have their defaults."""
        log = place.reading.log
        before = log.noted
        if self.word and not isinstance(node.data, tuple | Mapping) and node.raw:
            node = dataclasses.replace(node, data={self.word: node})
        inner = place.inside(node)
        if not isinstance(node.data, Mapping):
            place.wrong(node, self.wanted)
            values = {row.attribute: row.default_value(place.reading) for row in self.rows}
            return FormValues(inner, values, False)
        inner.only(self.keys)
        inner.keep_source(inner.nodes.get("source"))
        values = {row.attribute: row.read(inner) for row in self.rows}
        automatic: Mapping[str, Any] = {
            "name": place.name, "line": node.line, "place": inner, "file": log.file,
            "folder": place.reading.folder,
        }  # fmt: skip
        values.update((attribute, automatic[attribute]) for attribute in self._automatic)
        return FormValues(inner, values, log.noted == before)


# Field types made of others.


@dataclass(eq=False, repr=False)
class ListOf(FieldType[tuple[T_co, ...]], Generic[T_co]):
    """A list of values of one type."""

    kind: FieldType[T_co]
    wanted: str
    least: int = 0

    def value(self, node: Node, place: SourceLocation) -> tuple[T_co, ...] | None:
        items = node.data
        if not isinstance(items, tuple) or len(items) < self.least:
            return None
        values = [self.kind.read(item, place.item(i, item)) for i, item in enumerate(items)]
        return tuple(value for value in values if value is not None)

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "array", "items": self.kind.json_type(writer), "minItems": self.least}


@dataclass(eq=False, repr=False)
class Entries(FieldType[tuple[T_co, ...]], Generic[T_co]):
    """A mapping from names to values of one type, in file order."""

    kind: FieldType[T_co]

    wanted = "a mapping"

    def value(self, node: Node, place: SourceLocation) -> tuple[T_co, ...] | None:
        if not isinstance(node.data, Mapping):
            return None
        values = []
        for name, item in node.data.items():
            is_name(name, item.key_line or item.line, place)
            values.append(self.kind.read(item, place.entry(name, item)))
        return tuple(value for value in values if value is not None)

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return mapping_of(self.kind.json_type(writer), NAME.pattern)


@dataclass(eq=False, repr=False)
class Pairs(FieldType[tuple[tuple[Any, ...], ...]]):
    """Pairs of names and values: a mapping, or a list `by_position`, with None as names.

    In a list that `is_named` a value is its own name. `has_lines` adds the line to each pair.
    """

    kind: FieldType[Any]
    wanted: str
    least: int = 0
    by_position: bool = True
    is_named: bool = False
    has_lines: bool = False

    def value(self, node: Node, place: SourceLocation) -> tuple[tuple[Any, ...], ...] | None:
        items: list[tuple[str | None, Node]] | None = None
        if isinstance(node.data, Mapping):
            items = list(node.data.items())
        elif isinstance(node.data, tuple) and self.by_position:
            items = [(None, item) for item in node.data]
        if items is None or len(items) < self.least:
            return None
        pairs: list[tuple[Any, ...]] = []
        for index, (name, item) in enumerate(items):
            at = place.item(index, item) if name is None else place.entry(name, item)
            value = self.kind.read(item, at)
            if value is not None:
                named = value if name is None and self.is_named else name
                pairs.append((named, value, item.line) if self.has_lines else (named, value))
        return tuple(pairs)

    def json_type(self, writer: SchemaWriter) -> JsonType:
        kind = self.kind.json_type(writer)
        mapping = mapping_of(kind, minProperties=self.least)
        if not self.by_position:
            return mapping
        return {"anyOf": [mapping, {"type": "array", "items": kind, "minItems": self.least}]}


@dataclass(eq=False, repr=False)
class ByKey(FieldType[T_co], Generic[T_co]):
    """One of several schemas: the first whose key exists.

    `forms` is called when a value is read, so that a schema may be recursive.
    """

    wanted: str
    forms: Callable[[], Mapping[str, Schema[T_co]]]

    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        forms = self.forms()
        key, first = next(iter(forms.items()))
        inner = place.inside(node)
        if not isinstance(node.data, Mapping):
            inner.wrong(node, self.wanted)
            return None
        for word, form in forms.items():
            if word in inner.nodes and inner.nodes[word].data is not None:
                return form.read(node, place)
        inner.only(dict.fromkeys(word for form in forms.values() for word in form.keys))
        first.row(key).read(inner)
        return None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"anyOf": [writer.reference(form, key) for key, form in self.forms().items()]}


@dataclass(eq=False, repr=False)
class Tagged(FieldType[T_co], Generic[T_co]):
    """One of several schemas, by the word of the key `tag`, or a word without a mapping.

    `forms` is called when a value is read, so that a schema may be recursive.
    """

    wanted: str
    tag: str
    forms: Callable[[], Mapping[str, Schema[T_co]]]

    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        forms = self.forms()
        if is_word(node):
            node = replace(node, data={self.tag: node})
        inner = place.inside(node)
        tag = inner.nodes.get(self.tag, Node(inner.line, None))
        form = forms.get(tag.raw) if is_word(tag) else None
        if form is None:
            inner.at(self.tag).unknown_word(tag, forms)
            return None
        return form.read(node, place)

    def json_type(self, writer: SchemaWriter) -> JsonType:
        choices: list[JsonType] = [{"enum": list(self.forms())}]
        for word, form in self.forms().items():
            written = form.json_type(writer)
            properties = {**written["properties"], self.tag: {"const": word}}
            choices.append({**written, "properties": properties})
        return {"anyOf": choices}
