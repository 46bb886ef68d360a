"""Collect the contents of an output file in a temporary file until the output is written."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, final

from stitch.errors import StitchError
from stitch.files import Data, OutputFiles, Sink, naming, resolved, write_files

_PIECE_NBYTES = 1 << 20
COMPRESSED = ".gz"


@final
class TemporaryOutput:
    """Collects the bytes of the file at `path`, compressed if its name ends with `.gz`.

    The temporary file has no name: the system removes it with the process. Raises `StitchError` if
    the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = resolved(self.path).parent
        beside = folder.is_dir() and os.access(folder, os.W_OK)
        with naming(self.path):
            # Stays open until `close`.
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                dir=folder if beside else None
            )
        self._into: IO[bytes] = self._file
        if is_compressed(self.path):
            # Without name and time, equal contents give equal bytes.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._file, mtime=0)
            self._into = packed  # type: ignore[assignment]  # It writes bytes all the same.

    def write(self, data: Data) -> None:
        """Append one piece."""
        with naming(self.path):
            self._into.write(data)

    def copy_to(self, sink: Sink) -> None:
        """Write all pieces to `sink`; none can be appended afterwards."""
        if self._file.closed:
            raise StitchError("the temporary contents were closed", where=str(self.path))
        if self._into is not self._file:
            self._into.close()
        self._file.seek(0)
        while piece := self._file.read(_PIECE_NBYTES):
            sink.write(piece)

    def close(self) -> None:
        """Discard the contents; may be called twice."""
        self._into.close()
        self._file.close()


def is_compressed(path: str | Path) -> bool:
    """Return whether a file's name ends with `.gz`."""
    return Path(path).suffix.lower() == COMPRESSED


def write_and_close(add_to: Callable[[OutputFiles], None], close: Callable[[], None]) -> None:
    """Write the files that `add_to` adds, then call `close` in any case."""
    files: OutputFiles = {}
    try:
        add_to(files)
        write_files(files)
    finally:
        close()
