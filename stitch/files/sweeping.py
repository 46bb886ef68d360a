"""What dead writers left in a folder: litter is removed, what they had decided is finished.

Comes in: a folder. Goes out: the folder without parts that no process writes. Files that belong
together are decided by a manifest, `.stitch-manifest.PID.TOKEN`, which is there from when all of
their parts are complete until all have their names: once it is there, each part gets its name,
unless the file of that name is another by now. Must not know: how parts are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stitch.files import system_calls

_TOKEN = r"(\d+\.[0-9a-f]{12})"
_PART = re.compile(rf"\..*\.{_TOKEN}-\d+\.part", re.DOTALL)
_MANIFEST = re.compile(rf"\.stitch-manifest\.{_TOKEN}")
_MANIFEST_NBYTES = 1 << 22


def manifest_path(folder: Path, token: str) -> Path:
    """Where the manifest of a batch lies."""
    return folder / f".stitch-manifest.{token}"


def manifest_text(names: Mapping[Path, Path]) -> str:
    """The manifest of parts and the paths that they will get, all in one folder."""
    return json.dumps({part.name: [path.name, _state(path)] for part, path in names.items()})


def _state(path: Path) -> list[int] | None:
    """What tells a file from the one that takes its place."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def sweep_folder(folder: Path) -> None:
    """Finish what dead writers had decided, remove their parts; what cannot be told is left."""
    owners: dict[str, list[Path]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                named = _PART.fullmatch(entry.name) or _MANIFEST.fullmatch(entry.name)
                if named is not None:
                    owners.setdefault(named[1], []).append(folder / entry.name)
    except OSError:
        return  # Writing will say what is wrong with the folder.
    for token, left in owners.items():
        with contextlib.ExitStack() as stack:
            if all(_is_dead(path, stack) for path in left):
                manifest = manifest_path(folder, token)
                if manifest in left:
                    left.remove(manifest)
                    _finish(manifest, left)
                for path in left:
                    _remove(path)


def _finish(manifest: Path, parts: list[Path]) -> None:
    for part, (name, before) in _decided(manifest).items():
        path, target = manifest.with_name(part), manifest.with_name(name)
        if path in parts and _state(target) == before:
            with contextlib.suppress(OSError):
                system_calls.table.replace(path, target)
                parts.remove(path)
    _remove(manifest)


def _decided(manifest: Path) -> dict[str, tuple[str, Any]]:
    """Parts, names and what was there; nothing where the text is not a manifest's."""
    try:
        with manifest.open("rb") as file:
            entries = json.loads(file.read(_MANIFEST_NBYTES))
        decided = {part: (name, before) for part, (name, before) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    names = [name for name, _ in decided.values()]
    # The names come from a file: none may lead out of its folder.
    plain = all(isinstance(n, str) and Path(n).name == n and "\0" not in n for n in names)
    return decided if plain else {}


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        system_calls.table.unlink(path)


def _is_dead(part: Path, stack: contextlib.ExitStack) -> bool:
    """Whether no living owner has the part locked; then it is locked until the stack closes."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = system_calls.table.open(part, flags)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    stack.callback(os.close, handle)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        system_calls.table.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
