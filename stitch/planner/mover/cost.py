"""What moves cost: operations and bytes together, as the machine's curves say."""

from __future__ import annotations

from collections.abc import Iterable

from stitch.machine import Machine
from stitch.planner.mover.order import Move
from stitch.program import Space

#: An address from here on stands for bytes set aside: `ASIDE + x` for those that lay at x.
ASIDE = 1 << 50


#: Where curves of transfer sizes are flat: from here on only bytes count.
LARGE_TRANSFER = 1 << 20


def operation_size(machine: Machine, space: Space) -> int:
    """Bytes per bank that take as long to move inside a space as it takes to start a move.

    0 where the machine moves nothing inside it.
    """
    path, banks = machine.path(space, space), machine.shape.space(space).banks
    if path is None:
        return 0
    return int(path.latency_seconds * path.rate(LARGE_TRANSFER) / banks)


class Prices:
    """Simulated seconds of raw transfers inside a space and between it and the one beside it.

    Sizes are bytes per bank of the space. Without a path inside, every move passes through the
    space beside, so what is set aside there costs nothing further.
    """

    __slots__ = ("_known", "_machine", "banks", "beside", "bounces", "space")

    def __init__(self, machine: Machine, space: Space, beside: Space) -> None:
        self._machine, self.space, self.beside = machine, space, beside
        self.banks = machine.shape.space(space).banks
        self.bounces = machine.path(space, space) is None
        self._known: dict[tuple[Space, Space, int], float] = {}

    def transfer(self, source: Space, target: Space, size: int) -> float:
        """One transfer between two spaces."""
        key = source, target, size
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._machine.seconds(source, target, size * self.banks, size)
            self._known[key] = seconds
        return seconds

    def out(self, size: int) -> float:
        """One transfer that leaves the space."""
        return self.transfer(self.space, self.beside, size)

    def back(self, size: int) -> float:
        """One transfer that comes back."""
        return self.transfer(self.beside, self.space, size)

    def inside(self, size: int) -> float:
        """One move inside the space."""
        if self.bounces:
            return self.out(size) + self.back(size)
        return self.transfer(self.space, self.space, size)

    def seconds(self, moves: Iterable[Move]) -> float:
        """All of these moves; what is set aside lies outside the space."""
        total = 0.0
        for move in moves:
            if move.target >= ASIDE:
                total += self.out(move.size)
            elif move.source >= ASIDE:
                total += self.back(move.size)
            else:
                total += self.inside(move.size)
        return total
