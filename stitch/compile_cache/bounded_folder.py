"""Folders of files that can be made again, kept below a size: what was used last stays.

Whoever has a file open, or mapped, keeps what he has when it is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def mark_used(path: Path) -> None:
    """A file counts as used now; where the folder does not allow that, as before."""
    with contextlib.suppress(OSError):
        os.utime(path)


def keep_below(folder: Path, names: re.Pattern[str], most_nbytes: int) -> int:
    """Remove files, least recently used first, until the rest has so many bytes; gives how many
    bytes went. Only files whose whole name matches are counted and removed; those with the same
    first group belong together. What cannot be removed stays."""
    sizes: dict[str, int] = {}
    used: dict[str, int] = {}
    paths: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = names.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):  # Another process may have removed it.
                status = entry.stat(follow_symlinks=False)
                sizes[match[1]] = sizes.get(match[1], 0) + status.st_size
                used[match[1]] = max(used.get(match[1], 0), status.st_mtime_ns)
                paths.setdefault(match[1], []).append(folder / entry.name)
    over, gone = sum(sizes.values()) - most_nbytes, 0
    for key in sorted(paths, key=lambda key: (used[key], key)):
        if gone >= over:
            break
        for path in paths[key]:
            with contextlib.suppress(OSError):
                path.unlink()
        gone += sizes[key]
    return gone
