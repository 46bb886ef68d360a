"""Programs kept for graphs that come again, the latest ones.

Comes in: what a graph means, its program, the bytes of its constants. Goes out: the program. May be
used from several threads. Must not know nests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from stitch.runtime import LoadedProgram

#: Programs, and bytes of constants of all of them; but one program always.
MAX_PROGRAMS = 256
MAX_NBYTES = 128 << 20


class KeptPrograms:
    """A device keeps so many programs and constants for functions over nests."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, tuple[LoadedProgram, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, key: Hashable) -> LoadedProgram | None:
        """The program of this meaning, if it is kept."""
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                return None
            self._programs.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, program: LoadedProgram, nbytes: int) -> None:
        """Keep a program with so many bytes of constants, and let go of what was used longest
        ago."""
        with self._lock:
            if key in self._programs:
                self._nbytes -= self._programs.pop(key)[1]
            self._programs[key] = program, nbytes
            self._nbytes += nbytes
            while len(self._programs) > 1 and (
                len(self._programs) > MAX_PROGRAMS or self._nbytes > MAX_NBYTES
            ):
                self._nbytes -= self._programs.popitem(last=False)[1][1]
