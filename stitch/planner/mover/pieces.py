"""The map of bytes that moves are, and the holes that lead through it.

What belongs into a hole is moved there and leaves the next hole, as large as the last or cut where
a tensor ends. Holes that meet are joined, and the largest is filled first. A move that only
overlaps itself is one memmove.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from stitch.packing import Span, minus, union
from stitch.planner.mover.cost import ASIDE, Prices
from stitch.planner.mover.order import Move

#: Bytes that are followed to tell how much has to be set aside, each so far.
SAMPLES, LONGEST = 16, 12


class Pieces:
    """The map of bytes that a set of moves is: (target start, target end, source minus target)."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = sorted((m.target, m.target + m.size, m.source - m.target) for m in moves)
        self._starts = [start for start, _, _ in self._moves]
        self.sources = union((m.source, m.source + m.size) for m in moves)
        self._targets = targets = union((m.target, m.target + m.size) for m in moves)
        self.nbytes = sum(move.size for move in moves)
        #: Free regions inside the targets.
        self.open = minus(targets, self.sources)
        self.widest = max((end - start for start, end in self.open), default=0)

    def window(self, size: int) -> Span:
        """Where a hole of `size` bytes is made: beside the widest hole, above it, then below it.

        All of it is wanted by someone. What lies in it has to be set aside; holes in it are free.
        """
        low, high = max(self.open, key=lambda s: (s[1] - s[0], -s[0]), default=(-1, -1))
        if low < 0:
            low, high = max(self._runs(), key=lambda r: (r[1] - r[0], -r[0]), default=(0, 0))
            high = low
        first, last = next((s for s in self._targets if s[0] <= low < s[1]), (low, high))
        high = max(high, min(last, low + size))
        return max(first, min(low, high - size)), high

    def share_set_aside(self) -> float:
        """Which share of the bytes has to be set aside, by a sample: one of each cycle of bytes;
        none of those that lead to what is open. Long cycles count as none."""
        share, at = 0.0, self.nbytes // (2 * SAMPLES)
        for start, end, _ in self._moves:
            while at < end - start:
                share += self._share_of(start + at) / SAMPLES
                at += self.nbytes // SAMPLES or 1
            at -= end - start
        return share

    def _share_of(self, first: int) -> float:
        """One by the length of the cycle through a byte; 0 where none is found."""
        at = first
        for length in range(1, LONGEST + 1):
            i = bisect_right(self._starts, at) - 1
            if i < 0 or at >= self._moves[i][1]:
                return 0.0
            at += self._moves[i][2]
            if at == first:
                return 1 / length
        return 0.0

    def lying_in(self, span: Span) -> list[Span]:
        """Sources inside a span."""
        return minus([span], minus([span], self.sources)) if span[0] < span[1] else []

    def part_at(self, span: Span) -> None:
        """Moves whose source a span cuts are parted there."""
        if span[0] < span[1]:
            self._moves = [
                (start - shift, end - shift, shift)
                for first, last, shift in self._moves
                for start, end in _parts(first + shift, last + shift, *span)
            ]
            self._starts = [start for start, _, _ in self._moves]

    def _runs(self) -> list[Span]:
        """What lies where others go."""
        return minus(self.sources, minus(self.sources, self._targets))

    def follow(
        self, staged: Span, free: Sequence[Span], narrow: int, prices: Prices, most: float
    ) -> list[Move] | None:
        """The moves that free regions and the place of the piece set aside lead to.

        Holes narrower than `narrow` are left open; None once the moves cost `most`.
        """
        low, high = staged
        seconds, left, touched = 0.0, self.nbytes - (high - low), set()
        holes = _Holes([*free, staged] if low < high else free)
        done: list[Move] = []
        inside = prices.inside
        least = inside(self.nbytes) / self.nbytes
        for start, end in holes:
            if end - start < narrow:
                break
            i = max(0, bisect_right(self._starts, start) - 1)
            while i < len(self._moves) and self._starts[i] < end:
                first, last, shift = self._moves[i]
                a, b = max(start, first), min(end, last)
                i += 1
                if a >= b:
                    continue
                if (
                    b - a >= abs(shift)
                    and (i not in touched)
                    and a == first + max(0, last - first - (b - a)) * (shift < 0)
                    and (first + shift >= high or last + shift <= low)
                    and holes.none_in(first, last)
                ):
                    # It overlaps itself and nothing else: one memmove.
                    a, b = first, last
                    freed = [(max(first + shift, last), last + shift)] if shift > 0 else (
                        [(first + shift, min(last + shift, first))])  # fmt: skip
                    done.append(Move(a + shift, a, b - a))
                    seconds += inside(b - a)
                    left -= b - a
                else:
                    freed = []
                    if low <= a + shift < high:
                        done.append(Move(ASIDE + a + shift, a, b - a))
                    else:
                        done.append(Move(a + shift, a, b - a))
                        freed = [(a + shift, b + shift)]
                        seconds += inside(b - a)
                        left -= b - a
                touched.add(i)
                for span in freed:
                    holes.add(*span)
            # What is left takes no less than in one move.
            if seconds + left * least >= most:
                return None
        return done

    def not_in(self, done: Sequence[Move]) -> list[Move]:
        """What remains of the moves without these."""
        if sum(move.size for move in done) == self.nbytes:
            return []
        filled = sorted((m.target, m.target + m.size) for m in done)
        left, i = list[Move](), 0
        for at, end, shift in self._moves:
            while i < len(filled) and filled[i][0] < end:
                start, stop = filled[i]
                if start > at:
                    left.append(Move(at + shift, at, start - at))
                at = stop
                i += 1
            if at < end:
                left.append(Move(at + shift, at, end - at))
        return left


class _Holes:
    """Free regions that still have to be filled, the largest first; those that meet are one."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._queue: list[Span] = []
        for start, end in spans:
            self.add(start, end)
        heapify(self._queue)

    def add(self, start: int, end: int) -> None:
        before, after = self._starts.pop(start, None), self._ends.pop(end, None)
        if before is not None:
            del self._ends[before]
            start = before
        if after is not None:
            del self._starts[after]
            end = after
        self._ends[start], self._starts[end] = end, start
        heappush(self._queue, (start - end, start))

    def none_in(self, start: int, end: int) -> bool:
        return all(b <= start or end <= a for a, b in self._ends.items())

    def __iter__(self) -> Iterator[Span]:
        while self._queue:
            size, start = heappop(self._queue)
            end = start - size
            if self._ends.get(start) == end:
                del self._ends[start], self._starts[end]
                yield start, end


def cut_at(move: Move, span: Span) -> Iterator[Move]:
    """A move cut where its source enters and leaves a span."""
    for start, end in _parts(move.source, move.source + move.size, *span):
        yield Move(start, move.target + start - move.source, end - start)


def _parts(start: int, end: int, low: int, high: int) -> Iterator[Span]:
    """`[start, end)` cut at the borders of `[low, high)`."""
    for cut in (low, high):
        if start < cut < end:
            yield start, cut
            start = cut
    yield start, end
