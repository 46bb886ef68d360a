"""A host function that waits for a file: tests act while a server of a mesh is in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from stitch.program import Array

SECONDS = 60


def held(x: Array, folder: str) -> Array:
    """Twice x, when the file `go` is there; leaves a file named by the pid meanwhile."""
    mark = Path(folder, f"pid{os.getpid()}")
    mark.touch()
    until = time.monotonic() + SECONDS
    while not Path(folder, "go").exists() and time.monotonic() < until:
        time.sleep(0.002)
    mark.unlink()
    return x * np.float32(2)


def holder(folder: Path) -> int:
    """The pid of a process that is in `held`; waits for one."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for mark in folder.glob("pid*"):
            if Path("/proc", mark.name[3:]).exists():
                return int(mark.name[3:])
        time.sleep(0.002)
    raise TimeoutError(f"no process is held in {folder}")
