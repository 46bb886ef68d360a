"""Checkpoints: all that the next step depends on, in one file, whole or not at all.

A file says of which training it is: another one's is refused with what differs.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from stitch.errors import FormatError, IncompatibleError, StitchError
from stitch.files import FolderLock, atomic_write, make_folder
from stitch.program import Array
from stitch.training.checkpoints.checkpoint_format import read_tensors, write_tensors

VERSION = 1
_KEY = "stitch_checkpoint"
_NAME = re.compile(r"step-(\d{8,15})\.safetensors")
#: What a killed process leaves of a checkpoint that it was writing.
_PART = re.compile(r"\.step-\d{8,15}\.safetensors\.(\d+\.[0-9a-f]+\.)?part")
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
    atomic_write(path, lambda sink: write_tensors(sink, checkpoint.state, {_KEY: text}))


def _checksum(state: Mapping[str, Array]) -> int:
    checksum = 0
    for name in sorted(state):
        dense = np.ascontiguousarray(state[name]).reshape(-1)
        checksum = zlib.crc32(dense.view(np.uint8).data, zlib.crc32(name.encode(), checksum))
    return checksum


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
            remedy="values to start from are given by name: stitch.compile(..., weights=)",
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
    differing = differences(checkpoint.identity, identity)
    if differing:
        more = [f"and {len(differing) - MAX_SHOWN} more"] if len(differing) > MAX_SHOWN else []
        raise IncompatibleError(
            "this is the checkpoint of another training\n    "
            + "\n    ".join([*differing[:MAX_SHOWN], *more]),
            where=str(path),
            remedy="resume with the model, data and batches that it was made with, or start anew "
            "in another folder",
        )


@final
class CheckpointFolder:
    """The checkpoints of one training; the newest `keep` stay.

    The process that saves has the folder alone from `prepare`, or the first `save`, until `close`
    or its end: to others `UsageError` names the owner.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        assert keep >= 1
        self.folder = folder
        self.keep = keep
        self._lock: FolderLock | None = None

    def prepare(self) -> str | None:
        """Make the folder, lock it, and clear away what a killed run left half written.

        Gives why it could not be locked, where the file system has no locks.
        """
        make_folder(self.folder)
        if not self._is_held:
            self.close()
            self._lock = FolderLock(self.folder, "another training")
        assert self._lock is not None
        for entry in self._entries():
            if _PART.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    entry.unlink()
        return self._lock.missing

    @property
    def _is_held(self) -> bool:
        try:
            return self._lock is not None and self._lock.is_held
        except OSError:
            return True  # What is wrong with the folder, saving will say.

    def close(self) -> None:
        """Let others have the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _entries(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StitchError(
                "cannot look through the folder of checkpoints", where=str(self.folder),
                got=error.strerror or str(error),
            ) from error  # fmt: skip

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoints that are there, oldest first."""
        checkpoints = [entry for entry in self._entries() if _NAME.fullmatch(entry.name)]
        return tuple(sorted(checkpoints, key=lambda entry: int(entry.name[5:-12])))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then drop all but the newest; raises `StitchError`."""
        if not self._is_held:  # Not yet, not in this process, or the folder was removed meanwhile.
            self.prepare()
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        save_checkpoint(path, checkpoint)
        for old in self.files[: -self.keep]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def newest(self, note: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """The newest sound checkpoint, None where there is none; damaged ones are told of.

        Raises the error of the last one where all of them are damaged, and of one that could not
        be read: that says nothing about it, and an older one would be taken unasked.
        """
        last: FormatError | None = None
        for path in reversed(self.files):
            try:
                return path, read_checkpoint(path)
            except FormatError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                note(f"{path.name} is passed over: {error.what}")
                last = error
        if last is None:
            return None
        try:
            raise last
        finally:
            # Else it is in a frame that it keeps, and stays until garbage is collected.
            del last
