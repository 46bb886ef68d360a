"""Where bytes come from: a path, mapped read-only, or bytes as they are.

Comes in: a path or bytes. Goes out: a name for errors, and the bytes. Must not know: what they are.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from stitch.files.reading import open_file, unreadable

Source = str | Path | bytes | bytearray | memoryview


def open_source(source: Source) -> tuple[str, memoryview]:
    """A name for errors, and the bytes: of a path mapped read-only, of bytes as they are."""
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source)
        castable = view.c_contiguous and view.nbytes
        flat = view.cast("B") if castable else memoryview(view.tobytes())
        return f"{flat.nbytes} bytes", flat.toreadonly()
    try:
        with open_file(source) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # A pipe that the process was given.
                return str(source), memoryview(file.read())
            if status.st_size == 0:
                return str(source), memoryview(b"")
            return str(source), memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise unreadable(source, error) from error
