"""The error where no arrangement exists: the proof, who has the memory, and the least change."""

from __future__ import annotations

from dataclasses import replace

from stitch.errors import OutOfMemoryError
from stitch.packing import PLACEMENTS, pack
from stitch.planner.certificate import Certificate
from stitch.planner.making_room.demand import RoomDemand
from stitch.planner.mover import SpaceProblem
from stitch.planner.plan_picture import Residency
from stitch.program import Space


def out_of_memory(
    state: Residency, demand: RoomDemand, problem: SpaceProblem, certificate: Certificate
) -> OutOfMemoryError:
    """The error where nothing can leave: bytes needed and free, the biggest tensors, the proof."""
    space, allocator = demand.space, state.allocators[demand.space]
    wanted = ", ".join([w for _, _, w in demand.fixed] + [w for _, w in demand.floating])
    size = sum(s for _, s, _ in demand.fixed) + sum(s for s, _ in demand.floating)
    biggest = sorted(state.in_space(space), key=lambda b: -b.size_per_bank)[:5]
    listed = ", ".join(
        f"{b.origin} ({b.size_per_bank} B, {state.lifetime(b)})" for b in biggest
    )  # fmt: skip
    remedy = (
        "drop tensors that are not needed, place some in another space "
        "(--set input.NAME.space=dram), or split the program"
    )
    capacity = state.shape(space).capacity
    if size > capacity:
        remedy = (
            f"{space.value} has {capacity} B per bank in all, so freeing helps nothing: place "
            "it in another space (--set input.NAME.space=dram), shard it, or split the program"
        )
    remedy += _least_change(state, demand, problem)
    if space is Space.DRAM and not state.outlets(space):
        remedy += "; open_device(spill=True) lets tensors wait on the host"
    error = OutOfMemoryError(
        f"{space.value} cannot hold {wanted} of {demand.purpose}: {size} B per bank needed, "
        f"{allocator.free_nbytes} B free, largest hole {allocator.largest_hole} B",
        where=f"machine {state.machine.name!r}; biggest live tensors: {listed or 'none'}",
        remedy=remedy,
    )
    error.certificate = certificate
    return error


def _least_change(state: Residency, demand: RoomDemand, problem: SpaceProblem) -> str:
    """The smallest tensor without which there is room, in words; nothing where no one will do."""
    stays = {number for number, *_ in (*problem.movable, *problem.displaced)}
    #: Bytes, whose, and the region that has to be theirs; None: any will do.
    tensors: list[tuple[int, str, tuple[int, int] | None]] = [
        (size, what, (address, size)) for address, size, what in demand.fixed
    ]
    wanted = zip(problem.pieces, demand.floating, strict=True)
    tensors += [(size, what, None) for size, (_, what) in wanted]
    for buffer in state.in_space(demand.space):
        size, address = buffer.size_per_bank, buffer.address or 0
        if buffer.number in stays:
            tensors.append((size, buffer.origin, None))
        elif buffer.pinned or buffer.number in demand.relocate:
            address = demand.relocate.get(buffer.number, address)
            tensors.append((size, buffer.origin, (address, size)))
    pieces, budget, tried = problem.all_pieces, PLACEMENTS, set[int]()
    over = sum(pieces) - sum(size for _, size in problem.gaps)
    for size, what, region in sorted(tensors, key=lambda tensor: tensor[0]):
        if size < over or what == "scratch" or (region is None and size in tried):
            continue
        left, gaps = pieces, problem.gaps
        if region is None:
            tried.add(size)
            at = pieces.index(size)
            left = (*pieces[:at], *pieces[at + 1 :])
        else:
            others = tuple(obstacle for obstacle in problem.obstacles if obstacle != region)
            gaps = replace(problem, obstacles=others).gaps
        packing = pack(left, [room for _, room in gaps], placements=max(0, budget))
        budget -= packing.placements
        if packing.chosen is not None:
            missing = f"{over} B per bank are missing" if over > 0 else "what is left would pack"
            return f"; {what} ({size} B) elsewhere would do: {missing}"
    return ""
