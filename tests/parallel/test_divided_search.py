"""The search for weights to divide: equal to brute force, near the simulated run, no worse than
Megatron's placement, and its plans train."""

from __future__ import annotations

import dataclasses
import math
import pickle
from itertools import product

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, OutOfMemoryError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh import MachineSpecification
from stitch.mesh.specification import Link
from stitch.parallel import SegmentCosts, TensorPlan, best_division, simulate_plan
from stitch.parallel.tensor_costs import TensorCosts
from stitch.parallel.tensor_search import plan_terms
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
from tests.support.training.drawn_plans import drawn_case
from tests.support.training.staged_models import attention, convolutions, mlp, model_of

PLANS = pytest.mark.campaign("plans")
ADAM = stitch.Adam()


def check_against_brute_force(seed: int) -> int:
    """Check one drawn case with each number of shards; return how many have a plan."""
    case = drawn_case(seed)
    costs, steps, found = case.costs("none"), case.options.accumulation_steps, 0
    kinds = {
        slot.name: costs.graph.input_type(i).shape for i, slot in enumerate(costs.graph.inputs)
        if slot.kind is InputKind.PARAMETER
    }  # fmt: skip
    for degree in range(2, len(case.specification.devices) + 1):
        of_degree, least = TensorCosts(costs, ADAM, degree, steps), math.inf
        for axes in product([None, 0, 1], repeat=len(kinds)):
            chosen = {n: axis for n, axis in zip(kinds, axes, strict=True) if axis is not None}
            if not chosen or any(kinds[name][axis] % degree for name, axis in chosen.items()):
                continue
            terms = plan_terms(of_degree, chosen)
            if terms is not None and of_degree.fits(terms):
                least = min(least, terms.seconds(steps))
        plan = best_division(costs, ADAM, degree, steps)
        assert (plan is None) == math.isinf(least), (seed, degree)
        if plan is not None:
            assert plan.seconds == pytest.approx(least, rel=1e-12), (seed, degree)
            assert plan.at_least == plan.seconds
            found += 1
    return found


def test_the_search_equals_brute_force() -> None:
    assert check_against_brute_force(6) + check_against_brute_force(2) >= 1


@PLANS
def test_the_search_equals_brute_force_on_many_graphs() -> None:
    assert sum(map(check_against_brute_force, range(20, 60))) > 20


def costs_of(graph: ComputationGraph, devices: int, steps: int) -> SegmentCosts:
    return SegmentCosts(
        model_of(graph), loss_of("mse"), ADAM, TrainingOptions(accumulation_steps=steps),
        MachineSpecification.of(devices, "wormhole_n150"), SimulatedTime(),
    )  # fmt: skip


@PLANS
@pytest.mark.timeout(300)
def test_a_transformer_is_divided_no_worse_than_by_megatron() -> None:
    layers, steps = 2, 4
    graph = attention(layers, batch=8, words=64, width=256)
    costs = costs_of(graph, 2, steps)
    megatron = {f"{m}{i}": 0 if m == "o" else 1 for i in range(layers) for m in "qkvo"}
    terms = plan_terms(TensorCosts(costs, ADAM, 2, steps), megatron)
    best = best_division(costs, ADAM, 2, steps)
    assert terms is not None and best is not None
    theirs = TensorPlan(costs, 2, megatron, steps, terms.seconds(steps), 0.0, (0, 0))
    assert best.at_least <= best.seconds <= theirs.seconds
    runs = [
        simulate_plan(plan, model_of(graph), loss_of("mse"), ADAM,
                      TrainingOptions(accumulation_steps=steps)).makespan
        for plan in (best, theirs)
    ]  # fmt: skip
    assert runs[0] <= runs[1] * 1.01
    for run, plan in zip(runs, (best, theirs), strict=True):
        assert run == pytest.approx(plan.seconds, rel=0.4)


@PLANS
@pytest.mark.parametrize("graph", [mlp(2), convolutions(), attention(1)], ids=lambda g: g.name)
def test_a_found_plan_trains(graph: ComputationGraph) -> None:
    config = AlgorithmConfig("tensor", "mse", "adam")
    found = optimize(graph, MachineSpecification.of(2, "tiny"), SimulatedTime(), config)
    chosen = found.solution
    assert (chosen.tensor, chosen.replicas, chosen.cuts) == (2, 1, ())
    assert found.parallel.divide == chosen.divide and "/ 2:" in found.text()
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


def test_a_plan_whose_programs_do_not_fit_or_that_cannot_be_cut_is_not_found() -> None:
    config = AlgorithmConfig("tensor", "mse", ADAM, TrainingOptions(accumulation_steps=2))
    small = MachineSpecification.of(2, tiny(dram_nbytes=14336))
    with pytest.raises(OutOfMemoryError, match=r"_update' on machine 'tiny'(.|\n)*other weights"):
        optimize(mlp(2, 32), small, SimulatedTime(), config)
    b = ComputationGraphBuilder("averaged")
    x = b.input("x", (4, 8), "float32")
    w = b.input("w", (8, 8), "float32", InputKind.PARAMETER)
    mean = b.input("mean", (4, 8), "float32", InputKind.STATE)
    h = b.op("MatMul", x, w)
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
