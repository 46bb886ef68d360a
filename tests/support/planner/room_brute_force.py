"""Whether a task finds room at all, by trying everything: it shares no code with the planner.

All that is neither pinned nor the task's own may wait on the host. So a task runs if what it needs
in each space, and only that, can be laid out beside what is pinned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from stitch.machine import footprint
from stitch.planner import Buffer, PlanRequest
from stitch.program import Space, TensorDesc

Region = tuple[int, int]
#: What one way to serve an input takes: (block or None, address or None, size per bank).
Way = tuple[int | None, int | None, int]


#: Ways to lay out one set of pieces that are tried.
MOST_WAYS = 20_000


class TooManyWaysError(Exception):
    """There are more ways to lay something out than can be tried."""


def task_finds_room(request: PlanRequest, index: int) -> bool:
    """Whether some way to serve the inputs of a task leaves room for all that it needs.

    Raises `TooManyWaysError` for what is more than can be tried.
    """
    return all(_space_does(request, index, space) for space in request.machine.shape.spaces)


def _space_does(request: PlanRequest, index: int, space: Space) -> bool:
    shape = request.machine.shape.space(space)
    regions = [
        (b.address, b.size_per_bank)
        for b in request.buffers
        if b.pinned and b.space is space and b.address is not None
    ]
    pieces: list[int] = []
    what = request.tasks[index].transformation
    if what.scratch is not None and what.scratch.space is space and what.scratch.size_per_bank:
        size = -(-what.scratch.size_per_bank // shape.granule) * shape.granule
        if space is Space.L1:
            regions.append((shape.base, size))
        else:
            pieces.append(size)
    taken = {o for o, _ in what.aliases}
    for o, desc in enumerate(what.outputs):
        if o not in taken and desc.layout.space is space:
            _add(regions, pieces, desc.layout.address, _size(request, desc))
    for ways in itertools.product(*_inputs(request, index, space)):
        mine, floating = [*regions], [*pieces]
        for _, address, size in dict.fromkeys(
            (block if block is not None else -1 - at, address, size)
            for at, (block, address, size) in enumerate(ways)
            if size
        ):
            _add(mine, floating, address, size)
        if lies(mine, floating, shape.base, shape.limit):
            return True
    return False


def _add(regions: list[Region], pieces: list[int], address: int | None, size: int) -> None:
    if address is None:
        pieces.append(size)
    else:
        regions.append((address, size))


def _size(request: PlanRequest, desc: TensorDesc) -> int:
    return footprint(desc, request.machine.shape).size_per_bank


def _inputs(request: PlanRequest, index: int, space: Space) -> Iterator[list[Way]]:
    """For each input that the task wants in a space, all ways to have it there."""
    task = request.tasks[index]
    given = {i for _, i in task.transformation.aliases}
    wanted = dict.fromkeys(
        (task.inputs[i], desc, i if i in given else -1)
        for i, desc in enumerate(task.transformation.inputs)
        if desc.layout.space is space and task.inputs
    )
    buffers = {b.number: b for b in request.buffers}
    for value, desc, overwritten in wanted:
        ways: list[Way] = [(None, desc.layout.address, _size(request, desc))]
        if overwritten < 0:
            ways += _in_place(request, buffers, value, desc)
        yield ways


def _in_place(
    request: PlanRequest, buffers: dict[int, Buffer], value: int, desc: TensorDesc
) -> Iterator[Way]:
    bare, address = TensorDesc(desc.shape, desc.layout.without_address()), desc.layout.address
    for resident in request.residents:
        for instance in resident.instances if resident.value == value else ():
            block = buffers[instance.buffer]
            if instance.desc != bare or block.address is None:
                continue
            if address is not None and instance.offset_nbytes:
                continue
            if not block.pinned:
                yield block.number, address, block.size_per_bank
            elif address in (None, block.address):
                yield None, None, 0


def lies(regions: Sequence[Region], pieces: Sequence[int], base: int, limit: int) -> bool:
    """Whether fixed regions do not clash, and pieces find places in the gaps between them.

    Raises `TooManyWaysError` for what is more than can be tried.
    """
    gaps, at = [], base
    for address, size in sorted(regions):
        if address < at:
            return False
        gaps.append(address - at)
        at = address + size
    return at <= limit and _packs(sorted(pieces, reverse=True), [*gaps, limit - at])


def _packs(pieces: Sequence[int], gaps: Sequence[int]) -> bool:
    """Whether pieces, the largest first, find places in gaps: every way is tried once.

    What is left of the gaps decides, not which of them it is: equal pieces in any order are one
    way. A gap below the smallest piece counts for nothing.
    """
    after = [sum(pieces[at:]) for at in range(len(pieces))]
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def from_piece(at: int, gaps: tuple[int, ...]) -> bool:
        if at == len(pieces):
            return True
        if sum(gaps) < after[at] or (at, gaps) in failed:
            return False
        for gap in dict.fromkeys(gaps):
            if gap >= pieces[at]:
                left = [*gaps]
                left.remove(gap)
                if from_piece(at + 1, usable([*left, gap - pieces[at]])):
                    return True
        failed.add((at, gaps))
        if len(failed) > MOST_WAYS:
            raise TooManyWaysError
        return False

    def usable(gaps: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(gap for gap in gaps if gap >= pieces[-1])) if pieces else ()

    return from_piece(0, usable(gaps))
