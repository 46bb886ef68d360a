"""The search for weights to divide: equal to brute force, near the simulated run, no worse than
Megatron's placement, and its plans train."""

from __future__ import annotations

import dataclasses
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, OutOfMemoryError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh import MachineSpecification
from stitch.mesh.specification import Link
from stitch.parallel import ParallelComputationGraph, SegmentCosts, simulate_plan
from stitch.parallel.tensor_costs import TensorCosts
from stitch.parallel.tensor_search import DividedPlans
from stitch.program import InputKind
from stitch.training import (
    AlgorithmConfig,
    SimulatedTime,
    TrainingOptions,
    loss_of,
    optimize,
)
from tests.parallel.test_divided_weights import check_training
from tests.support.stitched_models import tiny
from tests.support.training.drawn_plans import (
    divided_plans,
    drawn_case,
    least_seconds,
    near_devices,
)
from tests.support.training.staged_models import (
    attention,
    convolutions,
    drawn_batches,
    mlp,
    model_of,
)

PLANS = pytest.mark.campaign("plans")
ADAM = stitch.Adam()


def check_against_brute_force(seed: int) -> bool:
    """Check one drawn case; return whether it has a plan."""
    case = drawn_case(seed)
    steps, count = case.options.accumulation_steps, len(case.specification.devices)
    least, costs, best = least_seconds(divided_plans(case)), case.costs("none"), math.inf
    for degree in range(2, count + 1):
        numbers = [r for r in range(1, count // degree + 1) if steps % r == 0]
        plans = DividedPlans(costs, degree, steps // numbers[-1])
        for replicas in numbers:
            plan, at_least = plans.best(replicas, steps)
            if plan is not None:
                assert at_least == plan.seconds
                best = min(best, plan.seconds)
    assert best == pytest.approx(least, rel=1e-12), seed
    return math.isfinite(best)


def test_the_search_equals_brute_force() -> None:
    assert check_against_brute_force(3) and not check_against_brute_force(6)


@PLANS
def test_the_search_equals_brute_force_on_many_graphs() -> None:
    assert sum(map(check_against_brute_force, range(20, 45))) > 8


def costs_of(graph: ComputationGraph, devices: int, steps: int) -> SegmentCosts:
    return SegmentCosts(
        model_of(graph), loss_of("mse"), ADAM, TrainingOptions(accumulation_steps=steps),
        MachineSpecification.of(devices, "wormhole_n150"), SimulatedTime(),
    )  # fmt: skip


@PLANS
@pytest.mark.timeout(300)
def test_a_transformer_is_divided_no_worse_than_by_megatron() -> None:
    layers, steps = 2, 4
    costs = costs_of(attention(layers, batch=8, words=64, width=256), 2, steps)
    megatron = {f"{m}{i}": 0 if m == "o" else 1 for i in range(layers) for m in "qkvo"}
    best, at_least = DividedPlans(costs, 2, steps).best(1, steps)
    assert best is not None
    theirs = simulate_plan(replace(best, axes=megatron)).makespan
    assert at_least < best.seconds == simulate_plan(best).makespan <= theirs


@PLANS
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("graph", [mlp(), convolutions(), attention()], ids=lambda g: g.name)
def test_the_estimate_is_the_simulated_step(graph: ComputationGraph, degree: int) -> None:
    costs = costs_of(graph, degree, 4)
    best, at_least = DividedPlans(costs, degree, 4).best(1, 4)
    assert best is not None
    assert at_least <= simulate_plan(best).makespan == best.seconds
    terms = TensorCosts(costs, degree, 4)
    # The guide orders plans; that it is too low is why it is no estimate.
    assert best.seconds > terms.start.at_least(4)


def test_the_search_finds_replicas_of_divided_weights() -> None:
    """A device has memory for half of the weight, and replicas are faster than quarters."""
    b = ComputationGraphBuilder("wide")
    x = b.input("x", (8, 64), "float32")
    b.output("y", b.op("MatMul", x, b.input("w", (64, 64), "float32", InputKind.PARAMETER)))
    model = model_of(b.build())
    found = stitch.compile(
        model.graph, weights=model.values, optimizer="adam", loss="mse", algorithm="search",
        devices=near_devices(4, tiny(dram_nbytes=40960)), accumulation_steps=4,
    )  # fmt: skip
    result: Any = found.search_result
    assert (result.solution.replicas, result.solution.tensor) == (2, 2)
    assert "2 x 1 / 2:" in result.text() and "1 x 1: 1f1b none does not fit" in result.text()
    assert ParallelComputationGraph.from_json(result.pcg.as_json()) == result.pcg
    graph = result.pcg.graph
    assert result.tensor_mapping[graph.values[graph.outputs[0].value].name].devices == ("d0",)
    assert {len(each.devices) for each in result.tensor_mapping.values()} == {1, 2, 4}
    with found.start() as training:
        assert len(training.step(drawn_batches(model, 4))) == 4


@PLANS
@pytest.mark.parametrize("graph", [mlp(2), convolutions(), attention(1)], ids=lambda g: g.name)
def test_a_found_plan_trains(graph: ComputationGraph) -> None:
    config = AlgorithmConfig("tensor", "mse", "adam")
    found = optimize(graph, MachineSpecification.of(2, "tiny"), SimulatedTime(), config)
    chosen = found.solution
    assert (chosen.tensor, chosen.replicas, chosen.cuts) == (2, 1, ())
    assert found.parallel.divide == chosen.divide and "1 x 1 / 2:" in found.text()
    assert all(len(p.devices) in (1, 2) for p in found.tensor_mapping.values())
    check_training(graph, dict(chosen.divide), ("local",))


def test_compile_takes_the_algorithm() -> None:
    model = stitch.compile(
        mlp(1), optimizer="adam", loss="mse", algorithm="tensor", devices=2,
        weights={n: np.asarray(a) for n, a in model_of(mlp(1)).values.items()},
    )  # fmt: skip
    assert model.parallel.tensor == 2 and set(model.parallel.divide) == {"w0"}


def test_devices_without_links_and_weights_that_do_not_divide_are_one_error() -> None:
    config = AlgorithmConfig("tensor", "mse", "adam")
    two = MachineSpecification.of(2, "tiny")
    one_way = MachineSpecification("one way", two.devices, (Link("device0", "device1", 1e-6, 1e9),))
    with pytest.raises(UsageError, match=r"no link device1 -> device0"):
        optimize(mlp(1), one_way, SimulatedTime(), config)
    b = ComputationGraphBuilder("odd")
    x, w = b.input("x", (4, 3), "float32"), b.input("w", (3, 5), "float32", InputKind.PARAMETER)
    b.output("y", b.op("MatMul", x, w))
    with pytest.raises(UsageError, match="no weights of graph 'odd' can be divided"):
        optimize(b.build(), two, SimulatedTime(), config)
    with pytest.raises(UsageError, match="among two or more devices"):
        optimize(mlp(1), MachineSpecification.of(1, "tiny"), SimulatedTime(), config)


def test_devices_that_are_too_small_for_the_shards_are_told_what_each_needs() -> None:
    small = MachineSpecification.of(2, tiny(dram_nbytes=2048))
    config = AlgorithmConfig("tensor", "mse", "adam")
    with pytest.raises(OutOfMemoryError, match=r"'device0' \(tiny\) needs \d+ B per bank of dram"):
        optimize(mlp(2), small, SimulatedTime(), config)


@PLANS
def test_with_less_memory_a_slower_plan_is_found() -> None:
    config = AlgorithmConfig("tensor", "mse", ADAM, TrainingOptions(accumulation_steps=2))
    less, more = [
        optimize(
            mlp(2, 32), MachineSpecification.of(2, tiny(dram_nbytes=n)), SimulatedTime(), config
        )
        for n in (14336, 20480)
    ]
    assert less.cost_values.seconds > more.cost_values.seconds
    assert less.solution.divide != more.solution.divide


def test_a_plan_that_cannot_be_cut_is_not_found() -> None:
    b = ComputationGraphBuilder("averaged")
    x = b.input("x", (4, 8), "float32")
    w = b.input("w", (8, 8), "float32", InputKind.PARAMETER)
    mean = b.input("mean", (4, 8), "float32", InputKind.STATE)
    h = b.op("MatMul", x + mean, w)
    b.output("mean", mean * 0.9 + h)
    b.output("y", h)
    two = MachineSpecification.of(2, "tiny")
    with pytest.raises(CompileError, match=r"'mean'.*cut separates(.|\n)*other weights than w"):
        optimize(b.build(), two, SimulatedTime(), AlgorithmConfig("tensor", "mse", "sgd"))


def test_the_options_of_a_result_compile_again_and_take_one_micro_batch() -> None:
    config = AlgorithmConfig("tensor", "mse", "adam")
    found = optimize(mlp(1), MachineSpecification.of(2, "tiny"), SimulatedTime(), config)
    assert found.solution.micro_batches == 1
    others = optimize(
        mlp(1), MachineSpecification.of(2, "tiny"), SimulatedTime(),
        AlgorithmConfig("data_parallel", "mse", "adam"),
    )  # fmt: skip
    for result in (found, others):
        model = stitch.compile(
            mlp(1), optimizer="adam", loss="mse", devices=result.specification,
            parallel=dataclasses.asdict(result.parallel),
            weights={n: np.asarray(a) for n, a in model_of(mlp(1)).values.items()},
        )  # fmt: skip
        assert model.parallel == result.parallel and pickle.dumps(result.solution)
