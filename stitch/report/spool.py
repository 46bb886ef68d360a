"""What becomes a file at the end of a long piece of work, kept on disk until then: memory holds one
piece. `OutputFiles.add(path, spool.pour)` writes it."""

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
class Spool:
    """Takes pieces for the file at `path`, compressed where its name ends with `.gz`.

    They lie in a file without a name, in the folder where the other is to be, which is gone with
    the process. Raises `StitchError` where there is no room.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = resolved(self.path).parent
        beside = folder.is_dir() and os.access(folder, os.W_OK)
        with naming(self.path):
            # It stays open: `close` is what ends it.
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                dir=folder if beside else None
            )
        self._into: IO[bytes] = self._file
        if is_compressed(self.path):
            # Neither name nor time: the same pieces are the same bytes.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._file, mtime=0)
            self._into = packed  # type: ignore[assignment]  # It writes bytes all the same.

    def write(self, data: Data) -> None:
        """Take one more piece."""
        with naming(self.path):
            self._into.write(data)

    def pour(self, sink: Sink) -> None:
        """Write all of it; nothing is taken afterwards."""
        if self._file.closed:
            raise StitchError("what was kept for the file is gone", where=str(self.path))
        if self._into is not self._file:
            self._into.close()
        self._file.seek(0)
        while piece := self._file.read(_PIECE_NBYTES):
            sink.write(piece)

    def close(self) -> None:
        """Forget what was taken; twice does no harm."""
        self._into.close()
        self._file.close()


def is_compressed(path: str | Path) -> bool:
    """Whether a file's name says that its bytes are compressed."""
    return Path(path).suffix.lower() == COMPRESSED
