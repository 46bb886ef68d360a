"""What was made of functions and graphs that come again, as much as is worth its memory.

Threads may share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from stitch.graph import ComputationGraph

#: Bytes of constants that kept programs have, beside those of the last one.
MAX_CONSTANT_NBYTES = 1 << 28

_Held = TypeVar("_Held")


class Kept(Generic[_Held]):
    """At most so many, and so many bytes; the least recently used entries are evicted first."""

    def __init__(self, most: int, most_nbytes: Callable[[], int]) -> None:
        self.most, self.most_nbytes, self.nbytes = most, most_nbytes, 0
        self._held: OrderedDict[Hashable, tuple[_Held, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> _Held | None:
        """What is kept under a key, from now on the last one asked for."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, held: _Held, nbytes: int) -> None:
        """Add an entry; evict the least recently used ones."""
        dropped = []  # They go once the lock is free.
        with self._lock:
            if key in self._held:
                dropped.append(self._taken(key))
            while self._held and (
                len(self._held) >= self.most or self.nbytes + nbytes > self.most_nbytes()
            ):
                dropped.append(self._taken(next(iter(self._held))))
            self._held[key] = held, nbytes
            self.nbytes += nbytes

    def clear(self) -> None:
        """Nothing is kept any more."""
        with self._lock:
            dropped, self._held, self.nbytes = self._held, OrderedDict(), 0
        del dropped

    def _taken(self, key: Hashable) -> _Held:
        held, nbytes = self._held.pop(key)
        self.nbytes -= nbytes
        return held


class KeptPrograms(Kept[_Held]):
    """Programs, and the bytes of their constants: weights that change are new ones each time.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> graph, kept = ComputationGraphBuilder("none").build(), KeptPrograms(most=2)
    >>> for key in "abc":
    ...     kept.keep(key, key.upper(), graph)
    >>> kept.get("a"), kept.get("b"), kept.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, most: int) -> None:
        super().__init__(most, lambda: MAX_CONSTANT_NBYTES)

    def keep(self, key: Hashable, program: _Held, graph: ComputationGraph) -> None:
        """Keep a program of a graph."""
        constants = [*graph.constants, *[c for body in graph.bodies for c in body.constants]]
        self.put(key, program, sum(constant.data.nbytes for constant in constants))
