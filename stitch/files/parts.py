"""One file on the way to its name: a part beside it, written, synced, renamed; dead parts swept.

Comes in: paths, contents. Goes out: `.name.PID.TOKEN-N.part` in the same folder, which then takes
the name. The parts of one batch share a token, and the first of them in a folder is locked while
their owner lives (`flock`, which the kernel gives free): parts without a lock are litter.
Must not know: what is in a file, which files belong together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias, final

from stitch.errors import StitchError
from stitch.files import system_calls
from stitch.files.sweeping import sweep_folder

#: Pieces smaller than this are joined before they are written.
_BUFFER = 1 << 18
#: A name's part of the name of its part: file systems take 255 bytes.
_NAME_NBYTES = 150
_PART_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
#: Folders that cannot be synced are those of file systems that do not need it.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)

Data: TypeAlias = bytes | bytearray | memoryview


class Sink(Protocol):
    """What contents are written into."""

    def write(self, data: Data, /) -> int:
        """Take all of the data; gives its length in bytes."""


#: Bytes, a text, or what writes the bytes piece by piece.
Content: TypeAlias = Data | str | Callable[[Sink], object]


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
            remedy="choose a folder that exists, is writable and has room; files that were there "
            "are as they were",
        ) from error


def write_parts(files: Mapping[Path, Content], parts: list[Part]) -> None:
    """Write each file as a part; those that were made are in `parts`, whatever happens.

    The first part of each folder holds the lock of them all: it is to be renamed last.
    """
    tokens: dict[Path, str] = {}
    for path, content in files.items():
        folder = path.parent
        with naming(path):
            if folder in tokens:
                parts.append(Part(path, f"{tokens[folder]}-{len(parts)}"))
                parts[-1].fill(content, keep_open=False)
                continue
            sweep_folder(folder)
            while folder not in tokens:
                token = f"{os.getpid()}.{os.urandom(6).hex()}"
                parts.append(Part(path, f"{token}-{len(parts)}"))
                if parts[-1].lock():
                    tokens[folder] = token
                else:  # Another's sweep was faster than our lock.
                    parts.pop().close()
            parts[-1].fill(content, keep_open=True)


@final
class Part:
    """A file under way to its name."""

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.token = token.rpartition("-")[0]
        name = os.fsencode(target.name)[:_NAME_NBYTES].decode("utf-8", "ignore")
        self.path = target.with_name(f".{name}.{token}.part")
        self._there = self._decided = False
        self._handle: int | None = system_calls.table.open(self.path, _PART_FLAGS, 0o666)
        self._there = True

    def lock(self) -> bool:
        """Show others that the owner lives; False where the part has been swept already."""
        assert self._handle is not None
        try:
            system_calls.table.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                return False
            if errno.errorcode.get(error.errno or 0) not in system_calls.NO_LOCKS:
                raise
        return self.path.exists()

    def fill(self, content: Content, *, keep_open: bool) -> None:
        """Write and sync the content; without `keep_open` no handle is held afterwards."""
        assert self._handle is not None
        with contextlib.suppress(OSError):  # A file that was there lends its permissions.
            os.fchmod(self._handle, stat.S_IMODE(self.target.stat().st_mode) & 0o777)
        sink = HandleSink(self._handle)
        pour(content, sink)
        sink.flush()
        system_calls.table.fsync(self._handle)
        if not keep_open:
            handle, self._handle = self._handle, None
            system_calls.table.close(handle)

    def rename(self) -> None:
        """Give the file its name."""
        with naming(self.target):
            system_calls.table.replace(self.path, self.target)
        self._there = False

    def decide(self) -> None:
        """A manifest names it: from now on it gets its name, by us or by the next sweep."""
        self._decided = True

    @property
    def is_named(self) -> bool:
        """Whether it has got its name."""
        return not self._there

    def taken(self) -> int:
        """The handle, which is the caller's from now on."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        return handle

    def close(self) -> None:
        """Remove what was not renamed, unless that is decided."""
        handle, self._handle = self._handle, None
        if self._there and not self._decided:
            with contextlib.suppress(OSError):
                system_calls.table.unlink(self.path)
        if handle is not None:
            with contextlib.suppress(OSError):
                system_calls.table.close(handle)


@final
class HandleSink:
    """Writes into a handle; small pieces are joined."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._held = bytearray()

    def write(self, data: Data, /) -> int:
        view = memoryview(data)
        if view.nbytes < _BUFFER:
            self._held += view
            if len(self._held) >= _BUFFER:
                self.flush()
        else:
            self.flush()
            write_all(self._handle, view.cast("B"))
        return view.nbytes

    def flush(self) -> None:
        held, self._held = self._held, bytearray()
        write_all(self._handle, memoryview(held))


def write_all(handle: int, view: memoryview) -> None:
    """The system may take less than it is given; it then gets the rest."""
    while view.nbytes:
        count = system_calls.table.write(handle, view)
        if count <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[count:]


def pour(content: Content, sink: Sink) -> None:
    if callable(content):
        content(sink)
    elif isinstance(content, str):
        sink.write(content.encode("utf-8", "backslashreplace"))
    else:
        sink.write(content)


def sync_names(folder: Path) -> None:
    """The new names in a folder have to be on the disk; raises `StitchError` where the system does
    not say so: the files are there all the same."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise StitchError(
            "the file is written, but not known to be on the disk: the folder cannot be synced",
            where=str(folder),
            got=error.strerror or str(error),
            remedy="save again; until that succeeds, a loss of power may bring back what was there "
            "before",
        ) from error


def sync_folder(folder: Path) -> None:
    """Names in a folder have to be on the disk; raises `OSError`."""
    handle = system_calls.table.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_calls.table.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        system_calls.table.close(handle)
