"""What fixed ways to carry out moves inside L1 take, and whether transfers land.

The ways are the checker's (`stitch.planner.checker.relocations`), inside the space and through the
one beside it. Nothing here is the mover's, so a defect of the mover cannot lower what it is
compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from stitch.planner.checker.relocations import (
    NARROW,
    OUTSIDE,
    MoveSequence,
    Part,
    TransferCosts,
    by_pieces,
    joined,
    ladder,
    waits_for,
    whole_tensors,
    without,
)

#: A piece that would take so many times the best, were all transfers as wide, is not looked at.
HOPELESS = 2.0


def best_way(
    moves: Sequence[Part], base: int, limit: int, granule: int, curves: TransferCosts
) -> MoveSequence:
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

    def way(name: str, transfers: Sequence[Part]) -> MoveSequence:
        ordered = (*before, *transfers, *after)
        return MoveSequence(name, curves.seconds(ordered), ordered)

    outside = [(i, OUTSIDE * (k + 1), n) for k, (i, _, n) in enumerate(moving)]
    home = [(OUTSIDE * (k + 1), i, n) for k, (_, i, n) in enumerate(moving)]
    every = (*outside, *home)
    best = MoveSequence("all through DRAM", curves.seconds(every), every)
    if not core:
        return min(best, way("as they are", ()), key=lambda way: way.seconds)
    for name, transfers in whole_tensors(core, spare, away=True):
        best = min(best, way(name, transfers), key=lambda way: way.seconds)
    around = curves.seconds((*before, *after))
    nbytes = sum(size for _, _, size in core)
    for size in ladder(core, granule):
        if nbytes / size * curves.inside(size) > HOPELESS * best.seconds:
            break
        for away, narrow in product((False, True), NARROW):
            most = best.seconds - around
            done = by_pieces(core, after, free, size, narrow, curves, most, away=away)
            if done is not None:
                name = f"pieces of {size} B {'in DRAM' if away else 'inside'}"
                best = min(best, way(name, done), key=lambda way: way.seconds)
    return best


def in_order(moves: Sequence[Part]) -> tuple[list[Part], list[Part], list[Part]]:
    """Moves that can go first one after the other, those on cycles, those that can go last."""
    before, core, after = list[Part](), list(moves), list[Part]()
    while ready := [
        m for m in core if not any(waits_for(m, other) for other in core if other != m)
    ]:
        before.append(ready[0])
        core.remove(ready[0])
    while ready := [
        m for m in core if not any(waits_for(other, m) for other in core if other != m)
    ]:
        after.insert(0, ready[0])
        core.remove(ready[0])
    return before, core, after


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
