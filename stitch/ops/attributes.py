"""Attributes as definitions read them: by name, with their Python type."""

from __future__ import annotations

from collections.abc import Mapping

from stitch.program import AttributeValue

Attributes = Mapping[str, AttributeValue]


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


class WithAttributes:
    """What an operation's context has: its resolved attributes, by name with their Python type."""

    __slots__ = ()
    attributes: Attributes

    def int_of(self, name: str) -> int:
        """An integer attribute."""
        return int_of(self.attributes, name)

    def float_of(self, name: str) -> float:
        """A float attribute."""
        return float_of(self.attributes, name)

    def string_of(self, name: str) -> str:
        """A string attribute."""
        return string_of(self.attributes, name)

    def ints_of(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is absent."""
        return ints_of(self.attributes, name)
