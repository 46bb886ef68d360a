"""Clusters: what of a plan has addresses in common, and where that may lie instead.

Comes in: a known plan, and the picture of memory that it is to run in. Goes out: addresses of the
buffers that it makes, or nothing. Must not know: steps of the plan that is made of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from stitch.memory import LENT_ADDRESSES, Allocator
from stitch.planner.plan import Allocate, Buffer, Execute, Plan, PlanRequest
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


#: Space, address and size in the known plan, the buffer's number or -1, and where it must lie now.
_Part = tuple[Space, int, int, int, int | None]


def addresses_in(
    request: PlanRequest, known: Plan, numbers: Mapping[int, int], given_up: Collection[int]
) -> dict[int, int] | None:
    """Where in a request's picture the buffers lie that a known plan makes, by their numbers there;
    None where there is no place for them.

    `numbers`: the request's for buffers of the known one; `given_up`: those that the plan frees.
    """
    old = {b.number: b for b in known.request.buffers}
    new = {b.number: b for b in request.buffers}
    fixed = known.fixed
    if any(old[n].address != new[numbers[n]].address for n in fixed & numbers.keys()):
        return None
    gone = [(old[number], new[numbers[number]]) for number in given_up]
    parts = [
        (a.space, a.address, a.size_per_bank, -1, b.address)
        for a, b in gone
        if a.address is not None
    ]
    parts += _made(known, fixed)
    clusters = _clusters(parts)
    if clusters is None:
        return None
    leaves = {buffer.number for _, buffer in gone}
    if not _find_places(request, [b for b in request.buffers if b.number not in leaves], clusters):
        return None
    made = {s.buffer.number: s.buffer.address or 0 for s in known.steps if isinstance(s, Allocate)}
    return {n: made[n] + (cluster.shift or 0) for cluster in clusters for n in cluster.members}


def _made(known: Plan, fixed: set[int]) -> Iterator[_Part]:
    for step in known.steps:
        if isinstance(step, Allocate):
            b = step.buffer
            assert b.address is not None
            at = b.address if b.number in fixed else None
            yield b.space, b.address, b.size_per_bank, b.number, at
        elif isinstance(step, Execute) and step.scratch is not None:
            space, address, size = step.scratch
            # In L1 it is at a promised place, elsewhere in a buffer.
            yield space, address, size, -1, address if space is Space.L1 else None


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
        if number >= 0:
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
