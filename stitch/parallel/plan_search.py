"""`optimize`: the plan of a training on several devices, and its parallel graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np

from stitch.argument_kinds import instance_of, takes, with_method
from stitch.errors import CompileError, OutOfMemoryError, UsageError
from stitch.graph import ComputationGraph
from stitch.html_table import html_table
from stitch.machine import Machine
from stitch.mesh import MachineSpecification, ParallelOptions, specification_of
from stitch.parallel.assignments import fastest_order
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.division import TensorMapping, can_replicate, replicated, tensor_mapping
from stitch.parallel.parallel_graph import ParallelComputationGraph
from stitch.parallel.plans import Plan, best_stages, shapes_of
from stitch.parallel.simulated_steps import PricedStages
from stitch.parallel.tensor_graph import divided_graph
from stitch.parallel.tensor_search import DividedPlans
from stitch.program import InputKind, Space
from stitch.training import (
    KEPT_KINDS,
    PARALLEL_ALGORITHMS,
    AlgorithmConfig,
    CostEstimator,
    CostValues,
    PlacementResult,
    ProgramEstimator,
    SearchSolution,
    SimulatedTime,
    Trainable,
    as_trainable,
    check_algorithm,
    home_space,
    place_training,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of plan that a search has looked at.

    `seconds`: the best estimate; None if none fits, or if `at_least` is more than another kind
    needs. `at_least`: a lower bound of plans that divide weights. `tensor`: the devices of each
    replica among which weights are divided.
    """

    replicas: int
    stages: int
    schedule: str
    recompute: str
    seconds: float | None
    tensor: int = 1
    at_least: float | None = None

    def text(self) -> str:
        """Return the microseconds."""
        if self.seconds is None:
            found = "does not fit" if self.at_least is None else "slower"
        else:
            found = f"{self.seconds * 1e6:.1f}"
        is_exact = self.at_least in (None, self.seconds)
        return found if is_exact else f"{found} (at least {(self.at_least or 0.0) * 1e6:.1f})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What `optimize` found.

    Attributes:
        pcg: The parallel graph of a step.
        tensor_mapping: The device of each shard of each value, and its memory space, by name.
        solution: What was chosen.
        cost_values: The estimate. `seconds` is one step with `solution.micro_batches`.
        candidates: All kinds of plans, fastest first.
        plan: The `Plan` itself, for `stitch.parallel.simulate_plan`.
    """

    pcg: ParallelComputationGraph
    tensor_mapping: TensorMapping
    solution: SearchSolution
    cost_values: CostValues
    candidates: tuple[Candidate, ...]
    plan: Plan

    @property
    def parallel(self) -> ParallelOptions:
        """The options with which `stitch.compile(parallel=..., devices=result.specification)`
        trains by this plan."""
        chosen = self.solution
        return ParallelOptions(
            chosen.cuts or 1, chosen.schedule, chosen.replicas, chosen.micro_batches,
            tensor=chosen.tensor, divide=dict(chosen.divide),
        )  # fmt: skip

    @property
    def specification(self) -> MachineSpecification:
        """The machine specification with its devices in the order of the plan."""
        return self.plan.specification

    def text(self) -> str:
        """Return the best plan of each number of replicas, stages and shards, fastest first."""
        lines = [" ".join(row) for row in self._rows()]
        return "\n".join(
            ["replicas x stages (/ shards of weights): schedule, recompute, us", *lines]
        )

    def _rows(self) -> list[tuple[str, ...]]:
        best = {(one.replicas, one.stages, one.tensor): one for one in reversed(self.candidates)}
        rows: list[tuple[str, ...]] = []
        for one in self.candidates:
            if best[one.replicas, one.stages, one.tensor] is one:
                shards = "" if one.tensor == 1 else f" / {one.tensor}"
                shape = f"{one.replicas} x {one.stages}{shards}:"
                rows.append((shape, one.schedule, one.recompute, one.text()))
        return rows

    def _repr_html_(self) -> str:
        return html_table(
            f"{self.solution.algorithm}: {self.cost_values.seconds * 1e6:.1f} us for a step",
            ("replicas x stages (/ shards)", "schedule", "recompute", "us"), self._rows(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelCompilationResult:
    """A computation graph, its parallel graph, and the placement of each value by name."""

    computation_graph: ComputationGraph
    pcg: ParallelComputationGraph
    tensor_mapping: TensorMapping


_PROGRAMS = with_method("an object with program(machine, program)", "program")
_MOVEMENTS = with_method(
    "an object with program(machine, program) and movement(specification, source, target, nbytes)",
    "movement",
)
_CONFIG = instance_of("an AlgorithmConfig", AlgorithmConfig)


@overload
def optimize(
    graph: Trainable | ComputationGraph, specification: AlgorithmConfig
) -> ModelCompilationResult: ...
@overload
def optimize(
    graph: Trainable | ComputationGraph, specification: MachineSpecification,
    estimator: CostEstimator, config: AlgorithmConfig,
) -> SearchResult: ...  # fmt: skip
@overload
def optimize(
    graph: Trainable | ComputationGraph, specification: Machine, estimator: ProgramEstimator,
    config: AlgorithmConfig,
) -> PlacementResult[Any]: ...  # fmt: skip
@takes(
    graph=instance_of("a ComputationGraph or a Trainable", ComputationGraph, Trainable),
    specification=instance_of(
        "a stitch.MachineSpecification, or an AlgorithmConfig alone", MachineSpecification, Machine,
        AlgorithmConfig,
    ),
)  # fmt: skip
def optimize(
    graph: Trainable | ComputationGraph,
    specification: MachineSpecification | Machine | AlgorithmConfig,
    estimator: Any = None, config: AlgorithmConfig | None = None,
) -> SearchResult | ModelCompilationResult | PlacementResult[Any]:  # fmt: skip
    """Return the best training of a graph on several devices that an algorithm finds.

    `optimize(graph, config)` is that for `config.devices`, by the simulated time.

    Args:
        graph: Parameters are its inputs of kind `parameter`, or else its named floating constants.
        specification: The devices; a `Machine` is one device: then memory spaces are chosen.
        estimator: The seconds of programs and of values that pass between devices.
        config: The algorithm and the training.

    Raises:
        OutOfMemoryError: No plan fits; says for each device what is needed and free.
        UsageError: An argument has another type, the estimator returns an impossible time, or all
            plans need a link that is missing.
        CompileError: An operator has no gradient, or no plan of 'tensor' can be cut into stages.

    >>> import stitch
    >>> b = stitch.ComputationGraphBuilder("line")
    >>> x = b.input("x", (16, 10), "float32")
    >>> b.output("y", b.linear(x, b.parameter("w", np.zeros((1, 10), np.float32))))
    >>> config = AlgorithmConfig("data_parallel", "mse", "adam")
    >>> two = stitch.MachineSpecification.of(2, "tiny")
    >>> optimize(b.build(), two, SimulatedTime(), config).solution.replicas
    2
    """
    model = _trainable(graph) if isinstance(graph, ComputationGraph) else graph
    if isinstance(specification, AlgorithmConfig):
        config = specification
        found = _search(model, specification_of(config.devices), SimulatedTime(), config)
        return ModelCompilationResult(model.graph, found.pcg, found.tensor_mapping)
    _PROGRAMS.check("optimize", "estimator", estimator)
    _CONFIG.check("optimize", "config", config)
    assert config is not None, "checked"
    if isinstance(specification, Machine):
        return place_training(model, specification, estimator, config)
    _MOVEMENTS.check("optimize", "estimator", estimator)
    return _search(model, specification, estimator, config)


def _trainable(graph: ComputationGraph) -> Trainable:
    """Return a graph as a model; declared parameters need no values for a search."""
    kept = [(s, graph.input_type(i)) for i, s in enumerate(graph.inputs) if s.kind in KEPT_KINDS]
    if not any(slot.kind is InputKind.PARAMETER for slot, _ in kept):
        return as_trainable(graph)
    values = {
        slot.name: np.broadcast_to(np.zeros((), kind.data_type.dtype), kind.shape)
        for slot, kind in kept
    }
    return Trainable(graph, values, graph)


def _search(
    model: Trainable, specification: MachineSpecification, estimator: CostEstimator,
    config: AlgorithmConfig,
) -> SearchResult:  # fmt: skip
    check_algorithm(config.algorithm, PARALLEL_ALGORITHMS)
    asked, is_tensor = config.options, config.algorithm == "tensor"
    # All devices with shards work on one micro-batch, so a step needs no more than one.
    steps = 1 if is_tensor else len(specification.devices)
    steps = asked.accumulation_steps if asked.accumulation_steps > 1 else steps
    kinds = ("none", "all") if asked.recompute == "none" and not is_tensor else (asked.recompute,)
    wanted: list[_Kind] = []
    searched: list[SegmentCosts] = []
    for recompute in kinds:
        options = replace(asked, recompute=recompute, accumulation_steps=steps)
        costs = SegmentCosts(
            model, config.loss, config.optimizer, options, specification, estimator
        )
        searched.append(costs)
        shapes = shapes_of(config.algorithm, len(specification.devices), steps, costs.count)
        if shapes and not can_replicate(costs.graph):
            shapes = [shape for shape in shapes if shape[0] == 1]
            if not shapes:
                raise UsageError(
                    f"graph {model.graph.name!r} has no replicas: forward replaces a state, or a "
                    "value of the batch has no axis", remedy="algorithm='pipeline'",
                )  # fmt: skip
        wanted += [_Kind(costs, *shape, steps) for shape in shapes]
    best, candidates = _fastest(wanted)
    if config.algorithm in ("search", "tensor"):
        replicas = 1 if is_tensor or not can_replicate(costs.graph) else steps
        best, divided, refusal = _divided(searched[0], best, steps, replicas)
        candidates += divided
        if best is None and is_tensor:
            raise refusal or _no_division(costs, [one.tensor for one in divided], steps)
    if best is None:
        raise _refusal(searched[-1], shapes, steps, config)
    candidates.sort(key=lambda one: (one.seconds is None, one.seconds or one.at_least or 0.0))
    graph = best.costs.graph
    whole = divided_graph(graph, best.degree, best.axes) if best.degree > 1 else graph
    pcg = replicated(whole, best.replicas)
    solution = SearchSolution(
        config.algorithm, best.costs.recompute, best.cuts, best.replicas, best.schedule, steps,
        best.degree, best.axes,
    )  # fmt: skip
    return SearchResult(
        pcg, tensor_mapping(pcg, best), solution, _cost_values(best), tuple(candidates), best
    )


def _divided(
    costs: SegmentCosts, best: Plan | None, steps: int, most_replicas: int
) -> tuple[Plan | None, list[Candidate], CompileError | None]:
    """Return the fastest plan, also of those that divide weights, the best of each kind of these,
    and the error of the first whose stages cannot be cut."""
    sizes = {
        size for i, slot in enumerate(costs.graph.inputs) if slot.kind is InputKind.PARAMETER
        for size in costs.graph.input_type(i).shape
    }  # fmt: skip
    candidates, refusal, count = [], None, len(costs.specification.devices)
    for degree in [d for d in range(2, count + 1) if any(size % d == 0 for size in sizes)]:
        most = min(most_replicas, count // degree)
        numbers = [replicas for replicas in range(1, most + 1) if steps % replicas == 0]
        limit = math.inf if best is None else best.seconds
        plans = DividedPlans(costs, degree, steps // numbers[-1], limit)
        for replicas in numbers:
            limit = math.inf if best is None else best.seconds
            found, at_least = plans.best(replicas, steps, limit)
            best = found or best
            seconds = None if found is None else found.seconds
            bound = None if math.isinf(at_least) else at_least
            candidates.append(
                Candidate(replicas, 1, "1f1b", costs.recompute, seconds, degree, bound)
            )
        refusal = refusal or plans.refusal
    return best, candidates, refusal


def _no_division(
    costs: SegmentCosts, degrees: Sequence[int], steps: int
) -> UsageError | OutOfMemoryError:
    """Return the error if no weights can be divided."""
    count = len(costs.specification.devices)
    if count == 1:
        return UsageError(
            "weights are divided among two or more devices", got="one device",
            remedy="devices=2, or an algorithm without devices=",
        )  # fmt: skip
    # The plan with the most shards needs least on most devices.
    for degree in reversed(degrees):
        plan, _ = DividedPlans(costs, degree, steps, within_memory=False).best(1, steps)
        if plan is not None:
            return _too_small(plan, "tensor", f"the most shards: {degree}", "a smaller batch")
    if costs.missing_links:
        links = ", ".join(f"{a} -> {b}" for a, b in sorted(costs.missing_links))
        return UsageError(
            "plans that divide weights need links that the machine specification does not have",
            got=f"no link {links}", remedy="describe them under links:",
        )  # fmt: skip
    return UsageError(
        f"no weights of graph {costs.graph.name!r} can be divided among {count} devices",
        expected="a product whose weight has an axis that a number of devices divides",
        got=f"tried {', '.join(map(str, degrees)) or 'no number of'} shards",
        remedy="algorithm='search'",
    )


def _too_small(plan: Plan, algorithm: str, what: str, *remedies: str) -> OutOfMemoryError:
    """Return the error of a plan that does not fit."""
    lines = [
        f"{device!r} ({machine.name}) needs {nbytes} B per bank of {space.value}, "
        f"{machine.shape.space(space).capacity} B are free"
        for device, machine, needed in _needed(plan) for space, nbytes in needed.items()
        if nbytes > machine.shape.space(space).capacity
    ]  # fmt: skip
    return OutOfMemoryError(
        f"no plan of {algorithm!r} fits the devices: " + "; ".join(lines),
        where=f"graph {plan.costs.graph.name!r} on {plan.costs.specification.name!r}",
        got=f"the plan with {what}",
        remedy=", or ".join(("more devices or larger machines", *remedies)),
    )


class _Kind(NamedTuple):
    """A kind of plan: numbers of replicas and stages, the schedule, and the recomputation."""

    costs: SegmentCosts
    replicas: int
    stages: int
    schedule: str
    micro_batches: int

    def best(self, *, within_memory: bool = True) -> Plan | None:
        """Return the fastest plan of all orders of devices that are tried."""

        def plan(order: tuple[str, ...], limit: float) -> Plan | None:
            return best_stages(
                self.costs, self.stages, self.replicas, self.schedule, self.micro_batches, limit,
                order=order, within_memory=within_memory,
            )  # fmt: skip

        used = self.replicas * self.stages
        return fastest_order(self.costs.specification, used, plan, math.inf)


def _fastest(kinds: Sequence[_Kind]) -> tuple[Plan | None, list[Candidate]]:
    """Return the fastest plan whose programs fit, and the best of each kind.

    The bound of memory is never too high, so a plan that is compiled and does not fit is followed
    by the best of its kind with what is known then.
    """
    plans = [kind.best() for kind in kinds]
    while True:
        found = [i for i, plan in enumerate(plans) if plan is not None]
        first = min(found, key=lambda i: _seconds(plans[i]), default=None)
        best = None if first is None else plans[first]
        if best is None or first is None:
            break
        if best.costs.check_memory(best.stages, best.machines, best.waiting):
            break
        plans[first] = kinds[first].best()
    candidates = [
        Candidate(
            kind.replicas, kind.stages, kind.schedule, kind.costs.recompute,
            None if plan is None else plan.seconds,
        )
        for kind, plan in zip(kinds, plans, strict=True)
    ]  # fmt: skip
    return best, candidates


def _seconds(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.seconds


def _needed(plan: Plan) -> list[tuple[str, Machine, dict[Space, int]]]:
    """Return what each device of a plan needs, in bytes per bank by space."""
    if plan.degree > 1:
        return PricedStages(plan.costs, (), plan.degree, plan.axes).needed(plan)
    return [
        (device, machine, plan.costs.memory.needed(first, end, machine, plan.waiting[k]))
        for k, (first, end) in enumerate(plan.stages)
        for device, machine in zip(plan.devices(k), plan.machines[k], strict=True)
    ]


def _cost_values(plan: Plan) -> CostValues:
    l1, home = [], []
    for _, machine, needed in _needed(plan):
        space = home_space(machine)
        l1.append(needed.get(Space.L1, 0) if space is not Space.L1 else 0)
        home.append(needed[space] * machine.shape.space(space).banks)
    return CostValues(plan.seconds, max(l1), max(home))


def _refusal(
    costs: SegmentCosts, shapes: Sequence[tuple[int, int, str]], steps: int,
    config: AlgorithmConfig,
) -> UsageError | OutOfMemoryError:  # fmt: skip
    """Return the error if no plan is possible."""
    # The plan with the most stages needs least on each device.
    replicas, stages, schedule = max(shapes, key=lambda shape: shape[1] - (shape[2] == "gpipe"))
    plan = _Kind(costs, replicas, stages, schedule, steps).best(within_memory=False)
    if plan is None:
        links = ", ".join(f"{a} -> {b}" for a, b in sorted(costs.missing_links))
        return UsageError(
            "all plans need links that the machine specification does not have",
            where=f"graph {costs.graph.name!r} on {costs.specification.name!r}",
            got=f"no link {links}", remedy="describe them under links:",
        )  # fmt: skip
    remedies = ["a smaller batch"]
    if config.options.recompute == "none":
        remedies.append("fewer accumulation_steps")
    shape = f"{replicas} x {stages}, {schedule}, recompute {costs.recompute}"
    return _too_small(plan, config.algorithm, f"the most stages: {shape}", *remedies)
