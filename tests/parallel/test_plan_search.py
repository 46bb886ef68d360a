"""The search for plans: equal to brute force, near the simulated run, within memory, and its plans
train with the losses of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import OutOfMemoryError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine
from stitch.mesh import MachineSpecification
from stitch.mesh.specification import Link
from stitch.parallel import ParallelComputationGraph, SearchResult, simulate_plan
from stitch.parallel.assignments import exchanges, orders
from stitch.program import OperationList
from stitch.training import (
    AlgorithmConfig,
    ModelCompilationResult,
    SimulatedTime,
    TrainingOptions,
    check_algorithm,
    compile_stage,
    loss_of,
    optimize,
    stages_of,
)
from tests.support.stitched_models import tiny
from tests.support.training.drawn_plans import all_plans, drawn_case, least_seconds
from tests.support.training.staged_models import MODELS, attention, drawn_batches, mlp, model_of

PLANS = pytest.mark.campaign("plans")
SMALL = mlp(depth=2)


def config(algorithm: str = "search", steps: int = 1, **options: Any) -> AlgorithmConfig:
    asked = TrainingOptions(accumulation_steps=steps, **options)
    return AlgorithmConfig(algorithm, "mse", stitch.Adam(), asked)


def check_against_brute_force(seed: int) -> bool:
    """Check one drawn case; return whether some plan fits."""
    case = drawn_case(seed)
    least = least_seconds(all_plans(case))
    wanted = config(steps=case.options.accumulation_steps)
    if math.isinf(least):
        with pytest.raises(OutOfMemoryError, match=r"needs .* are free"):
            optimize(case.model, case.specification, SimulatedTime(), wanted)
        return False
    found = optimize(case.model, case.specification, SimulatedTime(), wanted)
    assert found.cost_values.seconds == pytest.approx(least, rel=1e-12), seed
    return True


def test_the_search_equals_brute_force() -> None:
    assert {check_against_brute_force(seed) for seed in (2, 17)} == {True, False}


@PLANS
@pytest.mark.parametrize("part", range(8))
def test_the_search_equals_brute_force_on_200_graphs(part: int) -> None:
    assert sum(check_against_brute_force(seed) for seed in range(part * 25, part * 25 + 25)) > 5


def simulated_over_estimate(found: SearchResult) -> float:
    return simulate_plan(found.plan).makespan / found.cost_values.seconds


@PLANS
def test_the_estimate_is_near_the_simulated_run_and_no_worse_than_the_simple_plans() -> None:
    graph = attention(layers=2, batch=8, words=64, width=128)
    four = MachineSpecification.of(4, "wormhole_n150")
    results = {
        algorithm: optimize(graph, four, SimulatedTime(), config(algorithm, 8))
        for algorithm in ("data_parallel", "pipeline", "search")
    }
    best = results["search"].cost_values.seconds
    for result in results.values():
        assert best <= result.cost_values.seconds
        assert simulated_over_estimate(result) == pytest.approx(1, abs=0.05)
    assert results["data_parallel"].solution.replicas == 4
    assert results["pipeline"].solution.replicas == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("data_parallel", marks=PLANS), pytest.param("pipeline", marks=PLANS),
        "search",
    ],
)  # fmt: skip
def test_a_found_plan_trains_with_the_losses_of_one_device(algorithm: str) -> None:
    model = model_of(mlp())
    options: dict[str, Any] = {"optimizer": "adam", "loss": "mse", "weights": model.values}
    fast = [
        Link(a, b, 1e-9, 1e12) for a in ("d0", "d1", "d2") for b in ("d0", "d1", "d2") if a != b
    ]
    entry = MachineSpecification.of(1, "tiny").devices["device0"]
    three = MachineSpecification("three", dict.fromkeys(("d0", "d1", "d2"), entry), tuple(fast))
    found = stitch.compile(model.graph, algorithm=algorithm, devices=three, **options)
    assert found.search_result.solution.micro_batches == 3
    assert (len(found.staged.stages), found.parallel.replicas) != (1, 1)
    for name in ("save", "get_tensor", "dump"):
        with pytest.raises(UsageError, match=f"in stages has no {name}"):
            getattr(found, name)
    with pytest.raises(AttributeError, match="no attribute 'saved'"):
        found.saved  # noqa: B018
    batches = drawn_batches(model, 3)
    with found.start() as training:
        losses = [training.step(batches) for _ in range(2)]
        for name in ("predict", "forward", "get_tensor"):
            with pytest.raises(UsageError, match=f"in stages has no {name}"):
                getattr(training, name)
        assert not hasattr(training, "predicted")
    one = stitch.compile(model.graph, accumulation_steps=3, target="tiny", **options)
    with one.start() as instance:
        expected = [[float(loss) for loss in instance.step(batches)] for _ in range(2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_graph_is_taken_as_it_is_and_both_forms_agree() -> None:
    b = ComputationGraphBuilder("line")
    x = b.input("x", (8, 4), "float32")
    b.output("y", b.op("MatMul", x, b.parameter("w", np.ones((4, 2), np.float32))))
    two = MachineSpecification.of(2, "tiny")
    for graph in (b.build(), SMALL):
        options = TrainingOptions(recompute="all")
        wanted = AlgorithmConfig("data_parallel", "mse", "adam", options, devices=two)
        found = optimize(graph, two, SimulatedTime(), wanted)
        assert found.solution.replicas == found.solution.micro_batches == 2
        result = optimize(graph, wanted)
        assert isinstance(result, ModelCompilationResult)
        assert result.pcg == found.pcg == ParallelComputationGraph.from_json(found.pcg.as_json())
        assert result.tensor_mapping == found.tensor_mapping
        placed = found.tensor_mapping["x.shards"]
        assert placed.devices == ("device0", "device1")
        assert "2 x 1" in found.text() and "2 x 1" in found._repr_html_()


def test_devices_that_are_too_small_are_told_with_what_each_needs() -> None:
    two = MachineSpecification.of(2, tiny(dram_nbytes=2048))
    with pytest.raises(OutOfMemoryError) as caught:
        optimize(mlp(), two, SimulatedTime(), config())
    message = str(caught.value)
    assert "'device0'" in message and "'device1'" in message
    assert "B per bank of dram, 2048 B are free" in message


@PLANS
def test_more_memory_per_stage_makes_a_plan_possible() -> None:
    graph = mlp(depth=6, width=32, batch=64)
    # Recomputation needs the least on one device.
    needs = optimize(graph, MachineSpecification.of(1, "tiny"), SimulatedTime(),
                     config(steps=4, recompute="all")).cost_values.home_nbytes  # fmt: skip
    small = tiny(dram_nbytes=needs // 2048 * 1024)
    with pytest.raises(OutOfMemoryError):
        optimize(graph, MachineSpecification.of(1, small), SimulatedTime(), config(steps=4))
    found = optimize(graph, MachineSpecification.of(4, small), SimulatedTime(), config(steps=4))
    assert len(found.solution.cuts) > 0
    assert found.cost_values.home_nbytes <= small.shape.space(stitch.Space.DRAM).capacity * 2


def test_a_found_plan_fits_with_the_slots_and_scratch_of_its_updates() -> None:
    """Updates have their results beside parameters and states, and scratch."""
    graph = mlp(depth=2, width=32, batch=4)
    specification = MachineSpecification.of(2, tiny(dram_nbytes=24576))
    plan = optimize(graph, specification, SimulatedTime(), config(steps=2)).plan
    assert len(plan.ends) == 2
    options = TrainingOptions(accumulation_steps=2, recompute=plan.costs.recompute)
    for stage in stages_of(
        model_of(graph), loss_of("mse"), stitch.Adam(), options, plan.cuts
    ).stages:
        compile_stage(stage, plan.machines[0][0])
    with pytest.raises(OutOfMemoryError, match="does not fit dram"):
        compile_stage(
            stages_of(model_of(graph), loss_of("mse"), stitch.Adam(), options, 1).stages[0],
            plan.machines[0][0],
        )


def test_devices_take_the_places_that_their_machines_and_links_are_good_for() -> None:
    """The second device of the file is behind slow links; the first is the slower one of a pair."""
    entry = MachineSpecification.of(1, "tiny").devices["device0"]
    names = ("a", "b", "c", "d")
    links = tuple([
        Link(x, y, 1e-9 if {x, y} == {"a", "d"} else 1.0, 1e13)
        for x in names for y in names if x != y
    ])  # fmt: skip
    specification = MachineSpecification("one fast link", dict.fromkeys(names, entry), links)
    found = optimize(SMALL, specification, SimulatedTime(), config("pipeline", 8, recompute="all"))
    assert set(found.plan.order) == {"a", "d"}
    assert list(found.specification.devices)[:2] == list(found.plan.order)
    assert {d for place in found.tensor_mapping.values() for d in place.devices} == {"a", "d"}


def test_more_devices_are_ordered_by_chains_of_fast_links_and_exchanges() -> None:
    entry = MachineSpecification.of(1, "tiny").devices["device0"]
    names = [f"d{i}" for i in range(7)]
    ring = [names[i] for i in (0, 3, 6, 2, 5, 1, 4)]
    near = {frozenset(pair) for pair in pairwise(ring)}
    links = tuple([
        Link(x, y, 1e-9 if {x, y} in near else 1e-3, 1e13) for x in names for y in names if x != y
    ])  # fmt: skip
    specification = MachineSpecification("ring", dict.fromkeys(names, entry), links)
    assert tuple(ring) in orders(specification, 7)
    assert len(orders(specification, 7)) <= 8
    swapped = set(exchanges(specification, tuple(ring[:2])))
    assert len(swapped) == 1 + 2 * 5 and (ring[1], ring[0]) in swapped


@dataclass(frozen=True)
class Wrong:
    """An estimator with impossible times."""

    seconds: float
    moved: float = 0.0

    def program(self, machine: Machine, program: OperationList) -> float:
        return self.seconds

    def movement(self, specification: Any, source: str, target: str, nbytes: int) -> float:
        return self.moved


def test_programs_that_take_as_long_as_an_empty_one_are_counted() -> None:
    one = MachineSpecification.of(1, "tiny")
    found = optimize(SMALL, one, Wrong(1.0), config(steps=2, recompute="all"))
    # At least forward and backward passes of two batches, and the update.
    assert found.cost_values.seconds >= 5


def test_bad_input_is_one_error() -> None:
    two = MachineSpecification.of(2, "tiny")
    wrong_times = (math.nan, -1.0, math.inf, 10**400)
    for estimator in (*map(Wrong, wrong_times), Wrong(1.0, math.nan)):
        with pytest.raises(UsageError, match="impossible time"):
            optimize(SMALL, two, estimator, config(steps=2, recompute="all"))
    wrong: Any = object()
    with pytest.raises(UsageError, match="program"):
        optimize(SMALL, two, wrong, config())
    with pytest.raises(UsageError, match="unknown algorithm"):
        config("unity")
    with pytest.raises(UsageError, match="for one device"):
        optimize(SMALL, two, SimulatedTime(), config("greedy"))
    words: Any = "x"
    with pytest.raises(UsageError, match="impossible time"):
        optimize(SMALL, two, Wrong(1.0, words), config(steps=2, recompute="all"))
    with pytest.raises(UsageError, match="among devices"):
        check_algorithm("data_parallel")
    with pytest.raises(UsageError, match="takes parallel="):
        stitch.compile(SMALL, optimizer="adam", loss="mse", algorithm="greedy", devices=2)
    with pytest.raises(UsageError, match="has no replicas"):
        optimize(
            MODELS["statistics"](), two, SimulatedTime(), config("data_parallel", recompute="all")
        )
    one_way = MachineSpecification("one way", two.devices, (Link("device0", "device1", 1e-6, 1e9),))
    with pytest.raises(UsageError, match=r"no link device1 -> device0"):
        optimize(SMALL, one_way, SimulatedTime(), config("data_parallel", recompute="all"))
    # A plan without the link is possible.
    assert optimize(SMALL, one_way, SimulatedTime(), config(recompute="all")).solution.replicas == 1
