"""JSON Schemas (draft 2020-12) of YAML documents, written from the field types that read them.

A schema describes the form of a document: keys, types, bounds, choices. Constraints between fields
(`Schema.check`) and names that must exist are reported by the reader only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

JsonType = dict[str, Any]
#: A scalar that is read as a word: YAML may parse it as a number or a truth value.
WORD: JsonType = {"type": ["string", "number", "boolean"]}


class Described(Protocol):
    """A field type, as it is written here."""

    def json_type(self, writer: SchemaWriter) -> JsonType: ...


def json_schema(kind: Described, title: str, *, has_sources: bool = False) -> JsonType:
    """Return the JSON Schema of a document.

    Args:
        kind: The schema that reads it.
        title: The title.
        has_sources: Whether a figure may be `{value: .., source: ..}`, and a mapping may have a
            `source`, as in descriptions of machines.
    """
    writer = SchemaWriter(has_sources)
    written = kind.json_type(writer)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**head, **written, **({"$defs": writer.definitions} if writer.definitions else {})}


class SchemaWriter:
    """Collects definitions: of types used several times, and of schemas that may be recursive."""

    def __init__(self, has_sources: bool) -> None:
        self.has_sources = has_sources
        self.definitions: dict[str, JsonType] = {}

    def reference(self, kind: Described, name: str) -> JsonType:
        """Return a reference to the definition of a field type, which is written once."""
        if name not in self.definitions:
            self.definitions[name] = {}  # A recursive reference finds it.
            self.definitions[name] = kind.json_type(self)
        return {"$ref": f"#/$defs/{name}"}

    def value(self, written: JsonType, is_needed: bool) -> JsonType:
        """Return the type of a field's value: with its source, and absent if it is not needed."""
        choices = [written]
        # A mapping of fields has the source of all of them.
        if self.has_sources and "properties" not in written:
            properties = {"value": written, "source": {"type": "string"}}
            choices.append({"type": "object", "properties": properties, "required": ["value"],
                            "additionalProperties": False})  # fmt: skip
        if not is_needed:
            choices.append({"type": "null"})
        return written if len(choices) == 1 else self._shared({"anyOf": choices})

    def _shared(self, written: JsonType) -> JsonType:
        """Return a reference to a type that is written once, however often it is used."""
        for name, known in self.definitions.items():
            if known == written:
                return {"$ref": f"#/$defs/{name}"}
        name = f"value{len(self.definitions)}"
        self.definitions[name] = written
        return {"$ref": f"#/$defs/{name}"}


def mapping_of(written: JsonType, pattern: str = "", **more: Any) -> JsonType:
    """Return the type of a mapping from names to values of one type.

    >>> mapping_of({"type": "integer"}, minProperties=1)
    {'type': 'object', 'additionalProperties': {'type': 'integer'}, 'minProperties': 1}
    """
    names: Mapping[str, Any] = {"propertyNames": {"pattern": f"^{pattern}$"}} if pattern else {}
    return {"type": "object", "additionalProperties": written, **names, **more}
