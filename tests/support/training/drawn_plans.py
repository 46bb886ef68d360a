"""Random small trainings and devices, and all plans by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

import stitch
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.machine import Machine
from stitch.mesh import MachineSpecification
from stitch.mesh.specification import DeviceEntry, Link
from stitch.parallel import Plan, SegmentCosts
from stitch.parallel.simulated_steps import PricedStages
from stitch.program import InputKind
from stitch.training import SimulatedTime, Trainable, TrainingOptions, loss_of
from tests.support.stitched_models import tiny
from tests.support.training.staged_models import model_of


def near_devices(count: int, machine: str | Machine = "tiny") -> MachineSpecification:
    """Return devices with links so fast that dividing even small models pays."""
    entry = MachineSpecification.of(1, machine).devices["device0"]
    names = [f"d{i}" for i in range(count)]
    links = tuple([Link(a, b, 1e-9, 1e13) for a, b in permutations(names, 2)])
    return MachineSpecification("near", dict.fromkeys(names, entry), links)


def drawn_graph(rng: np.random.Generator, operations: int = 6) -> ComputationGraph:
    """Return a graph of at most so many operations: products, skips, sums, shared weights."""
    b = ComputationGraphBuilder("drawn")
    batch, width = int(rng.choice([4, 32])), int(rng.choice([8, 32]))
    weights = [
        b.input(f"w{i}", (width, width), "float32", InputKind.PARAMETER)
        for i in range(rng.integers(1, 4))
    ]
    made: list[Any] = [b.input("x", (batch, width), "float32")]
    made.append(b.op("MatMul", made[0], weights[0]))
    for _ in range(rng.integers(1, operations)):
        one = made[max(0, len(made) - 1 - int(rng.exponential(0.7)))]
        kind = rng.integers(5)
        if kind < 2:
            made.append(b.op("MatMul", one, weights[rng.integers(len(weights))]))
        elif kind == 4:
            made.append(b.op("Add", made[-1], one))
        else:
            made.append(b.op(("Tanh", "Relu")[kind - 2], made[-1]))
    b.output("y", made[-1])
    return b.build()


def drawn_specification(rng: np.random.Generator, devices: int) -> MachineSpecification:
    """Return devices with the memory for all, for some, or for few stages, and drawn links."""
    machines = [tiny(dram_nbytes=int(n)) for n in rng.choice([6144, 24576, 1 << 20], 2)]
    entries = {f"d{i}": DeviceEntry(machines[int(rng.integers(2))]) for i in range(devices)}
    links = [
        Link(a, b, float(rng.choice([1e-8, 1e-6])), float(rng.choice([1e9, 1e12])))
        for a in entries for b in entries if a != b
    ]  # fmt: skip
    return MachineSpecification("drawn", entries, tuple(links))


@dataclass(frozen=True)
class Case:
    """A training to plan."""

    model: Trainable
    specification: MachineSpecification
    options: TrainingOptions

    def costs(self, recompute: str) -> SegmentCosts:
        options = TrainingOptions(
            recompute=recompute, accumulation_steps=self.options.accumulation_steps
        )
        return SegmentCosts(
            self.model, loss_of("mse"), stitch.Adam(), options, self.specification, SimulatedTime()
        )


def drawn_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    graph = drawn_graph(rng)
    specification = drawn_specification(rng, int(rng.integers(1, 5)))
    steps = int(rng.choice([2, 3, 4, 8]))
    return Case(model_of(graph, seed), specification, TrainingOptions(accumulation_steps=steps))


#: The seconds of a plan, and whether it fits.
Tried = tuple[float, Callable[[], bool]]


def all_plans(case: Case) -> Iterator[Tried]:
    """Yield all plans, whether or not they fit."""
    steps = case.options.accumulation_steps
    for recompute in ("none", "all"):
        costs = case.costs(recompute)
        for names in permutations(case.specification.devices):
            yield from _plans_of(costs, names, steps)
    yield from divided_plans(case)


def divided_plans(case: Case) -> Iterator[Tried]:
    """Yield all plans that divide weights."""
    steps, count = case.options.accumulation_steps, len(case.specification.devices)
    costs = case.costs("none")
    kinds = {
        slot.name: costs.graph.input_type(i).shape for i, slot in enumerate(costs.graph.inputs)
        if slot.kind is InputKind.PARAMETER
    }  # fmt: skip
    for degree in range(2, count + 1):
        for axes in product([None, 0, 1], repeat=len(kinds)):
            chosen = {n: axis for n, axis in zip(kinds, axes, strict=True) if axis is not None}
            if not chosen or any(kinds[name][axis] % degree for name, axis in chosen.items()):
                continue
            try:
                stages = PricedStages(costs, (), degree, chosen)
            except CompileError:
                continue
            for replicas in range(1, count // degree + 1):
                if steps % replicas:
                    continue
                for order in permutations(case.specification.devices, replicas * degree):
                    plan = Plan(
                        costs, order, (costs.count,), replicas, "1f1b", steps, 0.0, degree, chosen
                    )
                    yield stages.run(plan).makespan, partial(stages.check_memory, plan)


def _plans_of(costs: SegmentCosts, names: Sequence[str], steps: int) -> Iterator[Tried]:
    for replicas in range(1, len(names) + 1):
        if steps % replicas:
            continue
        for stages in range(1, min(len(names) // replicas, costs.count) + 1):
            for inner in combinations(range(1, costs.count), stages - 1):
                ends = (*inner, costs.count)
                rows = [names[r * stages : (r + 1) * stages] for r in range(replicas)]
                for schedule in ("1f1b", "gpipe"):
                    n = steps // replicas
                    waiting = [
                        n if schedule == "gpipe" else min(n, stages - k) for k in range(stages)
                    ]
                    machines = [
                        [costs.specification.devices[row[k]].machine for row in rows]
                        for k in range(stages)
                    ]
                    whole = list(zip((0, *ends), ends, strict=False))
                    fits = partial(costs.check_memory, whole, machines, waiting)
                    yield _seconds(costs, ends, rows, schedule, n), fits


def least_seconds(plans: Iterable[Tried]) -> float:
    """Return the seconds of the fastest plan whose stages fit as they are compiled."""
    for seconds, fits in sorted(plans, key=lambda plan: plan[0]):
        if math.isinf(seconds):
            break
        if fits():
            return seconds
    return math.inf


def _seconds(
    costs: SegmentCosts, ends: tuple[int, ...], rows: Sequence[Sequence[str]], schedule: str, n: int
) -> float:
    """Return the seconds of a plan by the formula, whether or not it fits."""
    count, stages = len(ends), []
    for k, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        before = [row[k - 1] for row in rows] if k else []
        stages.append(costs.stage(first, end, [row[k] for row in rows], before))
    once = sum(s.forward + s.backward + s.arriving + s.returning for s in stages)
    tail = max(s.update for s in stages)
    if schedule == "gpipe":
        period = max(max(s.forward, s.arriving) for s in stages)
        period += max(max(s.backward + s.accumulation, s.returning) for s in stages)
        return once + (n - 1) * period + tail
    period = 0.0
    for k, stage in enumerate(stages):
        busy = stage.forward + stage.backward + stage.accumulation
        period = max(period, busy, stage.arriving, stage.returning)
        if n > count - k:
            behind = sum(s.forward + s.backward + s.arriving + s.returning for s in stages[k + 1 :])
            period = max(period, (busy + behind) / (count - k))
    return once + (n - 1) * period + tail
