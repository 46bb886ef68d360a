"""Order and cost of moves inside a space: dependencies between moves, and cycles of them.

Moves i: source → target, sources disjoint, targets disjoint. Move i waits for move j if i's target
overlaps j's source; two families of disjoint intervals give at most 2n-1 such pairs. Slides that
preserve the order never form a cycle; a move that overlaps itself is a memmove.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stitch.machine import Machine
from stitch.program import Space


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes per bank from one address to another of the same space."""

    source: int
    target: int
    size: int


def order_moves(moves: Sequence[Move]) -> tuple[list[Move], list[Move], list[Move]]:
    """Split moves into those that go first, those on or between cycles, and those that go last.

    The first and the last are in execution order; those between need staging.

    >>> order_moves([Move(0, 10, 10), Move(10, 20, 10)])[0]
    [Move(source=10, target=20, size=10), Move(source=0, target=10, size=10)]
    """
    moves = [move for move in moves if move.source != move.target]
    waits = _dependencies(moves)
    first = _peel(waits)
    rest = {i: [j for j in waits[i] if j not in first] for i in waits if i not in first}
    awaited: dict[int, list[int]] = {i: [] for i in rest}
    for i, blockers in rest.items():
        for j in blockers:
            awaited[j].append(i)
    last = _peel(awaited)
    core = [moves[i] for i in rest if i not in last]
    return [moves[i] for i in first], core, [moves[i] for i in reversed(last)]


def _peel(waits: dict[int, list[int]]) -> dict[int, None]:
    """Return the keys in dependency order until only cycles remain."""
    left = {i: len(blockers) for i, blockers in waits.items()}
    waiting: dict[int, list[int]] = {i: [] for i in waits}
    for i, blockers in waits.items():
        for j in blockers:
            waiting[j].append(i)
    ready = [i for i, count in left.items() if not count]
    peeled: dict[int, None] = {}
    while ready:
        at = ready.pop()
        peeled[at] = None
        for i in waiting[at]:
            left[i] -= 1
            if not left[i]:
                ready.append(i)
    return peeled


def _dependencies(moves: list[Move]) -> dict[int, list[int]]:
    by_source = sorted(range(len(moves)), key=lambda i: moves[i].source)
    starts = [moves[i].source for i in by_source]
    waits: dict[int, list[int]] = {}
    for i, move in enumerate(moves):
        first = bisect_left(starts, move.target)
        if first:
            before = moves[by_source[first - 1]]
            first -= before.source + before.size > move.target
        end = bisect_left(starts, move.target + move.size)
        waits[i] = [j for j in by_source[first:end] if j != i]
    return waits


#: `ASIDE + x` is the address of staged bytes that were at x.
STAGED = 1 << 50
#: Above this transfer size only bytes count.
LARGE_TRANSFER = 1 << 20


def operation_size(machine: Machine, space: Space) -> int:
    """Return the bytes per bank that take as long to move inside a space as starting a move takes.

    0 if the machine has no path inside it.
    """
    path, banks = machine.path(space, space), machine.shape.space(space).banks
    if path is None:
        return 0
    return int(path.latency_seconds * path.rate(LARGE_TRANSFER) / banks)


class Prices:
    """Simulated seconds of raw transfers inside a space and to and from the space beside it.

    Sizes are bytes per bank of the space. Without a path inside, every move bounces through the
    space beside, so staging costs nothing further.
    """

    __slots__ = ("_known", "_machine", "banks", "beside", "bounces", "space")

    def __init__(self, machine: Machine, space: Space, beside: Space) -> None:
        self._machine, self.space, self.beside = machine, space, beside
        self.banks = machine.shape.space(space).banks
        self.bounces = machine.path(space, space) is None
        self._known: dict[tuple[Space, Space, int], float] = {}

    def transfer(self, source: Space, target: Space, size: int) -> float:
        """Return the seconds of one transfer between two spaces."""
        key = source, target, size
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._machine.seconds(source, target, size * self.banks, size)
            self._known[key] = seconds
        return seconds

    def out(self, size: int) -> float:
        return self.transfer(self.space, self.beside, size)

    def back(self, size: int) -> float:
        return self.transfer(self.beside, self.space, size)

    def inside(self, size: int) -> float:
        if self.bounces:
            return self.out(size) + self.back(size)
        return self.transfer(self.space, self.space, size)

    def seconds(self, moves: Iterable[Move]) -> float:
        """Return the seconds of moves, including those to and from `STAGED` addresses."""
        total = 0.0
        for move in moves:
            if move.target >= STAGED:
                total += self.out(move.size)
            elif move.source >= STAGED:
                total += self.back(move.size)
            else:
                total += self.inside(move.size)
        return total
