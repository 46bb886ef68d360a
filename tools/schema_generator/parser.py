"""The part of the flatbuffers schema language that the `.ttb` schema uses, as data.

Refuses what the verifier could not bound: recursive tables, structs, nested vectors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: Scalar types of the schema language: the struct letter of each.
SCALARS = {
    "byte": "b", "ubyte": "B", "short": "h", "ushort": "H", "int": "i", "uint": "I",
    "long": "q", "ulong": "Q", "float": "f", "double": "d",
}  # fmt: skip

_TOKEN = re.compile(r'///[^\n]*|//[^\n]*|"[^"]*"|-?\d+|[A-Za-z_][\w.]*|[{}()\[\]:;,=]')


class SchemaError(Exception):
    """The schema says something that the generator does not take."""


@dataclass(frozen=True)
class Field:
    """One field: its type as written, whether it is a vector, its default and its attributes."""

    name: str
    type: str
    vector: bool
    default: str | None
    attributes: dict[str, str]


@dataclass(frozen=True)
class Declaration:
    """A table, an enum or a union, with the comment that stands before it."""

    kind: str
    name: str
    doc: str
    fields: tuple[Field, ...] = ()
    members: tuple[str, ...] = ()


@dataclass
class Schema:
    """All that a schema declares."""

    namespace: str = ""
    root: str = ""
    identifier: str = ""
    declarations: dict[str, Declaration] = field(default_factory=dict)

    def of_kind(self, kind: str) -> tuple[Declaration, ...]:
        return tuple(d for d in self.declarations.values() if d.kind == kind)


class _Tokens:
    def __init__(self, text: str) -> None:
        found = _TOKEN.findall(text)
        self.items = [t for t in found if t.startswith("///") or not t.startswith("//")]
        self.at = 0
        self.doc: list[str] = []

    def peek(self) -> str:
        while self.at < len(self.items) and self.items[self.at].startswith("///"):
            self.doc.append(self.items[self.at][3:].strip())
            self.at += 1
        return self.items[self.at] if self.at < len(self.items) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise SchemaError(f"expected {expected or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def take_doc(self) -> str:
        text, self.doc = " ".join(self.doc), []
        return text


def parse(text: str) -> Schema:
    """The schema that a text declares; raises `SchemaError` for what the verifier cannot bound."""
    tokens, schema = _Tokens(text), Schema()
    while tokens.peek():
        doc, word = tokens.take_doc(), tokens.take()
        if word in ("table", "enum", "union"):
            read = {"table": _table, "enum": _enum, "union": _union}[word]
            declaration = read(tokens, doc)
            schema.declarations[declaration.name] = declaration
        elif word in ("namespace", "root_type", "file_identifier", "file_extension", "attribute"):
            value = tokens.take().strip('"')
            tokens.take(";")
            schema.namespace = value if word == "namespace" else schema.namespace
            schema.root = value if word == "root_type" else schema.root
            schema.identifier = value if word == "file_identifier" else schema.identifier
        else:
            raise SchemaError(f"{word!r} is not a declaration that the verifier knows")
    _refuse_recursion(schema)
    return schema


def _table(tokens: _Tokens, doc: str) -> Declaration:
    name = tokens.take()
    tokens.take("{")
    fields = []
    while not tokens.accept("}"):
        fields.append(_field(tokens))
    return Declaration("table", name, doc, fields=tuple(fields))


def _field(tokens: _Tokens) -> Field:
    name = tokens.take()
    tokens.take(":")
    vector = tokens.accept("[")
    kind = tokens.take()
    if vector:
        tokens.take("]")
    default = tokens.take() if tokens.accept("=") else None
    attributes: dict[str, str] = {}
    if tokens.accept("("):
        while not tokens.accept(")"):
            key = tokens.take()
            attributes[key] = tokens.take().strip('"') if tokens.accept(":") else ""
            tokens.accept(",")
    tokens.take(";")
    return Field(name, kind, vector, default, attributes)


def _enum(tokens: _Tokens, doc: str) -> Declaration:
    name = tokens.take()
    tokens.take(":")
    tokens.take("ubyte")
    tokens.take("{")
    members: list[str] = []
    while not tokens.accept("}"):
        members.append(tokens.take())
        tokens.take("=")
        if int(tokens.take()) != len(members) - 1:
            raise SchemaError(f"enum {name}: {members[-1]} must be {len(members) - 1}")
        tokens.accept(",")
    return Declaration("enum", name, doc, members=tuple(members))


def _union(tokens: _Tokens, doc: str) -> Declaration:
    name = tokens.take()
    tokens.take("{")
    members: list[str] = []
    while not tokens.accept("}"):
        members.append(tokens.take())
        tokens.accept(",")
    return Declaration("union", name, doc, members=tuple(members))


def _refuse_recursion(schema: Schema) -> None:
    """Depth is bounded because no table can reach itself: nothing else stops a hostile file."""

    def walk(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise SchemaError("recursive tables: " + " -> ".join([*above, name]))
        declaration = schema.declarations.get(name)
        if declaration is None:
            if name not in SCALARS and name != "string":
                raise SchemaError(f"unknown type {name!r}")
            return
        children = [f.type for f in declaration.fields]
        for child in [*children, *(declaration.members if declaration.kind == "union" else ())]:
            walk(child, (*above, name))

    for declaration in schema.of_kind("table"):
        walk(declaration.name, ())
