"""Cache of results of programs that depend on parameters only, keyed by input versions.

Entries are shared between binaries (a program's key is its content). An entry is dropped when an
input is freed or changed, or a result is written or exported. Arrays have no version, so calls with
arrays are not cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stitch.runtime.recording import Agent
from stitch.runtime.values import ValueRecord

Key = tuple[bytes | int, ...]
_next_version = itertools.count(1).__next__


class ConstantCache:
    """The cached results of one device; `hits` and `misses` count the calls."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        #: Results, each with the handles that keep it alive.
        self._entries: dict[Key, tuple[tuple[ValueRecord, ...], object]] = {}
        self._by_version: dict[int, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, agent: Agent, inputs: Sequence[ValueRecord]) -> Key | None:
        """Return the cache key of a call; None if an input is an array or externally writable."""
        if any(value.handles == 0 or value.is_exposed for value in inputs):
            self.misses += 1
            return None
        for value in inputs:
            if value.version == 0:
                value.version = _next_version()
                value.lease = None
        return (agent.content_hash, *(value.version for value in inputs))

    def find(self, key: Key) -> tuple[ValueRecord, ...] | None:
        """Return the values of a cached result, if they still exist."""
        entry = self._entries.get(key)
        if entry is not None and all(value.is_usable for value in entry[0]):
            self.hits += 1
            return entry[0]
        self.misses += 1
        return None

    def remember(
        self, key: Key, inputs: Sequence[ValueRecord], results: tuple[ValueRecord, ...],
        handles: object,
    ) -> None:  # fmt: skip
        """Cache a result and keep it alive until an input is freed, or the result is written or
        exported."""
        self._entries[key] = results, handles
        for value in results:
            if value.version == 0:
                value.version = _next_version()
                value.lease = None
        for value in (*inputs, *results):
            self._by_version.setdefault(value.version, set()).add(key)

    def forget(self, value: ValueRecord) -> None:
        """Drop the entries that read or contain a value, which was freed or changed."""
        for key in self._by_version.pop(value.version, ()) if value.version else ():
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._by_version.clear()
