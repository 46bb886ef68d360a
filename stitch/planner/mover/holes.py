"""One space at one moment, indexed: buffers that may move by address, and the holes between.

Built once for a question in O(n log n). All windows in which a size fits, and all slides that make
room for it, come from two pointers over the buffers; the rooms that a trial would leave come from
one copy of a sorted list, changed where the trial takes something away.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from stitch.packing import gaps_between


@dataclass(frozen=True, slots=True)
class SpaceProblem:
    """One space at one moment; sizes and addresses in bytes per bank.

    `movable`: (number, address, size). `displaced`: buffers that must get another address.
    `obstacles`: (address, size) regions that stay or are promised. `pieces`: sizes that need room.
    `operation_size`: so many bytes take as long to move as it takes to start a move.
    """

    base: int
    limit: int
    alignment: int
    movable: tuple[tuple[int, int, int], ...]
    displaced: tuple[tuple[int, int, int], ...]
    obstacles: tuple[tuple[int, int], ...]
    pieces: tuple[int, ...]
    operation_size: int = 0

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        return gaps_between(self.obstacles, self.base, self.limit)

    @property
    def all_pieces(self) -> tuple[int, ...]:
        """The sizes of everything that has to lie in the gaps."""
        buffers = (*self.displaced, *self.movable)
        return (*(size for _, _, size in buffers), *self.pieces)


#: A room as one number, size above address, so that a sorted list of rooms is searched by size.
SHIFT = 48
ADDRESS = (1 << SHIFT) - 1


class Holes:
    """Movable buffers by address, the rooms between them, and what becomes of these without some.

    Buffers are named by their rank; a set of them is a bit mask.
    """

    def __init__(self, problem: SpaceProblem) -> None:
        buffers = sorted(problem.movable, key=lambda buffer: buffer[1])
        self.buffers = buffers
        self.starts = [address for _, address, _ in buffers]
        self.sizes = [size for _, _, size in buffers]
        #: What moving a buffer costs, in bytes.
        self.costs = [size + problem.operation_size for size in self.sizes]
        #: From where to where there is room beside each: to a neighbour, or to what cannot move.
        self._before: list[int] = []
        self._after: list[int] = []
        rooms: list[int] = []
        rank = 0
        for gap, size in problem.gaps:
            at, end = gap, gap + size
            while rank < len(buffers) and (start := self.starts[rank]) < end:
                if at > gap:
                    self._after.append(start)
                self._before.append(at)
                if at < start:
                    rooms.append(start - at << SHIFT | at)
                at = start + self.sizes[rank]
                rank += 1
            if at > gap:
                self._after.append(end)
            if at < end:
                rooms.append(end - at << SHIFT | at)
        rooms.sort()
        self._rooms = rooms
        self._windows: dict[tuple[int, bool], list[tuple[int, int]]] = {}

    def rooms(self, mask: int) -> list[int]:
        """The rooms (size above address), sorted, when the buffers of a set are gone."""
        rooms = list(self._rooms)
        start = at = after = -1
        for rank in members(mask):
            before, address = self._before[rank], self.starts[rank]
            if before != at:
                # It does not follow another that is gone: a new room begins.
                if start >= 0:
                    insort(rooms, after - start << SHIFT | start)
                start = before
                if before < address:
                    _remove(rooms, before, address)
            at, after = address + self.sizes[rank], self._after[rank]
            if at < after:
                _remove(rooms, at, after)
        if start >= 0:
            insort(rooms, after - start << SHIFT | start)
        return rooms

    def windows(self, size: int, *, keeps: bool = False) -> list[tuple[int, int]]:
        """(cost, set) of the shortest runs of neighbours that hold `size` when they are away, or
        leave as much in one piece when pushed together (`keeps`).

        Every window of that size touches all of one of them. The cheapest come first.
        """
        known = self._windows.get((size, keeps))
        if known is None:
            known = self._windows[size, keeps] = self._runs(size, keeps=keeps)
        return known

    def _runs(self, size: int, *, keeps: bool) -> list[tuple[int, int]]:
        sizes, costs, befores = self.sizes, self.costs, self._before
        runs: list[tuple[int, int]] = []
        first = cost = kept = 0
        for last, end in enumerate(self._after):
            if last and befores[last] != self.starts[last - 1] + sizes[last - 1]:
                first, cost, kept = last, 0, 0
            cost += costs[last]
            kept += sizes[last] if keeps else 0
            if end - befores[first] - kept < size:
                continue
            while first < last:
                less = kept - sizes[first] if keeps else 0
                if end - befores[first + 1] - less < size:
                    break
                cost, kept = cost - costs[first], less
                first += 1
            runs.append((cost, (1 << last + 1) - (1 << first)))
        runs.sort()
        return runs


def _remove(rooms: list[int], start: int, end: int) -> None:
    del rooms[bisect_left(rooms, end - start << SHIFT | start)]


def members(mask: int) -> list[int]:
    """The ranks of a set, rising.

    >>> members(0b1011)
    [0, 1, 3]
    """
    ranks = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return ranks
