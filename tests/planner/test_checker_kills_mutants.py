"""Plans with one thing wrong: the checker must see every one that is not as good as the plan.

A mutant may be equivalent: two outputs of one size that trade places, both freed later. That is
not believed but shown: the mutant runs on real bytes, twice with other values, and nothing is
lost, nothing overlaps, and memory ends exactly as the plan says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from stitch.errors import StitchError
from stitch.planner import WARNINGS, Allocate, Plan, Relocate, Step, check_plan, plan
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.cases import CASES
from tests.support.planner.small_requests import MACHINES, random_request

NAMED = sorted(CASES.keys() - {"phi_2"})


def without_a_step(made: Plan) -> Iterator[tuple[str, Plan]]:
    for i, step in enumerate(made.steps):
        steps = made.steps[:i] + made.steps[i + 1 :]
        yield f"drop {i} {type(step).__name__}", replace(made, steps=steps)


def without_a_transfer(made: Plan) -> Iterator[tuple[str, Plan]]:
    for i, step in enumerate(made.steps):
        if not isinstance(step, Relocate):
            continue
        for t in range(min(12, len(step.transfers))):
            left = step.transfers[:t] + step.transfers[t + 1 :]
            fewer = replace(step, transfers=left)
            yield f"drop transfer {t} of {i}", _with(made, {i: fewer})


def with_swapped_addresses(made: Plan) -> Iterator[tuple[str, Plan]]:
    places = [(i, s) for i, s in enumerate(made.steps) if isinstance(s, Allocate)]
    for (i, a), (j, b) in itertools.combinations(places, 2):
        if a.buffer.address == b.buffer.address:
            continue
        changed: dict[int, Step] = {
            i: Allocate(replace(a.buffer, address=b.buffer.address)),
            j: Allocate(replace(b.buffer, address=a.buffer.address)),
        }
        yield f"swap allocations {i} and {j}", _with(made, changed)


def with_swapped_targets(made: Plan) -> Iterator[tuple[str, Plan]]:
    for i, step in enumerate(made.steps):
        if not isinstance(step, Relocate):
            continue
        for a, b in itertools.combinations(range(len(step.targets)), 2):
            targets = list(step.targets)
            targets[a], targets[b] = (
                (targets[a][0], targets[b][1]),
                (targets[b][0], targets[a][1]),
            )
            yield f"swap targets in {i}", _with(made, {i: replace(step, targets=tuple(targets))})


def with_neighbours_exchanged(made: Plan) -> Iterator[tuple[str, Plan]]:
    for i, (a, b) in enumerate(itertools.pairwise(made.steps)):
        yield f"exchange {i} and {i + 1}", _with(made, {i: b, i + 1: a})


def _with(made: Plan, changed: dict[int, Step]) -> Plan:
    return replace(made, steps=tuple(changed.get(i, s) for i, s in enumerate(made.steps)))


def survives(mutant: Plan) -> bool:
    return not [p for p in check_plan(mutant) if p.kind not in WARNINGS]


def is_equivalent(mutant: Plan) -> bool:
    """Whether the mutant does all that the plan promises, on bytes."""
    return not ByteMachine(mutant, 1).run() and not ByteMachine(mutant, 2).run()


def hunt(made: Plan, mutants: Iterator[tuple[str, Plan]]) -> tuple[int, int, list[str]]:
    """How many mutants there are, how many are equivalent, and which others survive."""
    count, same, alive = 0, 0, []
    for name, mutant in mutants:
        count += 1
        if survives(mutant):
            if is_equivalent(mutant):
                same += 1
            else:
                alive.append(name)
    return count, same, alive


@pytest.mark.parametrize("name", NAMED)
def test_a_plan_of_a_named_case_that_lacks_a_step_is_refused(name: str) -> None:
    made = plan(CASES[name]())
    count, same, alive = hunt(made, without_a_step(made))
    assert (count, same, alive) == (len(made.steps), 0, [])


@pytest.mark.parametrize("name", [n for n in NAMED if plan(CASES[n]()).copies])
def test_a_move_of_a_named_case_that_lacks_a_transfer_is_refused(name: str) -> None:
    made = plan(CASES[name]())
    count, same, alive = hunt(made, without_a_transfer(made))
    assert (same, alive) == (0, [])
    assert (count > 0) == any(isinstance(s, Relocate) for s in made.steps)


@pytest.mark.parametrize("name", NAMED)
def test_addresses_that_trade_places_are_refused_or_change_nothing(name: str) -> None:
    made = plan(CASES[name]())
    mutants = itertools.chain(with_swapped_addresses(made), with_swapped_targets(made))
    _, _, alive = hunt(made, mutants)
    assert alive == []


@pytest.mark.parametrize("name", NAMED)
def test_steps_in_another_order_are_refused_or_change_nothing(name: str) -> None:
    made = plan(CASES[name]())
    _, _, alive = hunt(made, with_neighbours_exchanged(made))
    assert alive == []


def random_plans(seeds: range, machine: int | None = None) -> Iterator[Plan]:
    for seed in seeds:
        random = Random(seed)
        try:
            made = plan(random_request(random, None if machine is None else MACHINES[machine]))
        except StitchError:
            continue
        yield made


def test_random_plans_that_lack_a_step_are_refused_or_do_the_same() -> None:
    checked = 0
    for made in random_plans(range(25)):
        count, _, alive = hunt(made, without_a_step(made))
        assert alive == []
        checked += count
    assert checked > 200


@pytest.mark.campaign("planner")
@pytest.mark.parametrize("machine", range(len(MACHINES)))
def test_a_long_campaign_of_mutants_leaves_none_alive(machine: int) -> None:
    start = 5_000_000 * (machine + 1)
    print(f"seeds {start} to {start + 120}")
    for made in random_plans(range(start, start + 120), machine):
        for mutants in (
            without_a_step, without_a_transfer, with_swapped_addresses, with_swapped_targets,
            with_neighbours_exchanged,
        ):  # fmt: skip
            assert hunt(made, mutants(made))[2] == []
