"""The system calls by which files are written, in one table, so that a test can let each fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
table = SystemCalls()
