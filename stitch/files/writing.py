"""Atomic and durable writing of files.

A file is written under a temporary name beside its target (`.NAME.PID.TOKEN.part`), synced and
renamed, then its folder is synced. After a kill the old file is intact, and the temporary file may
remain. Devices and pipes (`/dev/null`, a shell's `>(...)`) are written directly; `-` is standard
output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias, final

from stitch.errors import StitchError
from stitch.files import folder_lock
from stitch.files.reading import own_descriptor, special_kind

STANDARD_OUTPUT = "-"
#: Pieces smaller than this are joined before they are written.
_BUFFER = 1 << 18
#: A name's part of the name of its part: file systems take 255 bytes.
_NAME_NBYTES = 150
_PART_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECT_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
#: Folders that cannot be synced are those of file systems that do not need it.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)

Data: TypeAlias = bytes | bytearray | memoryview


class Sink(Protocol):
    """What contents are written into."""

    def write(self, data: Data, /) -> int:
        """Take all of the data; gives its length in bytes."""


#: Bytes, a text, or what writes the bytes piece by piece.
Content: TypeAlias = Data | str | Callable[[Sink], object]


def atomic_write(path: str | Path, content: Content) -> None:
    """Write one file, whole or not at all; raises `StitchError`, also where it is written but not
    known to be on the disk."""
    files = OutputFiles()
    files.add(path, content)
    files.commit()


def write_added(add_to: Callable[[OutputFiles], None], forget: Callable[[], None]) -> None:
    """Write the files that `add_to` adds, then call `forget`, whatever happened."""
    files = OutputFiles()
    try:
        add_to(files)
        files.commit()
    finally:
        forget()


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing; raises `StitchError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    # ValueError: a zero in it, or half a surrogate pair. RecursionError: a thousand folders.
    except (OSError, ValueError, RecursionError) as error:
        raise StitchError(
            "cannot make the folder", where=str(path),
            got=getattr(error, "strerror", None) or str(error),
            remedy="choose a place that is writable, and where no file has this name",
        ) from error  # fmt: skip


def resolved(path: str | Path) -> Path:
    """Where a path leads: links followed, but for what the process has open already.

    Raises `StitchError` for a name that no file can have (with a NUL or half a surrogate pair).
    """
    try:
        return Path(path if own_descriptor(path) is not None else os.path.realpath(path))
    except ValueError as error:
        raise StitchError(
            "no file can have this name", where=repr(str(path)), got=str(error),
            remedy="choose a name without control characters",
        ) from error  # fmt: skip


@final
class OutputFiles:
    """The files of one command. `commit` writes each atomically, once all contents are complete.

    An error while contents are written changes no file; one between two renames leaves each file
    old or new.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[Content, bool]] = {}
        self._paths: dict[Path, str] = {}
        self._standard_output: Content | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, by the paths under which they were added, without standard output."""
        return tuple(self._paths.values())

    def add(self, path: str | Path, content: Content) -> None:
        """Add a file; a later one at the same path replaces it."""
        if path == STANDARD_OUTPUT:
            self._standard_output = content
        else:
            place = resolved(path)
            self._files[place] = content, _is_direct(place)
            self._paths[place] = str(path)

    def add_own(self, path: Path, content: Content) -> None:
        """A file whose name nobody has chosen: where a link or a pipe has it, it takes the name,
        and what the link leads to stays as it is."""
        place = resolved(path.parent) / path.name
        self._files[place] = content, False
        self._paths[place] = str(path)

    def commit(self) -> None:
        """Write the files, in the order in which they were added; raises `StitchError`."""
        parts: list[_Part] = []
        try:
            for path, (content, is_direct) in self._files.items():
                with naming(path):
                    if is_direct:
                        _write_direct(path, content)
                    else:
                        parts.append(_Part(path))
                        parts[-1].write(content)
            if self._standard_output is not None:
                sys.stdout.flush()
                _write_content(self._standard_output, sys.stdout.buffer)
                sys.stdout.buffer.flush()
            for part in parts:
                part.rename()
            for folder in dict.fromkeys(part.target.parent for part in parts):
                _sync_names(folder)
        finally:
            for part in parts:
                part.remove()


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
            remedy="choose a folder that exists, is writable and has room; the file that was there "
            "is as it was",
        ) from error


class _Part:
    """A file under way to its name."""

    def __init__(self, target: Path) -> None:
        name = os.fsencode(target.name)[:_NAME_NBYTES].decode("utf-8", "ignore")
        self.target = target
        self.path = target.with_name(f".{name}.{os.getpid()}.{os.urandom(6).hex()}.part")
        self._handle: int | None = None
        self._is_there = False

    def write(self, content: Content) -> None:
        """Write and sync the content."""
        self._handle = folder_lock.system_calls.open(self.path, _PART_FLAGS, 0o666)
        self._is_there = True
        with contextlib.suppress(OSError):  # A file that was there lends its permissions.
            os.fchmod(self._handle, stat.S_IMODE(self.target.stat().st_mode) & 0o777)
        _write_content_to(self._handle, content)
        folder_lock.system_calls.fsync(self._handle)
        handle, self._handle = self._handle, None
        folder_lock.system_calls.close(handle)

    def rename(self) -> None:
        """Give the file its name."""
        with naming(self.target):
            folder_lock.system_calls.replace(self.path, self.target)
        self._is_there = False

    def remove(self) -> None:
        """Remove what was not renamed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                folder_lock.system_calls.close(handle)
        if self._is_there:
            with contextlib.suppress(OSError):
                folder_lock.system_calls.unlink(self.path)


class _HandleSink:
    """Writes into a handle; small pieces are joined."""

    def __init__(self, handle: int) -> None:
        self._handle, self._held = handle, bytearray()

    def write(self, data: Data, /) -> int:
        view = memoryview(data)
        if view.nbytes < _BUFFER:
            self._held += view
            if len(self._held) >= _BUFFER:
                self.flush()
        else:
            self.flush()
            self._write_all(view.cast("B"))
        return view.nbytes

    def flush(self) -> None:
        held, self._held = self._held, bytearray()
        self._write_all(memoryview(held))

    def _write_all(self, view: memoryview) -> None:
        """The system may take less than it is given; it then gets the rest."""
        while view.nbytes:
            count = folder_lock.system_calls.write(self._handle, view)
            if count <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view = view[count:]


def _write_content(content: Content, sink: Sink) -> None:
    if callable(content):
        content(sink)
    elif isinstance(content, str):
        sink.write(content.encode("utf-8", "backslashreplace"))
    else:
        sink.write(content)


def _write_content_to(handle: int, content: Content) -> None:
    sink = _HandleSink(handle)
    _write_content(content, sink)
    sink.flush()


def _sync_names(folder: Path) -> None:
    """New names have to be on the disk; raises `StitchError` where the system does not say so."""
    try:
        handle = folder_lock.system_calls.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            folder_lock.system_calls.fsync(handle)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            folder_lock.system_calls.close(handle)
    except OSError as error:
        raise StitchError(
            "the file is written, but not known to be on the disk: the folder cannot be synced",
            where=str(folder),
            got=error.strerror or str(error),
            remedy="save again; until that succeeds, a loss of power may bring back what was there "
            "before",
        ) from error


def _is_direct(path: Path) -> bool:
    """Whether a path is written to as it is; raises `StitchError` for what is never written to."""
    if own_descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # It is not there, or creating it will say what is wrong.
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise StitchError(
            "cannot write the file", where=str(path), expected="a file",
            got=special_kind(mode), remedy="choose another name",
        )  # fmt: skip
    return not stat.S_ISREG(mode)


def _write_direct(path: Path, content: Content) -> None:
    own = own_descriptor(path)
    if own is not None:
        sys.stdout.flush()
        handle = os.dup(own)
    else:
        try:
            handle = folder_lock.system_calls.open(path, _DIRECT_FLAGS)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(errno.ENXIO, "nobody reads from this pipe") from error
            raise
        os.set_blocking(handle, True)
    try:
        _write_content_to(handle, content)
    finally:
        folder_lock.system_calls.close(handle)
