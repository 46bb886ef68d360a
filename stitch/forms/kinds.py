"""Kinds of values in a form: what may stand there, and the Python value that it is.

Each kind is data: its bounds and words are attributes, which nobody changes (a frozen dataclass
would say so, and cost more at every import).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from stitch.errors import LayoutError, closest
from stitch.forms.nodes import Node
from stitch.forms.places import SourceLocation
from stitch.program import MAX_RANK, DataType

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
