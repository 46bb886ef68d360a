"""Found plans: what is chosen for an MLP, a CNN and a transformer, and how these train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraph
from stitch.mesh import MachineSpecification
from stitch.parallel import Plan, simulate_plan
from stitch.training import (
    AlgorithmConfig,
    SimulatedTime,
    TrainingOptions,
    as_trainable,
    optimize,
)
from tests.support.training.drawn_plans import near_devices
from tests.support.training.staged_models import (
    attention,
    convolutions,
    drawn_batches,
    mlp,
    model_of,
)

pytestmark = pytest.mark.campaign("plans")
GRAPHS: dict[str, Callable[[], ComputationGraph]] = {
    "mlp": mlp, "cnn": convolutions, "transformer": attention,
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["data_parallel", "pipeline", "search"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_trains_on_both_carriers_with_the_losses_of_one_device(
    name: str, algorithm: str
) -> None:
    model = model_of(GRAPHS[name]())
    options: dict[str, Any] = {"optimizer": "adam", "loss": "mse", "weights": model.values}
    found = stitch.compile(model.graph, algorithm=algorithm, devices=near_devices(4), **options)
    assert (len(found.staged.stages), found.parallel.replicas) != (1, 1)
    batches = drawn_batches(model, found.parallel.micro_batches)
    states = []
    for backend in ("local", "ray"):
        with found.start(backend=backend) as training:
            losses = [training.step(batches) for _ in range(3)]
            states.append((losses, training.state_dict()))
    assert states[0][0] == states[1][0]
    for key, array in states[0][1].items():
        assert array.tobytes() == states[1][1][key].tobytes(), key
    steps = found.parallel.micro_batches
    one = stitch.compile(model.graph, accumulation_steps=steps, target="tiny", **options)
    with one.start() as instance:
        expected = [[float(loss) for loss in instance.step(batches)] for _ in range(3)]
    if found.parallel.micro_batches == found.parallel.replicas or found.parallel.replicas == 1:
        assert states[0][0] == expected
    np.testing.assert_allclose(states[0][0], expected, rtol=1e-5)


@pytest.mark.timeout(600)
def test_a_transformer_of_24_layers_on_8_devices() -> None:
    graph = attention(layers=24, batch=8, words=64, width=256)
    eight = MachineSpecification.of(8, "wormhole_n150")
    options = TrainingOptions(accumulation_steps=16)
    model = as_trainable(
        graph,
        {
            slot.name: np.zeros(graph.input_type(i).shape, np.float32)
            for i, slot in enumerate(graph.inputs)
            if slot.name != "x"
        },
    )
    best = optimize(
        model, eight, SimulatedTime(), AlgorithmConfig("search", "mse", "adam", options)
    )
    simulated = {}
    plans = {"search": best.plan}
    for algorithm in ("data_parallel", "pipeline"):
        config = AlgorithmConfig(algorithm, "mse", "adam", options)
        plans[algorithm] = optimize(model, eight, SimulatedTime(), config).plan
    for name, plan in plans.items():
        line = simulate_plan(plan)
        simulated[name] = line.makespan
        assert line.makespan == pytest.approx(plan.seconds, rel=0.1), name
        # The plans that compete within 10 % of each other may change places in the simulation.
        assert simulated["search"] <= line.makespan * 1.01
        assert best.cost_values.seconds <= plan.seconds
    costs, count = best.plan.costs, best.plan.costs.count
    even = tuple([round(count * (k + 1) / 8) for k in range(8)])
    for schedule in ("1f1b", "gpipe"):
        line = simulate_plan(Plan(costs, tuple(eight.devices), even, 1, schedule, 16, 0.0))
        assert max(best.cost_values.seconds, simulated["search"]) <= line.makespan
    # Megatron's placement: queries, keys and values by columns, the projection after them by rows.
    axes = {f"{m}{i}": 0 if m == "o" else 1 for i in range(24) for m in "qkvo"}
    megatron = Plan(
        costs, tuple(eight.devices), (costs.count,), 1, "1f1b", 16, 0.0, degree=8, axes=axes
    )
    line = simulate_plan(megatron)
    assert best.cost_values.seconds <= line.makespan and simulated["search"] <= line.makespan
    print(best.text(), best.cost_values.seconds, simulated, line.makespan)


#: What is chosen for `wormhole_n150` with default links and 8 micro-batches: replicas, stages and
#: schedule. The MLP has passes of a few microseconds, which only many devices make up for; the CNN
#: few weights, so replicas have little to add. The weights of the transformer take longer on a link
#: than a pass, so stages come before replicas: on 8 devices replicas of half of it add them in
#: parallel. With one micro-batch for each pair of devices both schedules are the same.
CHOSEN = {
    ("mlp", 2): (1, 1, "1f1b"), ("mlp", 4): (1, 1, "1f1b"), ("mlp", 8): (4, 2, "1f1b"),
    ("cnn", 2): (2, 1, "1f1b"), ("cnn", 4): (4, 1, "1f1b"), ("cnn", 8): (4, 2, "1f1b"),
    ("transformer", 2): (1, 2, "gpipe"), ("transformer", 4): (1, 4, "gpipe"),
    ("transformer", 8): (4, 2, "1f1b"),
}  # fmt: skip


def large(name: str) -> ComputationGraph:
    return (
        attention(layers=4, batch=8, words=64, width=256)
        if name == "transformer"
        else GRAPHS[name]()
    )


@pytest.mark.parametrize(("name", "devices"), CHOSEN)
def test_what_is_chosen(name: str, devices: int) -> None:
    specification = MachineSpecification.of(devices, "wormhole_n150")
    config = AlgorithmConfig(
        "search", "mse", "adam", TrainingOptions(accumulation_steps=8, recompute="cheap")
    )
    found = optimize(large(name), specification, SimulatedTime(), config)
    chosen = found.solution
    assert (chosen.replicas, len(chosen.cuts) + 1, chosen.schedule) == CHOSEN[name, devices]
