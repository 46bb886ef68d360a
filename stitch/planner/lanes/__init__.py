"""Lanes: which steps of a plan may run beside each other, and where their passing bytes lie then.

A *lane* is a thread that runs steps of a plan; lane 0 is the caller's. A *fork* is a piece of the
plan whose steps are divided among lanes, so that no step waits for one of another lane: they begin
together, and what follows begins when all have ended. The same plan gives the same forks: nothing
is measured.

Two steps depend on each other where they touch one buffer and one of them writes to it. That two
buffers lie at one address, one after the other, makes no such order: within forks temporary values
and scratch lie in bytes of their lane's own, as processors rename registers. So plan, addresses and
copies are those of one lane, and what runs beside what does not hang on how full memory is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stitch.planner.lanes.arena_slots import ArenaSlot, assign_arenas
from stitch.planner.lanes.forks import HANDING, LEAST, Fork, forks_of, touched_by
from stitch.planner.plan import Execute, Plan


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a plan runs on several lanes.

    `buffers` are the temporary values, by buffer, that lie in bytes of a lane's own, `scratch` the
    programs' scratch, by task; `nbytes`: how many bytes each lane has.
    """

    forks: tuple[Fork, ...] = ()
    buffers: Mapping[int, ArenaSlot] = field(default_factory=dict)
    scratch: Mapping[int, ArenaSlot] = field(default_factory=dict)
    nbytes: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return len(self.nbytes)

    def of_tasks(self, plan: Plan) -> dict[int, int]:
        """The lane of each task that runs on another than the caller's."""
        return {
            step.task: lane
            for fork in self.forks
            for lane, steps in enumerate(fork.lanes)
            for index in steps
            if lane and isinstance(step := plan.steps[index], Execute)
        }


#: Everything runs on the caller's thread.
ONE_LANE = Lanes()


def lanes_of(plan: Plan, microseconds: Sequence[float | None], most: int) -> Lanes:
    """How a plan that changes only its results runs on at most so many lanes.

    `microseconds`: what each step takes at least; None: it runs on the caller's thread, with
    nothing beside it.
    """
    forks = tuple(forks_of(plan, microseconds, most))
    return Lanes(forks, *assign_arenas(plan, forks)) if forks else ONE_LANE


__all__ = [
    "HANDING", "LEAST", "ONE_LANE", "Fork", "Lanes", "ArenaSlot", "lanes_of", "touched_by",
]  # fmt: skip
