"""The simulated run of a step of a plan: each pass of its stages as they are compiled."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.mesh import ParallelOptions, Step, Timeline, schedule, simulate
from stitch.parallel.plans import Plan
from stitch.parallel.tensor_search import TensorPlan
from stitch.parallel.tensor_training import divided_stages
from stitch.program import InputKind
from stitch.training import Loss, Optimizer, Trainable, TrainingOptions, stages_of


def simulate_plan(
    plan: Plan | TensorPlan,
    model: Trainable,
    loss: Loss,
    optimizer: Optimizer,
    options: TrainingOptions,
) -> Timeline[Any]:  # fmt: skip
    """Simulate a step of a plan on its specification, with the times of its cost estimator.

    The estimate of the search adds the costs of segments; here each stage is one program, and each
    value crosses its link when it is ready.
    """
    costs, specification = plan.costs, plan.costs.specification
    if isinstance(plan, TensorPlan):
        chosen = ParallelOptions(
            micro_batches=plan.micro_batches, tensor=plan.degree, divide=plan.axes
        )
        divided = divided_stages(model, loss, optimizer, options, chosen)
        stages, share = divided.staged.stages, plan.micro_batches
        orders = divided.schedule(share)
        places: list[tuple[str, ...]] = [(plan.devices[device],) for device in divided.devices]
    else:
        stages = stages_of(model, loss, optimizer, options, plan.cuts).stages
        share = plan.micro_batches // plan.replicas
        orders = schedule(plan.schedule, len(stages), share)
        places = [plan.devices(k) for k in range(len(stages))]
    replicas = len(places[0])
    sizes = [_sizes(stage.forward) | _sizes(stage.backward) for stage in stages]
    homes = {p.name: k for k, each in enumerate(stages) for p in each.parameters}
    steps: dict[str, list[Step[Any]]] = {device: [] for device in specification.devices}
    passes: list[Hashable] = []

    taken_by: dict[tuple[int, Machine], float] = {}

    def seconds(graph: ComputationGraph | None, device: str) -> float:
        machine = specification.devices[device].machine
        if graph is None:
            return 0.0
        key = id(graph), machine
        if key not in taken_by:
            taken_by[key] = costs.graph_seconds(graph, machine, options.spaces)
        return taken_by[key]

    for replica in range(replicas):
        for order in orders:
            for k, batch, is_backward in order:
                stage, device = stages[k], places[k][replica]
                passed = stage.returning if is_backward else stage.arriving
                reads = [(replica, batch, is_backward, v.source, v.output) for v in passed]
                graph = stage.backward if is_backward else stage.forward
                taken = seconds(graph, device)
                if is_backward and batch:
                    taken += seconds(stage.accumulation, device)
                elif not is_backward:
                    taken += seconds(stage.loss, device)
                made = {slot.name for slot in graph.outputs} if graph else set()
                makes = [((replica, batch, is_backward, k, name), sizes[k][name]) for name in made]
                key = replica, k, batch, is_backward
                steps[device].append(Step(key, taken, tuple(reads), tuple(makes)))
                passes.append(key)
    for k, stage in enumerate(stages):
        first, *others = places[k]
        gradients = [(p.gradient, p.type.nbytes) for p in stage.parameters]
        for replica, device in enumerate(others, 1):
            sums = tuple([((replica, name), nbytes) for name, nbytes in gradients])
            steps[device].append(Step(("sum", replica, k), 0.0, (), sums, tuple(passes)))
            added = seconds(stage.accumulation, first)
            read = tuple([value for value, _ in sums])
            steps[first].append(Step(("add", replica, k), added, read, (), tuple(passes)))
        taken = seconds(stage.squares, first) + seconds(stage.update, first)
        shared = tuple([(("new", p.name), p.type.nbytes) for p in stage.parameters])
        steps[first].append(Step(("update", k), taken, (), shared, tuple(passes)))
    for k, stage in enumerate(stages):
        parameters = {s.name for s in stage.forward.inputs if s.kind is InputKind.PARAMETER}
        for replica, device in enumerate(places[k]):
            names = sorted(name for name in parameters if replica or homes[name] != k)
            copies = tuple([("new", name) for name in names])
            steps[device].append(Step(("copies", replica, k), 0.0, copies))
    return simulate(steps, specification)


def _sizes(graph: ComputationGraph | None) -> dict[str, int]:
    """Return the bytes of the outputs of a graph by name."""
    if graph is None:
        return {}
    return {slot.name: graph.output_type(i).nbytes for i, slot in enumerate(graph.outputs)}
