"""Clusters: what of a plan has addresses in common, and where that may lie instead.

Comes in: a known plan, and the picture of memory that it is to run in. Goes out: addresses of the
buffers that it makes, or nothing. Must not know: steps of the plan that is made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stitch.memory import LENT_ADDRESSES, Allocator
from stitch.planner.plan import Allocate, Buffer, Execute, Plan, PlanRequest, Relocate
from stitch.program import Space


@dataclass(slots=True)
class _Cluster:
    """Buffers that have bytes in common, one after the other; `[start, end)` in the known plan.

    `shift`: to where it must lie, None: anywhere.
    """

    space: Space
    start: int
    end: int
    members: list[int]
    shift: int | None = None


#: The number of what nobody asks the address of.
NOTHING = 1 << 60
#: Space, address and size in the known plan, the buffer's number, and where it must lie now.
_Part = tuple[Space, int, int, int, int | None]
#: Buffers that must lie somewhere, and where.
_Fixed = Mapping[int, Collection[int | None]]


def addresses_in(
    request: PlanRequest, known: Plan, numbers: Mapping[int, int], given_up: Collection[int]
) -> dict[int, int] | None:
    """Where in a request's picture the buffers lie that a known plan makes, by their numbers there;
    None where there is no place for them.

    `numbers`: the request's for buffers of the known one; `given_up`: those that the plan frees.
    Of a buffer that is moved also where it lies before; where it is moved to has the number
    `~number`.
    """
    old = {b.number: b for b in known.request.buffers}
    new = {b.number: b for b in request.buffers}
    fixed, moved = known.fixed, moved_in(known)
    if not all(_lies_alike(old[n], new[b], fixed, moved) for n, b in numbers.items()):
        return None
    made = [*_made(known, fixed, moved)]
    if any(_need_not_move(moved[n][0], n in old, fixed, made) for n in moved):
        return None
    leaving = {*given_up, *(moved.keys() & old.keys())}
    parts: list[_Part] = [
        (old[n].space, at, old[n].size_per_bank, n if n in moved else NOTHING, now)
        for n in leaving
        if (at := old[n].address) is not None and (now := new[numbers[n]].address) is not None
    ]
    parts += made
    clusters = _clusters(parts)
    if clusters is None:
        return None
    left = {numbers[n] for n in leaving}
    if not _find_places(request, [b for b in request.buffers if b.number not in left], clusters):
        return None
    lay = {number: address for _, address, _, number, _ in parts}
    return {n: lay[n] + (cluster.shift or 0) for cluster in clusters for n in cluster.members}


def moved_in(known: Plan) -> dict[int, tuple[Buffer, int]]:
    """The buffers that a plan moves inside their space, as they lay, and where to, by number."""
    moved = {n: at for s in known.steps if isinstance(s, Relocate) for n, at in s.targets}
    made = [step.buffer for step in known.steps if isinstance(step, Allocate)] if moved else []
    those = (*known.request.buffers, *made)
    return {b.number: (b, moved[b.number]) for b in those if b.number in moved}


def _lies_alike(
    old: Buffer, new: Buffer, fixed: _Fixed, moved: Mapping[int, tuple[Buffer, int]]
) -> bool:
    """Whether a buffer of before lies where it must: where a program reads it, or in the way of
    one; what is moved to where a program reads it lies anywhere else."""
    number = old.number
    wanted = fixed.get(number, ())
    if number in moved and old.address not in wanted:
        target = moved[number][1]
        if target in wanted:
            return new.address != target
    elif not wanted:
        return True
    return old.address == new.address


def _need_not_move(buffer: Buffer, was_there: bool, fixed: _Fixed, made: Sequence[_Part]) -> bool:
    """Whether a plan without this move may do where things lie otherwise: it is in nobody's way who
    must be there, nor read elsewhere; or need not be made there."""
    number, start = buffer.number, buffer.address or 0
    is_in_the_way = any(
        space is buffer.space
        and at < start + buffer.size_per_bank
        and start < at + size
        and other != number
        and wanted is not None
        for space, at, size, other, wanted in made
    )
    if was_there:
        return not is_in_the_way and number not in fixed
    return not is_in_the_way or start not in fixed.get(number, ())


def _made(known: Plan, fixed: _Fixed, moved: Mapping[int, tuple[Buffer, int]]) -> Iterator[_Part]:
    for step in known.steps:
        if isinstance(step, Allocate):
            b = step.buffer
            assert b.address is not None
            at = b.address if b.address in fixed.get(b.number, ()) else None
            yield b.space, b.address, b.size_per_bank, b.number, at
        elif isinstance(step, Relocate):
            for n, address in step.targets:
                at = address if address in fixed.get(n, ()) else None
                yield step.space, address, moved[n][0].size_per_bank, ~n, at
        elif isinstance(step, Execute) and step.scratch is not None:
            space, address, size = step.scratch
            # In L1 it is at a promised place, elsewhere in a buffer.
            yield space, address, size, NOTHING, address if space is Space.L1 else None


def _clusters(parts: list[_Part]) -> list[_Cluster] | None:
    """Parts that overlap, together; None where one would have to lie at two places."""
    clusters: list[_Cluster] = []
    for space, start, size, number, wanted in sorted(parts, key=lambda p: (p[0].value, p[1])):
        end = start + size
        cluster = clusters[-1] if clusters else None
        if cluster is None or cluster.space is not space or start >= cluster.end:
            cluster = _Cluster(space, start, end, [])
            clusters.append(cluster)
        elif end > cluster.end:
            cluster.end = end
        if number != NOTHING:
            cluster.members.append(number)
        if wanted is not None:
            if cluster.shift not in (None, wanted - start):
                return None
            cluster.shift = wanted - start
    return clusters


def _find_places(request: PlanRequest, staying: list[Buffer], clusters: list[_Cluster]) -> bool:
    """Shift every cluster to bytes that are free beside what stays, and not another's; whether that
    can be. Where nothing says otherwise a cluster stays where it was."""
    allocators = {}
    for space in {cluster.space for cluster in clusters}:
        shape = request.machine.shape.space(space)
        allocators[space] = Allocator(shape.base, shape.limit, shape.alignment)
    for buffer in staying:
        at = buffer.address
        if at is not None and at < LENT_ADDRESSES and buffer.space in allocators:
            allocators[buffer.space].alloc_at(at, buffer.size_per_bank)
    late: list[_Cluster] = []
    for cluster in sorted(clusters, key=lambda b: b.shift is None):
        allocator, size = allocators[cluster.space], cluster.end - cluster.start
        at = cluster.start + (cluster.shift or 0)
        if allocator.is_free(at, size):
            allocator.alloc_at(at, size)
            cluster.shift = at - cluster.start
        elif cluster.shift is None:
            late.append(cluster)
        else:
            return False
    for cluster in sorted(late, key=lambda b: b.start - b.end):
        address = allocators[cluster.space].try_alloc(cluster.end - cluster.start)
        if address is None:
            return False
        cluster.shift = address - cluster.start
    return True
