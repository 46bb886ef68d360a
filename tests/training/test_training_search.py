"""The algorithms: what they choose fits, costs no more than nothing, and changes no result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

import stitch
from stitch.errors import OutOfMemoryError, UsageError
from stitch.machine import Machine, load_machine
from stitch.program import OperationList, Space
from stitch.training import (
    AlgorithmConfig,
    PlacementResult,
    SimulatedTime,
    TrainingGraphs,
    TrainingOptions,
    as_trainable,
    optimize,
)
from stitch.training.search import L1Candidate, best_set
from tests.support.grids import in_turn
from tests.support.stitched_models import tiny
from tests.support.training.models import batches, compiled, mlp, train

N150 = load_machine("wormhole_n150")


def found(
    algorithm: str, machine: Machine = N150, **options: Any
) -> PlacementResult[TrainingGraphs]:
    config = AlgorithmConfig(
        algorithm, stitch.losses.MSELoss(), stitch.Adam(), TrainingOptions(**options)
    )
    return optimize(as_trainable(mlp(hidden=512)), machine, SimulatedTime(), config)


@pytest.mark.parametrize(
    ("algorithm", "target"), in_turn(["greedy", "search"], ["wormhole_n150", "tiny", "host"])
)
def test_an_algorithm_changes_no_result_and_adds_no_copy(algorithm: str, target: str) -> None:
    plain = compiled(stitch.SGD(lr=0.001), target=target, graph=mlp(hidden=512))
    chosen = compiled(
        stitch.SGD(lr=0.001), target=target, graph=mlp(hidden=512), algorithm=algorithm
    )
    assert train(chosen, batches(4), 8) == train(plain, batches(4), 8)
    device = chosen.instance.device
    made = device.statistics().plans_made
    device.history.clear()
    train(chosen, batches(4), 4)
    assert device.statistics().plans_made == made
    assert sum(times * len(plan.copies) for plan, times in device.account().plans) == 8


@pytest.mark.parametrize(
    ("algorithm", "target"), in_turn(["none", "greedy", "search"], ["wormhole_n150", "tiny"])
)
def test_a_step_takes_what_the_search_estimated(algorithm: str, target: str) -> None:
    model = compiled(
        stitch.SGD(lr=0.001), target=target, graph=mlp(hidden=512), algorithm=algorithm
    )
    train(model, batches(4), 8)
    device = model.instance.device
    device.history.clear()
    train(model, batches(4), 4)
    assert model.training is not None and model.training.search_result is not None
    estimate = model.training.search_result.cost_values.seconds
    assert device.account().total.program_seconds / 4 == pytest.approx(estimate, rel=1e-4)


def test_nothing_is_left_where_it_is_and_an_algorithm_uses_l1() -> None:
    spaces = set(found("none").tensor_mapping.values())
    assert spaces == {Space.DRAM}
    result = found("search")
    assert Space.L1 in set(result.tensor_mapping.values())
    l1 = N150.shape.l1
    assert l1 is not None
    assert result.cost_values.l1_size_per_bank <= l1.capacity * 3 // 4


def test_recomputation_is_chosen_where_reading_costs_more_than_computing() -> None:
    @dataclass(frozen=True)
    class DearActivations:
        def program(self, machine: Machine, program: OperationList) -> float:
            slots = [slot.value for slot in program.inputs]
            slots += [slot.value for slot in program.outputs]
            return float(sum(program.values[v].type.shape == (16, 32) for v in slots))

    config = AlgorithmConfig("search", stitch.losses.MSELoss(), stitch.SGD())
    result = optimize(as_trainable(mlp()), N150, DearActivations(), config)
    assert result.solution.recompute == "all"
    assert result.graph.saved == ()


def test_a_machine_that_is_too_small_is_refused_with_what_was_tried() -> None:
    with pytest.raises(OutOfMemoryError, match="none, cheap, all"):
        found("greedy", tiny(dram_nbytes=1024))


def test_where_nothing_fits_the_remedy_is_one_that_could_help() -> None:
    def refused(
        rows: int, nbytes: int, algorithm: str = "none", momentum: float = 0.0, **options: Any
    ) -> OutOfMemoryError:
        optimizer = stitch.SGD(momentum=momentum)
        asked = TrainingOptions(**options)
        config = AlgorithmConfig(algorithm, stitch.losses.MSELoss(), optimizer, asked)
        model = as_trainable(mlp(batch=rows))
        with pytest.raises(OutOfMemoryError) as caught:
            optimize(model, tiny(dram_nbytes=nbytes), SimulatedTime(), config)
        assert "of them weights and optimizer state" in str(caught.value.got)
        return caught.value

    weights = "a larger machine, or fewer weights"
    assert refused(8, 1024).remedy == weights
    stateless = f"{weights}, or an optimizer with less state (sgd without momentum)"
    assert refused(8, 1024, momentum=0.9).remedy == stateless
    batch = "a smaller batch with accumulation_steps"
    narrower = f"{batch}, or precision=bfloat16"
    for algorithm in ("greedy", "search"):
        assert refused(4096, 1 << 16, algorithm).remedy == narrower
        assert refused(4096, 1 << 16, algorithm, precision=stitch.DataType.BFLOAT16).remedy == batch
    by_search = "algorithm=search, which recomputes activations, or"
    assert refused(4096, 1 << 16).remedy == f"{by_search} {narrower}"
    # Where what is computed again is said, search tries nothing else.
    for algorithm in ("none", "search"):
        assert refused(4096, 1 << 16, algorithm, recompute="all").remedy == narrower


def test_branch_and_bound_finds_the_best_of_all_sets() -> None:
    sizes, savings = (7, 3, 5, 4, 6), (9.0, 3.5, 6.0, 5.2, 7.0)
    candidates = sorted(
        (L1Candidate(str(i), s, n) for i, (n, s) in enumerate(zip(sizes, savings, strict=True))),
        key=lambda c: -c.saving / c.size_per_bank,
    )
    for room in range(26):
        chosen = best_set(candidates, room)
        best = max(
            sum(c.saving for c in subset)
            for count in range(6)
            for subset in itertools.combinations(candidates, count)
            if sum(c.size_per_bank for c in subset) <= room
        )
        assert sum(c.saving for c in candidates if c.name in chosen) == pytest.approx(best)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown algorithm"):
        compiled(algorithm="unity")
    with pytest.raises(UsageError, match="unknown algorithm"):
        stitch.compile(mlp(), algorithm="unity")


def test_a_plain_computation_graph_is_optimized_as_it_is_trained() -> None:
    graph, machine = mlp(), load_machine("wormhole_n150")
    config = AlgorithmConfig("search", stitch.losses.MSELoss(), stitch.SGD())
    found = optimize(graph, machine, SimulatedTime(), config)
    assert (
        found.solution == optimize(as_trainable(graph), machine, SimulatedTime(), config).solution
    )
    wrong: Any
    for wrong, word in (
        ((graph.text(), machine, SimulatedTime(), config), "a ComputationGraph or a Tr"),
        (
            (graph, "wormhole_n150", SimulatedTime(), config),
            "a stitch.Mac.* as spec",
        ),
        ((graph, machine, None, config), "program.* as estimator"),
        ((graph, machine, SimulatedTime(), "search"), "an AlgorithmConfig as config"),
    ):
        with pytest.raises(UsageError, match=f"optimize takes {word}|optimize takes .*{word}"):
            optimize(*wrong)
