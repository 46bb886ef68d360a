"""What fixed ways to carry out moves inside L1 take: a plain model, apart from the mover's.

The bytes of a tensor are parts (source, target, size), in bytes per bank; what is free is a list of
regions. A way is played part by part on these and priced by the machine's own curves. Nothing here
is the mover's, so a defect of the mover cannot lower what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from stitch.machine import Machine
from stitch.program import Space

#: Bytes from one address to another.
Part = tuple[int, int, int]
Region = tuple[int, int]
#: From here on addresses stand for bytes outside.
OUTSIDE = 1 << 60
#: Each piece is so much smaller than the last, down to so many granules.
LADDER, LEAST_GRANULES = 0.8, 8
#: A piece that would take so many times the best, were all transfers as wide, is not looked at.
HOPELESS = 2.0
#: What is free and narrower than a piece by these factors is widened anew.
NARROW = (1.0, 4.0)


class Curves:
    """Simulated seconds of one transfer of so many bytes per bank."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._banks = machine.shape.space(Space.L1).banks
        self._known: dict[tuple[Space, Space, int], float] = {}

    def inside(self, size: int) -> float:
        return self._seconds(Space.L1, Space.L1, size)

    def out(self, size: int) -> float:
        return self._seconds(Space.L1, Space.DRAM, size)

    def back(self, size: int) -> float:
        return self._seconds(Space.DRAM, Space.L1, size)

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
class Way:
    """A way to carry out moves: its transfers in order, and the seconds that they take."""

    name: str
    seconds: float
    transfers: tuple[Part, ...]


def best_way(moves: Sequence[Part], base: int, limit: int, granule: int, curves: Curves) -> Way:
    """The fastest of all ways for tensors of [base, limit); those that do not move are obstacles.

    >>> from stitch.machine import load_machine
    >>> swap = [(0, 64, 64), (64, 0, 64)]
    >>> best_way(swap, 0, 1024, 16, Curves(load_machine("tiny"))).transfers
    ((0, 128, 64), (64, 0, 64), (128, 64, 64))
    """
    moving = [move for move in moves if move[0] != move[1]]
    free = [(base, limit)]
    for source, _, size in moves:
        free = without(free, source, source + size)
    before, core, after = in_order(moving)
    for source, target, size in before:
        free = without(joined(free, source, source + size), target, target + size)
    spare = free
    for _, target, size in after:
        spare = without(spare, target, target + size)

    def way(name: str, transfers: Sequence[Part]) -> Way:
        ordered = (*before, *transfers, *after)
        return Way(name, curves.seconds(ordered), ordered)

    outside = [(i, OUTSIDE * (k + 1), n) for k, (i, _, n) in enumerate(moving)]
    home = [(OUTSIDE * (k + 1), i, n) for k, (_, i, n) in enumerate(moving)]
    every = (*outside, *home)
    best = Way("all through DRAM", curves.seconds(every), every)
    if not core:
        return min(best, way("as they are", ()), key=lambda way: way.seconds)
    for name, transfers in _whole(core, spare):
        best = min(best, way(name, transfers), key=lambda way: way.seconds)
    around = curves.seconds((*before, *after))
    nbytes = sum(size for _, _, size in core)
    piece = float(nbytes)
    while piece >= granule * LEAST_GRANULES:
        size = int(piece) // granule * granule
        if nbytes / size * curves.inside(size) > HOPELESS * best.seconds:
            break
        for away, narrow in product((False, True), NARROW):
            most = best.seconds - around
            done = _by_pieces(core, after, free, size, narrow, curves, most, away=away)
            if done is not None:
                name = f"pieces of {size} B {'in DRAM' if away else 'inside'}"
                best = min(best, way(name, done), key=lambda way: way.seconds)
        piece *= LADDER
    return best


def in_order(moves: Sequence[Part]) -> tuple[list[Part], list[Part], list[Part]]:
    """Moves that can go first one after the other, those on cycles, those that can go last."""
    before, core, after = list[Part](), list(moves), list[Part]()
    while ready := [m for m in core if not any(_waits(m, other) for other in core if other != m)]:
        before.append(ready[0])
        core.remove(ready[0])
    while ready := [m for m in core if not any(_waits(other, m) for other in core if other != m)]:
        after.insert(0, ready[0])
        core.remove(ready[0])
    return before, core, after


def _waits(move: Part, other: Part) -> bool:
    """Whether another's bytes lie where a move goes."""
    return move[1] < other[0] + other[2] and other[0] < move[1] + move[2]


# -- whole tensors ---------------------------------------------------------------------------------


def _whole(core: Sequence[Part], spare: Sequence[Region]) -> Iterator[tuple[str, list[Part]]]:
    """Every set of whole tensors whose absence breaks all cycles, in free regions and in DRAM."""
    waits = [
        sum(1 << j for j, other in enumerate(core) if i != j and _waits(move, other))
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
        for name, rooms in (("inside", spare), ("in DRAM", ())):
            places = _places([size for _, _, size in chosen], rooms)
            out = [(move[0], at, move[2]) for move, at in zip(chosen, places, strict=True)]
            home = [(at, move[1], move[2]) for move, at in zip(chosen, places, strict=True)]
            yield f"whole tensors set aside {name}", [*out, *stays, *home]


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


def _by_pieces(
    core: Sequence[Part],
    after: Sequence[Part],
    free: Sequence[Region],
    piece: int,
    narrow: float,
    curves: Curves,
    most: float,
    *,
    away: bool,
) -> list[Part] | None:
    """What is free is filled, the widest part first; None once that takes the `most` seconds.

    Where the widest part is narrower than a piece by the factor `narrow`, what lies beside it is
    set aside first, in what is free and no target or in DRAM (`away`), until it is as wide.
    """
    parts, free, seconds, done = list(core), list(free), 0.0, list[Part]()
    left = sum(size for _, _, size in parts)
    while parts:
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


# -- proof -----------------------------------------------------------------------------------------


def lands(moves: Sequence[Part], transfers: Iterable[Part]) -> bool:
    """Whether transfers, one after the other, bring all bytes from their sources to their targets.

    >>> lands([(0, 64, 64), (64, 0, 64)], [(0, 64, 64), (64, 0, 64)])
    False
    """
    #: What lies where: (start, end, where the first byte lay at first).
    lying = [(source, source + size, source) for source, _, size in moves]
    for source, target, size in transfers:
        carried = _lying_in(lying, source, source + size)
        kept = _lying_in(lying, 0, target) + _lying_in(lying, target + size, OUTSIDE**2)
        shift = target - source
        lying = [*kept, *((start + shift, end + shift, first) for start, end, first in carried)]
    for source, target, size in moves:
        at = target
        for start, end, first in sorted(_lying_in(lying, target, target + size)):
            if start != at or first != source + at - target:
                return False
            at = end
        if at != target + size:
            return False
    return True


def _lying_in(
    lying: Iterable[tuple[int, int, int]], low: int, high: int
) -> list[tuple[int, int, int]]:
    return [
        (max(start, low), min(end, high), first + max(start, low) - start)
        for start, end, first in lying
        if start < high and low < end
    ]


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
