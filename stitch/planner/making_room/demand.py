"""What one task needs of one space, and the problem that this is for the mover and the search."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from stitch.errors import LayoutError
from stitch.machine import round_up
from stitch.packing import pack
from stitch.planner.certificate import Branches, Certificate
from stitch.planner.mover import SpaceProblem, operation_size
from stitch.planner.plan import Buffer
from stitch.planner.plan_state import PlanState
from stitch.program import Space


@dataclass(slots=True)
class RoomDemand:
    """What one task needs of one space, in bytes per bank.

    `fixed`: regions (address, size, what) it must have. `floating`: (size, what) that may lie
    anywhere. `locked`: buffers that must stay in the space. `relocate`: buffers that must go to a
    given address. `evicts`: whether what lies nowhere else may leave.
    """

    space: Space
    purpose: str
    locked: set[int]
    fixed: list[tuple[int, int, str]] = field(default_factory=list)
    floating: list[tuple[int, str]] = field(default_factory=list)
    relocate: dict[int, int] = field(default_factory=dict)
    evicts: bool = True


def check_fixed(state: PlanState, demand: RoomDemand) -> None:
    shape, allocator = state.shape(demand.space), state.allocators[demand.space]
    regions = sorted([(address, size, what, -1) for address, size, what in demand.fixed] + [
        (address, state.buffers[n].size_per_bank, state.buffers[n].origin, n)
        for n, address in demand.relocate.items()
    ])  # fmt: skip
    for address, size, what, number in regions:
        if address < shape.base or address + size > shape.limit or address % shape.granule:
            raise LayoutError(
                f"{what} cannot lie at {address:#x} in {demand.space.value}",
                where=demand.purpose,
                expected=f"a multiple of {shape.granule} with room for {size} B per bank "
                f"in [{shape.base:#x}, {shape.limit:#x})",
                got=f"[{address:#x}, {address + size:#x})",
            )
        if number >= 0 and state.buffers[number].address == address:
            continue
        if allocator.is_free(address, size):
            continue
        for buffer in state.in_space(demand.space):
            if buffer.pinned and _overlap(address, size, buffer):
                raise LayoutError(
                    f"{what} needs [{address:#x}, {address + size:#x}) of {demand.space.value}, "
                    f"where {buffer.origin} is pinned",
                    where=demand.purpose,
                    remedy="release the exported array or view that pins it, or move the tensor",
                )
    for (a, size, what, _), (b, _, other, _) in pairwise(regions):
        if a + size > b:
            raise LayoutError(
                f"{what} [{a:#x}, {a + size:#x}) and {other} (at {b:#x}) clash in "
                f"{demand.space.value}",
                where=demand.purpose,
                remedy="compile one of them for another address",
            )


def _overlap(address: int, size: int, buffer: Buffer) -> bool:
    start = buffer.address or 0
    return start < address + size and address < start + buffer.size_per_bank


def sizes_of(demand: RoomDemand, granule: int) -> list[int]:
    return [round_up(max(size, 1), granule) for size, _ in demand.floating]


def problem_of(state: PlanState, demand: RoomDemand) -> SpaceProblem:
    shape = state.shape(demand.space)
    obstacles = [(address, size) for address, size, _ in demand.fixed]
    obstacles += [(a, state.buffers[n].size_per_bank) for n, a in demand.relocate.items()]
    promised = list(obstacles)
    movable: list[tuple[int, int, int]] = []
    displaced: list[tuple[int, int, int]] = []
    for buffer in state.in_space(demand.space):
        assert buffer.address is not None
        if buffer.number in demand.relocate:
            continue
        if buffer.pinned:
            obstacles.append((buffer.address, buffer.size_per_bank))
            continue
        entry = (buffer.number, buffer.address, buffer.size_per_bank)
        clash = any(_overlap(address, size, buffer) for address, size in promised)
        (displaced if clash else movable).append(entry)
    return SpaceProblem(
        shape.base,
        shape.limit,
        shape.granule,
        tuple(movable),
        tuple(displaced),
        tuple(sorted(obstacles)),
        tuple(sizes_of(demand, shape.granule)),
        operation_size(state.machine, demand.space),
    )


def certificate_of(problem: SpaceProblem) -> Certificate:
    """Why the pieces of a space were given no room in it, however they are moved."""
    pieces, gaps = problem.all_pieces, tuple(size for _, size in problem.gaps)
    if sum(pieces) > sum(gaps):
        return Certificate("capacity", pieces, gaps)
    packing = pack(pieces, gaps)
    if packing.refutation is None:
        return Certificate("undecided", pieces, gaps)
    steps = "".join("bfk"[step] for step in packing.refutation.steps)
    return Certificate("packing", pieces, gaps, Branches(steps, packing.refutation.by_sums))
