"""`SearchResult`: what a search chose, as an object and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from stitch.graph import ComputationGraph, JsonObject
from stitch.program import Role, Space


class Graphs(Protocol):
    """Graphs that run one after the other."""

    @property
    def in_order(self) -> tuple[tuple[Role, ComputationGraph], ...]: ...


G_co = TypeVar("G_co", bound=Graphs, covariant=True)
G = TypeVar("G", bound=Graphs)


@dataclass(frozen=True, slots=True)
class InferenceGraphs:
    """The one graph of a model that is not trained."""

    forward: ComputationGraph

    @property
    def in_order(self) -> tuple[tuple[Role, ComputationGraph], ...]:
        """The graph, with what it is for."""
        return ((Role.FORWARD, self.forward),)


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
class SearchResult(Generic[G_co]):
    """Graphs, where each tensor between them lies, and what that costs."""

    graph: G_co
    tensor_mapping: Mapping[str, TensorPlace]
    solution: SearchSolution
    cost_values: CostValues

    @property
    def spaces(self) -> Mapping[str, Space]:
        """The space of each tensor, for `compile_training`."""
        return {name: place.space for name, place in self.tensor_mapping.items()}

    def as_data(self) -> dict[str, Any]:
        """All but the graphs as plain data."""
        return {
            "tensors": {n: [p.device, p.space.value] for n, p in self.tensor_mapping.items()},
            "solution": {
                "algorithm": self.solution.algorithm, "recompute": self.solution.recompute,
                "compared": self.solution.compared,
                "operators": [[o.program, o.name, o.op, o.device] for o in self.solution.operators],
            },
            "costs": asdict(self.cost_values),
        }  # fmt: skip

    @staticmethod
    def from_record(record: JsonObject, graph: G) -> SearchResult[G]:
        """What `as_data` wrote, with its graphs; stand-ins where a defect was noted."""
        record.refuse_other_keys(("tensors", "solution", "costs"))
        solution, costs = record.record("solution"), record.record("costs")
        solution.refuse_other_keys(("algorithm", "recompute", "compared", "operators"))
        costs.refuse_other_keys(_COSTS)
        places = {
            name: _place_in(record, f"tensors.{name}", place)
            for name, place in record.fields("tensors").items()
        }
        operators = [
            _operator_in(solution, f"operators[{i}]", operator)
            for i, operator in enumerate(solution.items("operators"))
        ]
        return SearchResult(
            graph, MappingProxyType(places),
            SearchSolution(
                solution.text("algorithm"), solution.text("recompute"), tuple(operators),
                solution.integer("compared"),
            ),
            CostValues(costs.number("seconds"), *(costs.integer(key) for key in _COSTS[1:])),
        )  # fmt: skip


_COSTS = tuple(field.name for field in fields(CostValues))


def _place_in(record: JsonObject, key: str, place: object) -> TensorPlace:
    spaces = {space.value: space for space in Space}
    if isinstance(place, list) and len(place) == 2:
        device, space = place
        if _is_device(device) and isinstance(space, str) and space in spaces:
            return TensorPlace(device, spaces[space])
        place = space if _is_device(device) else device
    record.bad_value(key, f"a pair of a device and a space ({' or '.join(spaces)})", place)
    return TensorPlace(0, Space.HOST)


def _operator_in(record: JsonObject, key: str, operator: object) -> OperatorPlace:
    if isinstance(operator, list) and len(operator) == 4:
        program, name, op, device = operator
        if all(isinstance(word, str) for word in (program, name, op)) and _is_device(device):
            return OperatorPlace(program, name, op, device)
    record.bad_value(key, "a list of a program, a name, an operator and a device", operator)
    return OperatorPlace("", "", "", 0)


def _is_device(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
