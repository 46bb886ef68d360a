"""Buffers with lifetimes in MiniMalloc's CSV: `id,lower,upper,size` and perhaps more columns.

`[lower, upper)` is the lifetime; a column named `end` instead of `upper` has the last moment.
Columns may stand in any order, and a byte order mark before them. Every defect is one `FormatError`
that names its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stitch.errors import FormatError, closest
from stitch.files import read_text, unreadable
from stitch.packing import Interval

#: MiniMalloc's columns, by every name that it takes for them.
COLUMNS = {
    "id": "id", "buffer": "id", "buffer_id": "id", "lower": "lower", "start": "lower",
    "begin": "lower", "upper": "upper", "end": "upper", "size": "size", "alignment": "alignment",
    "gaps": "gaps", "offset": "offset",
}  # fmt: skip
NEEDED = ("id", "lower", "upper", "size")
#: Numbers are moments and bytes; their sums have to stay below 2 ** 62.
_LARGEST = 1 << 40
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of a file, in its order.

    Args:
        header: The names of its columns, as the file has them.
        rows: The fields of each buffer.
        intervals: The lifetime and the size of each, rounded up to `alignment`.
        alignment: A multiple of every buffer's alignment, of which offsets have to be multiples.
        has_offsets: Whether the file says where buffers are.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    intervals: list[Interval]
    alignment: int
    has_offsets: bool

    def with_offsets(self, offsets: Sequence[int]) -> str:
        """Return the file with a column of offsets, the last one or the file's own."""
        names = [COLUMNS[name] for name in self.header]
        at = names.index("offset") if self.has_offsets else len(names)
        lines = [[*self.header[:at], "offset", *self.header[at + 1 :]]]
        lines += [
            [*row[:at], str(offset), *row[at + 1 :]]
            for row, offset in zip(self.rows, offsets, strict=True)
        ]
        return "".join(",".join(line) + "\n" for line in lines)


def read_buffers(path: str | Path) -> Buffers:
    """Read the buffers of a file; raise `FormatError`."""
    lines = _text_of(Path(path)).removeprefix("\ufeff").splitlines()
    header = _header(lines[0] if lines else "", f"{path}:1")
    names = [COLUMNS[name] for name in header]
    rows, first_lines = list[tuple[str, ...]](), dict[str, int]()
    buffers, alignment = list[tuple[int, int, int]](), 1
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        where, fields = f"{path}:{number}", tuple(field.strip() for field in line.split(","))
        if len(fields) != len(header):
            raise FormatError(
                "a row of another length than the header",
                where=where, expected=f"{len(header)} fields", got=f"{len(fields)}: {line[:80]!r}",
            )  # fmt: skip
        row = dict(zip(names, fields, strict=True))
        if row["id"] in first_lines:
            raise FormatError(
                "an id twice",
                where=where,
                got=f"{row['id']!r}, as in line {first_lines[row['id']]}",
            )
        first_lines[row["id"]] = number
        rows.append(fields)
        alignment = math.lcm(alignment, _alignment(row, where))
        buffers.append(_lifetime(row, where, is_inclusive="end" in header))
    if not buffers:
        raise FormatError("no buffers", where=str(path), expected="a row for each buffer")
    if alignment > MAX_ALIGNMENT:
        raise FormatError("these alignments have no common multiple that can be used",
                          where=str(path), expected=f"at most {MAX_ALIGNMENT}",
                          got=str(alignment))  # fmt: skip
    intervals = [
        Interval(lower, upper - 1, -(-size // alignment) * alignment)
        for lower, upper, size in buffers
    ]
    return Buffers(header, tuple(rows), intervals, alignment, "offset" in header)


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise FormatError(
            "this is no UTF-8 text", where=str(path), got=f"{error.reason} at byte {error.start}"
        ) from error


def _header(line: str, where: str) -> tuple[str, ...]:
    header = tuple(name.strip() for name in line.split(","))
    names = [COLUMNS.get(name, "") for name in header]
    if any(names.count(name) != 1 for name in {*NEEDED, *names}):
        strange = next((name for name in header if name not in COLUMNS), "")
        raise FormatError(
            "the header does not name these columns once each",
            where=where, expected=",".join(NEEDED) + ", and perhaps alignment, offset",
            got=repr(line[:80]), remedy=closest(strange, COLUMNS) or None,
        )  # fmt: skip
    return header


def _count(row: dict[str, str], name: str, where: str, least: int = 0) -> int:
    text = row[name]
    sound = text.isascii() and text.isdigit() and len(text) < 20
    if not (sound and least <= int(text) < _LARGEST):
        raise FormatError(
            f"column {name!r} of buffer {row['id']!r} is no count",
            where=where, expected=f"a whole number from {least} to {_LARGEST - 1}",
            got=repr(text[:80]),
        )  # fmt: skip
    return int(text)


def _alignment(row: dict[str, str], where: str) -> int:
    if row.get("gaps"):
        raise FormatError(
            f"buffer {row['id']!r} has gaps in its lifetime, which Stitch does not pack",
            where=where, got=repr(row["gaps"][:80]),
            remedy="write a row for each part of its lifetime, or leave the column empty",
        )  # fmt: skip
    return _count(row, "alignment", where, 1) if "alignment" in row else 1


def _lifetime(row: dict[str, str], where: str, *, is_inclusive: bool) -> tuple[int, int, int]:
    """Return lower, upper and size."""
    lower, upper, size = (_count(row, name, where) for name in NEEDED[1:])
    upper += is_inclusive
    if upper <= lower:
        raise FormatError(
            f"buffer {row['id']!r} is never alive",
            where=where, expected="lower < upper", got=f"lower {lower}, upper {upper}",
        )  # fmt: skip
    return lower, upper, size
