"""The compile cache: a bounded folder of compiled programs, found by a digest of their inputs.

A key is a digest of what decides the result: the graph (its JSON with names and source lines, and
its constants), machine, options, versions (Stitch and its source, the format, NumPy, ml_dtypes,
processor), and an explicit limit of memory, which bounds constant folding.

An entry is `KEY.ttb`, the binary, and `KEY.json`: compiler messages, length and CRC-32 of the
binary's metadata, and a CRC-32 of itself. A damaged or read-only folder never fails a compilation;
it adds a compiler warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, final

import ml_dtypes
import numpy as np

from stitch.argument_kinds import PATH, TEXT, WHOLE, either, takes
from stitch.budget import explicit_limit, parse_nbytes
from stitch.compiler import CompileOptions, CompileWarning, LoopNote
from stitch.errors import FormatError, StitchError
from stitch.files import Sink, atomic_write, head_of, make_folder, read_bytes, read_text, unreadable
from stitch.frozen_json import check_format, from_plain, located, read_json, to_plain
from stitch.graph import ComputationGraph, as_data
from stitch.machine import Machine
from stitch.ops import DOMAINS, plugin_operators
from stitch.program import dense_bytes
from stitch.ttb import (
    CURRENT,
    OPSET,
    Binary,
    content_of,
    inspect_sizes,
    load,
    metadata_crc32,
    metadata_nbytes,
)
from stitch.version import __version__

# Keys.


def entry_key(graph: ComputationGraph, machine: Machine, options: CompileOptions) -> str:
    """Return the key of compiling a graph for a machine: 64 hexadecimal digits."""
    parts = _of_graph(graph), machine, options, versions(), explicit_limit(), _plugins_of(graph)
    return _of_text(_canonical_text(parts))


def _plugins_of(graph: ComputationGraph) -> str:
    """Return a digest of the files that define a graph's operators of plugins; empty without."""
    operations = (*graph.operations, *(o for body in graph.bodies for o in body.operations))
    domains = {operation.domain for operation in operations if not operation.is_foreign}
    rules = [
        rule
        for domain in sorted(domains - {*DOMAINS})
        for one in plugin_operators(domain).values()
        for rule in (one.infer, one.gradient, one.batching)
    ]
    files = {getattr(sys.modules.get(rule.__module__), "__file__", "") for rule in rules if rule}
    return _digest_of_files(sorted(filter(None, files))) if files else ""


def digest_of(value: Any, packages: tuple[str, ...] = ()) -> str:
    """Return a digest of a value, all versions, and the source of packages outside the compiler."""
    return _of_text(_canonical_text((value, versions(), _text_digest(packages))))


@cache
def _text_digest(packages: tuple[str, ...]) -> str:
    inner = [path for package in packages for path in _files_below(f"{_ROOT}/{package}")]
    return _digest_of_files([path for path in inner if path.endswith(".py")])


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions that decide a result, by name."""
    return (
        ("stitch", __version__), ("modules", _modules_digest()), ("format", str(CURRENT)),
        ("opset", str(OPSET)), ("numpy", np.__version__), ("ml_dtypes", ml_dtypes.__version__),
        ("processor", os.uname().machine),
    )  # fmt: skip


def _of_graph(graph: ComputationGraph) -> str:
    import hashlib  # Imported here: it loads OpenSSL.

    digest = hashlib.sha256(json.dumps(as_data(graph, with_data=False)).encode())
    for constant in graph.constants:
        digest.update(dense_bytes(constant.data).data)
    return digest.hexdigest()


#: Packages that do not affect compilation beyond the graph and the options.
_ABOVE = frozenset({"__pycache__", "api.py", "cli", "documents", "fractal", "frontend",
                    "linking.py", "report", "runtime", "training"})  # fmt: skip
_ROOT = str(Path(__file__).parent)


def modules() -> list[str]:
    """Return the modules and machine files of Stitch that may decide a compilation's result."""
    inner = _files_below(_ROOT, without=_ABOVE)
    return [path for path in inner if path.endswith((".py", ".yaml"))]


def _files_below(folder: str, without: Collection[str] = ("__pycache__",)) -> Iterator[str]:
    """Yield the files below a folder in a fixed order, as strings because there are hundreds."""
    with os.scandir(folder) as entries:
        sorted_entries = sorted(entries, key=attrgetter("name"))
    for entry in sorted_entries:
        if entry.name in without:
            continue
        if entry.is_dir():
            yield from _files_below(entry.path)
        else:
            yield entry.path


@cache
def _modules_digest() -> str:
    """Return a digest of Stitch's source, which may change without its version."""
    return _digest_of_files(modules())


def _digest_of_files(paths: Iterable[str]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for path in paths:
        text = read_bytes(path)
        digest.update(f"{path.removeprefix(_ROOT)} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _of_text(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _canonical_text(value: Any) -> str:
    """Return a value as text that is equal only for equal values; includes fields without
    `repr`."""
    return json.dumps(to_plain(value), sort_keys=True)


# Entries.

_KIND = "entry of a compile cache"
_VERSION = 1


class _Notes(NamedTuple):
    """The JSON file of an entry."""

    stitch: str
    version: int
    key: str
    nbytes: int
    metadata_crc32: int
    warnings: tuple[CompileWarning, ...]
    loops: tuple[LoopNote, ...]
    crc32: int


#: Names of both files and their temporary files; the first group is the key.
NAMES = re.compile(r"\.?([0-9a-f]{64})\.(?:ttb|json)(?:\.\d+\.[0-9a-f]+\.part)?")


@dataclass(frozen=True, slots=True)
class CachedCompilation:
    """The contents of an entry: the binary, the compiler's warnings, and its loop schedules."""

    binary: Binary
    warnings: tuple[CompileWarning, ...] = ()
    loops: tuple[LoopNote, ...] = ()


def binary_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.ttb"


def notes_path(folder: Path, key: str) -> Path:
    """Return the path of an entry's JSON file, whose modification time is its last use."""
    return folder / f"{key}.json"


def write_entry(folder: Path, key: str, compilation: CachedCompilation) -> None:
    """Write an entry; raise `StitchError` if the folder is not writable."""
    make_folder(folder)
    write, written = content_of(compilation.binary), _Recorder()
    binary, notes = binary_path(folder, key), notes_path(folder, key)
    # The binary first: the JSON file has its length and CRC. Replace symbolic links instead of
    # following them, because other users may write to a shared folder.
    atomic_write(binary, lambda sink: write(written.into(sink)), follow_links=False)
    atomic_write(notes, _notes(key, compilation, written), follow_links=False)


class _Recorder:
    """A sink that forwards its data and records its length and first part."""

    def __init__(self) -> None:
        self.head, self.nbytes = b"", 0

    def into(self, sink: Sink) -> Sink:
        self._sink = sink
        return self

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data)
        self.head = self.head or bytes(view)
        self.nbytes += view.nbytes
        return self._sink.write(data)


def _notes(key: str, compilation: CachedCompilation, written: _Recorder) -> bytes:
    body = to_plain(_Notes(
        _KIND, _VERSION, key, written.nbytes, metadata_crc32(written.head),
        compilation.warnings, compilation.loops, 0,
    ))  # fmt: skip
    del body["crc32"]
    return _text_of(body | {"crc32": zlib.crc32(_text_of(body))})


def _text_of(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def read_entry(folder: Path, key: str) -> CachedCompilation | None:
    """Read an entry; return None if it does not exist.

    Raises `FormatError` if it is damaged or belongs to another key.
    """
    notes, path = notes_path(folder, key), binary_path(folder, key)
    try:
        text = read_text(notes)
        head = head_of(path, metadata_nbytes(head_of(path, 4)))
        nbytes = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None  # Not written, or being written or removed.
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(notes, error) from error
    with located(str(notes)):
        body = read_json(text, _KIND)
        check_format(body, _KIND, stitch=_KIND, version=_VERSION, key=key)
        form = from_plain(_Notes, body, str(notes))
        if body.pop("crc32") != zlib.crc32(_text_of(body)):
            raise FormatError("the JSON file of the entry is damaged: its CRC-32 differs")
    if (form.nbytes, form.metadata_crc32) != (nbytes, metadata_crc32(head)):
        raise FormatError("the binary does not match the JSON file", where=str(path))
    try:
        return CachedCompilation(load(path, verify="full"), form.warnings, form.loops)
    except FormatError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None  # Another process has removed it.
        raise


# Eviction: least recently used first.


def mark_used(path: Path) -> None:
    """Set a file's time of last use to now, if the folder allows it."""
    with contextlib.suppress(OSError):
        os.utime(path)


def keep_below(folder: Path, most_nbytes: int) -> int:
    """Remove the least recently used files of a folder until `most_nbytes` remain.

    Only files whose whole name matches `NAMES` count; those with the same first group are removed
    together. Files that cannot be removed are skipped. Returns the number of bytes removed.
    """
    sizes: dict[str, int] = {}
    used: dict[str, int] = {}
    paths: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = NAMES.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):  # Another process may have removed it.
                status = entry.stat(follow_symlinks=False)
                sizes[match[1]] = sizes.get(match[1], 0) + status.st_size
                used[match[1]] = max(used.get(match[1], 0), status.st_mtime_ns)
                paths.setdefault(match[1], []).append(folder / entry.name)
    excess, removed = sum(sizes.values()) - most_nbytes, 0
    for key in sorted(paths, key=lambda key: (used[key], key)):
        if removed >= excess:
            break
        for path in paths[key]:
            with contextlib.suppress(OSError):
                path.unlink()
        removed += sizes[key]
    return removed


#: Default limit of a cache folder, in bytes.
DEFAULT_MAX_NBYTES = 4 << 30


@final
class CompileCache:
    """A cache of compiled programs in a folder, which several processes may share.

    Args:
        folder: The folder; it is created on first use.
        max_nbytes: Limit of all entries, in bytes or as a text (`2GiB`); the least recently used
            entries are removed first.

    `hits` and `misses` count the compilations through this object.
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
        compile: Callable[[], CachedCompilation],
    ) -> tuple[CachedCompilation, bool]:  # fmt: skip
        """Return the cached or a new compilation, and whether it was a hit.

        Raises the errors of `compile`.
        """
        key = entry_key(graph, machine, options)
        notices: list[CompileWarning] = []
        entry = self._read(key, notices)
        is_hit = entry is not None
        if entry is None:
            self.misses += 1
            entry = compile()
            self._keep(key, entry, notices)
        else:
            self.hits += 1
            mark_used(notes_path(self.folder, key))
        return replace(entry, warnings=(*entry.warnings, *notices)), is_hit

    def clear(self) -> None:
        """Remove all entries."""
        keep_below(self.folder, 0)

    def _read(self, key: str, notices: list[CompileWarning]) -> CachedCompilation | None:
        try:
            return read_entry(self.folder, key)
        except StitchError as error:
            self._say(notices, "cache_entry", error.where or str(binary_path(self.folder, key)),
                      f"the entry is ignored and replaced: {error.sentence()}",
                      "no action is needed")  # fmt: skip
            return None

    def _keep(
        self, key: str, compilation: CachedCompilation, notices: list[CompileWarning]
    ) -> None:
        try:
            nbytes = inspect_sizes(compilation.binary).total
            if nbytes > self.max_nbytes:
                self._say(notices, "cache_size", str(self.folder),
                          f"a binary of {nbytes} bytes is not cached: the limit is "
                          f"{self.max_nbytes} bytes", "a larger max_nbytes")  # fmt: skip
                return
            write_entry(self.folder, key, compilation)
            keep_below(self.folder, self.max_nbytes)
        except StitchError as error:
            self._say(notices, "cache_folder", error.where or str(self.folder),
                      f"the compiled program is not cached: {error.sentence()}",
                      "a writable folder with free space")  # fmt: skip

    def _say(
        self, notices: list[CompileWarning], kind: str, where: str, detail: str, remedy: str
    ) -> None:
        """Add a warning, once per damaged entry and once per kind for the folder."""
        about = where if kind == "cache_entry" else kind
        if about not in self._said:
            self._said.add(about)
            notices.append(CompileWarning(kind, where, detail, remedy))
