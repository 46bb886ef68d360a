"""Parallel execution of plans: costs of steps, and per-thread programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    Copy,
    Free,
    Plan,
    Relocate,
    Step,
    ThreadAssignment,
    assign_threads,
)
from stitch.runtime.backends import LocalBackend
from stitch.runtime.executors import PreparedProgram, least_copy_microseconds
from stitch.runtime.recording.agent import Agent

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


def assign_threads_for(
    device: RuntimeDevice, plan: Plan, agents: Sequence[Agent | None]
) -> ThreadAssignment:
    """Assign a plan's steps to threads; plans that overwrite values use one thread."""
    if (
        device.inter_op_threads == 1
        or plan.overwrites
        or device.backend.why_single_thread is not None
    ):
        return SINGLE_THREAD
    return assign_threads(
        plan, [_microseconds(step, agents) for step in plan.steps], device.inter_op_threads
    )


def _microseconds(step: Step, agents: Sequence[Agent | None]) -> float | None:
    """Return a lower bound of a step's time; None if nothing may run in parallel with it."""
    if isinstance(step, Allocate | Free):
        return 0.0
    if isinstance(step, Copy):
        return least_copy_microseconds(step.nbytes)
    if isinstance(step, Relocate):
        return None
    agent = agents[step.task]
    assert agent is not None, "copies are no executions"
    return agent.least_microseconds


def on_threads(
    kernels: Sequence[PreparedProgram | None],
    plan: Plan,
    assignment: ThreadAssignment,
    backend: LocalBackend,
) -> list[PreparedProgram | None]:
    """Return the programs of a plan's tasks, prepared for the threads on which they run."""
    own: dict[tuple[int, int], PreparedProgram] = {}
    there = [*kernels]
    for task, thread in assignment.of_tasks(plan).items():
        kernel = kernels[task]
        assert kernel is not None, "host functions run on the caller's thread"
        known = thread, id(kernel)
        if known not in own:
            own[known] = kernel.on_thread(backend.workspace(thread))
        there[task] = own[known]
    return there
