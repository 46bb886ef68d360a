"""Reading JSON that may be wrong: every field checked, every defect noted, none fatal at once."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from stitch.errors import Problem, StitchError, closest

_Choice = TypeVar("_Choice")
_Made = TypeVar("_Made")
#: More defects than this are not worth listing.
MAX_PROBLEMS = 50
#: No place and no sentence of a defect is longer, whatever it repeats of the text.
MAX_CHARACTERS = 240


def objects_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The hook for `json.loads` that refuses an object with two equal keys (`ValueError`)."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        some = [shortened(key, 40) for key in sorted(fields)[:8]]
        raise ValueError(f"a key stands twice in one object, among {some}")
    return fields


def shortened(text: str, most: int = MAX_CHARACTERS) -> str:
    """A text of so many characters at most: of a longer one, how it begins and how it ends.

    >>> shortened("values 1, 2, 3, 4, 5, 6, 7, 8 and 9", 20)
    'values 1 ... 8 and 9'
    """
    if len(text) <= most:
        return text
    kept = most - len(" ... ")
    return f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}"


class JsonObject:
    """A JSON object with the place where it stands."""

    __slots__ = ("_fields", "_problems", "where")

    def __init__(self, data: object, where: str, problems: list[Problem]) -> None:
        self.where = where
        self._problems = problems
        self._fields: Mapping[str, object] = {}
        if isinstance(data, dict):
            self._fields = data
        else:
            self._note("not_an_object", where, f"an object is needed, not {_kind(data)}")

    @property
    def is_full(self) -> bool:
        """Whether more defects would not be listed, so that nobody need look for words."""
        return len(self._problems) >= MAX_PROBLEMS

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str) -> object:
        """The field as it is, or None."""
        return self._fields.get(key)

    def problem(self, kind: str, key: str, detail: str) -> None:
        """Notes a defect of a field."""
        self._note(kind, f"{self.where}.{key}", detail)

    def more_problems(self, problems: Iterable[Problem]) -> None:
        """Notes defects of the whole that its reader finds: no more are found than are listed."""
        for problem in islice(problems, MAX_PROBLEMS - len(self._problems)):
            self._note(problem.kind, problem.where, problem.detail)

    def text(self, key: str) -> str:
        """A string."""
        value = self._fields.get(key)
        if isinstance(value, str):
            return value
        self._wrong(key, "a string", value)
        return ""

    def integer(self, key: str) -> int:
        """A whole number of 64 bits."""
        value = self._fields.get(key)
        if _is_integer(value):
            return int(value)  # type: ignore[call-overload, no-any-return]  # checked above
        self._wrong(key, "a whole number of 64 bits", value)
        return 0

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._fields.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        self._wrong(key, "a finite number", value)
        return 0.0

    def data(self, key: str) -> bytes | None:
        """The bytes that a string of base64 holds; None where it is none."""
        text = self._fields.get(key)
        if not isinstance(text, str):
            self._wrong(key, "a string of base64", text)
            return None
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            self.problem("bad_value", key, f"not base64: {error}")
            return None

    def made(self, key: str, make: Callable[[Any], _Made]) -> _Made | None:
        """What is made of a field, whatever it is; what refuses it says why. None where it does."""
        if key not in self._fields:
            self._wrong(key, "a value", None)
            return None
        try:
            return make(self._fields[key])
        except StitchError as error:
            self.problem("bad_value", key, "; ".join(map(str.strip, str(error).splitlines())))
            return None

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of 64 bits."""
        items = self.items(key)
        if all(_is_integer(item) for item in items):
            return tuple(int(item) for item in items)  # type: ignore[call-overload]  # checked
        self._wrong(key, "a list of whole numbers of 64 bits", items)
        return ()

    def items(self, key: str) -> Sequence[object]:
        """A list of anything."""
        value = self._fields.get(key)
        if isinstance(value, list):
            return value
        self._wrong(key, "a list", value)
        return ()

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        items = self.items(key)
        if all(isinstance(item, str) for item in items):
            return tuple(str(item) for item in items)
        self._wrong(key, "a list of strings", items)
        return ()

    def records(self, key: str) -> list[JsonObject]:
        """A list of objects."""
        return [
            JsonObject(item, f"{self.where}.{key}[{i}]", self._problems)
            for i, item in enumerate(self.items(key))
        ]

    def record(self, key: str) -> JsonObject:
        """An object."""
        return JsonObject(self._fields.get(key), f"{self.where}.{key}", self._problems)

    def fields(self, key: str) -> Mapping[str, object]:
        """An object of anything."""
        value = self._fields.get(key)
        if isinstance(value, dict):
            return value
        self._wrong(key, "an object", value)
        return {}

    def named_records(self, key: str) -> dict[str, JsonObject]:
        """An object of objects."""
        return {
            str(name): JsonObject(item, f"{self.where}.{key}.{name}", self._problems)
            for name, item in self.fields(key).items()
        }

    def choice(self, key: str, choices: Mapping[str, _Choice], otherwise: _Choice) -> _Choice:
        """One of some words."""
        value = self._fields.get(key)
        if isinstance(value, str) and value in choices:
            return choices[value]
        near = "" if self.is_full or not isinstance(value, str) else closest(value, choices)
        self._wrong(key, " or ".join(choices) + (f" ({near})" if near else ""), value)
        return otherwise

    def refuse_other_keys(self, allowed: Iterable[str]) -> None:
        """Notes every field that has no meaning here."""
        words = tuple(allowed)
        for key in self._fields:
            if self.is_full:
                return
            if key not in words:
                near = closest(key, words) or f"allowed: {', '.join(words)}"
                self.problem("unknown_key", key, f"it has no meaning here; {near}")

    def bad_value(self, key: str, wanted: str, value: object) -> None:
        """Notes that a part of a field is not what is wanted."""
        self.problem("bad_value", key, f"{wanted} is needed, not {_kind(value)}")

    def _wrong(self, key: str, wanted: str, value: object) -> None:
        if key in self._fields:
            self.bad_value(key, wanted, value)
        else:
            self.problem("missing_key", key, f"{wanted} is needed, not {_kind(value)}")

    def _note(self, kind: str, where: str, detail: str) -> None:
        if not self.is_full:
            self._problems.append(Problem(kind, shortened(where), shortened(detail)))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
