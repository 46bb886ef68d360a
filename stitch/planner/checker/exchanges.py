"""The price of moves inside a space, found without the mover: by pieces of a ladder of sizes, and
by whole tensors that are set aside.

The bytes of a tensor are parts (source, target, size), in bytes per bank; what is free is a list of
regions. A way is played part by part on these and priced by the machine's own curves. Nothing here
is the mover's, so a defect of the mover cannot lower what it is compared with. Work is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.machine import Machine
from stitch.program import Space

#: Bytes from one address to another.
Part = tuple[int, int, int]
Region = tuple[int, int]
#: From here on addresses stand for bytes outside.
OUTSIDE = 1 << 60
#: Each piece is so much smaller than the last, down to so many granules.
LADDER, LEAST_GRANULES = 0.8, 8
#: What is free and narrower than a piece by these factors is widened anew.
NARROW = (1.0, 4.0)
#: Of more tensors no sets are tried.
MOST_WHOLE = 8
#: Parts that are compared with free regions before the search ends.
WORK_LIMIT = 2_000_000


class Curves:
    """Simulated seconds of one transfer of so many bytes per bank, inside a space and to and from
    the one beside it."""

    def __init__(self, machine: Machine, space: Space = Space.L1, beside: Space = Space.DRAM):
        self._machine, self.space, self.beside = machine, space, beside
        self._banks = machine.shape.space(space).banks
        self._known: dict[tuple[Space, Space, int], float] = {}

    def inside(self, size: int) -> float:
        return self._seconds(self.space, self.space, size)

    def out(self, size: int) -> float:
        return self._seconds(self.space, self.beside, size)

    def back(self, size: int) -> float:
        return self._seconds(self.beside, self.space, size)

    def seconds(self, transfers: Iterable[Part]) -> float:
        return sum(
            self.out(size) if target >= OUTSIDE
            else self.back(size) if source >= OUTSIDE
            else self.inside(size)
            for source, target, size in transfers
        )  # fmt: skip

    def _seconds(self, source: Space, target: Space, size: int) -> float:
        key = source, target, size
        if key not in self._known:
            self._known[key] = self._machine.seconds(source, target, size * self._banks, size)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A way to carry out moves: its transfers in order, and the seconds that they take."""

    name: str
    seconds: float
    transfers: tuple[Part, ...]


def cheaper_inside(
    core: Sequence[Part], free: Sequence[Region], granule: int, curves: Curves, most: float
) -> Exchange | None:
    """Moves inside the space that carry out cycles in less than `most` seconds, None where none
    were found. Raises `TimeoutError` where there are ways left to try at the end of the work.

    >>> from stitch.machine import load_machine
    >>> curves = Curves(load_machine("tiny"))
    >>> swap = [(0, 64, 64), (64, 0, 64)]
    >>> cheaper_inside(swap, [(128, 256)], 16, curves, 1.0).transfers
    ((0, 128, 64), (64, 0, 64), (128, 64, 64))
    >>> cheaper_inside(swap, [(128, 256)], 16, curves, 1e-9)
    """
    best: Exchange | None = None
    work = [WORK_LIMIT]
    few = core if len(core) <= MOST_WHOLE else ()
    for name, transfers in whole_tensors(few, free, away=False):
        seconds = curves.seconds(transfers)
        if seconds < most:
            best, most = Exchange(name, seconds, tuple(transfers)), seconds
    for size in ladder(core, granule):
        nbytes = sum(size for _, _, size in core)
        if nbytes / size * curves.inside(size) >= most:
            break
        for narrow in NARROW:
            done = by_pieces(core, (), free, size, narrow, curves, most, away=False, work=work)
            if done is not None:
                best = Exchange(f"pieces of {size} B", curves.seconds(done), tuple(done))
                most = best.seconds
    return best


def ladder(core: Sequence[Part], granule: int) -> Iterator[int]:
    """Sizes of a piece, from all bytes down."""
    piece = float(sum(size for _, _, size in core))
    while piece >= granule * LEAST_GRANULES:
        yield int(piece) // granule * granule
        piece *= LADDER


# -- whole tensors ---------------------------------------------------------------------------------


def whole_tensors(
    core: Sequence[Part], spare: Sequence[Region], *, away: bool
) -> Iterator[tuple[str, list[Part]]]:
    """Every set of whole tensors whose absence breaks all cycles, in free regions; with `away`,
    what finds no room in these is outside, or all of them."""
    waits = [
        sum(1 << j for j, other in enumerate(core) if i != j and waits_for(move, other))
        for i, move in enumerate(core)
    ]
    for _, target, size in core:
        spare = without(spare, target, target + size)
    for aside in range(1, 1 << len(core)):
        left, going = (1 << len(core)) - 1 & ~aside, list[int]()
        while ready := [i for i, mask in enumerate(waits) if left >> i & 1 and not mask & left]:
            left &= ~(1 << ready[0])
            going.append(ready[0])
        if left:
            continue
        stays = [core[i] for i in going]
        chosen = [move for i, move in enumerate(core) if aside >> i & 1]
        for name, rooms in (("inside", spare), ("outside", ()))[: 1 + away]:
            places = _places([size for _, _, size in chosen], rooms)
            if not away and max(places) >= OUTSIDE:
                continue
            out = [(move[0], at, move[2]) for move, at in zip(chosen, places, strict=True)]
            home = [(at, move[1], move[2]) for move, at in zip(chosen, places, strict=True)]
            yield f"whole tensors set aside {name}", [*out, *stays, *home]


def waits_for(move: Part, other: Part) -> bool:
    """Whether another's bytes lie where a move goes."""
    return move[1] < other[0] + other[2] and other[0] < move[1] + move[2]


def _places(sizes: Sequence[int], rooms: Sequence[Region]) -> list[int]:
    """An address for each size: the largest first, in the smallest room left, or outside."""
    left, places = list(rooms), [OUTSIDE * (i + 1) for i, _ in enumerate(sizes)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [room for room in left if room[1] - room[0] >= sizes[i]]
        if fitting:
            places[i] = min(fitting, key=lambda room: room[1] - room[0])[0]
            left = without(left, places[i], places[i] + sizes[i])
    return places


# -- pieces ----------------------------------------------------------------------------------------


def by_pieces(
    core: Sequence[Part],
    after: Sequence[Part],
    free: Sequence[Region],
    piece: int,
    narrow: float,
    curves: Curves,
    most: float,
    *,
    away: bool,
    work: list[int] | None = None,
) -> list[Part] | None:
    """What is free is filled, the widest part first; None once that takes the `most` seconds.

    Where the widest part is narrower than a piece by the factor `narrow`, what lies beside it is
    set aside first, in what is free and no target or outside (`away`), until it is as wide. `work`
    is what is left of it; raises `TimeoutError` where that is used up.
    """
    parts, free, seconds, done = list(core), list(free), 0.0, list[Part]()
    left = sum(size for _, _, size in parts)
    while parts:
        if work is not None:
            work[0] -= len(parts) * (len(free) + 4)
            if work[0] < 0:
                raise TimeoutError
        at, start, end = _widest(parts, free)
        width = end - start
        widened = width * narrow < piece
        if widened:
            spare = free
            for _, target, size in (*parts, *after):
                spare = without(spare, target, target + size)
            room = max(spare, key=lambda region: region[1] - region[0], default=(0, 0))
            if away:
                room = OUTSIDE * (1 + len(done)), OUTSIDE * (1 + len(done)) + piece
            wanted = min(piece - width, room[1] - room[0])
            low, high = _beside(parts, (start, end), wanted) if wanted else (0, 0)
            widened = low < high
        if widened:
            shift = room[0] - low
            parts = [
                (source + shift if low <= source < high else source, target, size)
                for part in parts
                for source, target, size in _cut(part, low, high)
            ]
            free = joined(free, low, high)
            free = without(free, room[0], room[0] + high - low)
            done.append((low, room[0], high - low))
        elif not width:
            return None
        else:
            source, target, size = parts.pop(at)
            parts += [(source, target, start - target)] if target < start else []
            parts += (
                [(source + end - target, end, target + size - end)] if end < target + size else []
            )
            shift = source - target
            if source < OUTSIDE:
                free = joined(free, start + shift, end + shift)
            free = without(free, start, end)
            left -= width
            done.append((start + shift, start, width))
        seconds += curves.seconds(done[-1:])
        # What is left takes at least one transfer of all of it.
        if seconds + (curves.inside(left) if left else 0.0) >= most:
            return None
    return done


def _widest(parts: Sequence[Part], free: Sequence[Region]) -> tuple[int, int, int]:
    """The widest region of a target that is free: which part's, from where to where.

    A part that overlaps only itself may be moved whole.
    """
    best = 0, 0, 0
    widest = 0
    for i, (source, target, size) in enumerate(parts):
        stop = target + size
        if size <= widest:
            continue
        if abs(source - target) < size:
            for start, end in joined(free, source, source + size):
                if start <= target and stop <= end:
                    best, widest = (i, target, stop), size
        for start, end in free:
            start, end = max(start, target), min(end, stop)
            if end - start > widest:
                best, widest = (i, start, end), end - start
    return best


def _beside(parts: Sequence[Part], hole: Region, size: int) -> Region:
    """At most `size` bytes beside a hole that lie where others go; or of the longest such run."""
    lying = _union([(at, at + length) for at, _, length in parts if at < OUTSIDE])
    going = _union([(at, at + length) for _, at, length in parts])
    both = [(max(a, c), min(b, d)) for a, b in lying for c, d in going if a < d and c < b]
    for start, end in both:
        if start == hole[1]:
            return start, min(end, start + size)
    for start, end in both:
        if end == hole[0]:
            return max(start, end - size), end
    start, end = max(both, key=lambda region: region[1] - region[0], default=(0, 0))
    return start, min(end, start + size)


def _cut(part: Part, low: int, high: int) -> Iterator[Part]:
    """A part cut where its source enters and leaves [low, high)."""
    source, target, size = part
    cuts = [source, *(at for at in (low, high) if source < at < source + size), source + size]
    for start, end in pairwise(cuts):
        yield start, target + start - source, end - start


# -- regions ---------------------------------------------------------------------------------------


def _union(regions: Sequence[Region]) -> list[Region]:
    """Regions apart, those that meet as one."""
    apart: list[Region] = []
    for start, end in sorted(regions):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart


def without(regions: Sequence[Region], start: int, end: int) -> list[Region]:
    """Regions less one.

    >>> without([(0, 10), (20, 30)], 5, 25)
    [(0, 5), (25, 30)]
    """
    left: list[Region] = []
    for a, b in regions:
        if b <= start or end <= a:
            left.append((a, b))
            continue
        if a < start:
            left.append((a, start))
        if end < b:
            left.append((end, b))
    return left


def joined(regions: Sequence[Region], start: int, end: int) -> list[Region]:
    """Regions and one more, those that meet as one.

    >>> joined([(0, 10), (20, 30)], 10, 15)
    [(0, 15), (20, 30)]
    """
    return _union([*regions, (start, end)])
