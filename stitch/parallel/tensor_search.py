"""Search for the weights to divide: a dynamic program over the operations of a training guides it.

Plans of few weights are all priced as they are compiled, but those whose first device alone takes
too long. Of more weights, a dynamic program finds those to price by a guide: after each operation,
a plan is known by how the values that later operations read are divided, and of plans that are
equal in that, those are left out of which another one is no worse in any term of the guide. Then
`at_least` is a lower bound of the seconds of all plans.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stitch.errors import CompileError
from stitch.parallel.assignments import fastest_order
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.plans import Plan, undominated
from stitch.parallel.simulated_steps import PricedStages
from stitch.parallel.tensor_costs import TensorCosts, Terms
from stitch.parallel.tensor_graph import WEIGHTS, GraphDivision
from stitch.program import ABSENT, InputKind, Operation

#: Weights of which all plans are priced.
FEW_WEIGHTS = 3
#: Of more weights: plans that are kept after each operation, and those that are priced at the end.
MOST_LABELS = 64
MOST_PRICED = 8


class _Label(NamedTuple):
    terms: Terms
    division: GraphDivision


class DividedPlans:
    """Plans that divide weights among `degree` devices of each replica.

    Args:
        share: The micro-batches of a replica, at least.
        limit: Plans that take at least so many seconds are left out.
        within_memory: Plans that do not fit their devices are left out.
    """

    def __init__(
        self, costs: SegmentCosts, degree: int, share: int, limit: float = math.inf, *,
        within_memory: bool = True,
    ) -> None:  # fmt: skip
        self.costs, self.degree, self._share = costs, degree, share
        self._within_memory = within_memory
        #: The error of the first plan whose stages cannot be cut.
        self.refusal: CompileError | None = None
        self._priced: dict[int, PricedStages | None] = {}
        #: Seconds that plans that were left out take at least.
        self._left_out = math.inf
        products = {
            o.inputs[WEIGHTS[o.op]] for o in costs.graph.operations
            if not o.domain and o.op in WEIGHTS
        }  # fmt: skip
        parameters = {s.value for s in costs.graph.inputs if s.kind is InputKind.PARAMETER}
        self._is_exact = len(products & parameters) <= FEW_WEIGHTS
        self._plans = self._search(TensorCosts(costs, degree, share), limit)

    # -- the estimate ------------------------------------------------------------------------------

    def best(
        self, replicas: int, micro_batches: int, limit: float = math.inf
    ) -> tuple[Plan | None, float]:  # fmt: skip
        """Return the fastest plan that takes less than `limit`, None without one, and seconds that
        all plans that fit take at least."""
        share, best, at_least = micro_batches // replicas, None, self._left_out
        most = len(self._plans) if self._is_exact else MOST_PRICED
        by_guide = sorted(range(len(self._plans)), key=lambda i: self._plans[i][0].seconds(share))
        for i in by_guide:
            terms, axes = self._plans[i]
            if self._least(terms, share) >= limit or not most:
                at_least = min(at_least, terms.at_least(share))
                continue
            stages = self.priced(i)
            if stages is None:
                continue
            most -= 1

            def plan(
                order: tuple[str, ...], limit: float, stages: PricedStages = stages,
                axes: Mapping[str, int] = axes,
            ) -> Plan | None:  # fmt: skip
                nonlocal at_least
                tried = Plan(
                    self.costs, order, (self.costs.count,), replicas, "1f1b", micro_batches,
                    math.inf, self.degree, axes,
                )  # fmt: skip
                if self._within_memory and not stages.fits(tried):
                    return None
                tried = replace(tried, seconds=stages.run(tried).makespan)
                if tried.seconds >= limit:
                    at_least = min(at_least, limit)
                    return None
                return None if self._within_memory and not stages.check_memory(tried) else tried

            used = replicas * self.degree
            found = fastest_order(self.costs.specification, used, plan, limit)
            if found is not None:
                best, limit = found, found.seconds
        return best, at_least if best is None else min(at_least, best.seconds)

    def priced(self, index: int) -> PricedStages | None:
        """Return the stages of a plan, None if they cannot be cut."""
        if index not in self._priced:
            axes = self._plans[index][1]
            try:
                self._priced[index] = PricedStages(self.costs, (), self.degree, axes)
            except CompileError as error:
                error.remedy = "parallel={'tensor': 2, 'divide': ...} by other weights than " + (
                    ", ".join(axes) + ", or algorithm='search'"
                )
                self.refusal, self._priced[index] = self.refusal or error, None
        return self._priced[index]

    # -- the guide ---------------------------------------------------------------------------------

    def _search(self, guide: TensorCosts, limit: float) -> list[tuple[Terms, dict[str, int]]]:
        """Return the terms and axes of plans."""
        graph = guide.graph
        names = {slot.value: slot.name for slot in graph.inputs}
        last = {v: at for at, operation in enumerate(graph.operations) for v in operation.inputs
                if v != ABSENT}  # fmt: skip
        labels = [_Label(guide.start, GraphDivision(graph, self.degree))]
        for at, operation in enumerate(graph.operations):
            live = {v for v, reader in last.items() if reader > at}
            live |= {slot.value for slot in graph.outputs}
            groups: dict[Hashable, list[_Label]] = {}
            for terms, division in labels:
                for chosen in _choices(division, operation):
                    tried = division.copy({*live, *operation.inputs})
                    tried.wanted |= chosen
                    longer = terms.plus(_added(guide, tried, operation, at, last))
                    if self._is_kept(guide, longer, limit):
                        tried = tried.copy(live)
                        groups.setdefault(_key(tried, live), []).append(_Label(longer, tried))
            labels = self._fewer(groups)
        ended = []
        for terms, division in labels:
            whole = terms.plus(_finished(guide, division))
            is_used = division.wanted and not division.wanted.keys() - division.used
            if is_used and self._is_kept(guide, whole, limit):
                axes = {names[v]: axis for v, axis in sorted(division.wanted.items())}
                ended.append((whole, axes))
        return ended

    def _is_kept(self, guide: TensorCosts, terms: Terms, limit: float) -> bool:
        """Whether plans with these terms may be the best."""
        is_faster = self._least(terms, self._share) < limit
        if not is_faster:
            self._left_out = min(self._left_out, terms.at_least(self._share))
        fits = terms.nbytes <= guide.room or not self._within_memory
        return is_faster and math.isfinite(terms.rest) and fits

    def _least(self, terms: Terms, share: int) -> float:
        """Return the seconds by which a plan is left out."""
        return terms.at_least(share) if self._is_exact else terms.seconds(share)

    def _fewer(self, groups: Mapping[Hashable, Sequence[_Label]]) -> list[_Label]:
        """Return the plans to go on with."""
        labels = [label for group in groups.values() for label in group]
        if self._is_exact:
            return labels
        fewer = [
            label for group in groups.values()
            for label in undominated(group, lambda each: each.terms)
        ]  # fmt: skip
        fewer.sort(key=lambda each: each.terms.seconds(self._share))
        if len(fewer[:MOST_LABELS]) < len(labels):
            bounds = [each.terms.at_least(self._share) for each in labels]
            self._left_out = min(self._left_out, *bounds)
        return fewer[:MOST_LABELS]


def _added(
    costs: TensorCosts, division: GraphDivision, operation: Operation, at: int,
    last: Mapping[int, int],
) -> Terms:  # fmt: skip
    """Add an operation to a division; return the terms of what that adds."""
    division.operations.clear()
    division.add(operation)
    terms = _of_operations(costs, division)
    for v in dict.fromkeys(operation.inputs):
        if v in division.parameters and last[v] == at:
            terms = terms.plus(costs.parameter(division, v))
    return terms


def _finished(costs: TensorCosts, division: GraphDivision) -> Terms:
    """Return the terms of joining the outputs."""
    division.operations.clear()
    for slot in costs.graph.outputs:
        division.whole(slot.value)
    return _of_operations(costs, division)


def _of_operations(costs: TensorCosts, division: GraphDivision) -> Terms:
    terms = Terms()
    for one in division.operations:
        terms = terms.plus(costs.operation(division, one))
    return terms


def _choices(division: GraphDivision, operation: Operation) -> Iterator[dict[int, int]]:
    """Yield the ways to divide the weight that an operation is the first to read."""
    yield {}
    position = WEIGHTS.get(operation.op, -1)
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
