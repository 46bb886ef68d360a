"""Places before and after a plan: what was allocated, from the plan and what is there afterwards.

What happens outside plans (constants that take their places, handles that are dropped) is found by
comparing what is there before and after each plan with what the plan itself does: before it there
was what it found of its own, and of what is there afterwards all but what it left of its own. Must
not know: how that is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from stitch.memory import LENT_ADDRESSES
from stitch.planner import Buffer, Plan
from stitch.program import Space

Place = tuple[Space, int]


def own_at_start(plan: Plan) -> dict[Place, Buffer]:
    """The buffers that a plan found and reads, moves or frees."""
    return assign_arenas(plan, plan.request.buffers)


def assign_arenas(plan: Plan, buffers: Iterable[Buffer]) -> dict[Place, Buffer]:
    """Those of the buffers that a plan reads, moves, frees or makes."""
    others = {b.number for b in plan.request.buffers} - plan.touched
    return {
        (b.space, b.address): b
        for b in buffers
        if b.address is not None and b.address < LENT_ADDRESSES and b.number not in others
    }
