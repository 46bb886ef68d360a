"""Attributes: checked against the definition once, then read by name with their Python type.

Comes in: what a front end wrote. Goes out: a mapping with defaults filled in, or a `CompileError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from stitch.errors import CompileError, closest
from stitch.ops.definition import Attribute, OpDef
from stitch.program import AttributeValue

Attributes = Mapping[str, AttributeValue]


def resolve_attributes(
    definition: OpDef, attributes: Mapping[str, Any], location: str = ""
) -> Attributes:
    """The attributes of one operation with defaults filled in; optional ones may stay absent.

    Raises `CompileError` for an unknown, missing or mistyped attribute. An int is taken where a
    float is wanted; resolving a resolved mapping changes nothing.
    """
    where = definition.name + (f" at {location}" if location else "")
    for name in attributes:
        if name not in definition.attributes:
            raise CompileError(
                f"{definition.name} has no attribute {name!r}",
                where=where,
                expected=", ".join(definition.attributes) or "no attributes",
                remedy=closest(name, definition.attributes) or None,
            )
    resolved: dict[str, AttributeValue] = {}
    for name, declared in definition.attributes.items():
        if name in attributes:
            resolved[name] = _typed(name, declared, attributes[name], where)
        elif declared.required:
            raise CompileError(
                f"{definition.name} needs the attribute {name!r}",
                where=where,
                expected=declared.kind,
            )
        elif declared.default is not None:
            resolved[name] = declared.default
    return MappingProxyType(resolved)


def _typed(name: str, declared: Attribute, value: Any, where: str) -> AttributeValue:
    kind = declared.kind
    try:
        if kind.endswith("s"):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError
            # One element kind per attribute kind, which a union of tuples cannot say.
            return tuple(_scalar(kind[:-1], item) for item in value)  # type: ignore[return-value]
        return _scalar(kind, value)
    except TypeError:
        raise CompileError(
            f"attribute {name!r} has the wrong type", where=where, expected=kind, got=repr(value)
        ) from None


def _scalar(kind: str, value: Any) -> int | float | str:
    if kind == "int" and isinstance(value, Integral):
        return int(value)
    if kind == "float" and isinstance(value, Real):
        return float(value)
    if kind == "string" and isinstance(value, str):
        return value
    raise TypeError


def int_of(attributes: Attributes, name: str) -> int:
    """An integer attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, int)
    return value


def float_of(attributes: Attributes, name: str) -> float:
    """A float attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, float)
    return value


def string_of(attributes: Attributes, name: str) -> str:
    """A string attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, str)
    return value


def ints_of(attributes: Attributes, name: str) -> tuple[int, ...] | None:
    """A list of integers, or None where the attribute is absent."""
    value = attributes.get(name)
    if value is None:
        return None
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))
