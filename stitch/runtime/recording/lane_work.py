"""How plans run on lanes here: what their steps cost, and the programs' forms for each lane."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.planner import ONE_LANE, Allocate, Copy, Free, Lanes, Plan, Relocate, Step, lanes_of
from stitch.runtime.backends import LocalBackend
from stitch.runtime.executors import PreparedProgram, least_copy_microseconds
from stitch.runtime.recording.agent import Agent
from stitch.runtime.recording.site import Site


def lanes_for(device: Site, plan: Plan, agents: Sequence[Agent | None]) -> Lanes:
    """How a plan that changes only its results runs here; what overwrites values has one lane."""
    if device.lanes == 1 or plan.overwrites or device.backend.why_one_lane is not None:
        return ONE_LANE
    return lanes_of(plan, [_microseconds(step, agents) for step in plan.steps], device.lanes)


def _microseconds(step: Step, agents: Sequence[Agent | None]) -> float | None:
    """What a step takes at least; None where nothing may run beside it."""
    if isinstance(step, Allocate | Free):
        return 0.0
    if isinstance(step, Copy):
        return least_copy_microseconds(step.nbytes)
    if isinstance(step, Relocate):
        return None
    agent = agents[step.task]
    assert agent is not None, "copies are no executions"
    return agent.least_microseconds


def in_lanes(
    kernels: Sequence[PreparedProgram | None], plan: Plan, lanes: Lanes, backend: LocalBackend
) -> list[PreparedProgram | None]:
    """The programs of a plan's tasks, each in the form for the lane on which it runs."""
    own: dict[tuple[int, int], PreparedProgram] = {}
    there = [*kernels]
    for task, lane in lanes.of_tasks(plan).items():
        kernel = kernels[task]
        assert kernel is not None, "host functions run on the caller's thread"
        known = lane, id(kernel)
        if known not in own:
            own[known] = kernel.in_lane(backend.workspace(lane))
        there[task] = own[known]
    return there
