"""The order of fields in TTNN binaries, commit by commit of tt-mlir's main branch.

Fields, operations and codes are inserted and removed in the middle, so a slot means nothing without
its version. `history.json` holds each step as edits of the one before;
`tools/generate_ttnn_history` wrote it from the schemas (`include/ttmlir/Target` of
github.com/tenstorrent/tt-mlir). A version is 0.0.N: N commits after the tag v0.0; the history
begins at 0.0.1. From 0.0.1466 on a binary carries the SHA-256 of its compiled schema, which
decides, because branches count their commits as well.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch.flatbuffer import (
    FieldKind,
    FieldSpec,
    Release,
    Schema,
    TableSpec,
)
from stitch.machine import system_tables

_FILE = Path(__file__).with_name("history.json")
ROOT = "TTNNBinary"
#: From here on a binary carries its schema's hash, where the commit's stood before.
HASHED_SINCE = 1466
HASH_DIGITS = 16
_REQUIRED = {
    ROOT: {"version", "system_desc", "programs"}, "TensorRef": {"desc"},
    "TensorDesc": {"layout"}, "LayoutDesc": {"memory_desc"}, "Operation": {"type"},
}  # fmt: skip
#: Written once, pointed at from many places.
_POOLED = frozenset({
    "TensorRef", "TensorDesc", "LayoutDesc", "MemoryDesc", "MemoryConfig", "ShardSpec",
    "NDShardSpec", "CoreRangeSet",
})  # fmt: skip
#: What no sound tensor has more of.
_LIMITS = {"shape": 32, "shard_shape": 32, "physical_shard_shape": 32, "mesh_shape": 32}
_EXTENTS = frozenset(_LIMITS)


@dataclass(frozen=True, slots=True)
class TtnnSchema:
    """The tables of one version, the members of its enums by code, and the release it began at."""

    schema: Schema
    codes: Mapping[str, tuple[str, ...]]
    release: int


def known_versions() -> tuple[Release, Release]:
    """The first and the last version whose order of fields is known."""
    history = _history()
    return Release(0, 0, history["steps"][0]["first"]), Release(0, 0, history["last"])


def schema_of(version: Release, digest: str) -> TtnnSchema | None:
    """The tables of a version; `digest` is its schema's hash, or the hash of a commit before 1466.

    None where they are not known.
    """
    history = _history()
    first, last = known_versions()
    if version >= Release(0, 0, HASHED_SINCE):
        for index, step in enumerate(history["steps"]):
            release = step.get("hashes", {}).get(digest[:HASH_DIGITS])
            if release is not None and len(digest) == 64:
                return _schema(index, release)
        return None
    if not first <= version <= last:
        return None
    firsts = [step["first"] for step in history["steps"]]
    return _schema(bisect_right(firsts, version.release) - 1, version.release)


@functools.cache
def _history() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(_FILE.read_bytes())
    return read


@functools.lru_cache(maxsize=16)
def _schema(index: int, release: int) -> TtnnSchema:
    held: dict[str, dict[str, list[str]]] = {"tables": {}, "codes": {}}
    for step in _history()["steps"][: index + 1]:
        for part, entries in held.items():
            for name, edits in step.get(part, {}).items():
                if edits is None:
                    del entries[name]
                else:
                    entries[name] = _edited(entries.get(name, ()), edits)
    codes = {name: tuple(members) for name, members in held["codes"].items()}
    tables = {name: _table(name, rows, codes) for name, rows in held["tables"].items()}
    unions = {"OpType": codes["OpType"]}
    return TtnnSchema(Schema(ROOT, system_tables(release) | tables, unions), codes, release)


def _edited(old: Sequence[str], edits: Sequence[Sequence[Any]]) -> list[str]:
    """A list after `[at, dropped, inserted...]`, from the back.

    >>> _edited(["a", "b"], [[1, 1, "c", "d"]])
    ['a', 'c', 'd']
    """
    new = list(old)
    for at, dropped, *inserted in edits:
        new[at : at + dropped] = inserted
    return new


def _table(name: str, rows: Sequence[str], codes: Mapping[str, tuple[str, ...]]) -> TableSpec:
    return TableSpec(name, tuple(_field(name, row, codes) for row in rows))


def _field(table: str, row: str, codes: Mapping[str, tuple[str, ...]]) -> FieldSpec:
    """A row: `slot name kind`, then the letters of scalars and structs, or the name of a table;
    then a scalar's enum, and its default after `=`."""
    slot, name, word, *rest = row.split()
    kind: FieldKind = word  # type: ignore[assignment]
    default: int | None = 0 if kind == "scalar" else None
    if rest and rest[-1].startswith("="):
        default = int(rest.pop()[1:])
    has_letters = kind in ("scalar", "scalars", "struct", "structs")
    code = rest.pop(0) if rest and has_letters else ""
    of = rest[0] if rest else ""
    maximum = len(codes[of]) - 1 if kind == "scalar" and of else None
    return FieldSpec(
        int(slot), name, kind, code, of, default, name in _REQUIRED.get(table, ()), of in _POOLED,
        minimum=0 if name in _EXTENTS else None, maximum=maximum, limit=_LIMITS.get(name),
    )  # fmt: skip
