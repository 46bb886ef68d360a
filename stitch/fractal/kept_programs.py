"""Programs that come again, as many as are worth their memory.

Comes in: programs, the graphs that they were compiled from. Goes out: those asked for last, by
their keys. Threads may share them. Must not know what runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

from stitch.graph import ComputationGraph

#: Bytes of constants that kept programs have, beside those of the last one.
MAX_CONSTANT_NBYTES = 1 << 28

_Kept = TypeVar("_Kept")


class KeptPrograms(Generic[_Kept]):
    """At most so many programs, and so many bytes: weights that change are new constants each time.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> graph, kept = ComputationGraphBuilder("none").build(), KeptPrograms(most=2)
    >>> for key in "abc":
    ...     kept.keep(key, key.upper(), graph)
    >>> kept.get("a"), kept.get("b"), kept.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, most: int) -> None:
        self.most, self.nbytes = most, 0
        self._held: OrderedDict[Hashable, tuple[_Kept, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> _Kept | None:
        """What is kept under a key, from now on the last one asked for."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, program: _Kept, graph: ComputationGraph) -> None:
        """Keep a program, in place of those that nobody asked for for longest."""
        constants = [*graph.constants, *[c for body in graph.bodies for c in body.constants]]
        nbytes = sum(constant.data.nbytes for constant in constants)
        dropped = []  # They go once the lock is free.
        with self._lock:
            if key in self._held:
                dropped.append(self._taken(key))
            while self._held and (
                len(self._held) >= self.most or self.nbytes + nbytes > MAX_CONSTANT_NBYTES
            ):
                dropped.append(self._taken(next(iter(self._held))))
            self._held[key] = program, nbytes
            self.nbytes += nbytes

    def _taken(self, key: Hashable) -> _Kept:
        program, nbytes = self._held.pop(key)
        self.nbytes -= nbytes
        return program
