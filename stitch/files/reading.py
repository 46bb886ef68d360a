"""Read regular files, and record which were read.

Named pipes and devices are refused, because reading them may never end. Within `noting_files` every
opened file is recorded, so that a command does not overwrite its own inputs.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, TypeAlias

from stitch.errors import FormatError, nearest

#: Device and inode.
Identity: TypeAlias = tuple[int, int]

#: Files of a folder that are searched for a similar name.
_MOST_LISTED = 1000
#: Limit of the size of a text file (YAML, JSON).
TEXT_NBYTES = 1 << 30
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NOTED: ContextVar[dict[Identity, str] | None] = ContextVar("files_read", default=None)


@contextmanager
def noting_files() -> Iterator[None]:
    """Record every file that the block opens for reading, for `files_read`."""
    token = _NOTED.set({})
    try:
        yield
    finally:
        _NOTED.reset(token)


def files_read() -> dict[Identity, str]:
    """Return the files opened within `noting_files`, with their paths; empty outside."""
    return dict(_NOTED.get() or {})


def note_file(path: str | Path | int, called: str) -> None:
    """Record that a file is going to be read, by its path or handle (`< a.ttb`)."""
    with suppress(OSError, ValueError):
        _note(os.stat(path), called)  # noqa: PTH116  # Path takes no handle.


def _note(status: os.stat_result, called: str) -> None:
    noted = _NOTED.get()
    if noted is not None and stat.S_ISREG(status.st_mode):
        noted[status.st_dev, status.st_ino] = called


def identity(path: str | Path) -> Identity | None:
    """Return device and inode of the file at a path; None if there is none."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises `OSError` if that fails, `FormatError` for a named pipe, a device, a socket or a folder.
    """
    handle = _opened(path)
    try:
        status = os.fstat(handle)
        special = special_kind(status.st_mode)
        if special is not None:
            raise _not_regular(path, special)
        os.set_blocking(handle, True)
        _note(status, str(path))
    except BaseException:
        os.close(handle)
        raise
    return io.open(handle, "rb")  # noqa: UP020  # A descriptor, not a path.


def _opened(path: str | Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _not_regular(path, "a socket or a device") from error
        raise
    except ValueError as error:  # NUL or half a surrogate pair in the name.
        raise OSError(errno.EINVAL, "no file can have this name") from error


def special_kind(mode: int) -> str | None:
    """Return the kind of a file that is not regular, by its `st_mode`; None for a regular file."""
    kinds = (
        (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
    )  # fmt: skip
    return next((name for is_kind, name in kinds if is_kind(mode)), None)


def _not_regular(path: str | Path, kind: str) -> FormatError:
    return FormatError(
        "cannot read the file", where=str(path), expected="a regular file", got=kind,
        remedy="pass a module through a pipe as -",
    )  # fmt: skip


def unreadable(path: str | Path, error: Exception) -> FormatError:
    """Return the error for a file that cannot be opened, or is not text."""
    if isinstance(error, UnicodeDecodeError):
        return FormatError(
            "the file is no text", where=str(path), expected="text in UTF-8",
            got=f"byte {error.object[error.start]:#04x} at {error.start}", remedy="check the path",
        )  # fmt: skip
    is_missing = isinstance(error, FileNotFoundError)
    near = nearest_file(path, (Path(path).suffix,)) if is_missing else ""
    return FormatError(
        "cannot read the file", where=str(path),
        got=getattr(error, "strerror", None) or str(error),
        remedy=near or "check the path and its permissions",
    )  # fmt: skip


def nearest_file(path: str | Path, endings: tuple[str, ...]) -> str:
    """Return `did you mean ...?` for a file of the folder with a similar name, or nothing."""
    missing = Path(path)
    try:
        with os.scandir(missing.parent) as entries:
            names = [e.name for e in islice(entries, _MOST_LISTED) if e.name.endswith(endings)]
    except (OSError, ValueError):
        return ""
    near = nearest(missing.name, names, cutoff=0.7)
    return f"did you mean {str(missing.with_name(near[0]))!r}?" if near else ""


def head_of(path: str | Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file without recording it; raise as `open_file`."""
    handle = _opened(path)
    try:
        special = special_kind(os.fstat(handle).st_mode)
        if special is not None:
            raise _not_regular(path, special)
        return os.pread(handle, nbytes, 0)
    finally:
        os.close(handle)


def read_bytes(path: str | Path) -> bytes:
    """Return all bytes of a file; raise as `open_file`."""
    with open_file(path) as file:
        return file.read()


def text_of(file: str | Path | IO[str]) -> str:
    """Return the text of a path or an open file; raise `FormatError` if it cannot be read."""
    if not isinstance(file, str | os.PathLike):
        return file.read()
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Return a file's UTF-8 text; raise as `open_file`, `UnicodeDecodeError`.

    Raises `FormatError` for a file beyond `TEXT_NBYTES`.
    """
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size  # A sparse file takes no space on the disk.
        data = b"" if nbytes > TEXT_NBYTES else file.read(TEXT_NBYTES + 1)
    if max(nbytes, len(data)) > TEXT_NBYTES:
        raise FormatError(
            "the text is too long", where=str(path),
            expected=f"at most {TEXT_NBYTES} bytes", got=f"{max(nbytes, len(data))} bytes",
            remedy="store arrays in their own files (.npy, .npz, .safetensors)",
        )  # fmt: skip
    return data.decode("utf-8", errors)


#: A path, or bytes.
Source: TypeAlias = str | Path | bytes | bytearray | memoryview


def open_source(source: Source) -> tuple[str, memoryview]:
    """Return a name for errors and the bytes; a file is mapped read-only."""
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source)
        castable = view.c_contiguous and view.nbytes
        flat = view.cast("B") if castable else memoryview(view.tobytes())
        return f"{flat.nbytes} bytes", flat.toreadonly()
    try:
        with open_file(source) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return str(source), memoryview(b"")
            return str(source), memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise unreadable(source, error) from error
