"""`CompileCache`: a folder of compilations, bounded, which never decides whether a module compiles.

Nothing of the folder raises: what is wrong with it is told among the compiler's warnings, and the
module is compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from stitch.argument_kinds import PATH, TEXT, WHOLE, either, takes
from stitch.budget import parse_nbytes
from stitch.compile_cache.entries import (
    NAMES,
    KeptCompilation,
    binary_path,
    notes_path,
    read_entry,
    write_entry,
)
from stitch.compile_cache.keys import EntryKey, entry_key
from stitch.compiler import CompileOptions, CompileWarning
from stitch.errors import StitchError
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.ttb import inspect_sizes

# --------------------------------------------------------------------------------------------------
# Folders of files that can be made again, kept below a size: what was used last stays.


def mark_used(path: Path) -> None:
    """A file counts as used now; where the folder does not allow that, as before."""
    with contextlib.suppress(OSError):
        os.utime(path)


def keep_below(folder: Path, names: re.Pattern[str], most_nbytes: int) -> int:
    """Remove files, least recently used first, until the rest has so many bytes; gives how many
    bytes went. Only files whose whole name matches are counted and removed; those with the same
    first group belong together. What cannot be removed stays."""
    sizes: dict[str, int] = {}
    used: dict[str, int] = {}
    paths: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = names.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):  # Another process may have removed it.
                status = entry.stat(follow_symlinks=False)
                sizes[match[1]] = sizes.get(match[1], 0) + status.st_size
                used[match[1]] = max(used.get(match[1], 0), status.st_mtime_ns)
                paths.setdefault(match[1], []).append(folder / entry.name)
    over, gone = sum(sizes.values()) - most_nbytes, 0
    for key in sorted(paths, key=lambda key: (used[key], key)):
        if gone >= over:
            break
        for path in paths[key]:
            with contextlib.suppress(OSError):
                path.unlink()
        gone += sizes[key]
    return gone


#: What the entries of a folder may take together, unless said otherwise.
DEFAULT_MAX_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class FromCache:
    """A compilation, and whether it was read (a hit) or made."""

    kept: KeptCompilation
    is_hit: bool


@final
class CompileCache:
    """Compilations in a folder, found by what decides them: graph, machine, options, versions.

    `max_nbytes` (or a text: `2GiB`): what all entries may take; the least recently used go. Several
    processes may use a folder at once. `hits` and `misses` count the compilations of this object.
    Raises `UsageError` for a size that is none.
    """

    @takes(folder=PATH, max_nbytes=either(WHOLE, TEXT))
    def __init__(self, folder: str | Path, max_nbytes: int | str = DEFAULT_MAX_NBYTES) -> None:
        self.folder = Path(folder)
        self.max_nbytes = parse_nbytes(max_nbytes)
        self.hits = 0
        self.misses = 0
        self._said: set[str] = set()

    def __repr__(self) -> str:
        return f"<CompileCache {str(self.folder)!r}: {self.hits} hits, {self.misses} misses>"

    def compilation(
        self, graph: ComputationGraph, machine: Machine, options: CompileOptions,
        compile: Callable[[], KeptCompilation],
    ) -> FromCache:  # fmt: skip
        """What compiling gives, read or made; raises what `compile` raises."""
        key = entry_key(graph, machine, options)
        notices: list[CompileWarning] = []
        kept = self._read(key, notices)
        is_hit = kept is not None
        if kept is None:
            self.misses += 1
            kept = compile()
            self._keep(key, kept, notices)
        else:
            self.hits += 1
            mark_used(notes_path(self.folder, key))
        return FromCache(replace(kept, warnings=(*kept.warnings, *notices)), is_hit)

    def clear(self) -> None:
        """Remove all entries; what is in use stays usable."""
        keep_below(self.folder, NAMES, 0)

    def _read(self, key: EntryKey, notices: list[CompileWarning]) -> KeptCompilation | None:
        try:
            return read_entry(self.folder, key)
        except StitchError as error:
            self._say(notices, "cache_entry", error.where or str(binary_path(self.folder, key)),
                      f"this entry is not used, and the module compiled anew: {error.sentence()}",
                      "nothing where this was an accident: the entry is replaced")  # fmt: skip
            return None

    def _keep(self, key: EntryKey, kept: KeptCompilation, notices: list[CompileWarning]) -> None:
        try:
            nbytes = inspect_sizes(kept.binary).total
            if nbytes > self.max_nbytes:
                self._say(notices, "cache_size", str(self.folder),
                          f"a binary of {nbytes} bytes is not kept, the folder takes "
                          f"{self.max_nbytes} in all", "a larger bound")  # fmt: skip
                return
            write_entry(self.folder, key, kept)
            keep_below(self.folder, NAMES, self.max_nbytes)
        except StitchError as error:
            self._say(notices, "cache_folder", error.where or str(self.folder),
                      f"what was compiled is not kept: {error.sentence()}",
                      "a folder that is writable and has room")  # fmt: skip

    def _say(
        self, notices: list[CompileWarning], kind: str, where: str, detail: str, remedy: str
    ) -> None:
        """Once of each entry, and once that the folder takes none."""
        about = where if kind == "cache_entry" else kind
        if about not in self._said:
            self._said.add(about)
            notices.append(CompileWarning(kind, where, detail, remedy))
