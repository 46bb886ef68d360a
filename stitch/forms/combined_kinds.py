"""Kinds that are made of others: lists, mappings from names, one of several by what is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from stitch.forms.kinds import FieldType, is_name, is_word
from stitch.forms.nodes import Node
from stitch.forms.places import SourceLocation
from stitch.forms.rows import Schema

T_co = TypeVar("T_co", covariant=True)


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
