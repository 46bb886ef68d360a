"""Entries: one compilation in a folder, as two files named after its key.

`KEY.ttb` is the binary, as any other; `KEY.json` what the compiler said beside it, and of which
binary it says that: its length and the CRC-32 of its metadata, in which those of all segments are;
and last the CRC-32 of all that.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from stitch.compile_cache.keys import EntryKey
from stitch.compiler import CompileWarning, LoopNote
from stitch.errors import FormatError
from stitch.files import OutputFiles, Sink, head_of, make_folder, read_text, unreadable
from stitch.ttb import Binary, content_of, load, metadata_crc32, metadata_nbytes

_KIND = "entry of a compile cache"
_VERSION = 1
#: Names of both files, and of what a killed process left of them; the first group is the key.
NAMES = re.compile(r"\.?([0-9a-f]{64})\.(?:ttb|json)(?:\.\d+\.[0-9a-f]+\.part)?")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeptCompilation:
    """A compilation as it is kept: the binary, what the compiler warned of, how its loops run."""

    binary: Binary
    warnings: tuple[CompileWarning, ...] = ()
    loops: tuple[LoopNote, ...] = ()


def binary_path(folder: Path, key: EntryKey) -> Path:
    """Where the binary of an entry lies."""
    return folder / f"{key.text}.ttb"


def notes_path(folder: Path, key: EntryKey) -> Path:
    """Where the notes of an entry lie; when they were written or marked, it was used last."""
    return folder / f"{key.text}.json"


def write_entry(folder: Path, key: EntryKey, kept: KeptCompilation) -> None:
    """Write an entry; raises `StitchError` where the folder takes none."""
    make_folder(folder)
    write, written = content_of(kept.binary), _Measured()
    batch = OutputFiles()
    # In this order: the notes tell of what was written. Others may write into a folder that several
    # share: a link at the name of an entry leads nowhere.
    batch.add_own(binary_path(folder, key), lambda sink: write(written.into(sink)))
    batch.add_own(notes_path(folder, key), lambda sink: sink.write(_notes(key, kept, written)))
    batch.commit()


class _Measured:
    """A sink that passes on what it takes, and knows how long it was and how it began."""

    def __init__(self) -> None:
        self.head, self.nbytes = b"", 0

    def into(self, sink: Sink) -> Sink:
        self._sink = sink
        return self

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data)
        self.head = self.head or bytes(view)
        self.nbytes += view.nbytes
        return self._sink.write(data)


def _notes(key: EntryKey, kept: KeptCompilation, written: _Measured) -> bytes:
    body = {
        "stitch": _KIND, "version": _VERSION, "key": key.text, "made_of": dict(key.parts),
        "programs": [program.name for program in kept.binary.programs],
        "machine": kept.binary.machine.name,
        "nbytes": written.nbytes, "metadata_crc32": metadata_crc32(written.head),
        "warnings": [asdict(warning) for warning in kept.warnings],
        "loops": [asdict(loop) for loop in kept.loops],
    }  # fmt: skip
    return _text_of(body | {"crc32": zlib.crc32(_text_of(body))})


def _text_of(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def read_entry(folder: Path, key: EntryKey) -> KeptCompilation | None:
    """What an entry holds; None where there is none. Raises `FormatError` for one that is damaged,
    or is another's."""
    notes, path = notes_path(folder, key), binary_path(folder, key)
    try:
        text = read_text(notes)
        head = head_of(path, metadata_nbytes(head_of(path, 4)))
        nbytes = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None  # Never written, or on its way in or out.
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(notes, error) from error
    try:
        body = json.loads(text)
        if (body["stitch"], body["version"], body["key"]) != (_KIND, _VERSION, key.text):
            raise FormatError("the notes are those of something else", where=str(notes))
        if body.pop("crc32") != zlib.crc32(_text_of(body)):
            raise ValueError("not what was written")
        warnings = _all(CompileWarning, body["warnings"])
        loops = _all(LoopNote, body["loops"])
        promised = body["nbytes"], body["metadata_crc32"]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError("the notes of the entry are damaged", where=str(notes)) from error
    if promised != (nbytes, metadata_crc32(head)):
        raise FormatError("the binary is not the one that the notes tell of", where=str(path))
    try:
        return KeptCompilation(load(path, verify="full"), warnings, loops)
    except FormatError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None  # Another process has removed it just now.
        raise


def _all(kind: type[_T], rows: Any) -> tuple[_T, ...]:
    """Dataclasses as `asdict` and JSON left them; raises `TypeError` for what is none, or has other
    fields than there are now."""
    hints = get_type_hints(kind)
    if type(rows) is not list or any(type(row) is not dict or row.keys() != hints.keys()
                                     for row in rows):  # fmt: skip
        raise TypeError(f"no list of {kind.__name__}")
    return tuple([kind(**{name: _read(hints[name], row[name]) for name in row}) for row in rows])


def _read(kind: Any, value: Any) -> Any:
    if get_origin(kind) is not tuple:
        if type(value) is not kind:
            raise TypeError(f"{value!r:.40} is no {kind}")
        return value
    kinds = get_args(kind)
    if type(value) is not list:
        raise TypeError(f"{value!r:.40} is no list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    return tuple([_read(inner, held) for inner, held in zip(kinds, value, strict=True)])
