"""Write files atomically and durably.

A file is written under a temporary name in its folder (`.NAME.PID.TOKEN.part`), synced and renamed,
then the folder is synced. After a kill the old file is intact; the temporary file may remain.
Devices and pipes (`/dev/null`) are written directly; `-` is standard output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from stitch.errors import StitchError
from stitch.files.reading import special_kind

STANDARD_OUTPUT = "-"
#: Smaller pieces are buffered.
_BUFFER_NBYTES = 1 << 18
#: Bytes of the target's name in the temporary name: file systems allow 255 for a name.
_NAME_NBYTES = 150
_TEMPORARY_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECT_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
#: Errors of file systems whose folders need no sync.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)

Data: TypeAlias = bytes | bytearray | memoryview


class Sink(Protocol):
    """The target of `Content` that writes itself."""

    def write(self, data: Data, /) -> int:
        """Write all of the data; return its length in bytes."""


#: Bytes, text, or a function that writes the bytes in pieces.
Content: TypeAlias = Data | str | Callable[[Sink], object]
#: The files of one command, in the order in which they are written.
OutputFiles: TypeAlias = dict[str | Path, Content]


def write_files(files: Mapping[str | Path, Content]) -> list[str]:
    """Write each file atomically; return their paths, without standard output."""
    for path, content in files.items():
        if path == STANDARD_OUTPUT:
            sys.stdout.flush()
            _write_content(content, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            atomic_write(path, content)
    return [str(path) for path in files if path != STANDARD_OUTPUT]


def atomic_write(path: str | Path, content: Content, *, follow_links: bool = True) -> None:
    """Write one file: after an error the old file is intact.

    Args:
        path: The file.
        content: Its new content.
        follow_links: Write to the target of a link; otherwise replace a link or pipe at `path`.

    Raises:
        StitchError: The file is not written, or it is written but not known to be on the disk.
    """
    target = resolved(path) if follow_links else resolved(Path(path).parent) / Path(path).name
    with naming(target):
        if follow_links and _is_direct(target):
            _write_direct(target, content)
            return
        name = os.fsencode(target.name)[:_NAME_NBYTES].decode("utf-8", "ignore")
        temporary = target.with_name(f".{name}.{os.getpid()}.{os.urandom(6).hex()}.part")
        try:
            _write_temporary(temporary, target, content)
            os.replace(temporary, target)  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
    _sync_folder(target.parent)


def _write_temporary(temporary: Path, target: Path, content: Content) -> None:
    handle = os.open(temporary, _TEMPORARY_FLAGS, 0o666)
    try:
        with contextlib.suppress(OSError):  # Keep the permissions of the old file.
            os.fchmod(handle, stat.S_IMODE(target.stat().st_mode) & 0o777)
        _write_to_handle(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents; raises `StitchError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    # ValueError: NUL or half a surrogate pair in the name. RecursionError: a thousand folders.
    except (OSError, ValueError, RecursionError) as error:
        raise StitchError(
            "cannot make the folder", where=str(path),
            got=getattr(error, "strerror", None) or str(error),
            remedy="choose a writable parent folder, and a name that no file has",
        ) from error  # fmt: skip


def resolved(path: str | Path) -> Path:
    """Return the path with links followed.

    Raises `StitchError` for a name that no file can have (with NUL or half a surrogate pair).
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise StitchError(
            "no file can have this name", where=repr(str(path)), got=str(error),
            remedy="choose a name without control characters",
        ) from error  # fmt: skip


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn `OSError` into a `StitchError` that names the path."""
    try:
        yield
    except OSError as error:
        raise StitchError(
            "cannot write the file", where=str(path), got=error.strerror or str(error),
            remedy="choose a writable folder with free space; an existing file is unchanged",
        ) from error  # fmt: skip


def _write_content(content: Content, sink: Sink) -> None:
    if callable(content):
        content(sink)
    elif isinstance(content, str):
        sink.write(content.encode("utf-8", "backslashreplace"))
    else:
        sink.write(content)


def _write_to_handle(handle: int, content: Content) -> None:
    with os.fdopen(handle, "wb", _BUFFER_NBYTES, closefd=False) as stream:
        _write_content(content, stream)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder; raise `StitchError` if the system reports a failure."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(handle)
    except OSError as error:
        raise StitchError(
            "the file is written, but not known to be on the disk: the folder cannot be synced",
            where=str(folder), got=error.strerror or str(error),
            remedy="save again; until then a loss of power may bring back the old file",
        ) from error  # fmt: skip


def _is_direct(path: Path) -> bool:
    """Return whether to write to a path in place; raise `StitchError` if it cannot be written."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # A new file, or creating it will report the error.
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise StitchError(
            "cannot write the file", where=str(path), expected="a file",
            got=special_kind(mode), remedy="choose another name",
        )  # fmt: skip
    return not stat.S_ISREG(mode)


def _write_direct(path: Path, content: Content) -> None:
    try:
        handle = os.open(path, _DIRECT_FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads from this pipe") from error
        raise
    try:
        os.set_blocking(handle, True)
        _write_to_handle(handle, content)
    finally:
        os.close(handle)
