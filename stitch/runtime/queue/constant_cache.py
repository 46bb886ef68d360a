"""Results of programs that depend on parameters only, remembered by the versions of their inputs.

Entries are shared across binaries (the program counts by content) and die with any of their
inputs, or once a result is written or exported. Arrays have no version, so calls with arrays are
not remembered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stitch.runtime.recording import Agent
from stitch.runtime.values import ValueRecord

Key = tuple[bytes | int, ...]
_next_version = itertools.count(1).__next__


class ConstantCache:
    """The remembered results of one device; `hits` and `misses` count the calls."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        #: Results, each with what holds it.
        self._entries: dict[Key, tuple[tuple[ValueRecord, ...], object]] = {}
        self._by_version: dict[int, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, agent: Agent, inputs: Sequence[ValueRecord]) -> Key | None:
        """What a result is remembered by; None where others may write to an input unseen, or it is
        an array of this call only."""
        if any(value.handles == 0 or value.is_exposed for value in inputs):
            self.misses += 1
            return None
        for value in inputs:
            if value.version == 0:
                value.version = _next_version()
                value.lease = None
        return (agent.content_hash, *(value.version for value in inputs))

    def find(self, key: Key) -> tuple[ValueRecord, ...] | None:
        """The values of an earlier result, if they still exist."""
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
        """Keep a result, by handles on it, until one of its inputs dies, or it is written or can
        be."""
        self._entries[key] = results, handles
        for value in results:
            if value.version == 0:
                value.version = _next_version()
                value.lease = None
        for value in (*inputs, *results):
            self._by_version.setdefault(value.version, set()).add(key)

    def forget(self, value: ValueRecord) -> None:
        """A value died or changed: drop what was made from it, and what it was the result of."""
        for key in self._by_version.pop(value.version, ()) if value.version else ():
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._by_version.clear()
