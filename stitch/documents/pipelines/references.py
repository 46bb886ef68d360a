"""References: what a step of a pipeline file reads, a value or one element of its first
dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stitch.forms import FieldType, Node, SourceLocation, is_word

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_FORWARD = rf"({_WORD})\s*(?:([+-])\s*(\d+))?"
_BACKWARD = rf"(-?\d+)\s*-\s*({_WORD})"
_REFERENCE = re.compile(rf"({_WORD})(?:\[\s*(?:(-?\d+)|{_FORWARD}|{_BACKWARD})\s*\])?")
#: Digits of a number that can be meant.
_MOST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """A value by name, or one element of its first dimension.

    `offset` counts from the variable `index` (None: from 0, or from the end where negative);
    `is_element` tells `xs[0]` from `xs`. One that `is_backward` takes the variable off: `xs[-1-i]`
    counts from the end, `xs[9-i]` from the start.
    """

    name: str
    is_element: bool = False
    index: str | None = None
    offset: int = 0
    is_backward: bool = False

    def text(self) -> str:
        """As it is written."""
        if not self.is_element:
            return self.name
        if self.index is None:
            return f"{self.name}[{self.offset}]"
        if self.is_backward:
            return f"{self.name}[{self.offset}-{self.index}]"
        sign = f"{self.offset:+d}" if self.offset else ""
        return f"{self.name}[{self.index}{sign}]"

    @property
    def is_from_end(self) -> bool:
        """Whether it counts from the end."""
        return self.offset < 0 and (self.index is None or self.is_backward)

    def at(self, indices: Mapping[str, int]) -> int:
        """The element's number; negative where it counts from the end.

        >>> reference = parse_reference("xs[-1-i]")
        >>> [reference.at({"i": i}) for i in range(3)]
        [-1, -2, -3]
        """
        start = 0 if self.index is None else indices[self.index]
        return self.offset - start if self.is_backward else self.offset + start


def parse_reference(text: str) -> Reference | None:
    """`h`, `xs[i]`, `xs[i-1]`, `xs[-1-i]`, `xs[3]`; None for anything else.

    >>> parse_reference("xs[i+1]").text(), parse_reference("xs[ -1 - i ]").text()
    ('xs[i+1]', 'xs[-1-i]')
    """
    match = _REFERENCE.fullmatch(text.strip())
    if match is None:
        return None
    name, number, index, sign, offset, start, taken = match.groups()
    if max(len(digits or "") for digits in (number, offset, start)) > _MOST_DIGITS:
        return None
    if number is not None:
        return Reference(name, True, None, int(number))
    if taken is not None:
        return Reference(name, True, taken, int(start), is_backward=True)
    if index is None:
        return Reference(name)
    return Reference(name, True, index, int(f"{sign}{offset}") if sign else 0)


class ReferenceKind(FieldType[Reference]):
    """What a step reads."""

    wanted = "a value: x, xs[i], xs[i-1], xs[-1-i]"

    def value(self, node: Node, place: SourceLocation) -> Reference | None:
        reference = parse_reference(node.raw) if is_word(node) else None
        if reference is None:
            place.reading.log.note(
                "bad_value", node.line, f"{node.raw[:60]!r} is no value: x, xs[i], xs[i-1], "
                "xs[-1-i]"
            )  # fmt: skip
        return reference
