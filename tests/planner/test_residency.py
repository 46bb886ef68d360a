"""Residency: chains read as counted by hand, covers against all subsets, bounds that hold."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.frozen_json import from_plain, to_plain
from stitch.machine import Path, footprint, load_machine
from stitch.planner import Copy, Instance, Plan, PlanRequest, check_plan, plan
from stitch.planner.plan import copy_cost, predicted_cost
from stitch.planner.plan_state import RULES
from stitch.planner.residency import Holder, Stay, StayChain, chain_of, choose
from stitch.program import Layout, Space, TensorDesc
from tests.support.grids import every
from tests.support.planner.residency_chains import DESC, farthest_first, random_chain
from tests.support.planner.small_requests import (
    BF16,
    DRAM,
    F32,
    L1,
    SMALL,
    Scene,
    desc_of,
    program,
    random_request,
)


def seconds_of(chain: StayChain, away: tuple[Stay, ...]) -> float:
    """What it costs that these give way, counted anew."""
    written = {stay.holder for stay in away if stay.is_dirty}
    back = sum(stay.back_seconds for stay in away)
    return back + sum(chain.holders[holder].write_seconds for holder in written)


def fits(chain: StayChain, away: tuple[Stay, ...]) -> bool:
    """Whether enough bytes are away at every task."""
    return all(
        sum(stay.nbytes for stay in away if stay.first <= task < stay.end) >= excess
        for task, excess in enumerate(chain.excess)
    )


def best_of_all(chain: StayChain) -> float | None:
    """The least cost over all subsets of stays; None where none makes it fit."""
    subsets = (
        tuple(s for s, gone in zip(chain.stays, bits, strict=True) if gone)
        for bits in product((False, True), repeat=len(chain.stays))
    )
    return min((seconds_of(chain, away) for away in subsets if fits(chain, away)), default=None)


# -- covers and bounds --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", every(6, range(150)))
def test_a_choice_fits_costs_what_it_says_and_its_bound_is_below_every_cover(seed: int) -> None:
    chain = random_chain(seed, tasks=14, tensors=4)
    assert len(chain.stays) <= 13
    best, choice = best_of_all(chain), choose(chain)
    if best is None:
        assert choice is None
        return
    assert choice is not None and fits(chain, choice.away)
    assert choice.seconds == pytest.approx(seconds_of(chain, choice.away), abs=1e-9)
    assert choice.least_seconds <= best + 1e-9 <= choice.seconds + 2e-9
    assert choice.is_best and choice.seconds == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", every(5, range(60)))
def test_a_bound_holds_when_every_budget_is_small(seed: int) -> None:
    chain = random_chain(seed, tasks=14, tensors=4)
    best = best_of_all(chain)
    for budget in (0, 1, 20):
        choice = choose(chain, rounds=budget, width=budget + 1)
        assert (choice is None) == (best is None)
        if choice is not None and best is not None:
            assert fits(chain, choice.away)
            assert choice.least_seconds <= best + 1e-9 <= choice.seconds + 2e-9
            assert not choice.is_best or choice.seconds == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", every(5, range(30)))
def test_prices_decide_how_fast_an_optimum_is_found_and_never_which(seed: int) -> None:
    chain = random_chain(seed, tasks=40, tensors=7)
    blind, priced = choose(chain, rounds=0, width=1 << 12), choose(chain, width=1 << 12)
    assert blind is not None and priced is not None and blind.is_best and priced.is_best
    assert blind.seconds == pytest.approx(priced.seconds, rel=1e-8)
    narrow = choose(chain, width=3)
    assert narrow is not None and narrow.least_seconds <= priced.seconds + 1e-9
    assert narrow.seconds >= priced.seconds - 1e-9


def test_what_is_written_once_leaves_as_often_as_it_helps() -> None:
    holders = tuple(Holder(frozenset({v}), DESC, w) for v, w in ((0, 3.0), (1, 0.0), (2, 0.0)))
    stays = (
        Stay(0, 0, 2, 100, 1.0, True), Stay(0, 3, 5, 100, 1.0, True),
        Stay(1, 0, 2, 100, 2.0, False), Stay(2, 3, 5, 100, 2.0, False),
    )  # fmt: skip
    dear = choose(StayChain(holders, stays, (0, 100, 0, 0, 100)))
    assert dear is not None and dear.away == stays[2:] and dear.seconds == pytest.approx(4.0)
    cheaper = (Holder(frozenset({0}), DESC, 1.5), *holders[1:])
    cheap = choose(StayChain(cheaper, stays, (0, 100, 0, 0, 100)))
    assert cheap is not None and cheap.away == stays[:2] and cheap.seconds == pytest.approx(3.5)


# -- chains of requests -------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["kept", "read again", "pinned", "read twice"])
def test_what_somebody_else_reads_is_copied_before_it_is_overwritten(why: str) -> None:
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(1024), 1024, pinned=why == "pinned", keep=why == "kept")
    inputs = [desc_of(1024)] * (2 if why == "read twice" else 1)
    donate = program("p", inputs, [desc_of(1024)], aliases=((0, 0),))
    scene.run(donate, *[a] * len(inputs))
    if why == "read again":
        scene.run(program("q", [desc_of(1024)], [desc_of(256, DRAM)]), a)
    assert chain_of(scene.request()).excess[0] == 2 * 1024 - 4096


def copied(scene: Scene, source: TensorDesc, target: TensorDesc) -> float:
    return copy_cost(scene.machine, source, target)[1]


@pytest.mark.parametrize("space", [L1, DRAM])
def test_no_bound_is_known_where_inputs_of_a_task_are_copied_from_what_it_overwrites(
    space: Space,
) -> None:
    scene = Scene(SMALL)
    a = scene.tensor(TensorDesc((64, 4), Layout(F32, Space.HOST)), None, keep=True)
    other = TensorDesc((64, 4), Layout(BF16, L1))
    what = program("p", [desc_of(256, space), other], [desc_of(256, space)], aliases=((0, 0),))
    scene.run(what, a, a, keep=True)
    assert not chain_of(scene.request()).is_exact


def test_no_plan_of_a_random_request_is_below_the_chains_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whatever rule it was made. Two of them are of seeds that once were."""
    compared = 0
    for seed in (*range(600), 59_518, 73_884):
        request = random_request(Random(seed))
        chain = chain_of(request)
        choice = choose(chain)
        if not chain.is_exact or choice is None:
            continue
        least = chain.first_seconds + choice.least_seconds
        for rules in (RULES, *((rule,) for rule in RULES)):
            monkeypatch.setattr("stitch.planner.planner.RULES", rules)
            try:
                made = plan(request)
            except (OutOfMemoryError, LayoutError):
                continue
            assert made.seconds >= least * (1 - 1e-9), seed
            compared += least > 0
    assert compared > 380


def pressed_request() -> PlanRequest:
    """Five weights in turn, three times, in room for three of them; each result feeds the next."""
    scene = Scene(SMALL)
    weights = [scene.tensor(desc_of(1024, DRAM), 4096 * v, keep=True) for v in range(5)]
    (last,) = scene.run(program("first", [], [desc_of(256)]))
    for weight in weights * 3:
        step = program("p", [desc_of(1024), desc_of(256)], [desc_of(256)])
        (last,) = scene.run(step, weight, last)
    return scene.request()


def test_a_plan_says_how_far_from_the_best_it_can_be_and_the_checker_compares() -> None:
    made = plan(pressed_request())
    assert 0 < made.least_seconds <= made.seconds and check_plan(made) == ()
    assert made.gap == made.seconds / made.least_seconds - 1 and 0 <= made.gap < 0.02
    for claimed in (made.seconds * 1.01, -1e-9, float("nan"), float("inf")):
        (problem,) = check_plan(replace(made, least_seconds=claimed))
        assert problem.kind == "bound"


@pytest.mark.parametrize("soon", [0, 1])
def test_of_two_that_no_task_reads_the_one_leaves_that_is_predicted_to_be_read_later(
    soon: int,
) -> None:
    scene = Scene(SMALL)
    held = [scene.tensor(desc_of(1536), 1024 + 1536 * v, keep=True) for v in range(2)]
    scene.run(program("p", [], [desc_of(2048, L1)]), keep=True)
    later = tuple((value, 3 if at == soon else 9) for at, value in enumerate(held))
    made = plan(replace(scene.request(), later=later))
    (gone,) = (s.value for s in made.steps if isinstance(s, Copy) and s.kind == "evict")
    assert gone == held[1 - soon] and check_plan(made) == () and made.gap is None
    again = from_plain(Plan, json.loads(json.dumps(to_plain(made))), "plan")
    assert again.request.later == later and plan(again.request).steps == made.steps


@pytest.mark.parametrize("later", [((0, -9),), ((0, 0), (1, 1 << 70)), ((77, 3), (-1, -1))])
def test_predictions_that_cannot_be_cost_bytes_at_most(later: tuple[tuple[int, int], ...]) -> None:
    scene = Scene(SMALL)
    held = [scene.tensor(desc_of(1536), 1024 + 1536 * v, keep=v > 0) for v in range(2)]
    scene.run(program("p", [desc_of(1536, L1)], [desc_of(2048, L1)]), held[0], keep=True)
    made = plan(replace(scene.request(), later=later))
    (problem,) = check_plan(made)
    assert problem.kind == "later" and check_plan(replace(made, request=scene.request())) == ()
    assert {r.value for r in made.final_values} == scene.request().kept


def test_of_plans_that_take_as_long_the_one_with_the_fewest_bytes_is_made() -> None:
    # Every copy takes a microsecond, whatever its bytes.
    paths = tuple((a, b, Path(1e-6, ((1, 1e30),))) for a, b, _ in SMALL.paths)
    scene = Scene(replace(SMALL, paths=paths))
    large, small = scene.tensor(desc_of(2048), 1024), scene.tensor(desc_of(1024), 3072)
    scene.run(program("p", [], [desc_of(2048)]))
    for value, size in ((small, 1024), (large, 2048)):
        scene.run(program("q", [desc_of(size)], [desc_of(16, DRAM)]), value)
    made = plan(scene.request())
    assert [s.value for s in made.steps if isinstance(s, Copy)] == [small] * 2
    assert predicted_cost(made) == (2e-6, made.copies[0].nbytes * 2)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_copies_no_more_bytes_than_beladys_would(seed: int) -> None:
    random, scene = Random(seed), Scene(SMALL)
    weights = [scene.tensor(desc_of(512), 1024 + 512 * v, keep=True) for v in range(8)]
    (last,) = scene.run(program("first", [], [desc_of(256, DRAM)]))
    for _ in range(30):
        step = program("p", [desc_of(512), desc_of(256, DRAM)], [desc_of(1024), desc_of(256, DRAM)])
        _, last = scene.run(step, random.choice(weights), last)
    request = scene.request()
    chain = chain_of(request)
    belady = farthest_first(chain)
    assert belady is not None
    # All tensors have one size, so bytes are as seconds: back and forth, and written once.
    back = sum(stay.nbytes for stay in belady if stay.back_seconds)
    written = {stay.holder for stay in belady if stay.is_dirty}
    nbytes = (back + 512 * len(written)) * request.machine.shape.space(L1).banks
    assert 0 < sum(s.nbytes for s in plan(request).steps if isinstance(s, Copy)) <= nbytes


def test_what_is_dropped_comes_back_from_where_it_takes_least() -> None:
    scene = Scene(SMALL)
    near, below = scene.buffer(desc_of(1024), 1024), scene.buffer(desc_of(1024, DRAM), 0)
    host = scene.buffer(TensorDesc(near.desc.shape, Layout(F32)), None)
    a = scene.value(*(Instance(b.number, 0, b.desc) for b in (host, below, near)), keep=True)
    scene.run(program("p", [], [desc_of(256, DRAM)]))
    scene.run(program("q", [desc_of(1024)], [desc_of(256, DRAM)]), a)
    stay = chain_of(scene.request()).stays[0]
    assert stay.back_seconds == copy_cost(scene.machine, below.desc, near.desc)[1]


@pytest.mark.parametrize("name", ["wormhole_n150", "tiny", "blackhole_p150"])
@pytest.mark.parametrize("space", [DRAM, Space.HOST])
def test_a_bound_counts_that_what_is_dear_to_bring_back_may_wait_otherwise(
    name: str, space: Space
) -> None:
    """A task reads a tiled tensor in rows elsewhere, which are dear to bring back to L1."""
    machine = load_machine(name)
    l1 = machine.shape.l1
    assert l1 is not None
    for width, share in product((4, 64, 1024), (16, 4, 2)):
        rows = max(32, l1.capacity // share * l1.banks // (4 * width) // 32 * 32)
        tiled = TensorDesc((rows, width), Layout(F32, L1, (32, 32)))
        if footprint(tiled, machine.shape).size_per_bank > l1.capacity:
            continue
        scene = Scene(machine)
        a = scene.tensor(tiled, -(-l1.base // l1.granule) * l1.granule, keep=True)
        wanted = TensorDesc(tiled.shape, Layout(F32, space))
        scene.run(program("p", [wanted], [], scratch=l1.capacity - 64), a)
        scene.run(program("q", [tiled], []), a)
        chain = chain_of(scene.request())
        choice, made = choose(chain), plan(scene.request())
        if choice is not None and chain.is_exact:
            least = chain.first_seconds + choice.least_seconds
            assert least <= made.seconds * (1 + 1e-9)
