"""Open files for reading: checked before an open can block, and tracked.

Only regular files are read, and descriptors that the caller of a command opened (`/dev/stdin`,
`/dev/fd/63` of a shell's `<(...)`): a named pipe could block for ever, a device never end. Within
`noting_files` every opened file is recorded by its identity (device and inode), so that a command
can refuse to overwrite its own inputs.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, TypeAlias

from stitch.errors import FormatError, nearest

#: Device and inode.
Identity: TypeAlias = tuple[int, int]

_DESCRIPTOR = re.compile(r"/(?:dev/(stdin|stdout|stderr)|(?:dev|proc/self)/fd/(\d{1,9}))")
#: More files than this are not looked through for a name that resembles another.
_MOST_LISTED = 1000
_STANDARD = ("stdin", "stdout", "stderr")
#: The largest text (YAML, JSON) that is read.
TEXT_NBYTES = 1 << 30
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NOTED: ContextVar[dict[Identity, str] | None] = ContextVar("files_read", default=None)


@contextmanager
def noting_files() -> Iterator[None]:
    """Within the block, `files_read` knows every file that was opened for reading."""
    token = _NOTED.set({})
    try:
        yield
    finally:
        _NOTED.reset(token)


def files_read() -> dict[Identity, str]:
    """The files opened within `noting_files`, and how each was called; empty outside."""
    return dict(_NOTED.get() or {})


def note_standard_input() -> None:
    """Standard input is read: it may be a file as well (`< a.ttb`)."""
    _note(os.fstat(0), "standard input")


def _note(status: os.stat_result, called: str) -> None:
    noted = _NOTED.get()
    if noted is not None and stat.S_ISREG(status.st_mode):
        noted[status.st_dev, status.st_ino] = called


def identity(path: str | Path) -> Identity | None:
    """Device and inode of the file that a path leads to; None where there is none."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def own_descriptor(path: str | Path) -> int | None:
    """The handle that a path such as `/dev/fd/63` means; None for all others.

    >>> own_descriptor("/dev/stdin"), own_descriptor("/dev/fd/63"), own_descriptor("a.ttb")
    (0, 63, None)
    """
    descriptor = _DESCRIPTOR.fullmatch(os.fspath(path))
    if descriptor is None:
        return None
    return _STANDARD.index(descriptor[1]) if descriptor[1] else int(descriptor[2])


def open_file(path: str | Path) -> BinaryIO:
    """The file at a path, open for reading; never blocks.

    Raises `OSError` where it cannot be opened, `FormatError` for a named pipe, a device, a socket
    or a folder.
    """
    own = own_descriptor(path)
    handle = _opened(path) if own is None else os.dup(own)
    try:
        status = os.fstat(handle)
        special = special_kind(status.st_mode)
        if special is not None and (own is None or special == "a folder"):
            raise no_regular_file(path, special)
        if own is None:
            os.set_blocking(handle, True)
        _note(status, str(path))
    except BaseException:
        os.close(handle)
        raise
    # From here on it is the file's, which an interrupt drops and so closes.
    return io.open(handle, "rb")  # noqa: UP020  # It is a handle, not a path.


def _opened(path: str | Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket, or a device that is not there.
            raise no_regular_file(path, "a socket or a device") from error
        raise
    except ValueError as error:  # A zero in it, or half a surrogate pair.
        raise OSError(errno.EINVAL, "no file can have this name") from error


def special_kind(mode: int) -> str | None:
    """What has this mode (of `stat`), where it is no regular file; else None."""
    kinds = (
        (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
    )  # fmt: skip
    return next((name for is_kind, name in kinds if is_kind(mode)), None)


def no_regular_file(path: str | Path, kind: str) -> FormatError:
    """The error for what can only be read by waiting for others."""
    return FormatError(
        "this is no file that can be read",
        where=str(path),
        expected="a regular file",
        got=kind,
        remedy="what comes through a pipe: as - where a module is read, or with the shell's <(...)",
    )


def unreadable(path: str | Path, error: Exception) -> FormatError:
    """The error for a file that the system does not let us read, or that is no text."""
    if isinstance(error, UnicodeDecodeError):
        return FormatError(
            "the file is no text",
            where=str(path), expected="text in UTF-8",
            got=f"the byte {error.object[error.start]:#04x} at {error.start}",
            remedy="check the path: is it the file that was meant?",
        )  # fmt: skip
    return FormatError(
        "cannot read the file",
        where=str(path),
        got=getattr(error, "strerror", None) or str(error),
        remedy=(nearest_file(path, (Path(path).suffix,)) if isinstance(error, FileNotFoundError)
                else "") or "check the path and its permissions",
    )  # fmt: skip


def nearest_file(path: str | Path, endings: tuple[str, ...]) -> str:
    """`did you mean ...?` for the file beside a path with one of the endings and the nearest name.

    Nothing where none is near, or the folder cannot be listed.
    """
    place = Path(path)
    try:
        with os.scandir(place.parent) as entries:
            names = [e.name for e in islice(entries, _MOST_LISTED) if e.name.endswith(endings)]
    except (OSError, ValueError):
        return ""
    near = nearest(place.name, names, cutoff=0.7)
    return f"did you mean {str(place.with_name(near[0]))!r}?" if near else ""


def head_of(path: str | Path, nbytes: int) -> bytes:
    """The first bytes of a regular file, which is only looked at: it does not count as read.

    Raises `OSError`, `FormatError`.
    """
    handle = _opened(path)
    try:
        special = special_kind(os.fstat(handle).st_mode)
        if special is not None:
            raise no_regular_file(path, special)
        return os.pread(handle, nbytes, 0)
    finally:
        os.close(handle)


def read_bytes(path: str | Path) -> bytes:
    """All bytes of a file; raises what `open_file` raises."""
    with open_file(path) as file:
        return file.read()


def text_of(file: str | Path | IO[str]) -> str:
    """What a file of this path, or an open one, holds as text; raises `FormatError` for one that
    cannot be read."""
    if not isinstance(file, str | os.PathLike):
        return file.read()
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The file as UTF-8; raises what `open_file` raises, and `UnicodeDecodeError`.

    Raises `FormatError` beyond `TEXT_NBYTES`: a file with a hole takes nothing on the disk.
    """
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        data = b"" if nbytes > TEXT_NBYTES else file.read(TEXT_NBYTES + 1)
    if max(nbytes, len(data)) > TEXT_NBYTES:
        raise FormatError(
            "the file is too large for a text", where=str(path),
            expected=f"at most {TEXT_NBYTES} bytes", got=f"{max(nbytes, len(data))} bytes",
            remedy="large arrays belong into files of their own (.npy, .npz, .safetensors)",
        )  # fmt: skip
    return data.decode("utf-8", errors)


#: A path, or bytes.
Source: TypeAlias = str | Path | bytes | bytearray | memoryview


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
