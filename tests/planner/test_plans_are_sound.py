"""Random requests on small machines: every plan is sound, or the refusal is true."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import footprint
from stitch.planner import Copy, PlanRequest, Relocate, after_steps, check_plan, plan
from stitch.planner.checker.proof import packs
from stitch.program import Space
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import MACHINES, bare, random_request

QUICK = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def own_needs(request: PlanRequest, index: int) -> tuple[list[int], list[int]]:
    """What a task needs of L1 whatever else leaves it: pieces, and the gaps between what stays."""
    task, shape = request.tasks[index], request.machine.shape
    l1 = shape.space(Space.L1)
    stuck = [
        (b.address, b.size_per_bank)
        for b in request.buffers
        if b.pinned and b.space is Space.L1 and b.address is not None
    ]
    what = task.transformation
    if what.scratch is not None and what.scratch.space is Space.L1:
        size = -(-what.scratch.size_per_bank // l1.granule) * l1.granule
        stuck.append((l1.base, size))
    buffers = {b.number: b for b in request.buffers}
    pieces, taken = [], {o for o, _ in what.aliases}
    given_away = {i for _, i in what.aliases}
    wanted = {
        (task.inputs[i], desc, i if i in given_away else -1) for i, desc in enumerate(what.inputs)
    }
    wanted |= {(task.outputs[o], d, -2) for o, d in enumerate(what.outputs) if o not in taken}
    for value, desc, _ in wanted:
        if desc.layout.space is not Space.L1:
            continue
        size = footprint(desc, shape).size_per_bank
        for resident in request.residents:
            for instance in resident.instances:
                buffer = buffers[instance.buffer]
                # A view keeps its whole buffer; a pinned one is counted as an obstacle as well.
                if resident.value == value and instance.desc == bare(desc) and not buffer.pinned:
                    size = max(size, buffer.size_per_bank)
        if desc.layout.address is None:
            pieces.append(size)
        else:
            stuck.append((desc.layout.address, size))
    gaps, at = [], l1.base
    for address, size in sorted(stuck):
        gaps.append(max(0, address - at))
        at = max(at, address + size)
    return pieces, [*gaps, max(0, l1.limit - at)]


def check_refusal(request: PlanRequest, error: OutOfMemoryError) -> None:
    """The error must be true: the task's own needs cannot be met in that space."""
    found = re.match(
        r"(\w+) cannot hold .* of '(\w+)': (\d+) B .* needed, (\d+) B free", error.what
    )
    if found is not None and found[1] == "l1":
        names = [task.transformation.name for task in request.tasks]
        pieces, gaps = own_needs(request, names.index(found[2]))
        assert not packs(pieces, gaps), f"{pieces} do fit {gaps}: {error}"
        return
    numbers = re.search(r": (\d+) B per bank needed, (\d+) B free", error.what)
    assert numbers is not None, f"the error names no bytes: {error}"
    pinned = any(b.pinned and b.space.value in error.what for b in request.buffers)
    assert pinned or int(numbers[1]) > int(numbers[2]), f"there was room: {error}"


def check_request(request: PlanRequest, seed: int) -> Counter[str]:
    """Plan, check symbolically, run on bytes; what the plan did."""
    try:
        made = plan(request)
    except LayoutError:
        return Counter(layout_errors=1)
    except OutOfMemoryError as error:
        check_refusal(request, error)
        return Counter(out_of_memory=1)
    assert check_plan(made) == ()
    assert ByteMachine(made, seed).run() == []
    done: Counter[str] = Counter(plans=1)
    for step in made.copies:
        done[step.kind if isinstance(step, Copy) else "move"] += 1
        done["bounce"] += isinstance(step, Relocate) and step.stage is not None
    return done


@given(st.randoms(use_true_random=False))
@QUICK
def test_every_plan_passes_the_checker_and_the_bytes(random: Random) -> None:
    check_request(random_request(random), 1)


def test_seeded_requests_evict_move_and_bounce_soundly() -> None:
    done: Counter[str] = Counter()
    for seed in range(120):
        done += check_request(random_request(Random(seed)), seed)
    assert done["plans"] > 90
    assert min(done["evict"], done["move"], done["bounce"]) > 5


@pytest.mark.campaign("planner")
@pytest.mark.parametrize("machine", range(len(MACHINES)))
def test_a_long_campaign_of_requests_is_sound(machine: int) -> None:
    start = 1_000_000 * (machine + 1)
    print(f"seeds {start} to {start + 3000}")
    for seed in range(start, start + 3000):
        check_request(random_request(Random(seed), MACHINES[machine]), seed)


def test_what_steps_leave_behind_agrees_with_what_the_plan_says() -> None:
    for seed in range(70):
        try:
            made = plan(random_request(Random(seed)))
        except (LayoutError, OutOfMemoryError):
            continue
        buffers, values = after_steps(made, len(made.steps))
        said = {b.number: b.address for b in made.final_buffers if b.address is not None}
        assert {n: b.address for n, b in buffers.items() if b.address is not None} == said
        for resident in made.final_values:
            assert set(resident.instances) == set(values[resident.value])
