"""Checks of output paths, made before anything is computed.

Refuses outputs that would overwrite an input or each other. `-` is standard output, for one output
of a command; reports go to standard error then. Also lists the kinds of files with their suffixes.
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
    Identity,
    files_read,
    head_of,
    identity,
    own_descriptor,
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
DATABASE = "an SQLite database"
JSON = "JSON text"
TEXT = "text (YAML, source code, ...)"
_PACKED = "gzip-compressed data"

_HEAD_NBYTES = 4096
_FORMS = (
    (RESULT, rb'\s*\{\s*"result":'),
    (TRACE, rb'\s*\{\s*"traceEvents":'),
    (RECORD, rb'\s*\{\s*"stitch":\s*"run"'),
    (DATABASE, rb"SQLite format 3\0"),
    (TTB, rb"(?s:.{8})STCH"),
    # A zip archive whose first member is an array, or that has none.
    (NPZ, rb"(?s:PK\x03\x04.{26}[^\0]{0,200}?\.npy|PK\x05\x06)"),
    ("an SVG image", rb"(?s:<\?xml.{0,500}?<svg|<!DOCTYPE svg|<svg|<\?xml.{0,200}?DOCTYPE svg)"),
    ("PostScript", rb"%!PS"),
    ("a TIFF image", rb"II\*\0|MM\0\*"),
    ("a WebP image", rb"(?s:RIFF.{4}WEBP)"),
    ("a PGF picture", rb"%% Creator: Matplotlib, PGF"),
)
_KINDS = tuple((name, re.compile(form)) for name, form in _FORMS)


def array_kind(path: str | Path) -> str:
    """`.npz` or `.npy`."""
    return NPZ if Path(path).suffix.lower() == ".npz" else NPY


def trace_kind(path: str | Path | None) -> str:
    """A Chrome trace, or compressed data.

    >>> trace_kind("run.json.gz")
    'gzip-compressed data'
    """
    return _PACKED if path is not None and is_compressed(path) else TRACE


def kind_of_file(path: Path) -> str | None:
    """The kind of a regular file, None for an empty one; raises `OSError`."""
    head = head_of(path, _HEAD_NBYTES)
    if not head:
        return None
    for name, form in _KINDS:
        if form.match(head):
            return name
    return recognize(head, path.stat().st_size)[0]


#: Handles that a command has without opening a file.
_STANDARD_OUTPUT = 1
_STANDARD_OUTPUT_PLACE = Path("/dev/stdout")


@final
class OutputChecks:
    """The outputs of one command, checked when added and again after all input is read."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[str, str]] = {}
        self._named: dict[Identity, str] = {}
        self._standard_output: str | None = None

    def reads(self, paths: Iterable[str | Path]) -> None:
        """Files that the command will read, before it has; raises `UsageError`."""
        for path in paths:
            file = identity(path)
            if file is not None:
                self._named[file] = str(path)
        self.refuse_sources()

    def add(
        self, path: str | Path, kind: str, option: str, *, own_folder: str | Path | None = None
    ) -> None:
        """An output of this kind; raises `UsageError` where it cannot go there.

        `own_folder`: a folder that the command makes. Raises `StitchError` where there is no other.
        """
        if path == STANDARD_OUTPUT or own_descriptor(path) == _STANDARD_OUTPUT:
            self.take_standard_output(option)
            reports_aside()
            return
        place = resolved(path)
        same = [place, *(p for p in self._files if identity(p) == identity(place) is not None)]
        earlier = next((self._files[p] for p in same if p in self._files), None)
        if earlier is not None and not _is_endless(place):
            raise UsageError(
                "two outputs go to one file", where=str(path), got=f"{earlier[1]} and {option}",
                remedy="give each a file of its own",
            )  # fmt: skip
        self._files[place] = str(path), option
        self.refuse_sources()
        if own_descriptor(path) is None:  # Else the shell has opened it for writing.
            if own_folder is None or not place.is_relative_to(resolved(own_folder)):
                _check_folder(path, place.parent)
            _check_kind(path, kind, option)

    def add_folder(self, path: str | Path, option: str) -> None:
        """A folder to write into; raises `UsageError` for standard output, which is none."""
        if path == STANDARD_OUTPUT:
            raise UsageError(
                f"{option} takes a folder, not standard output", remedy="./- is a folder"
            )

    def take_standard_output(self, option: str) -> None:
        """Standard output is for this option; raises `UsageError` where it is for another."""
        if self._standard_output is not None:
            raise UsageError(
                "two outputs use standard output",
                got=f"{self._standard_output} and {option}",
                remedy="write one of them into a file",
            )
        self._standard_output = option
        # It may lead into a file: `>> a.ttb`.
        self._files[_STANDARD_OUTPUT_PLACE] = "standard output", option
        self.refuse_sources()

    def is_read(self, path: str | Path) -> bool:
        """Whether a path leads to a file that has been read so far."""
        return identity(path) in {**self._named, **files_read()}

    def refuse_sources(self) -> None:
        """Raise `UsageError` where an output is a file that has been read so far."""
        read = {**self._named, **files_read()}
        for place, (path, option) in self._files.items():
            called = read.get(identity(place) or (-1, -1))
            if called is not None:
                raise UsageError(
                    "the command reads this file and does not overwrite it",
                    where=path if called == path else f"{path}, read as {called}",
                    got=option, remedy="choose another name",
                )  # fmt: skip


def _is_endless(place: Path) -> bool:
    """Whether a path is a device, which takes any number of outputs."""
    try:
        return stat.S_ISCHR(place.stat().st_mode)
    except OSError:
        return False


def _check_folder(path: str | Path, folder: Path) -> None:
    """Raise `StitchError` if the folder cannot be written, before results are computed."""
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise StitchError(
            "cannot write the file", where=str(path),
            got=f"{folder} is not a writable folder" if folder.exists()
            else f"there is no folder {folder}",
            remedy="make it, or choose another",
        )  # fmt: skip


def _check_kind(path: str | Path, kind: str, option: str) -> None:
    try:
        status = resolved(path).stat()
        special = special_kind(status.st_mode)
        existing = kind_of_file(resolved(path)) if special is None else None
    except FileNotFoundError:
        return
    except NotADirectoryError:
        return  # Writing will say so.
    except OSError as error:
        raise UsageError(
            "the existing file cannot be read, and is not overwritten", where=str(path),
            expected=kind, got=error.strerror or str(error), remedy="choose another name",
        ) from error  # fmt: skip
    if special is not None:
        if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode):
            return
        raise UsageError(
            f"{option} names no file", where=str(path), expected=kind, got=special,
            remedy="choose another name",
        )  # fmt: skip
    if existing not in (None, kind):
        raise UsageError(
            "the file is of another kind and is not overwritten", where=str(path),
            expected=f"{kind}, an empty file, or none ({option})", got=existing,
            remedy="choose another name, or remove the file",
        )  # fmt: skip
