"""What the host allows this process: the machine's memory, or its control group's limit.

Comes in: the system's own files. Goes out: bytes. Must not know: who uses them.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

#: Where control groups are told of, and where they are mounted.
_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: A limit from here on means none (cgroup v1 writes the largest multiple of a page).
_UNLIMITED = 1 << 60


@cache
def machine_nbytes() -> int:
    """The machine's memory, or what a control group around this process allows if that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(installed, group_limit(_MEMBERSHIP, _MOUNT) or installed)


def group_limit(membership: Path, mount: Path) -> int | None:
    """The least limit of a process's control groups and of those around them; None without one.

    Version 2 has one tree (`0::/path`, `memory.max`), version 1 a tree of its own for memory.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            limits += _limits(mount, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(mount / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of all groups around it; inside a container only its own shows."""
    inside = [part for part in path.split("/") if part not in ("", "..", ".")]
    limits = []
    for depth in range(len(inside) + 1):
        try:
            text = root.joinpath(*inside[:depth], name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if re.fullmatch(r"\d+", text) and int(text) < _UNLIMITED:
            limits.append(int(text))
    return limits
