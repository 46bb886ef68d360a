"""Buffers with lifetimes from CSV, in MiniMalloc's form: id, lower, upper, size.

`[lower, upper)` is the lifetime, half open; columns may stand in any order, and a byte order mark
before them. Every defect is one `FormatError` that names its line.
"""

from __future__ import annotations

from pathlib import Path

from stitch.errors import FormatError
from stitch.files import read_text, unreadable
from stitch.packing import Interval

COLUMNS = ("id", "lower", "upper", "size")
#: Numbers are moments and bytes; their sums have to stay below 2 ** 62.
_LARGEST = 1 << 40


def read_buffers(path: Path) -> list[Interval]:
    """The buffers of a file, in its order; raises `FormatError`."""
    lines = _text_of(path).removeprefix("\ufeff").splitlines()
    order = _columns(lines[0] if lines else "", f"{path}:1")
    buffers, first_lines = [], dict[str, int]()
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        where, fields = f"{path}:{number}", line.split(",")
        if len(fields) != len(order):
            raise FormatError(
                "a row of another length than the header",
                where=where, expected=f"{len(order)} fields", got=f"{len(fields)}: {line[:80]!r}",
            )  # fmt: skip
        row = {name: field.strip() for name, field in zip(order, fields, strict=True)}
        if row["id"] in first_lines:
            raise FormatError(
                "an id twice",
                where=where,
                got=f"{row['id']!r}, as in line {first_lines[row['id']]}",
            )
        first_lines[row["id"]] = number
        buffers.append(_buffer(row, where))
    if not buffers:
        raise FormatError("no buffers", where=str(path), expected="a row for each buffer")
    return buffers


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise FormatError(
            "this is no UTF-8 text", where=str(path), got=f"{error.reason} at byte {error.start}"
        ) from error


def _columns(header: str, where: str) -> list[str]:
    names = [name.strip() for name in header.split(",")]
    if sorted(names) != sorted(COLUMNS):
        raise FormatError(
            "the header does not name these columns once each",
            where=where, expected=",".join(COLUMNS), got=repr(header[:80]),
        )  # fmt: skip
    return names


def _buffer(row: dict[str, str], where: str) -> Interval:
    numbers = {}
    for name in COLUMNS[1:]:
        text = row[name]
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _LARGEST):
            raise FormatError(
                f"column {name!r} of buffer {row['id']!r} is no count",
                where=where, expected=f"a whole number from 0 to {_LARGEST - 1}",
                got=repr(text[:80]),
            )  # fmt: skip
        numbers[name] = int(text)
    lower, upper = numbers["lower"], numbers["upper"]
    if upper <= lower:
        raise FormatError(
            f"buffer {row['id']!r} is never alive",
            where=where, expected="lower < upper", got=f"lower {lower}, upper {upper}",
        )  # fmt: skip
    return Interval(lower, upper - 1, numbers["size"])
