"""Asks the checker about every plan that ran in this process, whichever device ran it."""

from __future__ import annotations

from typing import Any

from stitch.planner import Plan, check_plan
from stitch.runtime import RuntimeDevice

#: Each plan that was bound or that stopped since the last look.
_ran: list[Plan] = []


def watch() -> None:
    """From now on, remember each plan that a device binds until it is taken."""
    begin = RuntimeDevice.__init__

    def remember(self: RuntimeDevice, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.on_plan(_ran.append)

    RuntimeDevice.__init__ = remember  # type: ignore[method-assign]


def taken() -> list[Plan]:
    """The plans that ran first since this was last called; one that stopped counts once."""
    plans = {id(plan): plan for plan in _ran}
    _ran.clear()
    return list(plans.values())


def defects(plans: list[Plan]) -> list[str]:
    """What the checker says of plans, warnings included."""
    return [f"{problem}, in {plan.steps}" for plan in plans for problem in check_plan(plan)]
