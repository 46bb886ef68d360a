"""Break cycles of moves inside a space: which part to stage, how large, and what follows it.

Staging one part leaves a hole. A move that fills the hole leaves another, so every byte moves once,
whatever the tensors' sizes, and a free strip of a few bytes is merged with a large part instead of
passing through the whole space. If holes become narrow, a part beside the widest is staged in
addition.

The staged part may also be empty (if free bytes inside the targets suffice), one whole tensor that
is kept outside while the others move, or a minimal set of parts that closes all cycles. The cost of
all options is computed, and the cheapest is taken.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import gcd

from stitch.packing import Span, minus, union
from stitch.planner.mover.order import STAGED, Move, Prices, order_moves


def assign_staging(
    parts: Iterable[Span], free: Sequence[Span], more: Sequence[Span] = ()
) -> list[tuple[int, int, int]]:
    """Assign staging addresses to spans: (source, address, size).

    Each part, the largest first, is placed in the largest region left, and cut only if that is too
    small. `more` regions are used when those are full.
    """
    places: list[tuple[int, int, int]] = []
    regions = [sorted((end - at, -at) for at, end in spans) for spans in (free, more)]
    for size, start in sorted(((start - end, start) for start, end in parts)):
        size = -size
        while size:
            gaps = regions[0] or regions[1]
            free_size, at = gaps.pop()
            taken = min(size, free_size)
            places.append((start, -at, taken))
            if taken < free_size:
                insort(gaps, (free_size - taken, at - taken))
            start, size = start + taken, size - taken
    return sorted(places)


def from_staging(moves: Iterable[Move], places: Sequence[tuple[int, int, int]]) -> list[Move]:
    """Return the moves with staged sources (`STAGED`) replaced by their staging addresses."""
    starts = [start for start, _, _ in places]
    done: list[Move] = []
    for move in moves:
        source, end = move.source - STAGED, move.source - STAGED + move.size
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


def moves_to_staging(places: Iterable[tuple[int, int, int]]) -> list[Move]:
    """Return the moves to the staging addresses, merging adjacent ones."""
    joined: list[Move] = []
    for source, target, size in places:
        before = joined[-1] if joined else Move(0, 0, -1)
        if (before.source + before.size, before.target + before.size) == (source, target):
            joined[-1] = Move(before.source, before.target, before.size + size)
        else:
            joined.append(Move(source, target, size))
    return joined


def spans_of(moves: Iterable[Move], end: str) -> list[Span]:
    starts = ((getattr(move, end), move.size) for move in moves)
    return [(start, start + size) for start, size in starts]


def nbytes_of(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


#: Search limit in sets of parts per move.
SETS = 64
#: Sets are searched with at most so many moves.
MOST_MOVES = 64

#: Parts of a move: not staged, moved at once into a free target, and staged.
_Parts = tuple[list[Move], list[Move], list[Move]]


def cheapest_cut(
    moves: Sequence[Move],
    open_: Sequence[Span],
    free: Sequence[Span],
    limit: int,
    prices: Prices,
    *,
    away: bool,
) -> list[Move] | None:
    """Stage the cheapest set of parts that closes all cycles.

    Args:
        moves: The moves; each source overlaps no other, and so do the targets.
        open_: Free regions inside the targets.
        free: Regions to stage in, unless `away`.
        limit: Limit of the staged bytes per bank.
        prices: Transfer costs.
        away: Stage in the space beside instead.

    Returns:
        All moves in order; None if nothing can be staged.

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
    if not limit or len(moves) > MOST_MOVES:
        return None
    cuts = _Cuts(moves, open_, free, prices, away)
    options = [_ordered(moves, spans, cuts, free, away=away) for spans in cuts.cheapest(limit)]
    return min(options, key=prices.seconds, default=None)


def _ordered(
    moves: Sequence[Move], spans: Sequence[Span], cuts: _Cuts, free: Sequence[Span], *, away: bool
) -> list[Move]:
    """Order all moves once `spans` are staged."""
    parted = [_parts(move, spans, cuts.open) for move in moves]
    rest, early, aside = ([part for parts in parted for part in parts[i]] for i in range(3))
    first, _, last = order_moves(rest)
    home = [Move(STAGED + part.source, part.target, part.size) for part in aside]
    if away:
        out = [Move(part.source, STAGED + part.source, part.size) for part in aside]
        return [*out, *early, *first, *last, *home]
    places = assign_staging(spans_of(aside, "source"), free)
    return [*moves_to_staging(places), *early, *first, *last, *from_staging(home, places)]


class _Cuts:
    """The waits-for graph of moves, and the cost of staging parts of them."""

    def __init__(
        self,
        moves: Sequence[Move],
        open_: Sequence[Span],
        free: Sequence[Span],
        prices: Prices,
        away: bool,
    ) -> None:
        self.moves, self.prices, self.away = moves, prices, away
        self.gaps = sorted((end - start for start, end in free), reverse=True)
        self.wholes = spans_of(moves, "source")
        #: Regions where moving a part at once saves more than one more transfer costs.
        self.open = [
            (start, end)
            for start, end in open_
            if self._staging_seconds(end - start) - self._staging_seconds(1)
            > prices.inside(end - start)
        ]
        #: The moves that each move waits for, as bits, and which of their bytes.
        self.waits = [0] * len(moves)
        self.awaited: dict[tuple[int, int], Span] = {}
        for i, (start, end) in enumerate(spans_of(moves, "target")):
            for j, (first, last) in enumerate(self.wholes):
                if i != j and start < last and first < end:
                    self.waits[i] |= 1 << j
                    self.awaited[i, j] = max(start, first), min(end, last)
        self._known: dict[tuple[int, Span], tuple[float, int]] = {}

    def cheapest(self, limit: int) -> list[list[Span]]:
        """Return the spans to stage: the cheapest set including parts, if cheaper, and the cheapest
        set of whole tensors.

        Both are returned because narrow free regions may cut the parts.
        """
        wholes, least = self._cheapest(limit, float("inf"), parts=False)
        parts = self._cheapest(limit, least, parts=True)[0]
        return [spans for spans in (parts, wholes) if spans is not None]

    def _cheapest(
        self, limit: int, least: float, *, parts: bool
    ) -> tuple[list[Span] | None, float]:
        """Search for the cheapest set by best-first search; return it and its cost."""
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
                options = {self.awaited[i, j], self.wholes[j]} if parts else {self.wholes[j]}
                for span in sorted(options):
                    more, aside = self._price(j, span)
                    if nbytes + aside > limit or seconds + more >= least:
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
        """Return the additional seconds of staging a span, and the bytes staged."""
        known = self._known.get((j, span))
        if known is None:
            move, inside = self.moves[j], self.prices.inside
            rest, early, aside = _parts(move, [span], self.open)
            seconds = sum(inside(part.size) for part in (*rest, *early)) - inside(move.size)
            seconds += sum(self._staging_seconds(part.size) for part in aside)
            known = self._known[j, span] = seconds, sum(part.size for part in aside)
        return known

    def _staging_seconds(self, size: int) -> float:
        prices = self.prices
        if self.away:
            return prices.out(size) + prices.back(size)
        # A part that fits into no free region is cut; each piece takes two transfers.
        seconds = 0.0
        for limit in self.gaps:
            if size <= limit:
                break
            seconds += 2 * prices.inside(limit)
            size -= limit
        return seconds + 2 * prices.inside(size)


def _parts(move: Move, spans: Sequence[Span], open_: Sequence[Span]) -> _Parts:
    """Split a move at the borders of spans, and the staged part by what is open at its target."""
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
    """Return the moves of a cycle in the waits-for graph, two if there are such; else []."""
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


#: Sample of bytes that estimates the share to stage, and how far each is followed.
SAMPLES, LONGEST = 16, 12


class Pieces:
    """Moves as a map of bytes: (target start, target end, source minus target)."""

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
        """Return where to make a hole of `size` bytes: beside the widest hole, above it, then
        below.

        Sources in it must be staged; holes in it are free.
        """
        low, high = max(self.open, key=lambda s: (s[1] - s[0], -s[0]), default=(-1, -1))
        if low < 0:
            low, high = max(self._runs(), key=lambda r: (r[1] - r[0], -r[0]), default=(0, 0))
            high = low
        first, last = next((s for s in self._targets if s[0] <= low < s[1]), (low, high))
        high = max(high, min(last, low + size))
        return max(first, min(low, high - size)), high

    def staged_share(self) -> float:
        """Estimate the share of bytes to stage, one of each cycle; long cycles count as none."""
        share, at = 0.0, self.nbytes // (2 * SAMPLES)
        for start, end, _ in self._moves:
            while at < end - start:
                share += self._share_of(start + at) / SAMPLES
                at += self.nbytes // SAMPLES or 1
            at -= end - start
        return share

    def _share_of(self, first: int) -> float:
        """Return one by the length of the cycle through a byte; 0 if none is found."""
        at = first
        for length in range(1, LONGEST + 1):
            i = bisect_right(self._starts, at) - 1
            if i < 0 or at >= self._moves[i][1]:
                return 0.0
            at += self._moves[i][2]
            if at == first:
                return 1 / length
        return 0.0

    def sources_in(self, span: Span) -> list[Span]:
        """Return the sources inside a span."""
        return minus([span], minus([span], self.sources)) if span[0] < span[1] else []

    def split_at(self, span: Span) -> None:
        """Split moves whose source crosses the borders of a span."""
        if span[0] < span[1]:
            self._moves = [
                (start - shift, end - shift, shift)
                for first, last, shift in self._moves
                for start, end in _split_span(first + shift, last + shift, *span)
            ]
            self._starts = [start for start, _, _ in self._moves]

    def _runs(self) -> list[Span]:
        """Return the regions that are both source and target."""
        return minus(self.sources, minus(self.sources, self._targets))

    def follow(
        self, staged: Span, free: Sequence[Span], narrow: int, prices: Prices, most: float
    ) -> list[Move] | None:
        """Return the moves that fill free regions and the hole of the staged piece, and those they
        free.

        Holes narrower than `narrow` are not filled; None once the moves cost `most`.
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
                    # It overlaps only itself: one memmove.
                    a, b = first, last
                    freed = [(max(first + shift, last), last + shift)] if shift > 0 else (
                        [(first + shift, min(last + shift, first))])  # fmt: skip
                    done.append(Move(a + shift, a, b - a))
                    seconds += inside(b - a)
                    left -= b - a
                else:
                    freed = []
                    if low <= a + shift < high:
                        done.append(Move(STAGED + a + shift, a, b - a))
                    else:
                        done.append(Move(a + shift, a, b - a))
                        freed = [(a + shift, b + shift)]
                        seconds += inside(b - a)
                        left -= b - a
                touched.add(i)
                for span in freed:
                    holes.add(*span)
            # Lower bound: the rest in a single move.
            if seconds + left * least >= most:
                return None
        return done

    def remaining(self, done: Sequence[Move]) -> list[Move]:
        """Return what remains of the moves without these."""
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
    """Free regions to fill, the largest first; adjacent ones are merged."""

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


def split_move(move: Move, span: Span) -> Iterator[Move]:
    """Split a move where its source crosses the borders of a span."""
    for start, end in _split_span(move.source, move.source + move.size, *span):
        yield Move(start, move.target + start - move.source, end - start)


def _split_span(start: int, end: int, low: int, high: int) -> Iterator[Span]:
    """Split `[start, end)` at the borders of `[low, high)`."""
    for cut in (low, high):
        if start < cut < end:
            yield start, cut
            start = cut
    yield start, end


#: Work limit of the search over piece sizes, in transfers per move.
TRIED = 80
#: The same with one tensor staged whole, and the limit of moves for that option.
TRIED_AGAIN, MOST_LEFT = 6, 16
#: Number of free regions used, the largest.
MOST_FREE = 16
#: An option is abandoned at this multiple of its estimate, unless there is no other.
PATIENCE = 3.0
#: Bytes leave the space only if that is cheaper by this factor.
CHEAPER = 1.05
#: An option within this factor of the lower bound ends the search.
ENOUGH = 1.01
#: Holes narrower than a piece by these factors are widened instead of filled: for pieces outside,
#: and inside. The second is tried only with few moves.
AWAY_NARROW, NARROWS, FEW = 4, (2, 4), 3


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
    """Order moves that form cycles at the least cost found.

    Bytes leave the space only if that is cheaper by the factor `CHEAPER` and `slack` seconds, or if
    necessary. Without any free byte, `outside` must be at least a granule.

    Args:
        moves: The moves on cycles.
        free: Unused regions of the space.
        outside: Limit of the bytes per bank staged in the space beside, at `STAGED` addresses.
        prices: Transfer costs.
        granule: Piece sizes are multiples of it.
        slack: Extra seconds allowed for staying inside the space.
        most: Cost limit in seconds.

    Returns:
        All moves in order; [] if none were found quickly below `most`.

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
    limit = nbytes_of(free)
    for patience in (PATIENCE, float("inf")):
        best, least = search.by_cut(outside, most, away=True)
        stays, inside = search.by_cut(limit, least * CHEAPER + slack, away=False)
        stays, inside = search.by_pieces(stays, limit, inside, patience, away=False)
        if stays is not None:
            best, least = stays, (inside - slack) / CHEAPER
        best, least = search.by_pieces(best, outside, least, patience, away=True)
        best, least = search.with_one_outside(best, outside, least)
        if best is not None:
            return best
        if most < float("inf"):
            return []
    raise AssertionError("no byte is free to stage a part in")


class _Search:
    """Options below a cost limit; each method returns the cheapest, or what it was given."""

    def __init__(
        self, moves: Sequence[Move], free: Sequence[Span], prices: Prices, granule: int
    ) -> None:
        self.moves, self.free, self.prices, self.granule = moves, free, prices, granule
        self.pieces = Pieces(moves)
        inside = prices.inside
        self.inside_seconds = sum(inside(m.size) for m in moves)
        # One inside transfer of each move is not enough: one is staged outside, or is cut.
        apart = [prices.out(m.size) + prices.back(m.size) - inside(m.size) for m in moves]
        further = 2 * inside(granule) - inside(2 * granule)
        further = min(further, prices.out(granule) + prices.back(granule), *apart)
        least = self.inside_seconds + sum(min(0.0, more) for more in apart)
        self.enough = (least + max(0.0, further)) * ENOUGH

    def by_cut(self, limit: int, most: float, *, away: bool) -> tuple[list[Move] | None, float]:
        """Stage parts that close the cycles, at most `limit` bytes."""
        best = cheapest_cut(self.moves, self.pieces.open, self.free, limit, self.prices, away=away)
        seconds = most if best is None else self.prices.seconds(best)
        return (best, seconds) if seconds < most else (None, most)

    def with_one_outside(
        self, best: list[Move] | None, limit: int, most: float
    ) -> tuple[list[Move] | None, float]:
        """Stage one tensor of at most `limit` bytes outside while the others move inside."""
        moves, prices = self.moves, self.prices
        smallest = sorted(moves, key=lambda move: move.size) if len(moves) <= MOST_LEFT else []
        for gone in smallest:
            price = prices.out(gone.size) + prices.back(gone.size)
            least = price + self.inside_seconds - prices.inside(gone.size)
            if gone.size > limit or least >= most or most <= self.enough:
                break
            rest = [move for move in moves if move != gone]
            within = _Search(rest, _free_without(rest, [gone], self.free), prices, self.granule)
            done, seconds = within.by_pieces(
                None, nbytes_of(within.free), most - price, PATIENCE, away=False, tried=TRIED_AGAIN
            )
            if done is not None:
                best, most = _wrap_outside(done, [gone]), price + seconds
        return best, most

    def by_pieces(
        self,
        best: list[Move] | None,
        limit: int,
        most: float,
        patience: float,
        *,
        away: bool,
        tried: int = TRIED,
    ) -> tuple[list[Move] | None, float]:
        """Fill holes of one piece size, of which at most `limit` bytes are staged."""
        moves, prices, pieces = self.moves, self.prices, self.pieces
        if most <= self.enough:
            return best, most
        limit += pieces.widest if away else nbytes_of(pieces.open)
        sizes = _sizes(moves, limit, self.granule)
        if away:
            sizes = {size for size in sizes if size > pieces.widest}
        else:
            if pieces.open:
                sizes.add(0)
            if self.free:
                sizes.add(pieces.widest + max(end - start for start, end in self.free))
        work = tried * len(moves)
        share = pieces.staged_share()
        estimates = ((_estimate(pieces, share, size, away, prices), size) for size in sizes)
        for estimate, size in sorted(estimates):
            if estimate >= most or work <= 0:
                break
            work -= len(moves) + pieces.nbytes // (size or pieces.widest)
            bound = min(most, estimate * patience)
            follow = _through_outside if away else _through_holes
            for narrow in (AWAY_NARROW,) if away else NARROWS[: 1 + (len(moves) <= FEW)]:
                done = follow(moves, size, self.free, prices, min(bound, most), narrow)
                if done is not None and (seconds := prices.seconds(done)) < most:
                    best, most = done, seconds
        return best, most


def _sizes(moves: Sequence[Move], most: int, granule: int) -> set[int]:
    """Return piece sizes to try: fractions of all bytes, whole tensors, and all of `most`."""
    nbytes = sum(move.size for move in moves)
    most = min(most, nbytes)
    # Divisors of all sizes and distances leave no narrow rests.
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
    """Estimate the seconds if every hole keeps its width and a `share` of the pieces is staged."""
    aside = max(0, size - pieces.widest)
    width = min(size or pieces.widest, pieces.nbytes)
    seconds = (pieces.nbytes - aside * away) / width * prices.inside(width)
    first = 0.0
    if aside:
        first = prices.out(aside) + prices.back(aside) if away else 2 * prices.inside(aside)
    # The piece staged first is part of the share.
    return seconds + max(share * seconds, first)


def _through_outside(
    moves: Sequence[Move], size: int, free: Sequence[Span], prices: Prices, most: float, narrow: int
) -> list[Move] | None:
    """Like `_through_holes`, but what the hole is widened by first is outside until the end."""
    pieces = Pieces(moves)
    span = pieces.window(size)
    parts = [part for move in moves for part in split_move(move, span)]
    rest = [part for part in parts if not span[0] <= part.source < span[1]]
    away = [part for part in parts if span[0] <= part.source < span[1]]
    done = _through_holes(rest, size, _free_without(rest, away, free), prices, most, narrow)
    return None if done is None else _wrap_outside(done, away)


def _free_without(rest: Sequence[Move], away: Sequence[Move], free: Sequence[Span]) -> list[Span]:
    """Return the unused regions once parts have left."""
    left = [*spans_of(away, "source"), *spans_of(away, "target")]
    busy = union([*spans_of(rest, "source"), *spans_of(rest, "target")])
    return minus(union([*free, *left]), busy)


def _wrap_outside(done: Sequence[Move], away: Sequence[Move]) -> list[Move]:
    out = [Move(part.source, STAGED + part.source, part.size) for part in away]
    return [*out, *done, *(Move(STAGED + part.source, part.target, part.size) for part in away)]


def _through_holes(
    moves: Sequence[Move],
    size: int,
    free: Sequence[Span],
    prices: Prices,
    most: float,
    narrow: int,
) -> list[Move] | None:
    """Move everything through holes, widened to `size` by staging; None if it costs `most`.

    If the widest hole is narrower than `size` by the factor `narrow`, bytes beside it are staged in
    other free regions. Holes are filled until they are too narrow (staged bytes have returned, or
    tensor borders have cut the holes), and widened again.
    """
    targets = union(spans_of(moves, "target"))
    spare = minus(union([*free, *spans_of(moves, "source")]), targets)
    core, ordered = list(moves), list[Move]()
    while core:
        pieces = Pieces(core)
        free = minus(spare, pieces.sources)
        widest = max(pieces.open, key=lambda span: (span[1] - span[0], -span[0]), default=(0, 0))
        gaps = [*free, *(span for span in pieces.open if span != widest)] if size else []
        width = widest[1] - widest[0]
        staged, lying = (0, 0), list[Span]()
        if width * narrow < size and gaps:
            staged = pieces.window(min(size, width + nbytes_of(gaps)))
            lying, gaps = pieces.sources_in(staged), minus(union(gaps), [staged])
            # Holes inside the window cannot be used for staging.
            staged = pieces.window(
                staged[1] - staged[0] - max(0, nbytes_of(lying) - nbytes_of(gaps))
            )
            lying = pieces.sources_in(staged)
        staged = staged if lying else (0, 0)
        pieces.split_at(staged)
        places = assign_staging(lying, free, minus(pieces.open, [staged]))
        taken = union((place, place + taken) for _, place, taken in places)
        # Fill holes until they would be widened, or are narrower than that by the same factor.
        least = (staged[1] - staged[0]) // narrow if lying else min(width, size // narrow)
        holes = minus(minus(pieces.open, taken), [staged])
        done = pieces.follow(staged, holes, least, prices, most)
        if done is None:
            return None
        if not done:
            # Staging the piece allows no move.
            if not size:
                return None
            size = 0
            continue
        step = [*moves_to_staging(places), *from_staging(done, places)]
        ordered += step
        left = pieces.remaining(done)
        if not left:
            break
        core = from_staging(
            [
                Move(part.source + STAGED, part.target, part.size)
                if staged[0] <= part.source < staged[1]
                else part
                for part in left
            ],
            places,
        )
        most -= prices.seconds(step)
        if core and most <= 0:
            return None
    return ordered
