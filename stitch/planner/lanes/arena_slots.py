"""Places in bytes of a lane's own, for temporary values and scratch of steps in forks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stitch.memory import Allocator
from stitch.planner.lanes.forks import Fork, touched_by
from stitch.planner.plan import Allocate, Execute, Free, Plan
from stitch.program import Space

#: Places begin at cache lines, and a lane has as many bytes as it wants.
_LINE, _ENDLESS = 64, 1 << 44


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """Bytes of a lane's own: from `offset` on, so many."""

    lane: int
    offset: int
    nbytes: int


#: By buffer; by task, its scratch; how many bytes each lane has.
OwnPlaces: TypeAlias = tuple[dict[int, ArenaSlot], dict[int, ArenaSlot], tuple[int, ...]]


def assign_arenas(plan: Plan, forks: Sequence[Fork]) -> OwnPlaces:
    """The places of all temporary values that are touched in forks, and of scratch there."""
    #: By step of a fork: its number, and the lane.
    in_fork = {
        index: (number, lane)
        for number, fork in enumerate(forks)
        for lane, steps in enumerate(fork.lanes)
        for index in steps
    }
    results = {buffer.number for buffer in plan.final_buffers}
    made = [step.buffer for step in plan.steps if isinstance(step, Allocate)]
    passing = {b.number for b in made if b.number not in results and b.address is not None}
    #: The lanes that touch a temporary value in each fork.
    users: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for index, (number, lane) in in_fork.items():
        for side in touched_by(plan.steps[index]):
            for buffer in side:
                if buffer in passing:
                    users[buffer][number].add(lane)
    arenas = _Arenas(max(len(fork.lanes) for fork in forks))
    buffers: dict[int, ArenaSlot] = {}
    scratch: dict[int, ArenaSlot] = {}
    later: list[ArenaSlot] = []
    now = -1
    for index, step in enumerate(plan.steps):
        number, lane = in_fork.get(index, (-1, 0))
        if number != now:
            # All lanes have come to the end of the fork before.
            for place in later:
                arenas.give_back(place)
            later.clear()
            now = number
        if isinstance(step, Allocate) and step.buffer.number in users:
            size = _nbytes(plan, step.buffer.space, step.buffer.size_per_bank)
            buffers[step.buffer.number] = arenas.take(lane, size)
        elif isinstance(step, Free) and step.buffer in users:
            place = buffers[step.buffer]
            if number < 0 or users[step.buffer][number] <= {place.lane}:
                arenas.give_back(place)
            else:
                # Another lane may be reading it when this one comes to what would take its place.
                later.append(place)
        elif isinstance(step, Execute) and step.scratch is not None and number >= 0:
            space, _, size_per_bank = step.scratch
            place = arenas.take(lane, _nbytes(plan, space, size_per_bank))
            scratch[step.task] = place
            arenas.give_back(place)
    return buffers, scratch, tuple(arenas.nbytes)


class _Arenas:
    """The bytes of each lane: who has which, and how many there are."""

    def __init__(self, count: int) -> None:
        self._lanes = [Allocator(0, _ENDLESS, _LINE) for _ in range(count)]
        self.nbytes = [0] * count

    def take(self, lane: int, nbytes: int) -> ArenaSlot:
        offset = self._lanes[lane].alloc(nbytes, low=True)
        self.nbytes[lane] = max(self.nbytes[lane], offset + nbytes)
        return ArenaSlot(lane, offset, nbytes)

    def give_back(self, place: ArenaSlot) -> None:
        self._lanes[place.lane].free(place.offset)


def _nbytes(plan: Plan, space: Space, size_per_bank: int) -> int:
    return size_per_bank * plan.request.machine.shape.space(space).banks
