"""Reading: only regular files, and what was read is known afterwards."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import load_pipeline
from stitch.errors import FormatError
from stitch.files import (
    files_read,
    identity,
    noting_files,
    open_file,
    read_text,
)
from stitch.forms import read_array, read_tensors
from stitch.frontend import read_graph
from stitch.machine import load_machine

DOORS: dict[str, Callable[[Path], Any]] = {
    "m.ttb": stitch.load,
    "a.npy": read_array,
    "a.npz": read_array,
    "a.safetensors": read_array,
    "c.safetensors": read_tensors,
    "m.onnx": read_graph,
    "m.yaml": read_graph,
    "p.yaml": load_pipeline,
    "machine.yaml": load_machine,
    "r.json": read_text,
}


def test_an_interrupt_behind_the_opening_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = io.open

    def interrupted(handle: int, mode: str) -> Any:
        with opened(handle, mode):  # Nobody gets it, so it is closed.
            raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(os, "fdopen", interrupted)
    monkeypatch.setattr(io, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_file(tmp_path / "a.txt")


@pytest.mark.parametrize("name", DOORS)
def test_a_named_pipe_is_refused_by_every_front_door(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match="a named pipe"):
        DOORS[name](tmp_path / name)


def test_folders_devices_and_sockets_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        for path, said in ((tmp_path, "a folder"), (Path("/dev/zero"), "a device"),
                           (tmp_path / "s", "a socket")):  # fmt: skip
            with pytest.raises(FormatError, match=said):
                open_file(path)


def test_files_that_were_read_are_known_by_whatever_link(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "soft.npy").symlink_to("a.npy")
    os.link(tmp_path / "a.npy", tmp_path / "hard.npy")
    with noting_files():
        read_array(tmp_path / "soft.npy")
        noted = files_read()
        assert identity(tmp_path / "hard.npy") in noted and len(noted) == 1
    assert files_read() == {}


def test_a_text_with_a_hole_that_takes_more_than_any_text_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(100 << 30)
    for read in (stitch.Pipeline.from_yaml, lambda path: stitch.compile(path, target="tiny")):
        with pytest.raises(FormatError, match="the text is too long"):
            read(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["\0", "a\0b.yaml", "\ud800"])
def test_what_no_file_can_be_called_is_not_found(name: str) -> None:
    for read in (stitch.Pipeline.from_yaml, stitch.load):
        with pytest.raises(FormatError, match="no file can have this name"):
            read(name)
