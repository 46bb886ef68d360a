"""A lock on a folder, held until its process ends, that names its holder in errors.

The lock is `flock` on the file `.stitch-lock` in the folder, which the kernel releases when the
process ends; the file's contents are only for the error message. On a file system without such
locks `missing` says why, and the holder continues without a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from stitch.errors import StitchError, UsageError
from stitch.live_objects import LiveObjects

# System calls, in one table that tests replace.

#: What `flock` says on a file system that has no such locks (NFS without its lock daemon, FUSE).
NO_LOCKS = frozenset({"ENOLCK", "ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL"})


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What writing a file asks of the system."""

    open: Callable[..., int] = os.open
    write: Callable[[int, Any], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[[Any, Any], None] = os.replace
    unlink: Callable[[Any], None] = os.unlink
    close: Callable[[int], None] = os.close
    flock: Callable[[int, int], None] = fcntl.flock


#: What is called; a test may put another in its place.
system_calls = SystemCalls()


NAME = ".stitch-lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@final
class FolderLock:
    """A folder that this process has to itself until `release`, or until it ends.

    Raises `UsageError` naming the owner where another has it, `StitchError` where the folder cannot
    be written to. `other`: what an owner is called there. `missing`: why there is no lock, where
    the file system has none.
    """

    def __init__(self, folder: Path, other: str = "another process") -> None:
        self.folder = folder
        self.other = other
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
            # Kept from the first moment: an interrupt must not leave a lock that nobody closes.
            self._handle = handle = system_calls.open(path, _FLAGS, 0o644)
            is_ours = False
            try:
                is_ours = self._is_locked(handle, path)
            finally:
                if not is_ours:
                    self._handle = None
                    system_calls.close(handle)

    def _is_locked(self, handle: int, path: Path) -> bool:
        """Lock the file; False where its last owner removed it before that, or without locks."""
        try:
            system_calls.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(handle, path):
                return False
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._refusal(_owner(handle)) from error
            if errno.errorcode.get(error.errno or 0) not in NO_LOCKS:
                raise
            self.missing = error.strerror or str(error)
            return False
        _write_owner(handle)
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process still has the folder, as far as its file system can tell.

        It has not after a fork, which leaves the lock with the parent, nor where the folder was
        removed: another may have made it anew, with a lock of its own.
        """
        if self.missing is not None:
            return True
        return self._handle is not None and _is_at(self._handle, self.folder / NAME)

    def _refusal(self, owner: str) -> UsageError:
        return UsageError(
            f"{self.other} has this folder",
            where=str(self.folder),
            got=owner,
            remedy="wait until it has ended, stop it, or choose another folder",
        )

    def release(self) -> None:
        """Let others have the folder; doing so twice is allowed."""
        handle = self._handle
        if handle is None:
            return
        try:
            with contextlib.suppress(OSError):
                if _is_at(handle, self.folder / NAME):  # Else it is another's.
                    system_calls.unlink(self.folder / NAME)
        finally:
            self._handle = None
            with contextlib.suppress(OSError):
                system_calls.close(handle)

    def _forget(self) -> None:
        """In a child after a fork: the lock is the parent's, and must not outlive it."""
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
        lock._forget()


os.register_at_fork(after_in_child=_after_fork)


def _is_at(handle: int, path: Path) -> bool:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(status, os.fstat(handle))


def _write_owner(handle: int) -> None:
    facts = {
        "pid": os.getpid(), "host": os.uname().nodename, "command": shlex.join(sys.argv)[:400],
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip
    with contextlib.suppress(OSError):  # It is for the message only.
        os.ftruncate(handle, 0)
        system_calls.write(handle, (json.dumps(facts) + "\n").encode())


def _owner(handle: int) -> str:
    """Which process has the lock, as far as its open file says."""
    try:
        facts = json.loads(os.pread(handle, 4096, 0).decode("utf-8", "replace"))
        pid, host, since = facts["pid"], facts["host"], facts["since"]
        return f"process {pid} on {host}, since {since}: {facts['command']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
