"""Contents of an output file, kept in a temporary file until the output is written.

Memory holds one piece at a time. `OutputFiles.add(path, output.copy_to)` writes the file.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path
from typing import IO, final

from stitch.errors import StitchError
from stitch.files import Data, Sink, naming, resolved

_PIECE_NBYTES = 1 << 20
COMPRESSED = ".gz"


@final
class TemporaryOutput:
    """Collects the bytes of the file at `path`, compressed if its name ends with `.gz`.

    They are kept in an unnamed temporary file in the folder of `path`, which the system removes
    with the process. Raises `StitchError` if the disk is full.
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
        """Write all of it into `sink`; no piece can be appended afterwards."""
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
    """Whether a file's name ends with `.gz`."""
    return Path(path).suffix.lower() == COMPRESSED
