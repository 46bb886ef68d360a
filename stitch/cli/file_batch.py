"""Files that appear together or not at all.

Comes in: paths and bytes. Goes out: files, written under temporary names that then take their
place; where one cannot be written, none is. Must not know: what is in them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkstemp

from stitch.errors import StitchError

Content = bytes | bytearray | memoryview


class FileBatch:
    """Collects files; `commit` writes all of them, or none and raises `StitchError`.

    Paths that exist and are no regular files (`/dev/null`, pipes) are written to as they are.
    """

    def __init__(self) -> None:
        self._files: dict[Path, Content] = {}

    def add(self, path: str | Path, content: Content | str) -> None:
        """A file to write; a later one at the same path replaces it."""
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        self._files[Path(os.path.realpath(path))] = data

    def commit(self) -> tuple[Path, ...]:
        """Write the files; gives their paths. The batch is empty afterwards."""
        parts: list[tuple[Path, Path]] = []
        try:
            direct = [path for path in self._files if path.exists() and not path.is_file()]
            for path, content in self._files.items():
                if path not in direct:
                    parts.append((_write_part(path, content), path))
            for path in direct:
                with naming(path), path.open("wb") as file:
                    file.write(self._files[path])
            for part, path in parts:
                with naming(path):
                    part.replace(path)
        finally:
            for part, _ in parts:
                with contextlib.suppress(OSError):
                    part.unlink()
        written = tuple(self._files)
        self._files = {}
        return written


def _write_part(path: Path, content: Content) -> Path:
    with naming(path):
        handle, name = mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            part.chmod(0o666 & ~_umask())
        except BaseException:
            part.unlink()
            raise
        return part


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn `OSError` into a `StitchError` that names the path."""
    try:
        yield
    except OSError as error:
        raise StitchError(
            "cannot write the file",
            where=str(path),
            got=error.strerror or str(error),
            remedy="choose a folder that exists, is writable and has room",
        ) from error
