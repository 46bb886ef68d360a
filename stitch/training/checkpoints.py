"""Checkpoints of a training as safetensors files, and folders of them."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from stitch.errors import FormatError, IncompatibleError, StitchError
from stitch.files import FolderLock, atomic_write, make_folder
from stitch.forms import read_tensors, write_tensors
from stitch.frozen_json import from_plain, located, read_json
from stitch.program import Array

VERSION = 1
_KEY = "stitch_checkpoint"
_NAME = re.compile(r"step-(\d{8,15})\.safetensors")
#: Temporary files of killed processes.
_PART = re.compile(r"\.step-\d{8,15}\.safetensors\.(\d+\.[0-9a-f]+\.)?part")
MAX_SHOWN = 8
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state of a training after `step` steps.

    Attributes:
        identity: JSON values that must be equal to resume (tensors, operations, data and its
            order).
        settings: JSON values that may differ.
        progress: JSON values of the loop: the position in the data, running sums.
    """

    step: int
    state: Mapping[str, Array]
    identity: Facts = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    progress: Facts = field(default_factory=dict)


class _Facts(NamedTuple):
    version: int
    step: int
    crc32: int
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    progress: Mapping[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: the old file stays until the new one is complete and synced.

    Raises `StitchError` if the file cannot be written.
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
    """Read a checkpoint; raise `FormatError`, or `IncompatibleError` for another version."""
    stored = read_tensors(path)
    with located(str(path)):
        facts = read_json(stored.metadata.get(_KEY, ""), "checkpoint of a training")
        if isinstance(facts, dict) and facts.get("version", VERSION) != VERSION:
            raise IncompatibleError(
                "the checkpoint has another version", where=str(path),
                expected=str(VERSION), got=str(facts["version"])[:40],
            )  # fmt: skip
    made = from_plain(_Facts, facts, str(path))
    if made.crc32 != _checksum(stored.tensors):
        raise FormatError("the checkpoint is damaged: its CRC-32 differs", where=str(path))
    return Checkpoint(made.step, stored.tensors, made.identity, made.settings, made.progress)


def differences(saved: Facts, own: Facts) -> tuple[str, ...]:
    """Return one sentence for each value that differs.

    >>> differences({"seed": 0, "w": "f32"}, {"seed": 1, "v": "f32"})
    ('seed: 0 in the checkpoint, 1 here', 'w: only in the checkpoint', 'v: only here')
    """
    sentences = []
    for name in [*saved, *(name for name in own if name not in saved)]:
        if name not in own:
            sentences.append(f"{name}: only in the checkpoint")
        elif name not in saved:
            sentences.append(f"{name}: only here")
        elif saved[name] != own[name]:
            sentences.append(
                f"{name}: {_short(saved[name])} in the checkpoint, {_short(own[name])} here"
            )
    return tuple(sentences)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def refuse_other(checkpoint: Checkpoint, identity: Facts, path: Path) -> None:
    """Raise `IncompatibleError` with what differs, for a checkpoint of another training."""
    differing = differences(checkpoint.identity, identity)
    if differing:
        more = [f"and {len(differing) - MAX_SHOWN} more"] if len(differing) > MAX_SHOWN else []
        raise IncompatibleError(
            "this is the checkpoint of another training\n    "
            + "\n    ".join([*differing[:MAX_SHOWN], *more]),
            where=str(path),
            remedy="resume with the same model, data and batches, or start in another folder",
        )


@final
class CheckpointFolder:
    """The checkpoints of one training; the newest `keep` are retained.

    The saving process locks the folder, from `prepare` or the first `save` until `close` or its
    exit. Another process that saves gets a `UsageError` that names the owner.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        assert keep >= 1
        self.folder = folder
        self.keep = keep
        self._lock: FolderLock | None = None

    def prepare(self) -> str | None:
        """Create and lock the folder, and remove incomplete files of killed processes.

        Returns the reason if the file system does not support locks, else None.
        """
        make_folder(self.folder)
        if not self._is_held:
            self.close()
            self._lock = FolderLock(self.folder)
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
            return True  # Saving raises an error that says more.

    def close(self) -> None:
        """Unlock the folder."""
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
                "cannot list the folder of checkpoints", where=str(self.folder),
                got=error.strerror or str(error),
            ) from error  # fmt: skip

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoints in the folder, oldest first."""
        checkpoints = [entry for entry in self._entries() if _NAME.fullmatch(entry.name)]
        return tuple(sorted(checkpoints, key=lambda entry: int(entry.name[5:-12])))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove all but the newest `keep`; raise `StitchError`."""
        if not self._is_held:  # Not locked yet, locked before a fork, or the folder was removed.
            self.prepare()
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        save_checkpoint(path, checkpoint)
        for old in self.files[: -self.keep]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def newest(self, note: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """Return the newest valid checkpoint with its path, None if there is none.

        Args:
            note: Called with a message for each damaged checkpoint.

        Raises:
            FormatError: All checkpoints are damaged, or one cannot be read: an older one might be
                outdated.
        """
        last: FormatError | None = None
        for path in reversed(self.files):
            try:
                return path, read_checkpoint(path)
            except FormatError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                note(f"{path.name} is skipped: {error.what}")
                last = error
        if last is None:
            return None
        try:
            raise last
        finally:
            del last  # Break the cycle between the exception and this frame.
