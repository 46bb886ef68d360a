"""Convert frozen data to JSON and back: dataclasses, named tuples, enums, tuples, sets, numbers."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from stitch.errors import FormatError, StitchError

_T = TypeVar("_T")
#: Nesting limit; plans have about a dozen levels.
MAX_DEPTH = 40
#: JSON names of classes and fields that were renamed since the format was fixed.
JSON_NAMES = {
    "Buffer": "Block", "buffer": "block", "buffers": "blocks", "final_buffers": "final_blocks",
}  # fmt: skip
#: Fields, by class, that older records lack: they have the default.
ADDED = {
    "Certificate": frozenset({"branches"}),
    "Cost": frozenset({"program_seconds"}),
    "CostCertificate": frozenset({"pieces"}),
    "Machine": frozenset({"compute"}),
    "Plan": frozenset({"least_seconds"}),
    "PlanRequest": frozenset({"later"}),
    "SpaceShape": frozenset({"granule", "policy"}),
    "Transformation": frozenset({"constants", "seconds"}),
}
#: Fields, by class, of older records that are ignored.
REMOVED = {
    "CostCertificate": frozenset({"inside_seconds"}),
    "Plan": frozenset({"fewest_bytes"}),
}


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
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        fields = {_json_name(name): to_plain(getattr(value, name)) for name in names}
        return {"is": _json_name(type(value).__name__)} | fields
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_json_name(name): to_plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    raise AssertionError(f"{type(value).__name__} is no frozen data")


def from_plain(kind: type[_T], data: object, where: str) -> _T:
    """Return the value of a type for plain data; raise `FormatError` with the location."""
    value: _T = _read(kind, data, where, 0)
    return value


def _read(hint: Any, data: object, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise FormatError(f"the record nests deeper than {MAX_DEPTH} levels", where=where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(hint), data, where, depth)
    if origin is typing.Literal:
        if data not in typing.get_args(hint) or not isinstance(data, str | int):
            raise _wrong(where, " or ".join(map(str, typing.get_args(hint))), data)
        return data
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), data, where, depth)
    if origin is frozenset:
        (item,) = typing.get_args(hint)
        return frozenset(_read_items(item, data, where, depth))
    return _read_plain(hint, data, where, depth)


def _read_plain(hint: Any, data: object, where: str, depth: int) -> Any:
    if hint is type(None):
        if data is not None:
            raise _wrong(where, "null", data)
        return None
    if hint is float:
        return _read_float(data, where)
    if hint in (int, str, bool):
        if type(data) is not hint:
            raise _wrong(where, hint.__name__, data)
        return data
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError as error:
            raise _wrong(where, " or ".join(str(m.value) for m in hint), data) from error
    return _read_fields(hint, data, where, depth)


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
    if item is int and all(type(part) is int for part in data):
        return data
    return [_read(item, part, f"{where}[{i}]", depth + 1) for i, part in enumerate(data)]


def _read_fields(kind: Any, data: object, where: str, depth: int) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, _json_name(kind.__name__), data)
    fields = {name: (_json_name(name), hint) for name, hint in _fields_of(kind).items()}
    keys = {key for key, _ in fields.values()}
    removed = REMOVED.get(kind.__name__, frozenset())
    surplus = sorted(data.keys() - keys - removed - {"is"})
    added = ADDED.get(kind.__name__, frozenset())
    missing = sorted(keys - data.keys() - added)
    if surplus or missing:
        listed = [f"no {name!r}" for name in missing] + [f"a surplus {name!r}" for name in surplus]
        what = _json_name(kind.__name__)
        raise FormatError(f"{what} has {', '.join(listed)[:200]}", where=where)
    values = {
        name: _read(hint, data[key], f"{where}.{key}", depth + 1)
        for name, (key, hint) in fields.items()
        if key in data or key not in added
    }
    try:
        return kind(**values)
    except (StitchError, ValueError, TypeError, ArithmeticError) as error:
        what = _json_name(kind.__name__)
        raise FormatError(f"{what} is not sound: {error}"[:300], where=where) from error


@functools.cache
def _fields_of(kind: Callable[..., object]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    names = getattr(kind, "_fields", None)
    if names is None:
        if not dataclasses.is_dataclass(kind):
            raise AssertionError(f"{kind} is no frozen data")
        names = [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}


def _wrong(where: str, expected: str, got: object) -> FormatError:
    return FormatError("the record has a value of the wrong type", where=where,
                       expected=expected[:200], got=repr(got)[:80])  # fmt: skip
