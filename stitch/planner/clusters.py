"""Clusters: what of a plan has addresses in common, and where that may lie instead.

Comes in: a known plan, and the picture of memory that it is to run in. Goes out: addresses of the
buffers that it makes, or nothing. Must not know: steps of the plan that is made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stitch.memory import LENT_ADDRESSES, Allocator
from stitch.planner.plan import Allocate, Buffer, Execute, Plan, PlanRequest, Relocate
from stitch.program import Space


class _Part(NamedTuple):
    """Bytes that the known plan fills at some time: `[start, end)` in it, and where they must start
    now, None: anywhere. `number`: the buffer whose address these are (`is_target`: to which it is
    moved), None for what nobody asks the address of."""

    space: Space
    start: int
    end: int
    wanted: int | None
    number: int | None
    is_target: bool = False


@dataclass(slots=True)
class _Cluster:
    """Parts that have bytes in common, one after the other; `[start, end)` in the known plan.

    `shift`: to where it must lie, None: anywhere.
    """

    space: Space
    start: int
    end: int
    parts: list[_Part]
    shift: int | None = None


#: Buffers that must lie somewhere, and where.
_Fixed = Mapping[int, Collection[int | None]]


def addresses_in(
    request: PlanRequest, known: Plan, numbers: Mapping[int, int], given_up: Collection[int],
    taken: Mapping[Space, Allocator],
) -> tuple[dict[int, int], dict[int, int]] | None:  # fmt: skip
    """Where in a request's picture the buffers lie that a known plan makes or moves, and where it
    moves these to, by their numbers there; None where there is no place for them.

    `numbers`: the request's for buffers of the known one; `given_up`: those that the plan frees;
    `taken`: what lies in the spaces, be it in the picture or not.
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
    there = [
        _Part(b.space, b.address, b.address + b.size_per_bank, now, n if n in moved else None)
        for n in leaving
        if (b := old[n]).address is not None and (now := new[numbers[n]].address) is not None
    ]
    clusters = _clusters([*there, *made])
    if clusters is None:
        return None
    free = {space: taken[space].clone() for space in {cluster.space for cluster in clusters}}
    for n in leaving:
        space, address = old[n].space, new[numbers[n]].address
        if space in free and address is not None and address < LENT_ADDRESSES:
            free[space].free(address)
    if not _find_places(free, clusters):
        return None
    addresses: dict[int, int] = {}
    targets: dict[int, int] = {}
    for cluster in clusters:
        for part in cluster.parts:
            if part.number is not None:
                those = targets if part.is_target else addresses
                those[part.number] = part.start + (cluster.shift or 0)
    return addresses, targets


def moved_in(known: Plan) -> dict[int, tuple[Buffer, int]]:
    """The buffers that a plan moves inside their space, as they lay, and where to, by number."""
    moved = {n: at for s in known.steps if isinstance(s, Relocate) for n, at in s.targets}
    if not moved:
        return {}
    made = [step.buffer for step in known.steps if isinstance(step, Allocate)]
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
        part.space is buffer.space
        and part.start < start + buffer.size_per_bank
        and start < part.end
        and (part.number != number or part.is_target)
        and part.wanted is not None
        for part in made
    )
    if was_there:
        return not is_in_the_way and number not in fixed
    return not is_in_the_way or start not in fixed.get(number, ())


def _made(known: Plan, fixed: _Fixed, moved: Mapping[int, tuple[Buffer, int]]) -> Iterator[_Part]:
    for step in known.steps:
        if isinstance(step, Allocate):
            b, at = step.buffer, step.buffer.address
            assert at is not None
            wanted = at if at in fixed.get(b.number, ()) else None
            yield _Part(b.space, at, at + b.size_per_bank, wanted, b.number)
        elif isinstance(step, Relocate):
            for n, at in step.targets:
                wanted = at if at in fixed.get(n, ()) else None
                end = at + moved[n][0].size_per_bank
                yield _Part(step.space, at, end, wanted, n, is_target=True)
        elif isinstance(step, Execute) and step.scratch is not None:
            space, at, size = step.scratch
            # In L1 it is at a promised place, elsewhere in a buffer.
            yield _Part(space, at, at + size, at if space is Space.L1 else None, None)


def _clusters(parts: list[_Part]) -> list[_Cluster] | None:
    """Parts that overlap, together; None where one would have to lie at two places."""
    clusters: list[_Cluster] = []
    for part in sorted(parts, key=lambda p: (p.space.value, p.start)):
        cluster = clusters[-1] if clusters else None
        if cluster is None or cluster.space is not part.space or part.start >= cluster.end:
            cluster = _Cluster(part.space, part.start, part.end, [])
            clusters.append(cluster)
        cluster.end = max(cluster.end, part.end)
        cluster.parts.append(part)
        if part.wanted is not None:
            shift = part.wanted - part.start
            if cluster.shift not in (None, shift):
                return None
            cluster.shift = shift
    return clusters


def _find_places(allocators: Mapping[Space, Allocator], clusters: list[_Cluster]) -> bool:
    """Shift every cluster to bytes that are free and not another's; whether that can be. Where
    nothing says otherwise a cluster stays where it was."""
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
