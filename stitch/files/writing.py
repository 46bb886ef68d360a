"""All files that are written: whole under their names, or not at all, and on the disk.

Comes in: paths and contents. Goes out: files. Each is written as a part (`.name.PID.TOKEN-N.part`
in the same folder), synced, renamed, and then its folder is synced; the files of one batch are
renamed together at the end. What a killed process left is swept by the next batch that writes into
that folder: a part whose owner lives is locked (`flock`, which the kernel gives free). Must not
know: what is in a file.

Devices and pipes (`/dev/null`, a shell's `>(...)`) are written to as they are; `-` is standard
output.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from stitch.errors import StitchError
from stitch.files import system_calls
from stitch.files.parts import (
    Content,
    HandleSink,
    Part,
    naming,
    pour,
    sync_folder,
    sync_names,
    write_all,
    write_parts,
)
from stitch.files.reading import own_descriptor, special_kind
from stitch.files.sweeping import manifest_path, manifest_text

STANDARD_OUTPUT = "-"
_DIRECT_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def resolved(path: str | Path) -> Path:
    """Where a path leads: links followed, but for what the process has open already.

    Raises `StitchError` for a name that no file can have (with a NUL or half a surrogate pair).
    """
    try:
        return Path(path if own_descriptor(path) is not None else os.path.realpath(path))
    except ValueError as error:
        raise StitchError(
            "no file can have this name", where=repr(str(path)), got=str(error),
            remedy="choose a name without control characters",
        ) from error  # fmt: skip


def write_file(path: str | Path, content: Content) -> None:
    """Write one file, whole or not at all; raises `StitchError`, also where it is written but not
    known to be on the disk."""
    batch = FileBatch()
    batch.add(path, content)
    batch.commit()


def write_added(add_to: Callable[[FileBatch], None], forget: Callable[[], None]) -> None:
    """Write what somebody adds to a batch, who is then told to `forget` it, whatever happened."""
    batch = FileBatch()
    try:
        add_to(batch)
        batch.commit()
    finally:
        forget()


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing; raises `StitchError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    # ValueError: a zero in it, or half a surrogate pair. RecursionError: a thousand folders.
    except (OSError, ValueError, RecursionError) as error:
        raise StitchError(
            "cannot make the folder", where=str(path),
            got=getattr(error, "strerror", None) or str(error),
            remedy="choose a place that is writable, and where no file has this name",
        ) from error  # fmt: skip


@final
class FileBatch:
    """Collects files; `commit` writes all of them, or none and raises `StitchError`.

    `as_one`: the files of a folder belong together, and are not to be mixed with older ones: where
    a kill or an error comes between two renames, `sweep_folder` or the next save there finishes
    them; after an interrupt they are finished at once.
    """

    def __init__(self, *, as_one: bool = False) -> None:
        self._as_one = as_one
        self._files: dict[Path, Content] = {}
        self._owned: set[Path] = set()
        self._standard_output: list[Content] = []

    def add(self, path: str | Path, content: Content) -> None:
        """A file to write; a later one at the same path replaces it."""
        if path == STANDARD_OUTPUT:
            self._standard_output = [content]
        else:
            self._files[resolved(path)] = content

    def add_own(self, path: Path, content: Content) -> None:
        """A file whose name nobody has chosen: where a link or a pipe has it, it takes the name,
        and what the link leads to stays as it is."""
        place = resolved(path.parent) / path.name
        self._files[place] = content
        self._owned.add(place)

    def commit(self) -> tuple[Path, ...]:
        """Write the files; gives their paths. The batch is empty afterwards."""
        files, self._files = self._files, {}
        owned, self._owned = self._owned, set()
        printed, self._standard_output = self._standard_output, []
        direct = {path for path in files if path not in owned and _is_direct(path)}
        whole = {path: content for path, content in files.items() if path not in direct}
        parts: list[Part] = []
        try:
            write_parts(whole, parts)
            for path in files:
                if path in direct:
                    with naming(path):
                        _write_direct(path, files[path])
            for content in printed:
                sys.stdout.flush()
                pour(content, sys.stdout.buffer)
                sys.stdout.buffer.flush()
            self._rename(parts)
        finally:
            for part in reversed(parts):
                part.close()
        return tuple(files)

    def _rename(self, parts: list[Part]) -> None:
        """Give all parts their names, and sync their folders."""
        folders: dict[Path, list[Part]] = {}
        for part in parts:
            folders.setdefault(part.target.parent, []).append(part)
        sets = [those for those in folders.values() if len(those) > 1] if self._as_one else []
        manifests: list[Part] = []
        decided = False
        try:
            _decide(sets, manifests)
            for part in itertools.chain.from_iterable(sets):
                part.decide()
            decided = True
            for part in reversed(parts):
                part.rename()
            for folder in folders:
                sync_names(folder)
        finally:
            unnamed = _unnamed(sets) if decided else []
            for manifest in manifests:
                manifest.close()
                if manifest.target.parent not in unnamed:
                    with contextlib.suppress(OSError):
                        system_calls.table.unlink(manifest.target)


def _decide(sets: list[list[Part]], manifests: list[Part]) -> None:
    """Write the manifests of parts that are complete; those made are in `manifests`."""
    for parts in sets:
        folder, token = parts[0].target.parent, parts[0].token
        with naming(folder):
            manifest = Part(manifest_path(folder, token), f"{token}-{len(parts) + len(manifests)}")
            manifests.append(manifest)
            names = {part.path: part.target for part in parts}
            manifest.fill(manifest_text(names), keep_open=False)
            manifest.rename()
            sync_folder(folder)


def _unnamed(sets: list[list[Part]]) -> list[Path]:
    """Finish what an error or interrupt stopped; the folders where parts still have no names.

    There the manifest stays, as after a kill: half of a set must not stand beside half of another.
    """
    for part in itertools.chain.from_iterable(sets):
        if not part.is_named:
            with contextlib.suppress(StitchError):
                part.rename()
    return [parts[0].target.parent for parts in sets if not all(part.is_named for part in parts)]


def _is_direct(path: Path) -> bool:
    """Whether a path is written to as it is; raises `StitchError` for what is never written to."""
    if own_descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # It is not there, or creating it will say what is wrong.
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise StitchError(
            "cannot write the file", where=str(path), expected="a file",
            got=special_kind(mode), remedy="choose another name",
        )  # fmt: skip
    return not stat.S_ISREG(mode)


def _open_direct(path: Path) -> int:
    own = own_descriptor(path)
    if own is not None:
        sys.stdout.flush()
        return os.dup(own)
    try:
        handle = system_calls.table.open(path, _DIRECT_FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads from this pipe") from error
        raise
    os.set_blocking(handle, True)
    return handle


def _write_direct(path: Path, content: Content) -> None:
    handle = _open_direct(path)
    try:
        sink = HandleSink(handle)
        pour(content, sink)
        sink.flush()
    finally:
        system_calls.table.close(handle)


@final
class LineFile:
    """A file that grows by lines; `first`: those that it begins with, all of them or none.

    Raises `StitchError`. A kill may leave half of the last line.
    """

    def __init__(self, path: str | Path, first: Iterable[str] = ()) -> None:
        self.path = Path(path)
        self._handle: int | None = None
        text = "".join(f"{line}\n" for line in first)
        if path == STANDARD_OUTPUT:
            self._print(text)
            return
        target = resolved(path)
        if _is_direct(target):
            with naming(self.path):
                self._handle = _open_direct(target)
                write_all(self._handle, memoryview(text.encode()))
            return
        parts: list[Part] = []
        try:
            write_parts({target: text}, parts)
            parts[0].rename()
            sync_names(target.parent)
            self._handle = parts[0].taken()
        finally:
            for part in parts:
                part.close()

    def add(self, line: str) -> None:
        """Write a line, at once; raises `StitchError` where there is no room."""
        if self._handle is None:
            self._print(f"{line}\n")
            return
        with naming(self.path):
            write_all(self._handle, memoryview(f"{line}\n".encode()))

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """No more lines."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):  # Devices and pipes cannot be synced.
                system_calls.table.fsync(handle)
            system_calls.table.close(handle)
