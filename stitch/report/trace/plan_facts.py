"""What all runs of a plan have in common in a trace, found once.

Comes in: a plan. Goes out: places and bytes. Must not know: lines, times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stitch.machine import Machine, footprint
from stitch.planner import Execute, Instance, Plan
from stitch.report.allocations import Place, own_at_start, own_places
from stitch.runtime import Lying


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What all runs of a plan have in common: what it finds of its own, by place and by number, the
    places and numbers of what it leaves, the bytes of each step that runs a task."""

    plan: Plan
    started: dict[Place, Lying]
    places: dict[int, Place]
    ended: frozenset[Place]
    final: tuple[int, ...]
    nbytes: dict[int, dict[str, int]]


def facts_of(plan: Plan, machine: Machine) -> PlanFacts:
    """What is the same in each run of a plan."""
    started, ended = own_at_start(plan), own_places(plan, plan.final_buffers)

    def of(instances: Sequence[Instance]) -> int:
        return sum(footprint(i.desc, machine.shape).own_nbytes for i in instances)

    nbytes = {}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Execute):
            each = {"read_nbytes": of(step.inputs), "written_nbytes": of(step.outputs)}
            if step.scratch is not None:
                space, _, size = step.scratch
                each["scratch_nbytes"] = size * machine.shape.space(space).banks
            nbytes[index] = each
    return PlanFacts(
        plan,
        {place: Lying(*place, b.size_per_bank, b.origin) for place, b in started.items()},
        {b.number: place for place, b in started.items()},
        frozenset(ended), tuple([b.number for b in ended.values()]), nbytes,
    )  # fmt: skip
