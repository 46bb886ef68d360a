"""Lock a folder with `flock` on its file `.stitch-lock`.

The kernel releases the lock when the process ends. The contents of the file name the holder in the
error of another process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import sys
import time
from pathlib import Path
from typing import final

from stitch.errors import StitchError, UsageError
from stitch.live_objects import LiveObjects

#: Errors of `flock` on a file system without locks (NFS without its lock daemon, FUSE).
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
NAME = ".stitch-lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@final
class FolderLock:
    """An exclusive lock on a folder, until `release` or the end of this process.

    `missing` is None, or the reason why the file system has no locks; then there is none.

    Raises:
        UsageError: Another process holds the lock.
        StitchError: The folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: str | None = None
        self._handle: int | None = None
        _LOCKS.add(self)
        try:
            self._take(folder / NAME)
        except OSError as error:
            raise StitchError(
                "the folder cannot be locked", where=str(folder),
                got=error.strerror or str(error),
                remedy="choose a folder that exists and is writable",
            ) from error  # fmt: skip

    def _take(self, path: Path) -> None:
        while self._handle is None and self.missing is None:
            # Assign at once, so that `__del__` closes the handle after an interrupt.
            self._handle = handle = os.open(path, _FLAGS, 0o644)
            is_locked = False
            try:
                is_locked = self._lock(handle, path)
            finally:
                if not is_locked:
                    self._handle = None
                    os.close(handle)

    def _lock(self, handle: int, path: Path) -> bool:
        """Lock the file; return False if its last holder removed it first, or without locks."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(handle, path):
                return False
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(
                    "another process has this folder", where=str(self.folder), got=_holder(handle),
                    remedy="wait until it has ended, stop it, or choose another folder",
                ) from error  # fmt: skip
            if error.errno not in NO_LOCKS:
                raise
            self.missing = error.strerror or str(error)
            return False
        _write_holder(handle)
        return True

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the lock (True without locks).

        It does not after a fork, nor if the folder was removed, and perhaps created again.
        """
        if self.missing is not None:
            return True
        return self._handle is not None and _is_at(self._handle, self.folder / NAME)

    def release(self) -> None:
        """Release the lock; may be called twice."""
        handle = self._handle
        if handle is None:
            return
        try:
            with contextlib.suppress(OSError):
                if _is_at(handle, self.folder / NAME):  # Otherwise another process owns the file.
                    os.unlink(self.folder / NAME)  # noqa: PTH108
        finally:
            self._handle = None
            with contextlib.suppress(OSError):
                os.close(handle)

    def _drop_after_fork(self) -> None:
        """Close the handle in a child, so that the lock ends with the parent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()


_LOCKS: LiveObjects[FolderLock] = LiveObjects()


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock._drop_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _is_at(handle: int, path: Path) -> bool:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(status, os.fstat(handle))


def _write_holder(handle: int) -> None:
    since, host = time.strftime("%Y-%m-%d %H:%M:%S"), os.uname().nodename
    text = f"process {os.getpid()} on {host}, since {since}: {shlex.join(sys.argv)[:400]}"
    with contextlib.suppress(OSError):  # Only error messages read it.
        os.ftruncate(handle, 0)
        os.write(handle, text.encode(errors="surrogateescape"))


def _holder(handle: int) -> str:
    """Return the contents of the file, which name the process that has the lock."""
    return os.pread(handle, 4096, 0).decode("utf-8", "replace") or "another process"
