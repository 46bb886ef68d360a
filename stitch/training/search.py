"""The search: where the tensors between programs lie, and what backward computes again.

Comes in: a graph, a machine, a cost estimator, and which algorithm. Goes out: a `SearchResult`: the
graphs, a place for every tensor, a device for every operator, and what it costs by the estimate.
Must not know: devices that are open, files.

What is decided: a tensor that passes between programs lies in L1 or in DRAM. What each program
takes then is what devices report of it: operations that read or write a tensor wait for DRAM.
All tensors in L1 live at once, beside the largest scratch, in three quarters of L1. Recomputation
makes saved tensors unnecessary at the price of operations; it is chosen where memory is short.
`none` leaves everything in DRAM, `greedy` takes the tensors that save most per byte, `search` finds
the best set (branch and bound) for every kind of recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from stitch.compiler import Recompute
from stitch.errors import OutOfMemoryError, UsageError, closest
from stitch.machine import Machine, room_per_bank
from stitch.program import (
    DataType,
    Layout,
    Space,
    TensorDesc,
    ValueType,
)
from stitch.training.costs import CostEstimator, PlacedSlots
from stitch.training.graphs import KEPT_KINDS, Trainable
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import TrainingGraphs, TrainingOptions, home_space, training_graphs

ALGORITHMS = ("none", "greedy", "search")
#: Sets of tensors that branch and bound looks at before it settles for the best so far.
MAX_SETS = 20_000
#: The share of L1 that tensors between programs and the scratch may take.
_L1_SHARE = (3, 4)


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Which algorithm, and for what training; raises `UsageError` for an unknown one."""

    algorithm: str
    loss: Loss
    optimizer: Optimizer
    options: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise UsageError(
                "no such algorithm", expected=", ".join(ALGORITHMS), got=repr(self.algorithm)
            )


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: on which device (there is one, 0), in which space of it."""

    device: int
    space: Space


@dataclass(frozen=True, slots=True)
class OperatorPlace:
    """Which device an operator runs on: its program, its first result's name, its ONNX name."""

    program: str
    name: str
    op: str
    device: int


@dataclass(frozen=True, slots=True)
class SearchSolution:
    """What was chosen: recomputation, a device for every operator; how many sets were compared."""

    algorithm: str
    recompute: str
    operators: tuple[OperatorPlace, ...]
    compared: int


@dataclass(frozen=True, slots=True)
class CostValues:
    """A step by the estimate: the simulated seconds of its programs; bytes that tensors take."""

    seconds: float
    l1_size_per_bank: int
    home_nbytes: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The graphs of a training, where each tensor between programs lies, and what that costs."""

    graph: TrainingGraphs
    tensor_mapping: Mapping[str, TensorPlace]
    solution: SearchSolution
    cost_values: CostValues

    @property
    def spaces(self) -> Mapping[str, Space]:
        """The space of each tensor, for `compile_training`."""
        return {name: place.space for name, place in self.tensor_mapping.items()}


def optimize(
    graph: Trainable, machine: Machine, cost_estimator: CostEstimator, config: AlgorithmConfig
) -> SearchResult:
    """The best way to train a graph on a machine that the algorithm finds.

    Spaces that `config.options` names stay. Raises `OutOfMemoryError` where no way fits,
    `UsageError` for a space of what is no tensor, and what `training_graphs` raises.
    """
    asked = config.options.recompute
    kinds: tuple[str, ...] = (asked,)
    if config.algorithm != "none" and asked == "none":
        kinds = get_args(Recompute)
    results: list[SearchResult] = []
    known = set[str]()
    for recompute in kinds:
        options = replace(config.options, recompute=recompute)
        graphs = training_graphs(graph, config.loss, config.optimizer, options)
        case = _Case(graphs, machine, cost_estimator, options.spaces)
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
        raise case.refusal(result.cost_values, kinds, config)
    return min(results, key=lambda result: result.cost_values.seconds)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tensor that may lie in L1: what that saves, and what it takes there."""

    name: str
    saving: float
    size_per_bank: int


class _Case:
    """One set of graphs on one machine."""

    def __init__(
        self, graphs: TrainingGraphs, machine: Machine, estimator: CostEstimator,
        fixed: Mapping[str, Space],
    ) -> None:  # fmt: skip
        self.graphs, self.machine, self.estimator = graphs, machine, estimator
        self.home = home_space(machine)
        self.types: dict[str, ValueType] = {}
        placed = [PlacedSlots(graph, machine.shape, self.home) for _, graph in graphs.in_order]
        #: Those of a step; and all, with that for evaluation.
        self.programs, self.every_program = placed[:4], placed
        for _, graph in graphs.in_order[:4]:
            slots = [(s.name, graph.input_type(i)) for i, s in enumerate(graph.inputs)]
            slots += [(s.name, graph.output_type(i)) for i, s in enumerate(graph.outputs)]
            for name, kind in slots:
                self.types[name] = kind
        # What another kind of recomputation would save is not there to be placed.
        self.fixed = {name: space for name, space in fixed.items() if name in self.types}

    def _size(self, name: str, space: Space) -> int:
        kind = self.types[name]
        desc = TensorDesc(kind.shape, Layout(kind.data_type, space))
        return room_per_bank(desc, self.machine.shape)

    def _seconds(self, name: str, space: Space) -> float:
        """What the operations that read or write a tensor take, all others at home."""
        total = 0.0
        for program in self.programs:
            if name in program.slots:
                near = program.near(name)
                total += self.estimator.program(self.machine, program.placed({name: space}, near))
        return total

    def room(self) -> int:
        """Bytes per bank of L1 for tensors between programs, less those that must be there."""
        l1 = self.machine.shape.l1
        if l1 is None:
            return 0
        scratch = max(program.scratch_per_bank for program in self.every_program)
        held = sum(self._size(n, s) for n, s in self.fixed.items() if s is Space.L1)
        return max(0, l1.capacity * _L1_SHARE[0] // _L1_SHARE[1] - scratch - held)

    def candidates(self) -> list[_Candidate]:
        """The tensors that are faster in L1, those first that save most per byte."""
        if self.machine.shape.l1 is None:
            return []
        possible = [
            _Candidate(
                name, self._seconds(name, self.home) - self._seconds(name, Space.L1),
                self._size(name, Space.L1),
            )
            for name in self.types if name not in self.fixed
        ]  # fmt: skip
        useful = [c for c in possible if c.saving > 0 and c.size_per_bank > 0]
        return sorted(useful, key=lambda c: (-c.saving / c.size_per_bank, c.name))

    def result(self, algorithm: str, recompute: str) -> SearchResult:
        """The places that an algorithm chooses, with what they cost."""
        chosen, compared = frozenset[str](), 1
        if algorithm == "greedy":
            chosen = _greedy(self.candidates(), self.room())
        elif algorithm == "search":
            chosen, compared = _best(self.candidates(), self.room())
        # A scratch that finds no room in L1 beside them may cost more than they save.
        ways = [self._spaces(names) for names in dict.fromkeys((chosen, frozenset[str]()))]
        costs, spaces = min(((self._costs(way), way) for way in ways), key=lambda c: c[0].seconds)
        mapping = {name: TensorPlace(0, space) for name, space in spaces.items()}
        operators = tuple(
            OperatorPlace(graph.name, graph.values[operation.outputs[0]].name, operation.op, 0)
            for _, graph in self.graphs.in_order
            for operation in graph.operations
        )
        solution = SearchSolution(algorithm, recompute, operators, compared)
        return SearchResult(self.graphs, MappingProxyType(mapping), solution, costs)

    def _spaces(self, in_l1: frozenset[str]) -> dict[str, Space]:
        spaces = {name: Space.L1 if name in in_l1 else self.home for name in self.types}
        return spaces | self.fixed

    def _costs(self, spaces: Mapping[str, Space]) -> CostValues:
        seconds = sum(
            self.estimator.program(self.machine, program.placed(spaces, program.graph.operations))
            for program in self.programs
        )
        banks = self.machine.shape.space(self.home).banks
        return CostValues(
            seconds,
            sum(self._size(n, s) for n, s in spaces.items() if s is Space.L1),
            sum(self._size(n, s) * banks for n, s in spaces.items() if s is self.home),
        )

    def fits(self, costs: CostValues) -> bool:
        """Whether the tensors fit where they are to lie."""
        return costs.home_nbytes <= self._home_nbytes()

    def _home_nbytes(self) -> int:
        home = self.machine.shape.space(self.home)
        return home.capacity * home.banks

    def refusal(
        self, costs: CostValues, tried: Sequence[str], config: AlgorithmConfig
    ) -> OutOfMemoryError:
        """What to say where they do not: what is done already is no remedy, and smaller batches are
        none where weights alone do not fit."""
        home, banks = self.home.value, self.machine.shape.space(self.home).banks
        kept = {s.name for _, g in self.graphs.in_order[:4] for s in g.inputs
                if s.kind in KEPT_KINDS}  # fmt: skip
        weights = sum(self._size(name, self.home) * banks for name in kept)
        if weights > self._home_nbytes():
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
            where=f"graph {self.graphs.forward.name!r} on {self.machine.name!r}",
            expected=f"at most {self._home_nbytes()} B in {home}",
            got=f"{costs.home_nbytes} B, {weights} B of them weights and optimizer state; "
            f"recomputation tried: {', '.join(tried)}",
            remedy=", or ".join(remedies),
        )


def _greedy(candidates: Sequence[_Candidate], room: int) -> frozenset[str]:
    chosen = set()
    for candidate in candidates:
        if candidate.size_per_bank <= room:
            chosen.add(candidate.name)
            room -= candidate.size_per_bank
    return frozenset(chosen)


def _best(candidates: Sequence[_Candidate], room: int) -> tuple[frozenset[str], int]:
    """The set that saves most in the room, and how many sets were compared.

    Branch and bound: what is left can save at most what it would if tensors could be cut.
    """
    best, best_saving, compared = _greedy(candidates, room), 0.0, 1
    best_saving = sum(c.saving for c in candidates if c.name in best)
    pending: list[tuple[int, int, float, tuple[str, ...]]] = [(0, room, 0.0, ())]
    while pending and compared < MAX_SETS:
        at, left, saving, names = pending.pop()
        compared += 1
        if saving > best_saving:
            best, best_saving = frozenset(names), saving
        if at == len(candidates) or saving + _bound(candidates, at, left) <= best_saving:
            continue
        candidate = candidates[at]
        pending.append((at + 1, left, saving, names))
        if candidate.size_per_bank <= left:
            taken = left - candidate.size_per_bank
            pending.append((at + 1, taken, saving + candidate.saving, (*names, candidate.name)))
    return best, compared


def _bound(candidates: Sequence[_Candidate], start: int, room: int) -> float:
    total = 0.0
    for candidate in candidates[start:]:
        if candidate.size_per_bank > room:
            return total + candidate.saving * room / candidate.size_per_bank
        room -= candidate.size_per_bank
        total += candidate.saving
    return total
