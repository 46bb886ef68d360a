"""Breaking cycles of moves: which piece is set aside, how large, and what follows it.

A set of moves is a map of bytes, made of paths and cycles. One piece is set aside; its place is a
hole. What belongs into the hole is moved there and leaves the next hole, as large as the last or
cut where a tensor ends; every byte moves once, however the tensors' sizes divide each other. Holes
that meet are joined and the largest is filled first, so a free strip of a few bytes is taken along
by a large piece instead of being passed through the whole space. Where holes have grown narrow, a
piece beside the widest is set aside anew. A move that only overlaps itself is one memmove.

The piece may also be nothing (what is free inside the targets is hole enough) or those parts of
tensors that close the cycles (`cuts`). All are priced; the cheapest is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from stitch.packing import Span, minus, union
from stitch.planner.mover.aside import laid, nbytes_of, outgoing, places_for, spans_of
from stitch.planner.mover.cost import ASIDE, Prices
from stitch.planner.mover.cuts import cheapest_cut
from stitch.planner.mover.order import Move

#: Work of trying piece sizes, those of the lowest estimates first: so many transfers a move.
TRIED = 80
#: A way that takes so many times its estimate is given up, unless there is no other.
PATIENCE = 1.6
#: Where bytes can leave, ways inside are given up at so many times the price of that.
DEARER = 1.25
#: Bytes leave where that takes less by this factor.
CHEAPER = 1.05
#: Holes so many times narrower than at first are not followed while a piece may be set aside.
NARROW = 4


def break_cycles(
    moves: Sequence[Move], free: Sequence[Span], outside: int, prices: Prices, granule: int
) -> tuple[list[Move], float]:
    """Moves that carry out these, which form cycles, in order, at the least cost that was found.

    Beside them the seconds at which the cheapest way inside the space was found or given up.
    `free` are regions of the space that nothing uses; `outside` bytes per bank may be set aside in
    the space beside: they appear as `ASIDE` addresses. Pieces are multiples of `granule`. Where
    nothing is free, inside the targets either, `outside` must be at least a granule.

    >>> from stitch.machine import load_machine
    >>> from stitch.program import Space
    >>> prices = Prices(load_machine("tiny"), Space.L1, Space.DRAM)
    >>> swap = [Move(0, 64, 64), Move(64, 0, 64)]
    >>> for move in break_cycles(swap, [(128, 192)], 0, prices, 16)[0]:
    ...     print(move)
    Move(source=0, target=128, size=64)
    Move(source=64, target=0, size=64)
    Move(source=128, target=64, size=64)
    """
    search = _Search(moves, free, prices, granule)
    for patience in (PATIENCE, float("inf")):
        best, least = search.by_cut(outside, float("inf"), away=True)
        stays, inside = search.by_cut(nbytes_of(free), least * DEARER, away=False)
        stays, inside = search.by_pieces(stays, nbytes_of(free), inside, patience, away=False)
        if stays is None:
            inside = max(inside, search.floor())
        elif inside / CHEAPER <= least:
            best, least = stays, inside / CHEAPER
        best, _ = search.by_pieces(best, outside, least, patience, away=True)
        if best is not None:
            return best, inside
    raise AssertionError("nothing may be set aside anywhere")


class _Search:
    """The ways to carry out some moves. Each takes what may cost the `most`, and gives the cheapest
    way below that with its price, or what it was given."""

    def __init__(
        self, moves: Sequence[Move], free: Sequence[Span], prices: Prices, granule: int
    ) -> None:
        self.moves, self.free, self.prices, self.granule = moves, free, prices, granule
        self.pieces = _Pieces(moves)

    def floor(self) -> float:
        """What moves inside take that fill no more than what is free."""
        nbytes, unused = self.pieces.nbytes, nbytes_of((*self.free, *self.pieces.open))
        return nbytes / unused * self.prices.inside(min(nbytes, unused)) if unused else 0.0

    def by_cut(self, room: int, most: float, *, away: bool) -> tuple[list[Move] | None, float]:
        """Parts of tensors that close the cycles go first, at most `room` bytes set aside."""
        best = cheapest_cut(self.moves, self.pieces.open, self.free, room, self.prices, away=away)
        seconds = most if best is None else self.prices.seconds(best)
        return (best, seconds) if seconds < most else (None, most)

    def by_pieces(
        self, best: list[Move] | None, room: int, most: float, patience: float, *, away: bool
    ) -> tuple[list[Move] | None, float]:
        """By holes as wide as a piece, of which at most `room` bytes are set aside."""
        moves, prices, pieces = self.moves, self.prices, self.pieces
        room += pieces.widest if away else nbytes_of(pieces.open)
        sizes = _sizes(moves, room, self.granule)
        if away:
            sizes = {size for size in sizes if size > pieces.widest}
        elif pieces.open:
            sizes.add(0)
        work = TRIED * len(moves)
        for estimate, size in sorted((_estimate(pieces, s, away, prices), s) for s in sizes):
            if estimate >= most or work <= 0:
                break
            work -= len(moves) + pieces.nbytes // (size or pieces.widest)
            bound = min(most, estimate * patience)
            follow = _leave if away else _stay
            done = follow(moves, size, self.free, prices, bound)
            if done is not None and (seconds := prices.seconds(done)) < most:
                best, most = done, seconds
        return best, most


def _sizes(moves: Sequence[Move], most: int, granule: int) -> set[int]:
    """Sizes of a piece that are worth a look: fractions of all bytes, whole tensors, all room."""
    nbytes = sum(move.size for move in moves)
    most = min(most, nbytes) // granule * granule
    sizes = {move.size for move in moves} | {most}
    for of, by in ((1, 2), (4, 5)):
        share = nbytes
        while share >= granule:
            sizes.add(share // granule * granule)
            share = share * of // by
    return {size for size in sizes if 0 < size <= most}


def _estimate(pieces: _Pieces, size: int, away: bool, prices: Prices) -> float:
    """Seconds if every hole is as wide as it is kept."""
    aside = max(0, size - pieces.widest)
    width = min(size or pieces.widest, pieces.nbytes)
    seconds = (pieces.nbytes - aside * away) / width * prices.inside(width)
    if aside:
        seconds += prices.out(aside) + prices.back(aside) if away else 2 * prices.inside(aside)
    return seconds


def _leave(
    moves: Sequence[Move], size: int, free: Sequence[Span], prices: Prices, most: float
) -> list[Move] | None:
    """As `_stay`, but what the hole is widened by first is outside from first to last."""
    pieces = _Pieces(moves)
    span = pieces.run_of_sources(size - pieces.widest)
    parts = [part for move in moves for part in _cut_at(move, span)]
    rest = [part for part in parts if not span[0] <= part.source < span[1]]
    away = [part for part in parts if span[0] <= part.source < span[1]]
    busy = union([*spans_of(rest, "source"), *spans_of(rest, "target")])
    free = minus(union([*free, span, *spans_of(away, "target")]), busy)
    done = _stay(rest, size, free, prices, most)
    if done is None:
        return None
    out = [Move(part.source, ASIDE + part.source, part.size) for part in away]
    return [*out, *done, *(Move(ASIDE + m.source, m.target, m.size) for m in away)]


def _stay(
    moves: Sequence[Move], size: int, free: Sequence[Span], prices: Prices, most: float
) -> list[Move] | None:
    """All moves by holes, each first widened to `size` if there is room; None if it costs `most`.

    The widest hole is widened: bytes beside it are set aside where anything else is free. It is
    followed until it is narrow (what was set aside has come home, or borders of tensors have cut
    it up); then the widest of what is open is widened.
    """
    universe = union([*free, *spans_of(moves, "source"), *spans_of(moves, "target")])
    ordered: list[Move] = []
    core, settled = list(moves), list[Span]()
    while core:
        pieces = _Pieces(core)
        widest = max(pieces.open, key=lambda span: (span[1] - span[0], -span[0]), default=(0, 0))
        rooms = [*free, *(span for span in pieces.open if span != widest)] if size else []
        wanted = min(size - widest[1] + widest[0], nbytes_of(rooms))
        staged = pieces.run_of_sources(wanted) if wanted > 0 else (0, 0)
        places = places_for([staged], free, rooms[len(free) :])
        taken = union((place, place + taken) for _, place, taken in places)
        width = widest[1] - widest[0] + staged[1] - staged[0]
        done = pieces.follow(
            staged, minus(pieces.open, taken), width // NARROW if size else 0, prices, most
        )
        if done is None:
            return None
        if not done:
            # The piece that was set aside gives way to nothing.
            if not size:
                return None
            size = 0
            continue
        step = [*outgoing(places), *laid(done, places)]
        left = [
            Move(part.source + ASIDE * (staged[0] <= part.source < staged[1]),
                 part.target, part.size)
            for move in pieces.not_in(done)
            for part in _cut_at(move, staged)
        ]  # fmt: skip
        ordered += step
        core = laid(left, places)
        settled = union([*settled, *spans_of(done, "target")])
        busy = union([*settled, *spans_of(core, "source"), *spans_of(core, "target")])
        free = minus(universe, busy)
        most -= prices.seconds(step)
        if core and most <= 0:
            return None
    return ordered


class _Pieces:
    """The map of bytes that a set of moves is: (target start, target end, source minus target)."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = sorted((m.target, m.target + m.size, m.source - m.target) for m in moves)
        self._starts = [start for start, _, _ in self._moves]
        self._sources = union((m.source, m.source + m.size) for m in moves)
        targets = union((m.target, m.target + m.size) for m in moves)
        self.nbytes = sum(move.size for move in moves)
        #: Free regions inside the targets.
        self.open = minus(targets, self._sources)
        self.widest = max((end - start for start, end in self.open), default=0)

    def run_of_sources(self, size: int) -> Span:
        """Where a piece of at most `size` bytes is set aside: beside the widest hole if it can."""
        at = max(self.open, key=lambda s: (s[1] - s[0], -s[0]), default=(0, self._sources[0][0]))[1]
        runs = [run for run in self._sources if run[0] <= at < run[1]] or [
            max(self._sources, key=lambda run: (run[1] - run[0], -run[0]))
        ]
        ((start, end),) = runs
        first = max(start, min(at if start <= at < end else start, end - size))
        return first, min(end, first + size)

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
                    for source, stop in _parts(a + shift, b + shift, low, high):
                        target = source - shift
                        if low <= source < high:
                            done.append(Move(ASIDE + source, target, stop - source))
                        else:
                            done.append(Move(source, target, stop - source))
                            freed.append((source, stop))
                            seconds += inside(stop - source)
                            left -= stop - source
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
        filled = union((m.target, m.target + m.size) for m in done)
        return [
            Move(a + shift, a, b - a)
            for start, end, shift in self._moves
            for a, b in minus([(start, end)], filled)
        ]


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


def _cut_at(move: Move, span: Span) -> Iterator[Move]:
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
