"""Finding addresses inside one space: placing pieces, opening holes, packing exactly.

Pure functions over a `SpaceProblem`: buffers that may move, regions that may not, pieces that need
room. The answer names the new address of every buffer that moves and of every piece. Nothing moves
if it need not; else a window is opened or a run of buffers slides, and fewer bytes are looked for:
where few buffers may move, in all choices of them, so the fewest possible move; where many, in runs
of neighbours and in subsets of what was found. At last everything is packed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from stitch.memory import Allocator
from stitch.packing import gaps_between, pack

#: With at most so many buffers that may move, the least bytes to move are found for certain.
EXACT_BUFFERS = 8
#: With more, so many choices are tried, each with so many nodes of exact packing.
MAX_CHOICES = 150
CHOICE_NODES = 2_000


@dataclass(frozen=True, slots=True)
class Repacking:
    """New addresses of the buffers that move (by number), addresses of the pieces (by position)."""

    moves: tuple[tuple[int, int], ...]
    pieces: tuple[int, ...]
    moved_nbytes: int


@dataclass(frozen=True, slots=True)
class SpaceProblem:
    """One space at one moment; sizes and addresses in bytes per bank.

    `movable`: (number, address, size). `displaced`: buffers that must get another address.
    `obstacles`: (address, size) regions that stay or are promised. `pieces`: sizes that need room.
    """

    base: int
    limit: int
    alignment: int
    movable: tuple[tuple[int, int, int], ...]
    displaced: tuple[tuple[int, int, int], ...]
    obstacles: tuple[tuple[int, int], ...]
    pieces: tuple[int, ...]

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        return gaps_between(self.obstacles, self.base, self.limit)

    @property
    def all_pieces(self) -> tuple[int, ...]:
        """The sizes of everything that has to lie in the gaps."""
        buffers = (*self.displaced, *self.movable)
        return (*(size for _, _, size in buffers), *self.pieces)


def arrange(problem: SpaceProblem) -> Repacking | None:
    """The cheapest arrangement found, None where there is provably none.

    Raises `TimeoutError` where the exact search gave up.
    """
    if sum(problem.all_pieces) > sum(size for _, size in problem.gaps):
        return None
    arrangements = [a for a in (_open_windows(problem), _slide(problem)) if a is not None]
    best = min(arrangements, key=lambda a: a.moved_nbytes, default=None)
    if len(problem.movable) <= EXACT_BUFFERS:
        return _move_least(problem, best)
    best = _move_a_run(problem, best)
    return _pack_exactly(problem) if best is None else _leave_more(problem, best)


def place(problem: SpaceProblem) -> Repacking | None:
    """The arrangement in which only displaced buffers move, None where best fit finds none."""
    return _place(problem, {})


def _allocator(problem: SpaceProblem, buffers: dict[int, tuple[int, int]]) -> Allocator:
    allocator = Allocator(problem.base, problem.limit, problem.alignment)
    for address, size in problem.obstacles:
        allocator.alloc_at(address, size)
    for address, size in buffers.values():
        allocator.alloc_at(address, size)
    return allocator


def _place(problem: SpaceProblem, moved: dict[int, int]) -> Repacking | None:
    """Displaced buffers and pieces by best fit, largest first; `moved` has been decided before."""
    buffers = {n: (moved.get(n, a), size) for n, a, size in problem.movable}
    allocator = _allocator(problem, buffers)
    jobs = [(size, 0, n) for n, _, size in problem.displaced]
    jobs += [(size, 1, i) for i, size in enumerate(problem.pieces)]
    moves, pieces = dict(moved), [0] * len(problem.pieces)
    for size, kind, index in sorted(jobs, key=lambda job: (-job[0], job[1], job[2])):
        address = allocator.try_alloc(size)
        if address is None:
            return None
        if kind:
            pieces[index] = address
        else:
            moves[index] = address
    return _arrangement(problem, moves, pieces)


def _arrangement(problem: SpaceProblem, moves: dict[int, int], pieces: list[int]) -> Repacking:
    before = {n: (a, size) for n, a, size in (*problem.movable, *problem.displaced)}
    real = {n: address for n, address in moves.items() if before[n][0] != address}
    return Repacking(tuple(sorted(real.items())), tuple(pieces), sum(before[n][1] for n in real))


def _open_windows(problem: SpaceProblem) -> Repacking | None:
    """One window for each piece or displaced buffer that finds no hole, cheapest windows first."""
    moved: dict[int, int] = {}
    reserved = list(problem.obstacles)
    sizes = {n: size for n, _, size in problem.movable}
    jobs = [(size, 0, n) for n, _, size in problem.displaced]
    jobs += [(size, 1, i) for i, size in enumerate(problem.pieces)]
    where = {n: a for n, a, _ in problem.movable}
    pieces = [0] * len(problem.pieces)
    for size, kind, index in sorted(jobs, key=lambda job: (-job[0], job[1], job[2])):
        buffers = [(n, a, sizes[n]) for n, a in where.items()]
        opened = _open_one(problem, buffers, reserved, size)
        if opened is None:
            return None
        address, new_places = opened
        reserved.append((address, size))
        where |= new_places
        moved |= new_places
        if kind:
            pieces[index] = address
        else:
            moved[index] = address
    return _arrangement(problem, moved, pieces)


def _open_one(
    problem: SpaceProblem,
    buffers: list[tuple[int, int, int]],
    reserved: list[tuple[int, int]],
    size: int,
) -> tuple[int, dict[int, int]] | None:
    windows = []
    for start, room in gaps_between(reserved, problem.base, problem.limit):
        if room < size:
            continue
        last = start + room - size
        starts = {start, last}
        for _, address, length in buffers:
            starts.add(min(max(address + length, start), last))
            starts.add(min(max(address - size, start), last))
        for at in starts:
            touched = [b for b in buffers if b[1] < at + size and at < b[1] + b[2]]
            windows.append((sum(b[2] for b in touched), -at, touched))
    windows.sort(key=lambda w: w[:2])
    for _, negated, touched in windows[:64]:
        at = -negated
        chosen = {b[0] for b in touched}
        fixed = {n: (a, length) for n, a, length in buffers if n not in chosen}
        trial = SpaceProblem(
            problem.base, problem.limit, problem.alignment, (), (), (*reserved, (at, size)), ()
        )
        allocator = _allocator(trial, fixed)
        places: dict[int, int] = {}
        for number, _, length in sorted(touched, key=lambda b: -b[2]):
            hole = allocator.try_alloc(length)
            if hole is None:
                break
            places[number] = hole
        else:
            return at, places
    return None


def _slide(problem: SpaceProblem) -> Repacking | None:
    """Slide one run of neighbours within a gap so that all pieces and displaced buffers fit."""
    best: Repacking | None = None
    for start, room in problem.gaps:
        inside = sorted(
            (b for b in problem.movable if start <= b[1] and b[1] + b[2] <= start + room),
            key=lambda b: b[1],
        )
        for first in range(len(inside)):
            at = inside[first - 1][1] + inside[first - 1][2] if first else start
            moved: dict[int, int] = {}
            for number, address, size in inside[first:]:
                if address != at:
                    moved[number] = at
                at += size
                cost = sum(b[2] for b in inside if b[0] in moved)
                if best is not None and cost >= best.moved_nbytes:
                    break
                arrangement = _place(problem, moved) if moved else None
                if arrangement is not None:
                    best = arrangement
                    break
    return best


_Buffers = tuple[tuple[int, int, int], ...]


def _bytes_of(buffers: _Buffers) -> int:
    return sum(size for _, _, size in buffers)


def _move_only(
    problem: SpaceProblem, chosen: _Buffers, node_limit: int | None = None
) -> Repacking | None:
    """The arrangement in which all movable buffers but these stay; None where there is none."""
    stays = tuple((a, size) for n, a, size in problem.movable if (n, a, size) not in chosen)
    obstacles = tuple(sorted((*problem.obstacles, *stays)))
    return _pack_exactly(replace(problem, movable=chosen, obstacles=obstacles), node_limit)


def _move_least(problem: SpaceProblem, best: Repacking | None) -> Repacking | None:
    """The choice of buffers with the fewest bytes such that all else can stay; exact."""
    spare = (best.moved_nbytes if best is not None else 1 << 60) - _bytes_of(problem.displaced)
    choices = [
        chosen
        for count in range(len(problem.movable) + 1)
        for chosen in combinations(problem.movable, count)
        if _bytes_of(chosen) < spare
    ]
    for chosen in sorted(choices, key=lambda c: (_bytes_of(c), c)):
        try:
            arrangement = _move_only(problem, chosen)
        except TimeoutError:
            if best is None:
                raise
            return best
        if arrangement is not None:
            return arrangement
    return best


def _move_a_run(problem: SpaceProblem, best: Repacking | None) -> Repacking | None:
    """The run of neighbours with the fewest bytes that can make room, if it beats the best."""
    buffers = tuple(sorted(problem.movable, key=lambda b: b[1]))
    runs = [buffers[i:j] for i, j in combinations(range(len(buffers) + 1), 2)]
    for run in sorted(runs, key=_bytes_of)[:MAX_CHOICES]:
        if best is not None and _bytes_of(run) + _bytes_of(problem.displaced) >= best.moved_nbytes:
            break
        try:
            arrangement = _move_only(problem, run, CHOICE_NODES)
        except TimeoutError:
            continue
        if arrangement is not None:
            return arrangement
    return best


def _leave_more(problem: SpaceProblem, best: Repacking) -> Repacking:
    """As the best, but for buffers that need not move after all, or that a smaller one replaces."""
    tries = MAX_CHOICES
    improved = True
    while improved:
        improved = False
        moving = dict(best.moves)
        chosen = tuple(b for b in problem.movable if b[0] in moving)
        others = tuple(b for b in problem.movable if b[0] not in moving)
        for buffer in sorted(chosen, key=lambda b: -b[2]):
            left = tuple(b for b in chosen if b != buffer)
            smaller = sorted((b for b in others if b[2] < buffer[2]), key=lambda b: b[2])
            for more in ((), *((b,) for b in smaller)):
                tries -= 1
                if tries < 0:
                    return best
                try:
                    arrangement = _move_only(problem, (*left, *more), CHOICE_NODES)
                except TimeoutError:
                    continue
                if arrangement is not None and arrangement.moved_nbytes < best.moved_nbytes:
                    best, improved = arrangement, True
                    break
            if improved:
                break
    return best


def _pack_exactly(problem: SpaceProblem, node_limit: int | None = None) -> Repacking | None:
    gaps = problem.gaps
    buffers = (*problem.displaced, *problem.movable)
    chosen = pack(problem.all_pieces, tuple(size for _, size in gaps), node_limit=node_limit)
    if chosen is None:
        return None
    moves: dict[int, int] = {}
    pieces = [0] * len(problem.pieces)
    for index, (start, _) in enumerate(gaps):
        here = [b for b, gap in zip(buffers, chosen, strict=False) if gap == index]
        at = start
        # Buffers keep their order, so those that stay in their gap only slide.
        for number, _, size in sorted(here, key=lambda b: b[1]):
            moves[number] = at
            at += size
        for i, size in enumerate(problem.pieces):
            if chosen[len(buffers) + i] == index:
                pieces[i] = at
                at += size
    return _arrangement(problem, moves, pieces)
