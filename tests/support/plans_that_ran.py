"""Asks the checker about every plan that ran in this process, whichever device ran it."""

from __future__ import annotations

from stitch.planner import Plan, check_plan
from stitch.runtime.events import Event, PlanStopped
from stitch.runtime.history import History, Tally

#: Number in its device's history and plan, of each that ran first since the last look.
_ran: list[Plan] = []


def watch() -> None:
    """From now on, remember each plan that runs until it is taken: once for each device."""
    add, count = History.add, History.count

    def remember(self: History, key: int, tally: Tally) -> None:
        _ran.append(tally.plan)
        add(self, key, tally)

    def remember_stopped(self: History, event: Event) -> None:
        if isinstance(event, PlanStopped):
            _ran.append(event.plan)
        count(self, event)

    History.add = remember  # type: ignore[method-assign]
    History.count = remember_stopped  # type: ignore[method-assign]


def taken() -> list[Plan]:
    """The plans that ran first since this was last called; one that stopped counts once."""
    plans = {id(plan): plan for plan in _ran}
    _ran.clear()
    return list(plans.values())


def defects(plans: list[Plan]) -> list[str]:
    """What the checker says of plans, warnings included."""
    return [f"{problem}, in {plan.steps}" for plan in plans for problem in check_plan(plan)]
