"""Convert data to JSON and back by its annotations.

Data are dataclasses, named tuples, enums, tuples, sets, mappings from texts, numbers, texts and
bytes (base64). A field with a default may be absent, and of named tuples it is not written then.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from stitch.errors import FormatError, StitchError, UsageError

_T = TypeVar("_T")
#: Nesting limit; plans have about a dozen levels.
MAX_DEPTH = 40
#: Maximum length of a location in an error.
MAX_CHARACTERS = 240
#: JSON names of classes and fields that were renamed since the format was fixed.
JSON_NAMES = {
    "Buffer": "Block", "buffer": "block", "buffers": "blocks", "final_buffers": "final_blocks",
}  # fmt: skip
#: Fields, by class, of older records that are ignored.
REMOVED = {
    "CostCertificate": frozenset({"inside_seconds"}),
    "Plan": frozenset({"fewest_bytes"}),
    "SearchSolution": frozenset({"compared", "operators"}),
}


#: Parsed JSON may be nested so deeply that `repr` exceeds the recursion limit.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def shown(data: object) -> str:
    """Return data from JSON for an error, without its deeply nested parts."""
    return _SHORT.repr(data)


def read_json(text: str | bytes, what: str) -> Any:
    """Parse JSON; raise `FormatError` that names `what` for other text, and for an object with
    duplicate keys."""
    if not isinstance(text, str | bytes | bytearray):
        raise UsageError(f"a {what} is read from JSON text", expected="str or bytes",
                         got=type(text).__name__, remedy="json.dumps(data)")  # fmt: skip
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise FormatError(f"this is no {what}", got="JSON that is nested too deeply") from error
    except ValueError as error:
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        got = f"no JSON: {error}" if words.strip() else "an empty text"
        if _is_cut_off(words, error):
            got = f"JSON that ends too early, as if it were cut off: {error}"
        raise FormatError(f"this is no {what}", got=got[:200]) from error


def _is_cut_off(text: str, error: ValueError) -> bool:
    """Return whether text begins as JSON and the error is that its end is missing."""
    stripped = text.strip()
    is_at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip())
    return stripped[:1] in ("{", "[") and (is_at_end or stripped[-1:] not in ("}", "]"))


def check_format(data: Any, what: str, remedy: str | None = None, **expected: object) -> None:
    """Raise `FormatError` unless data is an object with these fields: a format and a version."""
    fields = data if isinstance(data, dict) else {}
    wanted, got = [
        ", ".join(f"{key} {shown(part.get(key))}" for key in expected)
        for part in (expected, fields)
    ]
    if wanted != got:
        raise FormatError(
            f"this JSON is no {what}, or of another version", expected=wanted, got=got[:200],
            remedy=remedy,
        )  # fmt: skip


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"duplicate key in one object, among {sorted(fields)[:8]}")
    return fields


@contextmanager
def located(where: str) -> Iterator[None]:
    """Raise `FormatError` with a location for errors within the block that have none."""
    try:
        yield
    except StitchError as error:
        if isinstance(error, FormatError) and (error.where or error.problems):
            raise
        expected, got = error.expected, error.got
        raise _refusal(error.what, where, expected and expected[:200], got and got[:200]) from error


def _json_name(name: str) -> str:
    return JSON_NAMES.get(name, name)


def to_plain(value: Any) -> Any:
    """Return plain data for `json.dumps`; NaN and infinities become strings."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        fields = {_json_name(name): to_plain(getattr(value, name)) for name in names}
        return {"is": _json_name(type(value).__name__)} | fields
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        absent: Mapping[str, Any] = getattr(value, "_field_defaults", {})
        return {
            _json_name(name): to_plain(item)
            for name, item in zip(value._fields, value, strict=True)
            if name not in absent or item != absent[name]
        }
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    raise AssertionError(f"{type(value).__name__} is no frozen data")


def from_plain(kind: type[_T], data: object, where: str) -> _T:
    """Return the value of a type for plain data; raise `FormatError` with the location."""
    value: _T = _read(kind, data, where, 0)
    return value


def _read(hint: Any, data: object, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _refusal(f"JSON nested deeper than {MAX_DEPTH} levels", where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(hint), data, where, depth)
    if origin is typing.Literal:
        if not any(type(data) is type(word) and data == word for word in typing.get_args(hint)):
            raise _wrong(where, " or ".join(map(str, typing.get_args(hint))), data)
        return data
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), data, where, depth)
    if origin is frozenset:
        (item,) = typing.get_args(hint)
        return frozenset(_read_items(item, data, where, depth))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        item = typing.get_args(hint)[1]
        return {key: _read(item, part, f"{where}.{key}", depth + 1) for key, part in data.items()}
    return _read_plain(hint, data, where, depth)


def _read_plain(hint: Any, data: object, where: str, depth: int) -> Any:
    if hint is Any:
        return data
    if hint is float:
        return _read_float(data, where)
    if hint in (int, str, bool):
        if type(data) is not hint or (isinstance(data, int) and not -(2**63) <= data < 2**63):
            raise _wrong(where, _WORDS[hint], data)
        return data
    if hint is bytes:
        return _read_bytes(data, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError as error:
            raise _wrong(where, " or ".join(str(m.value) for m in hint), data) from error
    return _read_fields(hint, data, where, depth)


_WORDS = {int: "an integer of 64 bits", str: "a string", bool: "true or false"}


def _read_bytes(data: object, where: str) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "?", validate=True)
    except ValueError as error:
        raise _wrong(where, "a string of base64", data) from error


def _read_float(data: object, where: str) -> float:
    if isinstance(data, str) and data in ("inf", "-inf", "nan"):
        return float(data)
    if type(data) is float:
        return data
    # An int of JSON may exceed the range of float.
    if type(data) is int and abs(data) <= sys.float_info.max:
        return float(data)
    raise _wrong(where, "a number", data)


def _read_union(choices: tuple[Any, ...], data: object, where: str, depth: int) -> Any:
    if data is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    if len(choices) > 1:
        name = data.get("is") if isinstance(data, dict) else None
        names = [_json_name(getattr(choice, "__name__", str(choice))) for choice in choices]
        named = [choice for choice, known in zip(choices, names, strict=True) if known == name]
        if not named:
            raise _wrong(where, " or ".join(names), data)
        choices = (named[0],)
    return _read(choices[0], data, where, depth)


def _read_tuple(items: tuple[Any, ...], data: object, where: str, depth: int) -> Any:
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read_items(items[0], data, where, depth))
    if not isinstance(data, list) or len(data) != len(items):
        raise _wrong(where, f"a list of {len(items)}", data)
    pairs = zip(items, data, strict=True)
    return tuple(_read(k, d, f"{where}[{i}]", depth + 1) for i, (k, d) in enumerate(pairs))


def _read_items(item: Any, data: object, where: str, depth: int) -> list[Any]:
    if not isinstance(data, list):
        raise _wrong(where, "a list", data)
    return [_read(item, part, f"{where}[{i}]", depth + 1) for i, part in enumerate(data)]


def _read_fields(kind: Any, data: object, where: str, depth: int) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, _title(kind), data)
    fields = _fields_of(kind)
    removed = REMOVED.get(kind.__name__, frozenset())
    # `to_plain` names the class of a dataclass.
    names_class = {"is"} if dataclasses.is_dataclass(kind) else frozenset()
    surplus = sorted(data.keys() - fields.keys() - removed - names_class)
    missing = sorted(key for key, f in fields.items() if f.is_needed and key not in data)
    if surplus or missing:
        listed = [f"no {name!r}" for name in missing] + [f"a surplus {name!r}" for name in surplus]
        raise _refusal(f"{_title(kind)} has {', '.join(listed)[:200]}", where)
    values = {
        field.name: _read(field.hint, data[key], f"{where}.{key}", depth + 1)
        for key, field in fields.items() if key in data
    }  # fmt: skip
    try:
        return kind(**values)
    except (StitchError, ValueError, TypeError, ArithmeticError) as error:
        raise _refusal(f"{_title(kind)} is not sound: {error}"[:300], where) from error


class _Field(typing.NamedTuple):
    name: str
    hint: Any
    is_needed: bool


@functools.cache
def _fields_of(kind: Any) -> Mapping[str, _Field]:
    """Return the fields of a class by their names in JSON."""
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        absent = dataclasses.MISSING
        needed = {
            field.name: field.default is absent and field.default_factory is absent
            for field in dataclasses.fields(kind)
        }
    else:
        needed = {name: name not in kind._field_defaults for name in kind._fields}
    return {_json_name(name): _Field(name, hints[name], needed[name]) for name in needed}


def _title(kind: Any) -> str:
    return _json_name(kind.__name__).removeprefix("_")


def _wrong(where: str, expected: str, got: object) -> FormatError:
    return _refusal("a value of the wrong type", where, expected[:200], shown(got)[:80])


def _refusal(
    what: str, where: str, expected: str | None = None, got: str | None = None
) -> FormatError:
    if len(what) > 2 * MAX_CHARACTERS:
        what = f"{what[:MAX_CHARACTERS]} ... {what[-MAX_CHARACTERS:]}"
    return FormatError(what, where=where[:MAX_CHARACTERS], expected=expected, got=got)
