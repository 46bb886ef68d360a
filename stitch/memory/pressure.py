"""What an out-of-memory error says of a space: how full it is, and who is in the way.

Comes in: buffers and holes of a space. Goes out: text. Must not know: why somebody wants room.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Protocol

#: How many live buffers an error names.
_NAMED = 5


class Occupied(Protocol):
    """A space and what lies in it, in bytes per bank."""

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The live buffers, (address, size), by address."""

    @property
    def capacity(self) -> int:
        """Bytes, live and free."""

    @property
    def free_nbytes(self) -> int:
        """Bytes that are free."""

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""


def pressure_text(space: Occupied) -> str:
    """How much is free, in one piece and in all, and the biggest live buffers."""
    live = space.buffers()
    biggest = nlargest(_NAMED, live, key=lambda buffer: buffer[1])
    named = ", ".join(f"{size} B at {address:#x}" for address, size in biggest)
    return (
        f"{space.free_nbytes} B free of {space.capacity}, largest hole {space.largest_hole} B, "
        f"{len(live)} live blocks, the biggest: {named or 'none'}"
    )


def takers_text(space: Occupied, address: int, size: int) -> str:
    """Which live buffers lie in `[address, address + size)`."""
    end = address + size
    taken = [f"[{a:#x}, {a + s:#x})" for a, s in space.buffers() if a < end and address < a + s]
    more = f" and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
    return "taken by " + ", ".join(taken[:_NAMED]) + more
