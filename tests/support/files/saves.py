"""Every way in which Stitch saves something, and what is there before and afterwards.

Shared by the tests that let system calls fail and by those that kill the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import stitch
from stitch import ttb
from stitch.api import load
from stitch.files import atomic_write, write_files
from stitch.forms import npy_bytes, read_array_file
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType
from stitch.training.checkpoints import Checkpoint, read_checkpoint, save_checkpoint


@dataclass(frozen=True)
class Save:
    """`save(folder, age)` saves something old or new; `ages(folder)`: of each file, which it is."""

    save: Callable[[Path, int], None]
    ages: Callable[[Path], list[int]]


def _binary(age: int) -> ttb.Binary:
    builder = ComputationGraphBuilder("p")
    x = builder.input("x", (4, 4), DataType.FLOAT32)
    builder.output("y", x + builder.constant(np.full((4, 4), age, np.float32)))
    return stitch.compile(builder.build(), target="tiny").binary


BINARIES = {age: _binary(age) for age in (1, 2)}


def _age_of_ttb(path: Path) -> int:
    found = load(path, verify="full").programs[0].constants[0].data
    assert (found == found.flat[0]).all()
    return int(found.flat[0])


def _save_three(folder: Path, age: int) -> None:
    write_files(
        {
            folder / "a.npy": npy_bytes(np.full(100_000, age)),
            folder / "b.txt": f"{age}\n" * 1000,
            folder / "c.npy": npy_bytes(np.full(3, age)),
        }
    )


def _ages_of_three(folder: Path) -> list[int]:
    text = {int(line) for line in (folder / "b.txt").read_text().splitlines()}
    ages = [text.pop()]
    for name in ("a.npy", "c.npy"):
        array = read_array_file(folder / name)[None]
        assert (array == array[0]).all()
        ages.append(int(array[0]))
    assert not text
    return ages


def _state(age: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 64), age, np.float32), "steps": np.asarray(age)}


def _age_of_checkpoint(path: Path) -> int:
    found = read_checkpoint(path)
    assert {name: array.tobytes() for name, array in found.state.items()} == {
        name: array.tobytes() for name, array in _state(found.step).items()
    }
    return found.step


SAVES = {
    "a .ttb": Save(
        lambda folder, age: ttb.save(BINARIES[age], folder / "m.ttb"),
        lambda folder: [_age_of_ttb(folder / "m.ttb")],
    ),
    "a checkpoint": Save(
        lambda folder, age: save_checkpoint(folder / "c", Checkpoint(age, _state(age))),
        lambda folder: [_age_of_checkpoint(folder / "c")],
    ),
    "one file": Save(
        lambda folder, age: atomic_write(folder / "f", bytes([age]) * 300_000),
        lambda folder: list(set((folder / "f").read_bytes())),
    ),
    "a command's outputs": Save(_save_three, _ages_of_three),
}
