"""Where the tensors between graphs lie: in L1 what saves most, in the room that there is.

All tensors in L1 live at once, beside the largest scratch, in three quarters of L1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from stitch.machine import Machine, room_per_bank
from stitch.program import Layout, Space, TensorDesc, ValueType
from stitch.training.costs import CostEstimator, PlacedSlots
from stitch.training.programs import home_space
from stitch.training.search.search_result import (
    CostValues,
    Graphs,
    OperatorPlace,
    SearchResult,
    SearchSolution,
    TensorPlace,
)

#: Sets of tensors that branch and bound looks at before it settles for the best so far.
MAX_SETS = 20_000
#: The programs that one step runs: those after them are run at other times.
STEP_PROGRAMS = 4
#: The share of L1 that tensors between programs and the scratch may take.
_L1_SHARE = (3, 4)
G = TypeVar("G", bound=Graphs)


@dataclass(frozen=True, slots=True)
class L1Candidate:
    """A tensor that may lie in L1: what that saves, and what it takes there."""

    name: str
    saving: float
    size_per_bank: int


class Case(Generic[G]):
    """One set of graphs on one machine, and the tensors that pass between them."""

    def __init__(
        self, graphs: G, machine: Machine, estimator: CostEstimator,
        fixed: Mapping[str, Space],
    ) -> None:  # fmt: skip
        self.graphs, self.machine, self.estimator = graphs, machine, estimator
        self.home = home_space(machine)
        self.types: dict[str, ValueType] = {}
        placed = [PlacedSlots(graph, machine.shape, self.home) for _, graph in graphs.in_order]
        #: Those of a step; and all, with that for evaluation.
        self.programs, self.every_program = placed[:STEP_PROGRAMS], placed
        for _, graph in graphs.in_order[:STEP_PROGRAMS]:
            slots = [(s.name, graph.input_type(i)) for i, s in enumerate(graph.inputs)]
            slots += [(s.name, graph.output_type(i)) for i, s in enumerate(graph.outputs)]
            for name, kind in slots:
                self.types[name] = kind
        # What another kind of recomputation would save is not there to be placed.
        self.fixed = {name: space for name, space in fixed.items() if name in self.types}

    def size(self, name: str, space: Space) -> int:
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
        held = sum(self.size(n, s) for n, s in self.fixed.items() if s is Space.L1)
        return max(0, l1.capacity * _L1_SHARE[0] // _L1_SHARE[1] - scratch - held)

    def candidates(self) -> list[L1Candidate]:
        """The tensors that are faster in L1, those first that save most per byte."""
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

    def result(self, algorithm: str, recompute: str) -> SearchResult[G]:
        """The places that an algorithm chooses, with what they cost."""
        chosen, compared = frozenset[str](), 1
        if algorithm == "greedy":
            chosen = greedy_set(self.candidates(), self.room())
        elif algorithm == "search":
            chosen, compared = best_set(self.candidates(), self.room())
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
            sum(self.size(n, s) for n, s in spaces.items() if s is Space.L1),
            sum(self.size(n, s) * banks for n, s in spaces.items() if s is self.home),
        )

    def fits(self, costs: CostValues) -> bool:
        """Whether the tensors fit where they are to lie."""
        return costs.home_nbytes <= self.capacity()

    def capacity(self) -> int:
        """The bytes that there are where tensors lie that are not in L1."""
        home = self.machine.shape.space(self.home)
        return home.capacity * home.banks


def greedy_set(candidates: Sequence[L1Candidate], room: int) -> frozenset[str]:
    """What is taken by one who takes what saves most per byte, while there is room."""
    chosen = set()
    for candidate in candidates:
        if candidate.size_per_bank <= room:
            chosen.add(candidate.name)
            room -= candidate.size_per_bank
    return frozenset(chosen)


def best_set(candidates: Sequence[L1Candidate], room: int) -> tuple[frozenset[str], int]:
    """The set that saves most in the room, and how many sets were compared.

    Branch and bound: what is left can save at most what it would if tensors could be cut.
    """
    best, best_saving, compared = greedy_set(candidates, room), 0.0, 1
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


def _bound(candidates: Sequence[L1Candidate], start: int, room: int) -> float:
    total = 0.0
    for candidate in candidates[start:]:
        if candidate.size_per_bank > room:
            return total + candidate.saving * room / candidate.size_per_bank
        room -= candidate.size_per_bank
        total += candidate.saving
    return total
