"""Checkpoints: all that the next step depends on, in one file, whole or not at all.

Comes in: what `TrainingInstance.state_dict` gave, and facts about the training as plain data. Goes
out: `step-00000120.safetensors` in a folder, written under a temporary name, synced, renamed; and
back. A file says of which training it is: another one's is refused with what differs. Must not
know: devices, where data come from.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stitch.errors import FormatError, IncompatibleError, StitchError
from stitch.program import Array
from stitch.training.checkpoint_format import read_tensors, write_tensors

VERSION = 1
_KEY = "stitch_checkpoint"
_NAME = re.compile(r"step-(\d{8,15})\.safetensors")
_PART = re.compile(r"\.step-\d{8,15}\.safetensors\.part")
MAX_SHOWN = 8
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after `step` steps.

    `identity`: what has to be the same where training goes on, by name (the tensors, the
    operations, the data and their order). `settings`: what may change, and is then told of.
    `progress`: where in the data the training is, and sums that go on. All of it JSON.
    """

    step: int
    state: Mapping[str, Array]
    identity: Facts = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    progress: Facts = field(default_factory=dict)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write one file, whole or not at all; raises `StitchError` where there is no room.

    What stood there before stays until the new file is complete and on the disk.
    """
    facts = {
        "version": VERSION, "step": checkpoint.step, "crc32": _checksum(checkpoint.state),
        "identity": checkpoint.identity, "settings": checkpoint.settings,
        "progress": checkpoint.progress,
    }  # fmt: skip
    text = json.dumps(facts, sort_keys=True)
    write_whole(path, lambda file: write_tensors(file, checkpoint.state, {_KEY: text}))


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file under a temporary name, sync it, and give it its name.

    Raises `StitchError` if that fails; the temporary file is then gone, and an older one stays.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        try:
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise StitchError(
            f"cannot save {path.name}: {error.strerror or error}",
            where=str(path.parent),
            remedy="make room, or choose another folder; files that were there are as they were",
        ) from error


def _sync_folder(folder: Path) -> None:
    """The new name itself has to be on the disk, where the system can sync folders."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(state: Mapping[str, Array]) -> int:
    found = 0
    for name in sorted(state):
        dense = np.ascontiguousarray(state[name]).reshape(-1)
        found = zlib.crc32(dense.view(np.uint8).data, zlib.crc32(name.encode(), found))
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """What `save_checkpoint` wrote; raises `FormatError`, `IncompatibleError`."""
    stored = read_tensors(path)
    try:
        facts = json.loads(stored.metadata[_KEY])
        version = facts["version"]
        if version != VERSION:
            raise IncompatibleError(
                "the checkpoint is of another version", where=str(path),
                expected=str(VERSION), got=str(version)[:40],
            )  # fmt: skip
        parts = [facts[key] for key in ("identity", "settings", "progress")]
        step, checksum = facts["step"], facts["crc32"]
        if type(step) is not int or not all(isinstance(part, dict) for part in parts):
            raise ValueError("its facts are of another form")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"this is no checkpoint of a training: {error}", where=str(path),
            remedy="files with weights only are given as weights: in the training file",
        ) from error  # fmt: skip
    if checksum != _checksum(stored.tensors):
        raise FormatError("the checkpoint is damaged: its checksum is another", where=str(path))
    return Checkpoint(step, stored.tensors, *parts)


def differences(saved: Facts, own: Facts) -> tuple[str, ...]:
    """One sentence for each fact that is not the same.

    >>> differences({"seed": 0, "w": "f32"}, {"seed": 1, "v": "f32"})
    ('seed: 0 in the checkpoint, 1 here', 'w: only in the checkpoint', 'v: only here')
    """
    told = []
    for name in [*saved, *(name for name in own if name not in saved)]:
        if name not in own:
            told.append(f"{name}: only in the checkpoint")
        elif name not in saved:
            told.append(f"{name}: only here")
        elif saved[name] != own[name]:
            told.append(
                f"{name}: {_short(saved[name])} in the checkpoint, {_short(own[name])} here"
            )
    return tuple(told)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def refuse_other(checkpoint: Checkpoint, identity: Facts, path: Path) -> None:
    """Raise `IncompatibleError` for the checkpoint of another training, with what differs."""
    found = differences(checkpoint.identity, identity)
    if found:
        more = [f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        raise IncompatibleError(
            "this is the checkpoint of another training\n    "
            + "\n    ".join([*found[:MAX_SHOWN], *more]),
            where=str(path),
            remedy="resume with the model, data and batches that it was made with, or start anew "
            "in another --checkpoint_dir",
        )


class CheckpointFolder:
    """The checkpoints of one training; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        assert keep >= 1
        self.folder = folder
        self.keep = keep

    def prepare(self) -> None:
        """Make the folder, and clear away what a killed run left half written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in self.folder.iterdir():
                if _PART.fullmatch(entry.name):
                    entry.unlink()
        except OSError as error:
            raise StitchError(
                "this cannot be a folder of checkpoints",
                where=str(self.folder),
                got=error.strerror or str(error),
            ) from error

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return ()
        found = [entry for entry in self.folder.iterdir() if _NAME.fullmatch(entry.name)]
        return tuple(sorted(found, key=lambda entry: int(entry.name[5:-12])))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then drop all but the newest; raises `StitchError`."""
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        save_checkpoint(path, checkpoint)
        for old in self.files[: -self.keep]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def newest(self, note: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """The newest sound checkpoint, None where there is none; damaged ones are told of.

        Raises the error of the last one where all of them are damaged.
        """
        last: FormatError | None = None
        for path in reversed(self.files):
            try:
                return path, read_checkpoint(path)
            except FormatError as error:
                note(f"{path.name} is passed over: {error.what}")
                last = error
        if last is not None:
            raise last
        return None
