"""`SearchResult`: what a search chose, as an object and as plain data.

Comes in: graphs, places, costs. Goes out: the same, from and to JSON; the graphs are in the
programs, from which they come back. Must not know: how it was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from stitch.graph import ComputationGraph
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
    def from_data(body: Mapping[str, Any], graph: G) -> SearchResult[G]:
        """What `as_data` wrote, with its graphs; raises `KeyError`, `TypeError`, `ValueError`."""
        solution = body["solution"]
        operators: Sequence[Any] = solution["operators"]
        return SearchResult(
            graph,
            MappingProxyType({
                name: TensorPlace(device, Space(space))
                for name, (device, space) in body["tensors"].items()
            }),
            SearchSolution(
                solution["algorithm"], solution["recompute"],
                tuple([OperatorPlace(*operator) for operator in operators]), solution["compared"],
            ),
            CostValues(**body["costs"]),
        )  # fmt: skip
