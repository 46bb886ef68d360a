"""Search for the memory spaces of tensors between programs, and for what backward recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, get_args

from stitch.compiler import Recompute
from stitch.errors import OutOfMemoryError, UsageError, unknown
from stitch.frozen_json import from_plain, to_plain
from stitch.graph import ComputationGraph
from stitch.html_table import html_table
from stitch.linker import choose_scratch, pack_scratch
from stitch.machine import Machine, MachineShape, estimated_seconds, room_per_bank
from stitch.program import (
    DataType,
    Layout,
    Operation,
    OperationList,
    Space,
    TensorDesc,
    ValueType,
)
from stitch.training.from_torch import loss_of
from stitch.training.graphs import KEPT_KINDS, Trainable
from stitch.training.optimizers import optimizer_from_config
from stitch.training.programs import TrainingGraphs, TrainingOptions, home_space, training_graphs

# --------------------------------------------------------------------------------------------------
# Cost estimators


class Links(Protocol):
    """Devices by name and the links between them (`stitch.MachineSpecification`)."""

    def link(self, source: str, target: str) -> Any:
        """Return the link between two devices."""


class ProgramEstimator(Protocol):
    """Estimates the run time of programs, in simulated seconds."""

    def program(self, machine: Machine, program: OperationList) -> float:
        """Return the time of one run; layouts say in which memory space each value is."""


class CostEstimator(ProgramEstimator, Protocol):
    """Estimates the times of programs, and of values that pass between devices."""

    def movement(self, specification: Any, source: str, target: str, nbytes: int) -> float:
        """Return the time of a value from one device of a specification to another."""


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """The estimate that devices report: the machine's rates of computing and copying.

    On a machine without compute rates (the host) it is the time to copy what operations read and
    write.
    """

    def program(self, machine: Machine, program: OperationList) -> float:
        return estimated_seconds(program, machine)

    def movement(self, specification: Links, source: str, target: str, nbytes: int) -> float:
        seconds: float = specification.link(source, target).seconds(nbytes)
        return seconds


class PlacedSlots:
    """A graph with movable slots; other values have the compiler's default placement."""

    __slots__ = ("_home", "_machine", "_touching", "graph", "scratch_nbytes", "slots")

    def __init__(self, graph: ComputationGraph, machine: MachineShape, home: Space) -> None:
        self.graph, self._machine, self._home = graph, machine, home
        #: The values of each slot's name: of an input, an output, or both.
        self.slots: dict[str, set[int]] = {}
        named = [(slot.name, slot.value) for slot in graph.inputs]
        named += [(slot.name, slot.value) for slot in graph.outputs]
        for name, value in named:
            self.slots.setdefault(name, set()).add(value)
        self._touching: dict[int, list[int]] = {}
        for at, operation in enumerate(graph.operations):
            for touched in {*operation.inputs, *operation.outputs}:
                self._touching.setdefault(touched, []).append(at)
        plan = pack_scratch(graph.values, graph.operations, graph.placed_values())
        self.scratch_nbytes = plan.nbytes

    @property
    def scratch_per_bank(self) -> int:
        """Bytes per bank of the program's scratch in L1."""
        return -(-self.scratch_nbytes // self._machine.space(Space.L1).banks)

    def near(self, name: str) -> tuple[Operation, ...]:
        """Return the operations that read or write a slot."""
        positions = {at for value in self.slots[name] for at in self._touching.get(value, ())}
        return tuple(self.graph.operations[at] for at in sorted(positions))

    def placed(
        self, spaces: Mapping[str, Space], operations: tuple[Operation, ...],
        scratch_space: Space | None = None,
    ) -> OperationList:  # fmt: skip
        """Return operations of the graph with slots in the given spaces, else in the default
        space, and intermediate values in `scratch_space`, by default where the compiler has it."""
        graph, homes = self.graph, dict.fromkeys(self.graph.placed_values(), self._home)
        in_l1 = 0
        for name in self.slots.keys() & spaces.keys():
            for value in self.slots[name]:
                homes[value] = spaces[name]
                if spaces[name] is Space.L1:
                    kind = graph.values[value].type
                    desc = TensorDesc(kind.shape, Layout(kind.data_type, Space.L1))
                    in_l1 += room_per_bank(desc, self._machine)
        if scratch_space is None:
            chosen = choose_scratch(self.scratch_nbytes, self._machine, l1_slots_per_bank=in_l1)
            scratch_space = chosen.space
        values = tuple(
            replace(value, layout=Layout(value.type.data_type, homes.get(index, scratch_space)))
            for index, value in enumerate(graph.values)
        )
        return OperationList(
            graph.name, graph.inputs, graph.outputs, values, operations, graph.constants,
            bodies=graph.bodies,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Results


G = TypeVar("G")


class SearchSolution(NamedTuple):
    """What an algorithm chose.

    Attributes:
        recompute: What backward recomputes.
        cuts: The nodes after which stages end.
        replicas: Copies of all stages.
        schedule: The order of forward and backward passes.
        micro_batches: Those of a step, of all replicas together.
        tensor: The devices among which weights are divided.
        divide: The axis of each divided weight, by name.
    """

    algorithm: str
    recompute: str
    cuts: tuple[str, ...] = ()
    replicas: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    tensor: int = 1
    divide: Mapping[str, int] = {}


class CostValues(NamedTuple):
    """The estimate of one step: simulated seconds, bytes per bank in L1, bytes in the default
    space, the latter two of the device that needs most."""

    seconds: float
    l1_size_per_bank: int
    home_nbytes: int


@dataclass(frozen=True, slots=True)
class PlacementResult(Generic[G]):
    """Graphs, a memory space for each tensor between them, and the estimated cost."""

    graph: G
    tensor_mapping: Mapping[str, Space]
    solution: SearchSolution
    cost_values: CostValues

    def _repr_html_(self) -> str:
        cost, solution = self.cost_values, self.solution
        return html_table(
            f"{solution.algorithm}, recompute {solution.recompute}: "
            f"{cost.seconds * 1e6:.1f} us for a step, {cost.l1_size_per_bank:,} B per bank in L1",
            ("tensor", "space"),
            [(name, space.value) for name, space in self.tensor_mapping.items()],
        )

    def as_data(self) -> dict[str, Any]:
        """Return all but the graphs as JSON data."""
        places = {name: (0, space) for name, space in self.tensor_mapping.items()}
        data: dict[str, Any] = to_plain(_Result(places, self.solution, self.cost_values))
        return data

    @staticmethod
    def from_data(data: Any, graph: G) -> PlacementResult[G]:
        """Read what `as_data` returned; raise `FormatError`."""
        places, solution, costs = from_plain(_Result, data, "model.search")
        mapping = {name: space for name, (_, space) in places.items()}
        return PlacementResult(graph, MappingProxyType(mapping), solution, costs)


class _Result(NamedTuple):
    #: A device, always 0, and a space.
    tensors: Mapping[str, tuple[int, Space]]
    solution: SearchSolution
    costs: CostValues


# --------------------------------------------------------------------------------------------------
# L1 candidates

#: Limit of branch and bound: it then returns the best set so far.
MAX_SETS = 20_000
#: Number of programs in a step; the evaluation program follows them.
STEP_PROGRAMS = 4
#: The share of L1 that tensors between programs and the scratch may take.
_L1_SHARE = (3, 4)


@dataclass(frozen=True, slots=True)
class L1Candidate:
    """A tensor that may be in L1: the seconds it saves, and its bytes per bank."""

    name: str
    saving: float
    size_per_bank: int


class Case:
    """Graphs that run one after the other on a machine, and the tensors between them."""

    def __init__(
        self, graphs: Iterable[ComputationGraph], machine: Machine, estimator: ProgramEstimator,
        fixed: Mapping[str, Space],
    ) -> None:  # fmt: skip
        self.machine, self.estimator = machine, estimator
        self.home = home_space(machine)
        self.types: dict[str, ValueType] = {}
        placed = [PlacedSlots(graph, machine.shape, self.home) for graph in graphs]
        #: The programs of a step; all programs, with evaluation.
        self.programs, self.every_program = placed[:STEP_PROGRAMS], placed
        for program in self.programs:
            graph = program.graph
            slots = [(s.name, graph.input_type(i)) for i, s in enumerate(graph.inputs)]
            slots += [(s.name, graph.output_type(i)) for i, s in enumerate(graph.outputs)]
            for name, kind in slots:
                self.types[name] = kind
        # Without the activations that only another kind of recomputation saves.
        self.fixed = {name: space for name, space in fixed.items() if name in self.types}

    def size(self, name: str, space: Space) -> int:
        kind = self.types[name]
        desc = TensorDesc(kind.shape, Layout(kind.data_type, space))
        return room_per_bank(desc, self.machine.shape)

    def _seconds(self, name: str, space: Space) -> float:
        """Return the time of the operations that read or write a tensor in `space`."""
        total = 0.0
        for program in self.programs:
            if name in program.slots:
                near = program.near(name)
                total += self.estimator.program(self.machine, program.placed({name: space}, near))
        return total

    def free_per_bank(self) -> int:
        """Return the bytes per bank of L1 that are free for tensors between programs."""
        l1 = self.machine.shape.l1
        if l1 is None:
            return 0
        scratch = max(program.scratch_per_bank for program in self.every_program)
        fixed = sum(self.size(n, s) for n, s in self.fixed.items() if s is Space.L1)
        return max(0, l1.capacity * _L1_SHARE[0] // _L1_SHARE[1] - scratch - fixed)

    def candidates(self) -> list[L1Candidate]:
        """Return the tensors that are faster in L1, by descending saving per byte."""
        if self.machine.shape.l1 is None:
            return []
        possible = [
            L1Candidate(
                name, self._seconds(name, self.home) - self._seconds(name, Space.L1),
                self.size(name, Space.L1),
            )
            for name in self.types if name not in self.fixed
        ]  # fmt: skip
        useful = [c for c in possible if c.saving > 0 and c.size_per_bank > 0]
        return sorted(useful, key=lambda c: (-c.saving / c.size_per_bank, c.name))

    def result(self, graph: G, algorithm: str, recompute: str = "none") -> PlacementResult[G]:
        """Return the placement that an algorithm chooses, with its cost."""
        chosen = frozenset[str]()
        if algorithm == "greedy":
            chosen = greedy_set(self.candidates(), self.free_per_bank())
        elif algorithm == "search":
            chosen = best_set(self.candidates(), self.free_per_bank())
        # Compare with no tensor in L1: moving the scratch out of L1 may cost more than they save.
        options = [self._spaces(names) for names in dict.fromkeys((chosen, frozenset[str]()))]
        costs, spaces = min(((self._costs(s), s) for s in options), key=lambda c: c[0].seconds)
        solution = SearchSolution(algorithm, recompute)
        return PlacementResult(graph, MappingProxyType(spaces), solution, costs)

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
            sum(self.size(n, s) for n, s in spaces.items() if s is Space.L1),
            sum(self.size(n, s) * banks for n, s in spaces.items() if s is self.home),
        )

    def capacity(self) -> int:
        """Return the size of the default memory space in bytes."""
        home = self.machine.shape.space(self.home)
        return home.capacity * home.banks


def greedy_set(candidates: Sequence[L1Candidate], free: int) -> frozenset[str]:
    """Greedy knapsack by saving per byte."""
    chosen = set()
    for candidate in candidates:
        if candidate.size_per_bank <= free:
            chosen.add(candidate.name)
            free -= candidate.size_per_bank
    return frozenset(chosen)


def best_set(candidates: Sequence[L1Candidate], free: int) -> frozenset[str]:
    """Return the best set of tensors.

    Branch and bound; the bound of a partial set is the fractional knapsack of the rest.
    """
    best, compared = greedy_set(candidates, free), 1
    best_saving = sum(c.saving for c in candidates if c.name in best)
    pending: list[tuple[int, int, float, tuple[str, ...]]] = [(0, free, 0.0, ())]
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
    return best


def _bound(candidates: Sequence[L1Candidate], start: int, free: int) -> float:
    total = 0.0
    for candidate in candidates[start:]:
        if candidate.size_per_bank > free:
            return total + candidate.saving * free / candidate.size_per_bank
        free -= candidate.size_per_bank
        total += candidate.saving
    return total


# --------------------------------------------------------------------------------------------------
# The search

#: Algorithms for one device, and for several.
ALGORITHMS = ("none", "greedy", "search")
PARALLEL_ALGORITHMS = ("data_parallel", "pipeline", "tensor", "search")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """An algorithm, and the training that it is for.

    Attributes:
        algorithm: `none`, `greedy` or `search` for one device, `data_parallel`, `pipeline` or
            `search` for several.
        loss: A loss, its name, or its configuration.
        optimizer: An optimizer, its name, or its configuration.
        options: With `accumulation_steps` above 1, the micro-batches of a step of any plan; else
            there are as many as devices.
        devices: For `optimize(graph, config)`: a machine specification, its file, or a number of
            devices.

    Raises:
        UsageError: An unknown algorithm, loss or optimizer.
    """

    algorithm: str
    loss: Any
    optimizer: Any
    options: TrainingOptions = field(default_factory=TrainingOptions)
    devices: Any = 1

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm, tuple(dict.fromkeys(ALGORITHMS + PARALLEL_ALGORITHMS)))
        object.__setattr__(self, "loss", loss_of(self.loss))
        object.__setattr__(self, "optimizer", optimizer_from_config(self.optimizer))


def check_algorithm(word: object, known: Sequence[str] = ALGORITHMS) -> None:
    """Raise `UsageError` for an unknown algorithm."""
    if word in PARALLEL_ALGORITHMS and word not in known:
        raise UsageError(
            f"the algorithm {word!r} divides a training among devices",
            expected=f"here {' or '.join(map(repr, known))}",
            remedy="stitch.compile(..., optimizer=, loss=, algorithm=, devices=)",
        )
    if word in ALGORITHMS and word not in known:
        raise UsageError(
            f"the algorithm {word!r} is for one device",
            expected=f"here {' or '.join(map(repr, known))}",
            remedy="algorithm='search', or compile for one device, without devices=",
        )
    if word not in known:
        raise unknown("unknown algorithm", word, known, got=repr(word))


def place_training(
    graph: Trainable, machine: Machine, cost_estimator: ProgramEstimator, config: AlgorithmConfig
) -> PlacementResult[TrainingGraphs]:
    """Return the best training of a model on one machine that the algorithm finds.

    Spaces in `config.options` are fixed.

    Raises:
        OutOfMemoryError: No placement fits.
        UsageError: The algorithm is for several devices, or `spaces` names no tensor.
    """
    check_algorithm(config.algorithm)
    asked = config.options.recompute
    kinds: tuple[str, ...] = (asked,)
    if config.algorithm != "none" and asked == "none":
        kinds = get_args(Recompute)
    results: list[PlacementResult[TrainingGraphs]] = []
    names = set[str]()
    for recompute in kinds:
        options = replace(config.options, recompute=recompute)
        graphs = training_graphs(graph, config.loss, config.optimizer, options)
        in_order = [graph for _, graph in graphs.in_order]
        case = Case(in_order, machine, cost_estimator, options.spaces)
        names |= case.types.keys()
        result = case.result(graphs, config.algorithm, recompute)
        if result.cost_values.home_nbytes <= case.capacity():
            results.append(result)
            if config.algorithm != "search":
                break
    for name in options.spaces:
        if name not in names:
            raise unknown(
                f"spaces= names {name!r}, which is not a tensor between programs of this training",
                name, names, expected=None, remedy=f"one of {', '.join(sorted(names)[:12])}",
            )  # fmt: skip
    if not results:
        raise _refusal(case, result.cost_values, kinds, config)
    return min(results, key=lambda result: result.cost_values.seconds)


def place_inference(
    graph: ComputationGraph, machine: Machine, cost_estimator: ProgramEstimator, algorithm: str,
    fixed: Mapping[str, Space] | None = None,
) -> PlacementResult[ComputationGraph]:  # fmt: skip
    """Return the memory spaces of a graph's inputs and outputs, `fixed` ones as they are.

    Raises `UsageError` for an unknown algorithm.
    """
    check_algorithm(algorithm)
    return Case((graph,), machine, cost_estimator, fixed or {}).result(graph, algorithm)


def _refusal(
    case: Case, costs: CostValues, tried: Sequence[str], config: AlgorithmConfig
) -> OutOfMemoryError:
    """Return the error if nothing fits, with remedies that would help."""
    home, banks = case.home.value, case.machine.shape.space(case.home).banks
    persistent = {s.name for p in case.programs for s in p.graph.inputs if s.kind in KEPT_KINDS}
    weights = sum(case.size(name, case.home) * banks for name in persistent)
    if weights > case.capacity():
        remedies = ["a larger machine", "fewer weights"]
        if config.optimizer.states:
            remedies.append("an optimizer with less state (sgd without momentum)")
    else:
        remedies = ["a smaller batch with accumulation_steps"]
        if tuple(tried) == ("none",):
            remedies.insert(0, "algorithm=search, which recomputes activations")
        if config.options.precision.bits > DataType.BFLOAT16.bits:
            remedies.append("precision=bfloat16")
    return OutOfMemoryError(
        "the training does not fit the machine",
        where=f"graph {case.programs[0].graph.name!r} on {case.machine.name!r}",
        expected=f"at most {case.capacity()} B in {home}",
        got=f"{costs.home_nbytes} B, {weights} B of them weights and optimizer state; "
        f"recomputation tried: {', '.join(tried)}",
        remedy=", or ".join(remedies),
    )
