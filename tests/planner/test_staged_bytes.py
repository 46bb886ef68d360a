"""How much a cycle in a full space sets aside: no plan of ours is refused for it by the checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from stitch.machine import Machine, load_machine
from stitch.planner import CostCertificate, Plan, Relocate, check_plan, plan
from tests.support.planner.small_requests import Scene, relaid

MACHINES = [load_machine(name) for name in ("tiny", "wormhole_n150", "blackhole_p150")]


def in_order(
    machine: Machine, base: int, sizes: Sequence[int], order: Sequence[int], free: int = 0
) -> Plan:
    """An L1 from `base` on, whose tensors (sizes in granules) come to lie in another order.

    `free` granules are at its end: none, and it is full.
    """
    l1 = machine.shape.l1
    assert l1 is not None
    granule = l1.granule
    l1 = replace(l1, base=base, limit=base + (sum(sizes) + free) * granule)
    scene = Scene(replace(machine, shape=replace(machine.shape, l1=l1)))
    places = [0] * len(sizes)
    at = base
    for i in order:
        places[i], at = at, at + sizes[i] * granule
    starts = [base + sum(sizes[:i]) * granule for i in range(len(sizes))]
    nbytes = [size * granule for size in sizes]
    return plan(relaid(scene, *zip(nbytes, starts, places, strict=True)))


def other_rates(machine: Machine, random: Random) -> Machine:
    """The machine with other latencies and rates on each path."""
    paths = tuple(
        (source, target, replace(
            path,
            latency_seconds=path.latency_seconds * random.choice((0, 0.001, 0.01, 0.1, 1)),
            limit_bytes_per_second=path.limit_bytes_per_second * random.choice((0.1, 0.5, 1)),
            curve=tuple((n, rate * factor) for n, rate in path.curve),
        ))
        for source, target, path in machine.paths
        for factor in [random.choice((0.1, 0.3, 0.6, 1, 3))]
    )  # fmt: skip
    return replace(machine, paths=paths)


def check_seed(seed: int) -> int:
    """A sound relayout; how many bytes were set aside."""
    random = Random(seed)
    machine = MACHINES[seed % len(MACHINES)]
    if random.randrange(2):
        machine = other_rates(machine, random)
    assert machine.shape.l1 is not None
    base = machine.shape.l1.base + machine.shape.l1.granule * random.randrange(5)
    most = random.choice((3, 3, 20, 60))
    sizes = [random.randrange(1, most) for _ in range(random.randrange(2, 9))]
    order = random.sample(range(len(sizes)), len(sizes))
    made = in_order(machine, base, sizes, order)
    assert check_plan(made) == (), f"seed {seed}"
    return sum(step.bounced_nbytes for step in made.copies if isinstance(step, Relocate))


def test_a_relayout_of_a_full_space_is_never_refused() -> None:
    assert sum(check_seed(seed) > 0 for seed in range(200)) > 130


def test_leaving_a_space_that_is_not_full_is_refused_nowhere_and_is_cheaper() -> None:
    leaving = 0
    for seed in range(130):
        random = Random(seed)
        machine = other_rates(MACHINES[seed % len(MACHINES)], random)
        assert machine.shape.l1 is not None
        sizes = [random.randrange(1, 40) for _ in range(random.randrange(2, 9))]
        order = random.sample(range(len(sizes)), len(sizes))
        made = in_order(machine, machine.shape.l1.base, sizes, order, random.choice((1, 3, 9)))
        assert check_plan(made) == (), f"seed {seed}"
        for step in made.copies:
            if isinstance(step, Relocate) and step.bounced_nbytes:
                assert isinstance(step.certificate, CostCertificate)
                leaving += 1
    assert leaving > 30


@pytest.mark.campaign("planner")
@pytest.mark.parametrize("start", range(1_000, 7_000, 1_000))
def test_six_thousand_relayouts_are_not_refused(start: int) -> None:
    assert sum(check_seed(seed) > 0 for seed in range(start, start + 1_000)) > 700
