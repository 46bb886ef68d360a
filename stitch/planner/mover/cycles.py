"""Breaking cycles of moves: which piece is set aside, how large, and what follows it.

One piece is set aside; its place is a hole. Holes are filled and leave holes (`pieces`), so every
byte moves once, however the tensors' sizes divide each other, and a free strip of a few bytes is
taken along by a large piece instead of being passed through the whole space. Where holes have grown
narrow, a piece beside the widest is set aside anew.

The piece may also be nothing (what is free inside the targets is hole enough), one whole tensor
that is outside while the others move, or those parts of tensors that close the cycles (`cuts`). All
are priced; the cheapest is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from stitch.packing import Span, minus, union
from stitch.planner.mover.cost import ASIDE, Prices
from stitch.planner.mover.cuts import cheapest_cut
from stitch.planner.mover.order import Move
from stitch.planner.mover.pieces import Pieces, cut_at
from stitch.planner.mover.staging import laid, nbytes_of, outgoing, places_for, spans_of

#: Work of trying piece sizes, those of the lowest estimates first: so many transfers a move.
TRIED = 80
#: The same where one tensor has left, which is tried for so many moves at most.
TRIED_AGAIN, MOST_LEFT = 6, 16
#: So many free regions are used, the largest.
MOST_FREE = 16
#: A way that takes so many times its estimate is given up, unless there is no other.
PATIENCE = 3.0
#: Bytes leave where that takes less by this factor.
CHEAPER = 1.05
#: So many transfers for each move, and for each piece of the widest, are no more than needed; where
#: there are more, ways that take up to so many times the seconds are looked at.
TRANSFERS, SLOWER = 4, 1.1
#: Holes so many times narrower than a piece are widened, not followed, where there is room: where
#: the piece is outside, and where it is inside. With few moves the second is tried as well.
AWAY_NARROW, NARROWS, FEW = 4, (2, 4), 3
#: Holes are widened as often as they are narrow.
MANY = 1 << 30


def break_cycles(
    moves: Sequence[Move],
    free: Sequence[Span],
    outside: int,
    prices: Prices,
    granule: int,
    *,
    slack: float = 0.0,
    most: float = float("inf"),
) -> list[Move]:
    """Moves that carry out these, which form cycles, in order, at the least cost that was found;
    none where none were found quickly for less than `most` seconds.

    `free` are regions of the space that nothing uses; `outside` bytes per bank may be set aside in
    the space beside: they appear as `ASIDE` addresses. Pieces are multiples of `granule`. Where
    nothing is free, inside the targets either, `outside` must be at least a granule. Bytes leave
    the space where that takes less by the factor `CHEAPER` and `slack` seconds, or where they must.

    >>> from stitch.machine import load_machine
    >>> from stitch.program import Space
    >>> prices = Prices(load_machine("tiny"), Space.L1, Space.DRAM)
    >>> swap = [Move(0, 64, 64), Move(64, 0, 64)]
    >>> for move in break_cycles(swap, [(128, 192)], 0, prices, 16):
    ...     print(move)
    Move(source=0, target=128, size=64)
    Move(source=64, target=0, size=64)
    Move(source=128, target=64, size=64)
    """
    free = sorted(sorted(free, key=lambda span: span[0] - span[1])[:MOST_FREE])
    search = _Search(moves, free, prices, granule)
    room = nbytes_of(free)
    for patience in (PATIENCE, float("inf")):
        best, least = search.by_cut(outside, most, away=True)
        stays, inside = search.by_cut(room, least * CHEAPER + slack, away=False)
        stays, inside = search.by_pieces(stays, room, inside, patience, away=False)
        if stays is not None:
            best, least = stays, (inside - slack) / CHEAPER
        best, least = search.by_pieces(best, outside, least, patience, away=True)
        best, least = search.without_one(best, outside, least)
        if best is not None:
            return search.in_fewer(best)
        if most < float("inf"):
            return []
    raise AssertionError("nothing may be set aside anywhere")


class _Search:
    """The ways to carry out some moves. Each takes what may cost the `most`, and gives the cheapest
    way below that with its price, or what it was given."""

    def __init__(
        self, moves: Sequence[Move], free: Sequence[Span], prices: Prices, granule: int
    ) -> None:
        self.moves, self.free, self.prices, self.granule = moves, free, prices, granule
        self.pieces = Pieces(moves)

    def by_cut(self, room: int, most: float, *, away: bool) -> tuple[list[Move] | None, float]:
        """Parts of tensors that close the cycles go first, at most `room` bytes set aside."""
        best = cheapest_cut(self.moves, self.pieces.open, self.free, room, self.prices, away=away)
        seconds = most if best is None else self.prices.seconds(best)
        return (best, seconds) if seconds < most else (None, most)

    def in_fewer(self, best: list[Move]) -> list[Move]:
        """The same in fewer transfers, where it takes many: each is one more for the host."""
        moves, prices, nbytes = self.moves, self.prices, self.pieces.nbytes
        most = SLOWER * prices.seconds(best)
        sizes = _sizes(moves, nbytes, self.granule) if self._is_long(best) else set[int]()
        count = len(best)
        for size in sorted(size for size in sizes if 2 * nbytes <= size * count):
            for times in (1, MANY):
                done = _stay(moves, size, self.free, prices, most, 1, times)
                if done is None or len(done) >= count or self._is_long(done):
                    continue
                if (seconds := prices.seconds(done)) < most:
                    best, most = done, seconds
        return best

    def _is_long(self, done: list[Move]) -> bool:
        pieces = -(-self.pieces.nbytes // max(move.size for move in done))
        return len(done) > TRANSFERS * (len(self.moves) + pieces)

    def without_one(
        self, best: list[Move] | None, room: int, most: float
    ) -> tuple[list[Move] | None, float]:
        """One tensor of at most `room` bytes leaves whole; the others move inside meanwhile."""
        moves, prices = self.moves, self.prices
        smallest = sorted(moves, key=lambda move: move.size) if len(moves) <= MOST_LEFT else []
        for gone in smallest:
            price = prices.out(gone.size) + prices.back(gone.size)
            if gone.size > room or price + prices.inside(self.pieces.nbytes - gone.size) >= most:
                break
            rest = [move for move in moves if move != gone]
            within = _Search(rest, _free_without(rest, [gone], self.free), prices, self.granule)
            done, seconds = within.by_pieces(
                None, nbytes_of(within.free), most - price, PATIENCE, away=False, tried=TRIED_AGAIN
            )
            if done is not None:
                best, most = _around(done, [gone]), price + seconds
        return best, most

    def by_pieces(
        self,
        best: list[Move] | None,
        room: int,
        most: float,
        patience: float,
        *,
        away: bool,
        tried: int = TRIED,
    ) -> tuple[list[Move] | None, float]:
        """By holes as wide as a piece, of which at most `room` bytes are set aside."""
        moves, prices, pieces = self.moves, self.prices, self.pieces
        room += pieces.widest if away else nbytes_of(pieces.open)
        sizes = _sizes(moves, room, self.granule)
        if away:
            sizes = {size for size in sizes if size > pieces.widest}
        else:
            if pieces.open:
                sizes.add(0)
            if self.free:
                sizes.add(pieces.widest + max(end - start for start, end in self.free))
        work = tried * len(moves)
        share = pieces.share_set_aside()
        estimates = ((_estimate(pieces, share, size, away, prices), size) for size in sizes)
        for estimate, size in sorted(estimates):
            if estimate >= most or work <= 0:
                break
            work -= len(moves) + pieces.nbytes // (size or pieces.widest)
            bound = min(most, estimate * patience)
            follow = _leave if away else _stay
            for narrow in (AWAY_NARROW,) if away else NARROWS[: 1 + (len(moves) <= FEW)]:
                done = follow(moves, size, self.free, prices, min(bound, most), narrow)
                if done is not None and (seconds := prices.seconds(done)) < most:
                    best, most = done, seconds
        return best, most


def _sizes(moves: Sequence[Move], most: int, granule: int) -> set[int]:
    """Sizes of a piece that are worth a look: fractions of all bytes, whole tensors, all room."""
    nbytes = sum(move.size for move in moves)
    most = min(most, nbytes)
    # Pieces of which all tensors and distances are multiples leave no narrow rests.
    common = gcd(*(move.size for move in moves), *(move.source - move.target for move in moves))
    sizes = {move.size for move in moves}
    for unit in {granule, max(granule, common)}:
        sizes.add(most // unit * unit)
        for of, by in ((1, 2), (4, 5)):
            share = nbytes
            while share >= unit:
                sizes.add(share // unit * unit)
                share = share * of // by
    return {size for size in sizes if 0 < size <= most}


def _estimate(pieces: Pieces, share: float, size: int, away: bool, prices: Prices) -> float:
    """Seconds if every hole is as wide as it is kept, and a `share` of all pieces is set aside."""
    aside = max(0, size - pieces.widest)
    width = min(size or pieces.widest, pieces.nbytes)
    seconds = (pieces.nbytes - aside * away) / width * prices.inside(width)
    first = 0.0
    if aside:
        first = prices.out(aside) + prices.back(aside) if away else 2 * prices.inside(aside)
    # The piece that is set aside first is one of the share.
    return seconds + max(share * seconds, first)


def _leave(
    moves: Sequence[Move], size: int, free: Sequence[Span], prices: Prices, most: float, narrow: int
) -> list[Move] | None:
    """As `_stay`, but what the hole is widened by first is outside from first to last."""
    pieces = Pieces(moves)
    span = pieces.window(size)
    parts = [part for move in moves for part in cut_at(move, span)]
    rest = [part for part in parts if not span[0] <= part.source < span[1]]
    away = [part for part in parts if span[0] <= part.source < span[1]]
    done = _stay(rest, size, _free_without(rest, away, free), prices, most, narrow)
    return None if done is None else _around(done, away)


def _free_without(rest: Sequence[Move], away: Sequence[Move], free: Sequence[Span]) -> list[Span]:
    """What nothing uses once parts have left."""
    left = [*spans_of(away, "source"), *spans_of(away, "target")]
    busy = union([*spans_of(rest, "source"), *spans_of(rest, "target")])
    return minus(union([*free, *left]), busy)


def _around(done: Sequence[Move], away: Sequence[Move]) -> list[Move]:
    """Moves between the first and the last of parts that are outside meanwhile."""
    out = [Move(part.source, ASIDE + part.source, part.size) for part in away]
    return [*out, *done, *(Move(ASIDE + part.source, part.target, part.size) for part in away)]


def _stay(
    moves: Sequence[Move],
    size: int,
    free: Sequence[Span],
    prices: Prices,
    most: float,
    narrow: int,
    times: int = MANY,
) -> list[Move] | None:
    """All moves by holes, widened to `size` where there is room; None if it costs `most`.

    Where the widest hole is narrower than that by the factor `narrow`, bytes beside it are set
    aside where anything else is free. Holes are followed until they are so narrow (what was set
    aside has come home, or borders of tensors have cut them up), and widened so many `times`.
    """
    targets = union(spans_of(moves, "target"))
    spare = minus(union([*free, *spans_of(moves, "source")]), targets)
    core, ordered = list(moves), list[Move]()
    while core:
        pieces = Pieces(core)
        free = minus(spare, pieces.sources)
        widest = max(pieces.open, key=lambda span: (span[1] - span[0], -span[0]), default=(0, 0))
        rooms = [*free, *(span for span in pieces.open if span != widest)] if size else []
        width = widest[1] - widest[0]
        staged, lying = (0, 0), list[Span]()
        if width * narrow < size and rooms:
            staged = pieces.window(min(size, width + nbytes_of(rooms)))
            lying, rooms = pieces.lying_in(staged), minus(union(rooms), [staged])
            # Holes inside the window are no rooms: a byte less of it is a byte more of room.
            staged = pieces.window(
                staged[1] - staged[0] - max(0, nbytes_of(lying) - nbytes_of(rooms))
            )
            lying = pieces.lying_in(staged)
        staged = staged if lying else (0, 0)
        times -= bool(lying)
        pieces.part_at(staged)
        places = places_for(lying, free, minus(pieces.open, [staged]))
        taken = union((place, place + taken) for _, place, taken in places)
        # Holes are followed until they would be widened, or are as many times narrower than what
        # could be made of them.
        least = (staged[1] - staged[0]) // narrow if lying else min(width, size // narrow)
        holes = minus(minus(pieces.open, taken), [staged])
        done = pieces.follow(staged, holes, least, prices, most)
        if done is None:
            return None
        if not done:
            # The piece that was set aside gives way to nothing.
            if not size:
                return None
            size = 0
            continue
        step = [*outgoing(places), *laid(done, places)]
        ordered += step
        left = pieces.not_in(done)
        if not left:
            break
        core = laid(
            [
                Move(part.source + ASIDE, part.target, part.size)
                if staged[0] <= part.source < staged[1]
                else part
                for part in left
            ],
            places,
        )
        size = size if times else 0
        most -= prices.seconds(step)
        if core and most <= 0:
            return None
    return ordered
