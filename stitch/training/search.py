"""The search: where the tensors between programs lie, and what backward computes again.

Comes in: a graph, a machine, a cost estimator, and which algorithm. Goes out: a `SearchResult`: the
graphs, a place for every tensor, a device for every operator, and what it costs by the estimate.
Must not know: devices that are open, files.

What is decided: a tensor that passes between programs lies in L1 or in DRAM. Each program that
reads or writes it carries its bytes to or from the cores once, so L1 saves time on every access.
All tensors in L1 live at once, beside the largest scratch, in three quarters of L1. Recomputation
makes saved tensors unnecessary at the price of operations; it is chosen where memory is short.
`none` leaves everything in DRAM, `greedy` takes the tensors that save most per byte, `search` finds
the best set (branch and bound) for every kind of recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, get_args

from stitch.compiler import Recompute
from stitch.errors import OutOfMemoryError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.linker import pack_scratch
from stitch.machine import Machine, footprint, room_per_bank
from stitch.program import ABSENT, DataType, Layout, Space, TensorDesc, ValueType
from stitch.training.graphs import KEPT_KINDS, Trainable
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import TrainingGraphs, TrainingOptions, home_space, training_graphs

ALGORITHMS = ("none", "greedy", "search")
#: Sets of tensors that branch and bound looks at before it settles for the best so far.
MAX_SETS = 20_000
#: The share of L1 that tensors between programs and the scratch may take.
_L1_SHARE = (3, 4)


class CostEstimator(Protocol):
    """What things cost on a machine, in simulated seconds."""

    def access(self, machine: Machine, kind: ValueType, space: Space) -> float:
        """Carrying a tensor between a space and the cores, once."""

    def operation(self, machine: Machine, operands: Sequence[ValueType]) -> float:
        """One operation over these operands and results, wherever they come from."""


@dataclass(frozen=True, slots=True)
class MovementCost:
    """Costs by the machine's own figures: what counts is the bytes that are carried."""

    def access(self, machine: Machine, kind: ValueType, space: Space) -> float:
        """The simulated seconds of a copy between the space and L1 (the host: of a copy there)."""
        target = Space.HOST if machine.shape.l1 is None else Space.L1
        size = footprint(TensorDesc(kind.shape, Layout(kind.data_type, space)), machine.shape)
        return machine.seconds(space, target, size.nbytes, size.aligned_page_nbytes)

    def operation(self, machine: Machine, operands: Sequence[ValueType]) -> float:
        """The bytes of its operands and results, read and written once where they are fastest."""
        near = Space.HOST if machine.shape.l1 is None else Space.L1
        return sum(self.access(machine, kind, near) for kind in operands)


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
    """A step by the estimate: seconds of access and of operations; bytes that tensors take."""

    access_seconds: float
    operation_seconds: float
    l1_size_per_bank: int
    home_nbytes: int

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step."""
        return self.access_seconds + self.operation_seconds


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
        self.accesses: dict[str, int] = {}
        for _, graph in graphs.in_order[:4]:
            slots = [(s.name, graph.input_type(i)) for i, s in enumerate(graph.inputs)]
            slots += [(s.name, graph.output_type(i)) for i, s in enumerate(graph.outputs)]
            for name, kind in slots:
                self.types[name] = kind
                self.accesses[name] = self.accesses.get(name, 0) + 1
        # What another kind of recomputation would save is not there to be placed.
        self.fixed = {name: space for name, space in fixed.items() if name in self.types}

    def _size(self, name: str, space: Space) -> int:
        kind = self.types[name]
        desc = TensorDesc(kind.shape, Layout(kind.data_type, space))
        return room_per_bank(desc, self.machine.shape)

    def _seconds(self, name: str, space: Space) -> float:
        once = self.estimator.access(self.machine, self.types[name], space)
        return self.accesses[name] * once

    def room(self) -> int:
        """Bytes per bank of L1 for tensors between programs, less those that must be there."""
        l1 = self.machine.shape.l1
        if l1 is None:
            return 0
        scratch = max(self._scratch(graph) for _, graph in self.graphs.in_order)
        held = sum(self._size(n, s) for n, s in self.fixed.items() if s is Space.L1)
        return max(0, l1.capacity * _L1_SHARE[0] // _L1_SHARE[1] - scratch - held)

    def _scratch(self, graph: ComputationGraph) -> int:
        nbytes = pack_scratch(graph.values, graph.operations, graph.placed_values()).nbytes
        return -(-nbytes // self.machine.shape.space(Space.L1).banks)

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
        spaces = {name: Space.L1 if name in chosen else self.home for name in self.types}
        spaces.update(self.fixed)
        mapping = {name: TensorPlace(0, space) for name, space in spaces.items()}
        operators = tuple(
            OperatorPlace(graph.name, graph.values[operation.outputs[0]].name, operation.op, 0)
            for _, graph in self.graphs.in_order
            for operation in graph.operations
        )
        solution = SearchSolution(algorithm, recompute, operators, compared)
        return SearchResult(self.graphs, MappingProxyType(mapping), solution, self._costs(spaces))

    def _costs(self, spaces: Mapping[str, Space]) -> CostValues:
        operations = sum(
            self.estimator.operation(
                self.machine,
                [graph.values[v].type for v in (*o.inputs, *o.outputs) if v != ABSENT],
            )
            for _, graph in self.graphs.in_order[:4]
            for o in graph.operations
        )
        banks = self.machine.shape.space(self.home).banks
        return CostValues(
            sum(self._seconds(name, space) for name, space in spaces.items()),
            operations,
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
