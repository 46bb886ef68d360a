"""A process without free file handles is told so by every front door, with one of our errors."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import load_pipeline
from stitch.errors import StitchError
from stitch.files import FolderLock, atomic_write
from stitch.forms import read_array
from stitch.frontend import read_graph
from stitch.machine import named_machines
from stitch.training.checkpoints import Checkpoint, CheckpointFolder

MODULE = "inputs: {x: {shape: [2], type: float32}}\noperations:\n  - y = Relu(x)\noutputs: [y]\n"
DOORS: dict[str, Callable[[Path], Any]] = {
    "a machine": lambda here: stitch.open_device("tiny"),
    "a module": lambda here: read_graph(here / "a.yaml"),
    "a pipeline": lambda here: load_pipeline(here / "a.yaml"),
    "an array": lambda here: read_array(here / "x.npy"),
    "a binary": lambda here: stitch.load(here / "a.ttb"),
    "the newest checkpoint": lambda here: CheckpointFolder(here / "c").newest(print),
    "a checkpoint": lambda here: CheckpointFolder(here / "c").save(Checkpoint(2, {})),
    "a lock": lambda here: FolderLock(here),
    "a file": lambda here: atomic_write(here / "f", b"x"),
}


@contextmanager
def handles_left(count: int) -> Iterator[None]:
    """Within the block, the process can open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8  # noqa: PTH208
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        while len(taken) < most:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)


@pytest.mark.parametrize("name", DOORS)
def test_handles_that_run_out_are_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.yaml").write_text(MODULE)
    np.save(tmp_path / "x.npy", np.zeros(2))
    stitch.compile(tmp_path / "a.yaml", target="tiny").save(tmp_path / "a.ttb")
    folder = CheckpointFolder(tmp_path / "c")
    folder.save(Checkpoint(1, {"w": np.zeros(2)}))
    folder.close()
    before = sorted(tmp_path.rglob("*"))
    named_machines._shipped.cache_clear()
    with handles_left(0), pytest.raises(StitchError, match="Too many open files"):
        DOORS[name](tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
