"""What leaves its space had to: for every eviction and bounce brute force finds no way without."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.planner import Copy, PlanRequest, check_plan, plan
from tests.planner.test_spilling_and_views import CROWDED, views_of_blocks
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.leaving_brute_force import needless
from tests.support.planner.small_requests import random_request


def looked_at(request: PlanRequest, seed: int) -> tuple[list[str], Counter[str]]:
    """What brute force says of the plan for a request; nothing where there is none."""
    try:
        made = plan(request)
    except (LayoutError, OutOfMemoryError):
        return [], Counter()
    assert check_plan(made) == () and ByteMachine(made, seed).run() == []
    return needless(made)


def campaign(seeds: range) -> Counter[str]:
    """All that brute force looked at; where that was too much, the checker alone was asked."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        requests = [random_request(Random(seed), m) for m in (None, CROWDED[seed % len(CROWDED)])]
        for request in (*requests, views_of_blocks(Random(seed)).request()):
            said, looked = looked_at(request, seed)
            if said:
                print(f"seed {seed}: {said}")
            seen += looked
            seen["without need"] += len(said)
    print(f"seeds {seeds}: {dict(seen)}")
    assert seen["undecided"] < 0.1 * seen["evict"]
    return seen


def test_nothing_leaves_that_could_have_stayed() -> None:
    seen = campaign(range(80))
    assert seen["evict"] > 30 and seen["bounce"] > 10 and seen["without need"] == 0


@pytest.mark.campaign("planner")
@pytest.mark.parametrize("start", range(200_000, 212_000, 3_000))
def test_nothing_leaves_that_could_have_stayed_in_many_requests(start: int) -> None:
    assert campaign(range(start, start + 1_500))["without need"] == 0


@pytest.mark.parametrize("seed", (201_193, 306_700, 306_916, 307_145))
def test_a_block_that_comes_back_and_the_outputs_beside_it_are_given_room_at_once(
    seed: int,
) -> None:
    request = views_of_blocks(Random(seed)).request()
    said, looked = looked_at(request, seed)
    assert said == [] and looked["evict"] > 1
    assert "return" in {step.kind for step in plan(request).copies if isinstance(step, Copy)}
