"""Breaking cycles of moves: which piece is set aside, how large, and what follows it.

A set of moves is a map of bytes, made of paths and cycles. One piece is set aside; its place is a
hole. What belongs into the hole is moved there and leaves the next hole, as large as the last or
cut where a tensor ends; every byte moves once, however the tensors' sizes divide each other. Holes
that meet are joined and the largest is filled first, so a free strip of a few bytes is taken along
by a large piece instead of being passed through the whole space. Where holes have grown narrow, a
piece beside the widest is set aside anew. A move that only overlaps itself is one memmove.

The piece may also be nothing (what is free inside the targets is hole enough) or whole tensors, as
many as it takes until none waits for itself. All are priced; the cheapest is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from stitch.packing import Span, minus, union
from stitch.planner.mover.cost import ASIDE, Prices
from stitch.planner.mover.order import Move, order_moves

#: So many ways of cutting are carried out on paper, those of the lowest estimates.
TRIED = 4
#: A way that takes so many times its estimate is given up, unless there is no other.
PATIENCE = 1.25
#: A way within this factor of the next estimate is good enough.
NEAR = 1.1
#: Holes so many times narrower than at first are not followed while a piece may be set aside.
NARROW = 4
#: With more moves than this, tensors are not set aside whole.
MOST_WHOLE = 64


def break_cycles(
    moves: Sequence[Move], free: Sequence[Span], outside: int, prices: Prices, granule: int
) -> list[Move]:
    """Moves that carry out these, which form cycles, in order, at the least cost that was found.

    `free` are regions of the space that nothing uses; `outside` bytes per bank may be set aside in
    the space beside: they appear as `ASIDE` addresses. Pieces are multiples of `granule`. Where
    nothing is free, inside the targets either, `outside` must be at least a granule.

    >>> from stitch.machine import load_machine
    >>> from stitch.program import Space
    >>> prices = Prices(load_machine("tiny"), Space.L1, Space.DRAM)
    >>> for move in break_cycles([Move(0, 64, 64), Move(64, 0, 64)], [(128, 192)], 0, prices, 16):
    ...     print(move)
    Move(source=0, target=128, size=64)
    Move(source=64, target=0, size=64)
    Move(source=128, target=64, size=64)
    """
    pieces = _Pieces(moves)
    room = _nbytes(free)
    ways = [
        (_estimate(pieces, size, away, prices), size, away)
        for away, most in ((False, room + _nbytes(pieces.open)), (True, outside))
        for size in _sizes(moves, most, granule)
    ]
    if pieces.open:
        ways.append((_estimate(pieces, 0, False, prices), 0, False))
    best, least = _whole(moves, free, room, outside, prices)
    for patience, tries in ((PATIENCE, TRIED), (float("inf"), 2)):
        for estimate, size, away in sorted(ways)[:tries]:
            if best is not None and estimate * NEAR >= least:
                break
            most = min(least, estimate * patience)
            done = (_leave(moves, size, prices, most) if away
                    else _stay(moves, size, free, prices, most))  # fmt: skip
            if done is not None and (seconds := prices.seconds(done)) < least:
                best, least = done, seconds
        if best is not None:
            break
    # Never dearer than pieces of a granule, by which plans are judged: these take their estimate.
    if outside >= granule and _estimate(pieces, granule, True, prices) < least:
        done = _leave(moves, granule, prices, least)
        if done is not None and prices.seconds(done) < least:
            best = done
    assert best is not None, "nothing may be set aside anywhere"
    return best


def _sizes(moves: Sequence[Move], most: int, granule: int) -> set[int]:
    """Sizes of a piece that are worth a look: fractions of all bytes, whole tensors, all room."""
    nbytes = sum(move.size for move in moves)
    most = min(most, nbytes) // granule * granule
    sizes = {move.size for move in moves if move.size <= most} | {most}
    share = nbytes
    while share >= granule:
        sizes |= {share // granule * granule, share * 3 // 4 // granule * granule}
        share //= 2
    return {size for size in sizes if 0 < size <= most}


def _estimate(pieces: _Pieces, size: int, away: bool, prices: Prices) -> float:
    """Seconds if every hole is as wide as it is kept."""
    width = min(size or pieces.widest, pieces.nbytes)
    aside = (prices.out(size) + prices.back(size)) if away else 2 * prices.inside(size)
    return (aside if size else 0.0) + (pieces.nbytes - size) / width * prices.inside(width)


def _whole(
    moves: Sequence[Move], free: Sequence[Span], room: int, outside: int, prices: Prices
) -> tuple[list[Move] | None, float]:
    """Small tensors set aside whole until no other waits for itself; inside if there is room."""
    aside: list[Move] = []
    core = list(moves)
    if len(core) > MOST_WHOLE:
        return None, float("inf")
    while core:
        smallest = min(core, key=lambda move: (move.size, move.source))
        aside.append(smallest)
        core = order_moves([move for move in moves if move not in aside])[1]
    for move in list(aside):
        fewer = [other for other in aside if other is not move]
        if not order_moves([m for m in moves if m not in fewer])[1]:
            aside = fewer
    nbytes = sum(move.size for move in aside)
    if nbytes > max(room, outside):
        return None, float("inf")
    first, _, last = order_moves([move for move in moves if move not in aside])
    home = [Move(ASIDE + move.source, move.target, move.size) for move in aside]
    ways = []
    if nbytes <= room:
        places = _places(_spans(aside, "source"), free)
        ways.append([*_outgoing(places), *first, *last, *_laid(home, places)])
    if nbytes <= outside:
        out = [Move(move.source, ASIDE + move.source, move.size) for move in aside]
        ways.append([*out, *first, *last, *home])
    return min(((way, prices.seconds(way)) for way in ways), key=lambda way: way[1])


def _leave(moves: Sequence[Move], size: int, prices: Prices, most: float) -> list[Move] | None:
    """As `_stay`, one piece of `size` set aside outside from first to last: its place is free."""
    span = _Pieces(moves).run_of_sources(size)
    parts = [part for move in moves for part in _cut_at(move, span)]
    rest = [part for part in parts if not span[0] <= part.source < span[1]]
    away = [part for part in parts if span[0] <= part.source < span[1]]
    busy = union([*_spans(rest, "source"), *_spans(rest, "target")])
    done = _stay(rest, size, minus(union([span, *_spans(away, "target")]), busy), prices, most)
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
    universe = union([*free, *_spans(moves, "source"), *_spans(moves, "target")])
    ordered: list[Move] = []
    core, settled = list(moves), list[Span]()
    while core:
        pieces = _Pieces(core)
        widest = max(pieces.open, key=lambda span: (span[1] - span[0], -span[0]), default=(0, 0))
        rooms = [*free, *(span for span in pieces.open if span != widest)] if size else []
        wanted = min(size - widest[1] + widest[0], _nbytes(rooms))
        staged = pieces.run_of_sources(wanted) if wanted > 0 else (0, 0)
        places = _places([staged], free, rooms[len(free) :])
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
        step = [*_outgoing(places), *_laid(done, places)]
        left = [
            Move(part.source + ASIDE * (staged[0] <= part.source < staged[1]),
                 part.target, part.size)
            for move in pieces.not_in(done)
            for part in _cut_at(move, staged)
        ]  # fmt: skip
        ordered += step
        core = _laid(left, places)
        settled = union([*settled, *_spans(done, "target")])
        busy = union([*settled, *_spans(core, "source"), *_spans(core, "target")])
        free = minus(universe, busy)
        most -= prices.seconds(step)
        if core and most <= 0:
            return None
    return ordered


def _places(
    parts: Iterable[Span], free: Sequence[Span], more: Sequence[Span] = ()
) -> list[tuple[int, int, int]]:
    """(source, place, size) of spans laid into free regions of the space, the largest first.

    `more` regions are used when those are full.
    """
    places: list[tuple[int, int, int]] = []
    regions = [
        *sorted(free, key=lambda span: (span[0] - span[1], span[0])),
        *sorted(more, key=lambda span: (span[0] - span[1], span[0])),
    ]
    at, end = regions.pop(0) if regions else (0, 0)
    for start, stop in sorted(parts):
        while start < stop:
            if at == end:
                at, end = regions.pop(0)
            taken = min(stop - start, end - at)
            places.append((start, at, taken))
            start, at = start + taken, at + taken
    return places


def _laid(moves: Iterable[Move], places: Sequence[tuple[int, int, int]]) -> list[Move]:
    """The same moves with what is set aside coming from its places."""
    starts = [start for start, _, _ in places]
    done: list[Move] = []
    for move in moves:
        source, end = move.source - ASIDE, move.source - ASIDE + move.size
        if source < 0:
            done.append(move)
            continue
        i = bisect_right(starts, source) - 1
        while source < end:
            start, place, size = places[i]
            taken = min(end, start + size) - source
            target = move.target + move.size - (end - source)
            done.append(Move(place + source - start, target, taken))
            source, i = source + taken, i + 1
    return done


def _outgoing(places: Iterable[tuple[int, int, int]]) -> list[Move]:
    """The moves that set parts aside: those that continue each other are one."""
    joined: list[Move] = []
    for source, target, size in places:
        before = joined[-1] if joined else Move(0, 0, -1)
        if (before.source + before.size, before.target + before.size) == (source, target):
            joined[-1] = Move(before.source, before.target, before.size + size)
        else:
            joined.append(Move(source, target, size))
    return joined


def _spans(moves: Iterable[Move], end: str) -> list[Span]:
    starts = ((getattr(move, end), move.size) for move in moves)
    return [(start, start + size) for start, size in starts]


def _cut_at(move: Move, span: Span) -> Iterator[Move]:
    """A move cut where its source enters and leaves a span."""
    for start, end in _parts(move.source, move.source + move.size, *span):
        yield Move(start, move.target + start - move.source, end - start)


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
        seconds, touched = 0.0, set()
        holes = _Holes([*free, staged] if low < high else free)
        done: list[Move] = []
        inside = prices.inside
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
                touched.add(i)
                for span in freed:
                    holes.add(*span)
            if seconds >= most:
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


def _parts(start: int, end: int, low: int, high: int) -> Iterator[Span]:
    """`[start, end)` cut at the borders of `[low, high)`."""
    for cut in (low, high):
        if start < cut < end:
            yield start, cut
            start = cut
    yield start, end


def _nbytes(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
