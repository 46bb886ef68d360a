"""Schemas of YAML documents: field types, and readers that turn a document into a frozen dataclass.

A schema is data: its keys, the type of each value, and its default::

    CHECKPOINTS = Schema(
        "checkpoints",
        CheckpointEntry,
        Field("folder", RelativePath()),
        Field("every", EVERY, default=Every(1, "epoch")),
        Field("keep", Whole(1, MAX_COUNT), default=3),
    )
    entry = CHECKPOINTS.read(node, reading.root)

A new key is one field. Fields and types describe all their checks, so a schema can also be printed
(as JSON Schema, say); constraints between fields are the schema's `check`.
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
from stitch.forms.nodes import Node, ParseContext, SourceLocation
from stitch.program import MAX_RANK, DataType

# Field types.

T_co = TypeVar("T_co", covariant=True)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class FieldType(ABC, Generic[T_co]):
    """What may stand at a place; `wanted`: in words that go on after `must be`."""

    __slots__ = ()
    wanted: str

    def read(self, node: Node, place: SourceLocation) -> T_co | None:
        """The value that stands there (there is one); None where a defect was noted."""
        noted = place.reading.log.noted
        value = self.value(node, place)
        if value is None and place.reading.log.noted == noted:
            place.wrong(node, self.wanted)
        return value

    @abstractmethod
    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        """The value; None where it is not what is `wanted`, or another defect was noted."""


def is_word(node: Node) -> bool:
    """Whether a scalar stands there; numbers count as the words that they are written as."""
    return not isinstance(node.data, tuple | Mapping) and bool(node.raw)


@dataclass(eq=False, repr=False)
class Word(FieldType[str]):
    """A word as it is written; `is_text` refuses numbers."""

    wanted: str = "a word"
    is_text: bool = False
    may_be_empty: bool = False

    def value(self, node: Node, place: SourceLocation) -> str | None:
        is_text = isinstance(node.data, str) and bool(node.raw.strip())
        is_empty = node.data == "" and self.may_be_empty
        is_ours = is_text or is_empty or (is_word(node) and not self.is_text)
        return node.raw if is_ours else None


@dataclass(eq=False, repr=False)
class AsWritten(FieldType[Node]):
    """Anything, which another reader looks at."""

    wanted: str = "a value"

    def value(self, node: Node, place: SourceLocation) -> Node | None:
        return node


class Name(FieldType[str]):
    """A word that can be the name of a value."""

    wanted = "a name"

    def value(self, node: Node, place: SourceLocation) -> str | None:
        is_ours = is_word(node) and is_name(node.raw, node.line, place)
        return node.raw if is_ours else None


def is_name(word: str, line: int, place: SourceLocation) -> bool:
    """Whether a word can be a name; notes that it cannot."""
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


class Flag(FieldType[bool]):
    """True or false."""

    wanted = "true or false"

    def value(self, node: Node, place: SourceLocation) -> bool | None:
        return node.data if isinstance(node.data, bool) else None


@dataclass(eq=False, repr=False)
class Whole(FieldType[int]):
    """A whole number from `least` to `most` (None: as large as can be written)."""

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


@dataclass(eq=False, repr=False)
class Number(FieldType[float]):
    """A number between bounds: from `least` to `most`, and `above` and `below` these.

    It stays a whole number if it is written as one, unless it `is_float`. `wanted` may say it
    better than the bounds do.
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
    """A path, relative to the file; one with one of the `endings`, if there are any."""

    wanted: str = "a path"
    endings: tuple[str, ...] = ()

    def value(self, node: Node, place: SourceLocation) -> Path | None:
        if not is_word(node) or "\0" in node.raw:
            return None
        if self.endings and Path(node.raw).suffix.lower() not in self.endings:
            place.wrong(node, f"a path that ends in {' or '.join(self.endings)}", "unknown_word")
            return None
        return place.reading.folder / node.raw


@dataclass(eq=False, repr=False)
class NameOrPath(FieldType[str]):
    """A name as it is, or the path of a file that has one of some endings, relative to the file."""

    wanted: str
    endings: tuple[str, ...] = (".yaml", ".yml", ".ttsys")

    def value(self, node: Node, place: SourceLocation) -> str | None:
        if not is_word(node) or "\0" in node.raw:
            return None
        # What stands behind a colon says which part of the file is meant.
        parts = node.raw, node.raw.rpartition(":")[0]
        is_path = any(part.endswith(self.endings) for part in parts)
        return str(place.reading.folder / node.raw) if is_path else node.raw


class Shape(FieldType[tuple[int, ...]]):
    """A list of dimensions, or the only one."""

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


def _is_dimension(data: object) -> bool:
    return isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 2**40


class ElementType(FieldType[DataType]):
    """The name of a data type of single elements."""

    wanted = "a data type, such as float32"

    def value(self, node: Node, place: SourceLocation) -> DataType | None:
        if not is_word(node):
            return None
        try:
            data_type = DataType.parse(node.raw)
        except LayoutError as error:
            near = closest(node.raw, (t.value for t in DataType), "; ")
            detail = f"{place.what}: {error.what}; allowed: {error.expected}{near}"
            place.reading.log.note("unknown_word", place.line, detail)
            return None
        if data_type.is_block:
            place.wrong(node, "a type of single elements, not a way to store")
            return None
        return data_type


# Schemas.

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


# Field types made of others.


@dataclass(eq=False, repr=False)
class ListOf(FieldType[tuple[T_co, ...]], Generic[T_co]):
    """A list of values of one kind."""

    kind: FieldType[T_co]
    wanted: str
    least: int = 0

    def value(self, node: Node, place: SourceLocation) -> tuple[T_co, ...] | None:
        items = node.data
        if not isinstance(items, tuple) or len(items) < self.least:
            return None
        values = [self.kind.read(item, place.item(i, item)) for i, item in enumerate(items)]
        return tuple(value for value in values if value is not None)


@dataclass(eq=False, repr=False)
class Entries(FieldType[tuple[T_co, ...]], Generic[T_co]):
    """A mapping from names to values of one kind, in the order of the file."""

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


@dataclass(eq=False, repr=False)
class Pairs(FieldType[tuple[tuple[Any, ...], ...]]):
    """A mapping from names to values; a list of values `by_position`, whose names are None.

    Pairs may have a third: the line that they stand on. In a list that `is_named`, a value is its
    own name.
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


@dataclass(eq=False, repr=False)
class ByKey(FieldType[T_co], Generic[T_co]):
    """One of several forms: the first whose key is there.

    They are asked for when something is read, so that a form may hold itself.
    """

    wanted: str
    forms: Callable[[], Mapping[str, Schema[T_co]]]

    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        forms = self.forms()
        key, first = next(iter(forms.items()))
        inner = place.inside(node, first.what)
        if not isinstance(node.data, Mapping):
            inner.wrong(node, self.wanted)
            return None
        for word, form in forms.items():
            if word in inner.nodes and inner.nodes[word].data is not None:
                return form.read(node, place)
        inner.only(dict.fromkeys(word for form in forms.values() for word in form.keys))
        first.row(key).read(inner)
        return None


@dataclass(eq=False, repr=False)
class Tagged(FieldType[T_co], Generic[T_co]):
    """One of several forms, by the word that stands at `tag`, or alone without a mapping.

    They are asked for when something is read, so that a form may hold itself.
    """

    wanted: str
    tag: str
    forms: Callable[[], Mapping[str, Schema[T_co]]]

    def value(self, node: Node, place: SourceLocation) -> T_co | None:
        forms = self.forms()
        if is_word(node):
            node = replace(node, data={self.tag: node})
        inner = next(iter(forms.values())).place(node, place)
        tag = inner.nodes.get(self.tag, Node(inner.line, None))
        form = forms.get(tag.raw) if is_word(tag) else None
        if form is None:
            inner.at(self.tag).unknown_word(tag, forms)
            return None
        return form.read(node, place)
