"""Handles under any use, drawn by Hypothesis: what NumPy says, with every window and executor.

A failing case shrinks to the fewest steps and the smallest numbers. Brute force, which shares no
code with the planner, confirms each request that found no room, each eviction and each bounce;
those that were too much to try are counted.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from stitch import planner
from stitch.errors import OutOfMemoryError
from stitch.planner import Plan, PlanRequest
from stitch.runtime.executors import EXECUTORS
from tests.support import plans_that_ran
from tests.support.grids import every
from tests.support.handle_world import STEPS, World
from tests.support.planner.leaving_brute_force import TooManyWaysError, needless, task_finds_room
from tests.support.random_work import MACHINES
from tests.support.run_seed import SEED

STEPS_OF_A_CASE = 50
NUMBERS = st.integers(0, 63)
WINDOWS = (1, 8, 64)


class AnyUse(RuleBasedStateMachine):
    """A `World` and what was said of its plans; its rules are the steps of `STEPS`."""

    window = 8
    executor = "numpy"
    #: What was done and looked at, over all cases of a class.
    seen: ClassVar[Counter[str]] = Counter()
    #: Requests that found no room, in the case that runs.
    refused: ClassVar[list[PlanRequest]] = []

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(machine=st.integers(0, len(MACHINES) - 1), debug=st.booleans())
    def open(self, machine: int, debug: bool) -> None:
        plans_that_ran.taken()
        self.refused.clear()
        self.world = World(machine, window=self.window, executor=self.executor, debug=debug)

    def take(self, name: str, numbers: dict[str, int]) -> None:
        """A step; one that fails is the last, so that closing adds nothing to what it says."""
        world, self.world = self.world, None
        assert world is not None
        getattr(world, name)(*numbers.values())
        self.seen["steps"] += 1
        self.world = world

    @invariant()
    def check(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            world.check()
        self.world = world

    def teardown(self) -> None:
        world, self.world = self.world, None
        if world is None:
            return
        world.close()
        for request in self.refused:
            try:
                assert not all(task_finds_room(request, i) for i in range(len(request.tasks)))
                self.seen["refused by brute force, too"] += 1
            except TooManyWaysError:
                self.seen["undecided"] += 1
        plans = plans_that_ran.taken()
        assert plans_that_ran.defects(plans) == []
        for plan in plans:
            said, looked = needless(plan)
            assert said == []
            self.seen.update(looked)


def _rule(name: str, takes: int) -> Any:
    def step(self: AnyUse, **numbers: int) -> None:
        self.take(name, numbers)

    step.__name__ = name
    ruled: Any = rule
    return ruled(**dict.fromkeys("abcd"[:takes], NUMBERS))(step)


for index, (name, takes) in enumerate(STEPS):
    setattr(AnyUse, f"{name}_{index}", _rule(name, takes))


def campaign(
    number: int, window: int, executor: str, steps: int, cases: int, *, wanted: bool = False
) -> Counter[str]:
    """At least so many steps with one window and executor, as rounds of cases; what was seen.

    `wanted`: until something had to leave, and something found no room, too (a round draws much of
    one kind, or nothing of it), but at most four times the steps: some seeds draw none of it for
    long.
    """
    plan = planner.plan

    class Use(AnyUse):
        seen: ClassVar[Counter[str]] = Counter()
        refused: ClassVar[list[PlanRequest]] = []

    Use.window, Use.executor = window, executor

    def remembering(request: PlanRequest, **options: Any) -> Plan:
        try:
            return plan(request, **options)
        except OutOfMemoryError:
            Use.refused.append(request)
            raise

    drawn = settings(
        max_examples=cases, stateful_step_count=STEPS_OF_A_CASE, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            if name.startswith("stitch.runtime") and vars(module).get("plan") is plan:
                patch.setattr(module, "plan", remembering)
        for draw in itertools.count(number, len(COMBINATIONS)):
            run_state_machine_as_test(seed(SEED + draw)(Use), settings=drawn)
            seen = Use.seen
            left, refused = seen["evict"] + seen["bounce"], seen["refused by brute force, too"]
            is_seen = not wanted or (left and refused) or seen["steps"] >= 4 * steps
            if seen["steps"] >= steps and is_seen:
                break
    print(f"window {window}, {executor}: {dict(Use.seen)}")
    return Use.seen


#: Every window with every executor, torch among them: where it is not installed, these stay out.
COMBINATIONS = tuple(itertools.product(WINDOWS, EXECUTORS))


@pytest.mark.parametrize("number", every(3, range(len(COMBINATIONS))))
def test_random_handle_use_gives_what_the_host_computes(number: int) -> None:
    assert campaign(number, *COMBINATIONS[number], steps=100, cases=3)["steps"] >= 100


@pytest.mark.campaign("random_work")
@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_a_hundred_thousand_steps_have_what_the_host_computes(number: int) -> None:
    seen = campaign(number + 1000, *COMBINATIONS[number], steps=6_700, cases=75, wanted=True)
    # One request that is too much for brute force may be planned many times in a case.
    assert seen["undecided"] <= max(10, 0.1 * seen["evict"])
