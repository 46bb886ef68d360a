"""A cache of the least recently used entries, bounded in entries and bytes; thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class LruCache(Generic[_Value]):
    """At most `most` entries and `most_nbytes` bytes, or one entry; the least recently used are
    evicted first.

    >>> cache: LruCache[str] = LruCache(most=2, most_nbytes=9)
    >>> for key in "abc":
    ...     cache.put(key, key.upper(), 1)
    >>> cache.get("a"), cache.get("b"), cache.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, most: int, most_nbytes: int) -> None:
        self.most, self.most_nbytes, self.nbytes = most, most_nbytes, 0
        self._held: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> _Value | None:
        """Return an entry and mark it as most recently used."""
        with self._lock:
            entry = self._held.get(key)
            if entry is None:
                return None
            self._held.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: _Value, nbytes: int) -> None:
        """Add an entry; evict the least recently used ones."""
        dropped = []  # Destroy entries after the lock is released.
        with self._lock:
            if key in self._held:
                dropped.append(self._taken(key))
            while self._held and (
                len(self._held) >= self.most or self.nbytes + nbytes > self.most_nbytes
            ):
                dropped.append(self._taken(next(iter(self._held))))
            self._held[key] = value, nbytes
            self.nbytes += nbytes

    def _taken(self, key: Hashable) -> _Value:
        value, nbytes = self._held.pop(key)
        self.nbytes -= nbytes
        return value
