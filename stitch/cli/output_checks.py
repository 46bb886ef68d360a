"""Check output paths before anything is computed.

Refuses outputs that would overwrite an input, each other, or a file of another kind. One output of
a command may be `-`, standard output; its reports then go to standard error.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import final

from stitch.cli.command import reports_aside
from stitch.errors import StitchError, UsageError
from stitch.files import (
    STANDARD_OUTPUT,
    files_read,
    head_of,
    identity,
    note_file,
    resolved,
    special_kind,
)
from stitch.report import is_compressed
from stitch.ttb import recognize

TTB = "a .ttb module"
NPY = "a NumPy array (.npy)"
NPZ = "NumPy arrays (.npz)"
RESULT = "the results of a run"
TRACE = "a Chrome trace"
RECORD = "a record of a run"
PAGE = "a report page"
DATABASE = "an SQLite database"
JSON = "JSON text"
ONNX = "an ONNX model"
TEXT = "text (YAML, source code, ...)"
CSV = "a CSV table"
SCHEMA = "a schema of Stitch"
DRAWING = "a drawing of a program"
SWEEP = "a table of simulated passes"
BUFFERS = "a table of buffers with offsets"
GZIP = "gzip-compressed data"

_HEAD_NBYTES = 4096
_MAGIC = (
    (RESULT, rb'\s*\{\s*"result":'),
    (TRACE, rb'\s*\{\s*"traceEvents":'),
    (RECORD, rb'\s*\{\s*"stitch":\s*"run"'),
    (
        PAGE,
        rb'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        rb"<meta name=\"generator\" content=\"stitch\">",
    ),
    (DATABASE, rb"SQLite format 3\0"),
    (TTB, rb"(?s:.{8})STCH"),
    (GZIP, rb"\x1f\x8b"),
    # A zip archive whose first member is an array, or that is empty.
    (NPZ, rb"(?s:PK\x03\x04.{26}[^\0]{0,200}?\.npy|PK\x05\x06)"),
    (SCHEMA, rb'// The truth of the \.ttb format|\{\s*"\$schema":'),
    (DRAWING, rb'digraph "[^\n]*\n  node \[|\{\s*"label":[^\n]*\n\s*"graphs":'),
    (SWEEP, rb"(?:[^\n]*,)?us,copies_us,programs_us,"),
    (BUFFERS, rb"(?=(?:[^\n]*,)?id,)(?=[^\n]*\boffset\b)|(?=id,)(?=[^\n]*\boffset\b)"),
    # A first line of column names.
    (CSV, rb"(?:\xef\xbb\xbf)?[\w .]+(?:,[\w .]+)+\r?\n"),
)
_KINDS = tuple((name, re.compile(magic)) for name, magic in _MAGIC)
_STANDARD_OUTPUT_PATH = Path("/dev/stdout")


def array_kind(path: str | Path) -> str:
    """Return the kind of an array file, by its suffix."""
    return NPZ if Path(path).suffix.lower() == ".npz" else NPY


def trace_kind(path: str | Path | None) -> str:
    """Return the kind of the file of `--trace`, by its suffix."""
    return GZIP if path is not None and is_compressed(path) else TRACE


def kind_of_file(path: Path) -> str | None:
    """Return the kind of a regular file, None for an empty one; raise `OSError`."""
    head = head_of(path, _HEAD_NBYTES)
    if not head:
        return None
    for name, magic in _KINDS:
        if magic.match(head):
            return name
    return recognize(head)[0]


@final
class OutputChecks:
    """Checks the outputs of one command when they are added, and after all input is read."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[str, str]] = {}
        self._standard_output: str | None = None

    def reads(self, paths: Iterable[str | Path]) -> None:
        """Add files that the command is going to read; raise `UsageError`."""
        for path in paths:
            note_file(path, str(path))
        self.refuse_sources()

    def add(
        self, path: str | Path, kind: str, option: str, *, own_folder: str | Path | None = None
    ) -> None:
        """Add an output file.

        Args:
            path: The file, or `-`.
            kind: The only kind of an existing file that is overwritten.
            option: The option of the command, for errors.
            own_folder: A folder that the command creates.

        Raises:
            UsageError: The file is another output, an input, or of another kind.
            StitchError: Its folder does not exist or is not writable.
        """
        if path == STANDARD_OUTPUT:
            self.take_standard_output(option)
            reports_aside()
            return
        target = resolved(path)
        same = [target, *(p for p in self._files if identity(p) == identity(target) is not None)]
        earlier = next((self._files[p] for p in same if p in self._files), None)
        if earlier is not None and not _is_device(target):
            raise UsageError(
                "two outputs have the same file", where=str(path),
                got=f"{earlier[1]} and {option}", remedy="write them to different files",
            )  # fmt: skip
        self._files[target] = str(path), option
        self.refuse_sources()
        if own_folder is None or not target.is_relative_to(resolved(own_folder)):
            _check_folder(path, target.parent)
        _check_kind(path, kind, option)

    def add_folder(self, path: str | Path, option: str) -> None:
        """Check the path of a folder; raise `UsageError` for standard output."""
        if path == STANDARD_OUTPUT:
            raise UsageError(
                f"{option} takes a folder, not standard output", remedy="./- is a folder"
            )

    def take_standard_output(self, option: str) -> None:
        """Reserve standard output for an option; raise `UsageError` if another option uses it."""
        if self._standard_output is not None:
            raise UsageError(
                "two outputs use standard output",
                got=f"{self._standard_output} and {option}",
                remedy="write one of them into a file",
            )
        self._standard_output = option
        # It may be a file: `>> a.ttb`.
        self._files[_STANDARD_OUTPUT_PATH] = "standard output", option
        self.refuse_sources()

    def is_read(self, path: str | Path) -> bool:
        """Return whether the command has read the file at a path."""
        return identity(path) in files_read()

    def refuse_sources(self) -> None:
        """Raise `UsageError` if an output is a file that the command reads."""
        read = files_read()
        for target, (path, option) in self._files.items():
            source = read.get(identity(target) or (-1, -1))
            if source is not None:
                raise UsageError(
                    "the command reads this file and does not overwrite it",
                    where=path if source == path else f"{path}, read as {source}",
                    got=option, remedy="choose another name",
                )  # fmt: skip


def _is_device(path: Path) -> bool:
    """Return whether a path is a character device, such as `/dev/null`."""
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        return False


def _check_folder(path: str | Path, folder: Path) -> None:
    """Raise `StitchError` if the folder is not writable."""
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise StitchError(
            "cannot write the file", where=str(path),
            got=f"{folder} is not a writable folder" if folder.exists()
            else f"there is no folder {folder}",
            remedy="create it, or choose another",
        )  # fmt: skip


def _check_kind(path: str | Path, kind: str, option: str) -> None:
    try:
        status = resolved(path).stat()
        special = special_kind(status.st_mode)
        existing = kind_of_file(resolved(path)) if special is None else None
    except FileNotFoundError:
        return
    except NotADirectoryError:
        return  # Writing reports it.
    except OSError as error:
        raise UsageError(
            "the existing file cannot be read, and is not overwritten", where=str(path),
            expected=kind, got=error.strerror or str(error), remedy="choose another name",
        ) from error  # fmt: skip
    if special is not None:
        if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode):
            return
        raise UsageError(
            f"{option} is not a file", where=str(path), expected=kind, got=special,
            remedy="choose another name",
        )  # fmt: skip
    if existing not in (None, kind):
        raise UsageError(
            "the file is of another kind and is not overwritten", where=str(path),
            expected=f"{kind}, an empty file, or none ({option})", got=existing,
            remedy="choose another name, or remove the file",
        )  # fmt: skip
