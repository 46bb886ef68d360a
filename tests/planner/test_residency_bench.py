"""The residency benchmark: rows of planned chains, goals that are met or named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stitch.machine import Machine, load_machine
from stitch.planner import check_plan, plan
from stitch.planner.residency import chain_of, choose
from stitch.program import Space
from tests.support.benches import load_bench
from tests.support.planner.residency_chains import FAMILIES, drawn_request


@pytest.mark.campaign("residency")
def test_residency_over_optimum_is_at_most_1_02_in_the_mean_and_1_05_on_every_chain() -> None:
    """In bytes and in simulated seconds: random 1.10, training 1.065, loop 1.045, U-net 1.004 once.
    The optimum is a bound that a wider search proves, and that it reaches."""
    bench = load_bench("residency")
    random = {f"random {s}": (4_608, bench.in_any_order(s, 56), 1) for s in range(8)}
    ratios: dict[str, float] = {}
    for name, (l1_nbytes, chain, rounds) in (bench.CHAINS | random).items():
        machine = bench.small_machine(l1_nbytes)
        request, _ = bench.planned(machine, chain, rounds, rounds, Space.DRAM)
        for what, priced in (("bytes", bench.priced_by_bytes(machine)), ("seconds", machine)):
            asked = replace(request, machine=priced)
            best = choose(chain_of(asked), rounds=200, width=3_000)
            assert best is not None and best.is_best
            if best.away:
                made = plan(asked)
                assert check_plan(made) == ()
                ratios[f"{name}, {what}"] = bench.paid(made)[1] / best.least_seconds
    assert len(ratios) >= 20 and max(ratios.values()) <= 1.05, ratios
    assert sum(ratios.values()) / len(ratios) <= 1.02, ratios


TINY = load_machine("tiny")


@pytest.mark.parametrize(
    ("machine", "unit_nbytes", "seeds", "most"),
    [
        (TINY, 128, range(10, 15), 1.05),
        pytest.param(TINY, 128, range(30), 1.05, marks=pytest.mark.campaign("residency")),
        pytest.param(TINY, 64, range(30), 1.05, marks=pytest.mark.campaign("residency")),
        pytest.param(
            load_machine("wormhole_n150"), 256, range(30), 1.05,
            marks=pytest.mark.campaign("residency"),
        ),
    ],
    ids=["tiny-128-five", "tiny-128", "tiny-64", "wormhole_n150-256"],
)  # fmt: skip
def test_bytes_of_unseen_chains_are_within_1_02_of_the_optimum_in_the_mean_and_1_05_at_worst(
    machine: Machine, unit_nbytes: int, seeds: range, most: float
) -> None:
    """Drawn networks on machines as described: 1.25 at worst where bytes left L1 in cycles of moves
    because that is quicker by less than 2 % of the plan. What counts is as in the benchmark."""
    bench = load_bench("residency")
    ratios: dict[str, float] = {}
    for family in FAMILIES:
        for seed in seeds:
            request = drawn_request(family, seed, machine, unit_nbytes)
            asked = replace(request, machine=bench.priced_by_bytes(request.machine))
            best = choose(chain_of(asked), rounds=200, width=3_000)
            assert best is not None and best.is_best
            if best.seconds * 1e9 > 1:
                made = plan(request)
                assert check_plan(made) == ()
                ratios[f"{family} {seed}"] = bench.paid(made)[0] / (best.seconds * 1e9)
    assert len(ratios) >= 4 * len(seeds) and max(ratios.values()) <= most, ratios
    assert sum(ratios.values()) / len(ratios) <= 1.02, ratios


@pytest.mark.parametrize(("family", "seed"), [("residual", 10), ("U-net", 13)])
def test_bytes_stay_inside_where_tensors_that_keep_their_order_make_room_in_less_time(
    family: str, seed: int
) -> None:
    """1.83 and 1.25 of the fewest bytes, where a cycle of fewer moves went through DRAM."""
    request = drawn_request(family, seed, TINY, 64)
    asked = replace(request, machine=load_bench("residency").priced_by_bytes(request.machine))
    best, made = choose(chain_of(asked)), plan(request)
    assert best is not None and best.is_best and check_plan(made) == ()
    assert load_bench("residency").paid(made)[0] == pytest.approx(best.seconds * 1e9)
