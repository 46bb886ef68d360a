"""`optimize` and `place_inference`: which way of doing it costs least by the estimate.

Recomputation makes saved tensors unnecessary at the price of operations; it is chosen where memory
is short. `none` leaves everything in DRAM, `greedy` takes the tensors that save most per byte,
`search` finds the best set (branch and bound) for every kind of recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from stitch.compiler import Recompute
from stitch.errors import OutOfMemoryError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.program import DataType, Space
from stitch.training.costs import CostEstimator
from stitch.training.graphs import KEPT_KINDS, Trainable, as_trainable
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import TrainingGraphs, training_graphs
from stitch.training.search.search_result import CostValues, InferenceGraphs, SearchResult
from stitch.training.search.tensor_places import STEP_PROGRAMS, Case
from stitch.training.training_options import TrainingOptions

ALGORITHMS = ("none", "greedy", "search")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Which algorithm, and for what training; raises `UsageError` for an unknown one."""

    algorithm: str
    loss: Loss
    optimizer: Optimizer
    options: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)


def check_algorithm(word: object) -> None:
    """Raise `UsageError` for what is no algorithm."""
    if word not in ALGORITHMS:
        raise UsageError(
            "no such algorithm", expected=", ".join(ALGORITHMS), got=repr(word),
            remedy=closest(str(word), ALGORITHMS) or None,
        )  # fmt: skip


def optimize(
    graph: Trainable | ComputationGraph, machine: Machine, cost_estimator: CostEstimator,
    config: AlgorithmConfig,
) -> SearchResult[TrainingGraphs]:  # fmt: skip
    """The best way to train a graph on a machine that the algorithm finds.

    Of a plain computation graph its named floating constants are trained, as `as_trainable` has it.
    Spaces that `config.options` names stay. Raises `OutOfMemoryError` where no way fits,
    `UsageError` for a space of what is no tensor, and what `training_graphs` raises.
    """
    if isinstance(graph, ComputationGraph):
        graph = as_trainable(graph)
    for name, kind, value in (
        ("graph", "a ComputationGraph or a Trainable", isinstance(graph, Trainable)),
        ("machine", "a Machine (stitch.machine.load_machine gives one)",
         isinstance(machine, Machine)),
        ("cost_estimator", "an object with program(machine, program), as SimulatedTime()",
         callable(getattr(cost_estimator, "program", None))),
        ("config", "an AlgorithmConfig", isinstance(config, AlgorithmConfig)),
    ):  # fmt: skip
        if not value:
            raise UsageError(f"optimize takes {kind} as {name}")
    asked = config.options.recompute
    kinds: tuple[str, ...] = (asked,)
    if config.algorithm != "none" and asked == "none":
        kinds = get_args(Recompute)
    results: list[SearchResult[TrainingGraphs]] = []
    known = set[str]()
    for recompute in kinds:
        options = replace(config.options, recompute=recompute)
        graphs = training_graphs(graph, config.loss, config.optimizer, options)
        case = Case(graphs, machine, cost_estimator, options.spaces)
        known |= case.types.keys()
        result = case.result(config.algorithm, recompute)
        if case.fits(result.cost_values):
            results.append(result)
            if config.algorithm != "search":
                break
    for name in options.spaces:
        if name not in known:
            raise UsageError(
                f"spaces= names {name!r}, which is no tensor between the programs of this training",
                remedy=closest(name, known) or f"one of {', '.join(sorted(known)[:12])}",
            )
    if not results:
        raise _refusal(case, result.cost_values, kinds, config)
    return min(results, key=lambda result: result.cost_values.seconds)


def place_inference(
    graph: ComputationGraph, machine: Machine, cost_estimator: CostEstimator, algorithm: str,
    fixed: Mapping[str, Space] | None = None,
) -> SearchResult[InferenceGraphs]:  # fmt: skip
    """Where the inputs and outputs of a graph lie that is not trained; `fixed` ones stay.

    Raises `UsageError` for an unknown algorithm.
    """
    check_algorithm(algorithm)
    case = Case(InferenceGraphs(graph), machine, cost_estimator, fixed or {})
    return case.result(algorithm, "none")


def _refusal(
    case: Case[TrainingGraphs], costs: CostValues, tried: Sequence[str], config: AlgorithmConfig
) -> OutOfMemoryError:
    """What to say where they do not: what is done already is no remedy, and smaller batches are
    none where weights alone do not fit."""
    home, banks = case.home.value, case.machine.shape.space(case.home).banks
    kept = {s.name for _, g in case.graphs.in_order[:STEP_PROGRAMS] for s in g.inputs
            if s.kind in KEPT_KINDS}  # fmt: skip
    weights = sum(case.size(name, case.home) * banks for name in kept)
    if weights > case.capacity():
        remedies = ["a larger machine", "fewer weights"]
        if config.optimizer.states:
            remedies.append("an optimizer with less state (sgd without momentum)")
    else:
        remedies = ["a smaller batch with accumulation_steps"]
        if tuple(tried) == ("none",):
            remedies.insert(0, "algorithm=search, which recomputes what does not fit")
        if config.options.precision.bits > DataType.BFLOAT16.bits:
            remedies.append("precision=bfloat16")
    return OutOfMemoryError(
        "no way to train this graph fits the machine",
        where=f"graph {case.graphs.forward.name!r} on {case.machine.name!r}",
        expected=f"at most {case.capacity()} B in {home}",
        got=f"{costs.home_nbytes} B, {weights} B of them weights and optimizer state; "
        f"recomputation tried: {', '.join(tried)}",
        remedy=", or ".join(remedies),
    )
