"""Keys of entries: a digest of everything that decides what a compilation gives.

What is equal in all of it compiles to the same bytes.

The parts, each with a digest of its own: `graph` (its JSON form, and its constants by content: the
names of values and the lines of the source are in it, as they are in the file), `machine` (all
figures), `options` (every field of `CompileOptions`), `versions` (Stitch, also by the text of its
modules, the format, NumPy and ml_dtypes, which compute what is folded, and the processor's kind)
and `memory` (a bound that was asked for, as what does not fit is not folded).
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stitch.budget import asked_nbytes
from stitch.compiler import CompileOptions
from stitch.files import read_bytes
from stitch.graph import ComputationGraph, as_data
from stitch.machine import Machine
from stitch.program import dense_bytes
from stitch.ttb import CURRENT, OPSET
from stitch.version import __version__


@dataclass(frozen=True, slots=True)
class EntryKey:
    """What an entry is found by: 64 hexadecimal digits, and the digests that they are made of."""

    text: str
    parts: tuple[tuple[str, str], ...]


def entry_key(graph: ComputationGraph, machine: Machine, options: CompileOptions) -> EntryKey:
    """The key of what compiling a graph for a machine gives."""
    parts = (
        ("graph", _of_graph(graph)),
        ("machine", _of_text(_told(machine))),
        ("options", _of_text(_told(options))),
        ("versions", _of_text(_told(versions()))),
        ("memory", _of_text(_told(asked_nbytes()))),
    )
    return EntryKey(_of_text(_told(parts)), parts)


def digest_of(value: Any, rooms: tuple[str, ...] = ()) -> str:
    """The digest of a value, of all versions, and of the text of rooms above the compiler that
    decide, too."""
    return _of_text(_told((value, versions(), _text_digest(rooms))))


@cache
def _text_digest(rooms: tuple[str, ...]) -> str:
    inner = [path for room in rooms for path in _files_below(f"{_ROOT}/{room}")]
    return _digest_of_files([path for path in inner if path.endswith(".py")])


def versions() -> tuple[tuple[str, str], ...]:
    """What computes and writes here, by name."""
    return (
        ("stitch", __version__), ("modules", _modules_digest()), ("format", str(CURRENT)),
        ("opset", str(OPSET)), ("numpy", np.__version__), ("ml_dtypes", ml_dtypes.__version__),
        ("processor", os.uname().machine),
    )  # fmt: skip


def _of_graph(graph: ComputationGraph) -> str:
    import hashlib  # It loads OpenSSL, for processes that use a cache.

    digest = hashlib.sha256(json.dumps(as_data(graph, with_data=False)).encode())
    for constant in graph.constants:
        digest.update(dense_bytes(constant.data).data)
    return digest.hexdigest()


#: Rooms above the compiler, which it cannot know: what they decide is in the graph and the options.
_ABOVE = frozenset({"__pycache__", "api.py", "cli", "documents", "fractal", "frontend",
                    "linking.py", "report", "runtime", "training"})  # fmt: skip
_ROOT = str(Path(__file__).parents[1])


def modules() -> list[str]:
    """The modules and machines of Stitch that may decide what compiling gives."""
    inner = _files_below(_ROOT, without=_ABOVE)
    return [path for path in inner if path.endswith((".py", ".yaml"))]


def _files_below(folder: str, without: Collection[str] = ("__pycache__",)) -> Iterator[str]:
    """The files of a folder, in one order. Their paths are texts, for there are hundreds."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=attrgetter("name"))
    for entry in found:
        if entry.name in without:
            continue
        if entry.is_dir():
            yield from _files_below(entry.path)
        else:
            yield entry.path


@cache
def _modules_digest() -> str:
    """Of the text of Stitch's own modules: a version's number stays while it is worked on."""
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


def _told(value: Any) -> str:
    """A value as text, the same for equal ones only: all fields, whatever its `repr` leaves out."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        held = ", ".join(f"{f.name}={_told(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({held})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_told, value))},)"
    if isinstance(value, Mapping):
        return _told(sorted((_told(key), _told(held)) for key, held in value.items()))
    if isinstance(value, frozenset | set):
        return _told(sorted(map(_told, value)))
    assert value is None or isinstance(value, str | bytes | int | float), type(value)
    return repr(value)
