"""Search for the weights to divide: a dynamic program over the operations of a training.

After each operation, a plan is known by how the values that later operations read are divided. Of
plans that are equal in that, those with a term no smaller than another's in each are left out, so
the search is exact while no more than `MOST_LABELS` are left; else it goes on with the fastest, and
`at_least` is a lower bound of the seconds of all plans.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stitch.mesh import MachineSpecification
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.plans import undominated
from stitch.parallel.tensor_costs import TensorCosts, Terms
from stitch.parallel.tensor_graph import GraphDivision
from stitch.program import ABSENT, Operation
from stitch.training import Optimizer

#: Plans that are kept after each operation.
MOST_LABELS = 64
#: The operators whose weights are divided, and the position of the weight.
_WEIGHTS = {"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Weights that are divided among the first devices of a specification.

    Attributes:
        costs: The costs of the training.
        degree: The number of devices.
        axes: The axis of each divided weight by name.
        micro_batches: Those of a step.
        seconds: The estimated seconds of a step.
        at_least: A lower bound of the seconds of all such plans; the same if the search was exact.
        nbytes: Bytes per bank of the default space, of the first device and of each other one.
    """

    costs: SegmentCosts
    degree: int
    axes: Mapping[str, int]
    micro_batches: int
    seconds: float
    at_least: float
    nbytes: tuple[int, int]

    @property
    def specification(self) -> MachineSpecification:
        """The specification, of which the first devices train."""
        return self.costs.specification

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the shards."""
        return tuple(self.costs.specification.devices)[: self.degree]


class _Label(NamedTuple):
    terms: Terms
    division: GraphDivision


def plan_terms(costs: TensorCosts, axes: Mapping[str, int]) -> Terms | None:
    """Return the terms of one plan, None if a weight that it divides is nowhere read so."""
    division = GraphDivision(costs.graph, costs.degree)
    numbers = {slot.name: slot.value for slot in costs.graph.inputs}
    division.wanted |= {numbers[name]: axis for name, axis in axes.items()}
    terms = costs.start
    last = _last_readers(costs.graph.operations)
    for at, operation in enumerate(costs.graph.operations):
        terms = terms.plus(_added(costs, division, operation, at, last))
    if division.wanted.keys() - division.used:
        return None
    return terms.plus(_finished(costs, division))


def best_division(
    costs: SegmentCosts, optimizer: Optimizer, degree: int, micro_batches: int, *,
    within_memory: bool = True,
) -> TensorPlan | None:  # fmt: skip
    """Return the fastest plan that divides weights among `degree` devices, None if none fits."""
    found = TensorCosts(costs, optimizer, degree, micro_batches)
    graph = found.graph
    names = {slot.value: slot.name for slot in graph.inputs}
    last = _last_readers(graph.operations)
    labels = [_Label(found.start, GraphDivision(graph, degree))]
    dropped = math.inf
    for at, operation in enumerate(graph.operations):
        live = {v for v, reader in last.items() if reader > at}
        live |= {slot.value for slot in graph.outputs}
        groups: dict[Hashable, list[_Label]] = {}
        for terms, division in labels:
            for chosen in _choices(division, operation, last, at):
                tried = division.copy({*live, *operation.inputs})
                tried.wanted |= chosen
                longer = terms.plus(_added(found, tried, operation, at, last))
                fits = found.fits(longer) or not within_memory
                if not math.isfinite(longer.pass_seconds) or not fits:
                    continue
                tried = tried.copy(live)
                groups.setdefault(_key(tried, live), []).append(_Label(longer, tried))
        labels = [
            label
            for group in groups.values()
            for label in undominated(group, lambda each: each.terms)
        ]
        if len(labels) > MOST_LABELS:
            labels.sort(key=lambda each: each.terms.seconds(micro_batches))
            dropped = min(dropped, labels[MOST_LABELS].terms.seconds(micro_batches))
            labels = labels[:MOST_LABELS]
    ended = []
    for terms, division in labels:
        whole = terms.plus(_finished(found, division))
        is_used = division.wanted and not division.wanted.keys() - division.used
        fits = found.fits(whole) or not within_memory
        if is_used and math.isfinite(whole.pass_seconds) and fits:
            ended.append((whole.seconds(micro_batches), whole, division.wanted))
    if not ended:
        return None
    seconds, terms, wanted = min(ended, key=lambda each: each[0])
    axes = {names[v]: axis for v, axis in sorted(wanted.items())}
    return TensorPlan(
        costs, degree, axes, micro_batches, seconds, min(seconds, dropped),
        (terms.first_nbytes, terms.others_nbytes),
    )  # fmt: skip


def _last_readers(operations: Sequence[Operation]) -> dict[int, int]:
    return {v: at for at, operation in enumerate(operations) for v in operation.inputs
            if v != ABSENT}  # fmt: skip


def _added(
    costs: TensorCosts, division: GraphDivision, operation: Operation, at: int,
    last: Mapping[int, int],
) -> Terms:  # fmt: skip
    """Add an operation to a division; return the terms of what that adds."""
    division.operations.clear()
    division.add(operation)
    terms = Terms()
    for one in division.operations:
        terms = terms.plus(costs.operation(division, one))
    for v in dict.fromkeys(operation.inputs):
        if v in division.parameters and last[v] == at:
            terms = terms.plus(costs.parameter(division, v))
    return terms


def _finished(costs: TensorCosts, division: GraphDivision) -> Terms:
    """Return the terms of joining the outputs."""
    division.operations.clear()
    for slot in costs.graph.outputs:
        division.whole(slot.value)
    terms = Terms()
    for one in division.operations:
        terms = terms.plus(costs.operation(division, one))
    return terms


def _choices(
    division: GraphDivision, operation: Operation, last: Mapping[int, int], at: int
) -> Iterator[dict[int, int]]:
    """Yield the ways to divide the weight that an operation is the first to read."""
    yield {}
    position = _WEIGHTS.get(operation.op, -1)
    if operation.domain or not 0 <= position < len(operation.inputs):
        return
    weight = operation.inputs[position]
    is_first = not any(v == weight for v, _ in division.converted)
    is_first = is_first and weight not in division.read_whole and weight not in division.wanted
    if weight in division.parameters and is_first:
        for axis in division.axes_of(operation, position):
            yield {weight: axis}


def _key(division: GraphDivision, live: set[int]) -> Hashable:
    """Return what the rest of a plan depends on."""
    return (
        tuple(sorted((v, axis) for v, axis in division.axes.items() if v in live)),
        frozenset(division.converted),
        frozenset(
            (v, axis, v in division.used) for v, axis in division.wanted.items()
            if v in live or v not in division.used
        ),
        frozenset(division.read_whole & live),
        bool(division.wanted),
    )  # fmt: skip
