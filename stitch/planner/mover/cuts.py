"""Breaking cycles of moves at their narrowest: the parts of tensors that others wait for go first.

A cycle ends where one of its tensors gives way whole, or the part of it that another's target
covers. Of what gives way, bytes whose targets are free go there at once; the others are set aside,
in a free region or in the space beside, and come home last. The cheapest such set is searched by
rising cost, of whole tensors first and then of parts too, within a budget of sets; from there on
the cheapest next one is taken each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from stitch.packing import Span, minus, union
from stitch.planner.mover.cost import ASIDE, Prices
from stitch.planner.mover.order import Move, order_moves
from stitch.planner.mover.staging import laid, outgoing, places_for, spans_of

#: So many sets for each move are looked at.
SETS = 64
#: With more moves than this no set is looked for.
MOST_MOVES = 64

#: Parts of a move: those that stay behind, those that go home at once, those to set aside.
_Parts = tuple[list[Move], list[Move], list[Move]]


def cheapest_cut(
    moves: Sequence[Move],
    open_: Sequence[Span],
    free: Sequence[Span],
    room: int,
    prices: Prices,
    *,
    away: bool,
) -> list[Move] | None:
    """All moves, in order, with the cheapest parts going first; None: there is no room for any.

    `open_` are free regions inside the targets. At most `room` bytes per bank are set aside: in the
    `free` regions, or in the space beside (`away`).

    >>> from stitch.machine import load_machine
    >>> from stitch.program import Space
    >>> prices = Prices(load_machine("tiny"), Space.L1, Space.DRAM)
    >>> swap = [Move(0, 48, 64), Move(64, 0, 48)]
    >>> for move in cheapest_cut(swap, [], [(128, 192)], 48, prices, away=False):
    ...     print(move)
    Move(source=64, target=128, size=48)
    Move(source=0, target=48, size=64)
    Move(source=128, target=0, size=48)
    """
    if not room or len(moves) > MOST_MOVES:
        return None
    cuts = _Cuts(moves, open_, free, prices, away)
    ways = [_ordered(moves, spans, cuts, free, away=away) for spans in cuts.cheapest(room)]
    return min(ways, key=prices.seconds, default=None)


def _ordered(
    moves: Sequence[Move], spans: Sequence[Span], cuts: _Cuts, free: Sequence[Span], *, away: bool
) -> list[Move]:
    """All moves once spans have given way."""
    parted = [_parts(move, spans, cuts.open) for move in moves]
    rest, early, aside = ([part for parts in parted for part in parts[i]] for i in range(3))
    first, _, last = order_moves(rest)
    home = [Move(ASIDE + part.source, part.target, part.size) for part in aside]
    if away:
        out = [Move(part.source, ASIDE + part.source, part.size) for part in aside]
        return [*out, *early, *first, *last, *home]
    places = places_for(spans_of(aside, "source"), free)
    return [*outgoing(places), *early, *first, *last, *laid(home, places)]


class _Cuts:
    """Which move waits for which others, and what it costs that parts of these give way."""

    def __init__(
        self,
        moves: Sequence[Move],
        open_: Sequence[Span],
        free: Sequence[Span],
        prices: Prices,
        away: bool,
    ) -> None:
        self.moves, self.prices, self.away = moves, prices, away
        self.rooms = sorted((end - start for start, end in free), reverse=True)
        self.wholes = spans_of(moves, "source")
        #: Where a part that goes home at once saves more than another transfer takes.
        self.open = [
            (start, end)
            for start, end in open_
            if self._aside(end - start) - self._aside(1) > prices.inside(end - start)
        ]
        #: For which others each move waits, as bits, and for which of their bytes.
        self.waits = [0] * len(moves)
        self.awaited: dict[tuple[int, int], Span] = {}
        for i, (start, end) in enumerate(spans_of(moves, "target")):
            for j, (first, last) in enumerate(self.wholes):
                if i != j and start < last and first < end:
                    self.waits[i] |= 1 << j
                    self.awaited[i, j] = max(start, first), min(end, last)
        self._known: dict[tuple[int, Span], tuple[float, int]] = {}

    def cheapest(self, room: int) -> list[list[Span]]:
        """The parts to give way, in order and apart: of whole tensors, and of parts if cheaper.

        Free regions may be too narrow for parts to lie whole, so either may be the cheaper one.
        """
        wholes, least = self._cheapest(room, float("inf"), parts=False)
        parts = self._cheapest(room, least, parts=True)[0]
        return [spans for spans in (parts, wholes) if spans is not None]

    def _cheapest(self, room: int, least: float, *, parts: bool) -> tuple[list[Span] | None, float]:
        """The first set of those that cost less, of whole tensors or of parts too; its price."""
        queue: list[tuple[float, int, int, list[int], tuple[Span, ...]]] = [
            (0.0, 0, 0, self.waits, ())
        ]
        count, most = 0, SETS * len(self.moves)
        while queue:
            seconds, _, nbytes, waits, spans = heappop(queue)
            ring = _ring(waits)
            if not ring:
                return union(spans), seconds
            if count > most:
                queue.clear()
            for i, j in pairwise((*ring, ring[0])):
                ways = {self.awaited[i, j], self.wholes[j]} if parts else {self.wholes[j]}
                for span in sorted(ways):
                    more, aside = self._price(j, span)
                    if nbytes + aside > room or seconds + more >= least:
                        continue
                    if span == self.wholes[j]:
                        fewer = [mask & ~(1 << j) for mask in waits]
                        fewer[j] = 0
                    else:
                        fewer = waits.copy()
                        fewer[i] &= ~(1 << j)
                    count += 1
                    heappush(queue, (seconds + more, count, nbytes + aside, fewer, (*spans, span)))
        return None, least

    def _price(self, j: int, span: Span) -> tuple[float, int]:
        """The seconds that it takes more if a part gives way, and the bytes set aside."""
        known = self._known.get((j, span))
        if known is None:
            move, inside = self.moves[j], self.prices.inside
            rest, early, aside = _parts(move, [span], self.open)
            seconds = sum(inside(part.size) for part in (*rest, *early)) - inside(move.size)
            seconds += sum(self._aside(part.size) for part in aside)
            known = self._known[j, span] = seconds, sum(part.size for part in aside)
        return known

    def _aside(self, size: int) -> float:
        prices = self.prices
        if self.away:
            return prices.out(size) + prices.back(size)
        # What no free region can hold whole is cut, and each part of it takes two transfers.
        seconds = 0.0
        for room in self.rooms:
            if size <= room:
                break
            seconds += 2 * prices.inside(room)
            size -= room
        return seconds + 2 * prices.inside(size)


def _parts(move: Move, spans: Sequence[Span], open_: Sequence[Span]) -> _Parts:
    """A move parted where its source enters and leaves spans, and there by what is open."""
    shift = move.target - move.source
    whole = [(move.source, move.source + move.size)]
    rest = minus(whole, spans)
    going = [(start + shift, end + shift) for start, end in minus(whole, rest)]
    later = minus(going, open_)
    at_once = minus(going, later)
    return (
        [Move(start, start + shift, end - start) for start, end in rest],
        [Move(start - shift, start, end - start) for start, end in at_once],
        [Move(start - shift, start, end - start) for start, end in later],
    )


def _ring(waits: Sequence[int]) -> list[int]:
    """Moves of which each waits for the next and the last for the first, two if any; else none."""
    left, before = (1 << len(waits)) - 1, 0
    while left != before:
        before = left
        for i, mask in enumerate(waits):
            if left >> i & 1 and not mask & left:
                left ^= 1 << i
    for i, mask in enumerate(waits):
        if left >> i & 1:
            for j in range(i):
                if mask >> j & 1 and waits[j] >> i & 1:
                    return [i, j]
    path: list[int] = []
    at = left.bit_length() - 1
    while left and at not in path:
        path.append(at)
        at = (waits[at] & left).bit_length() - 1
    return path[path.index(at) :] if left else []
