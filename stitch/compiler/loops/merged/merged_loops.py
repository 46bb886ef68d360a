"""Merged loops: the scans of a graph that run one cell, and need nothing of each other, become
stretches of rounds in which the same rows run, where that costs less than each by itself.

Comes in: a graph, rates of a machine, which bodies are no more than a scan for each of many lanes.
Goes out: the graph, in which those are scans of all lanes. Must not know: other schedules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stitch import ops
from stitch.compiler.loops.lane_scans import (
    LaneScan,
    lane_scan_of,
    lanes_of_lanes,
    scan_of_lanes,
)
from stitch.compiler.loops.lanes import by_itself, in_rounds, lane_by_lane, lifted_scan
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.compiler.loops.merged.alike_scans import alike_scans, same_operands
from stitch.compiler.loops.merged.stretch_costs import CellCosts
from stitch.compiler.loops.merged.stretch_plan import StretchPlan
from stitch.compiler.loops.merged.written_stretches import (
    Merging,
    rows_that_vary,
    written_stretches,
)
from stitch.compiler.loops.rewriting import renumbered, rewritten
from stitch.compiler.loops.waves import can_fail
from stitch.graph import ComputationGraph, ComputationGraphBuilder, lift
from stitch.machine import LoopRates
from stitch.program import ABSENT, Body, Operation, ScanForm, is_scan

#: The name of the schedule.
STRETCHES = "stretches"


@dataclass(frozen=True, slots=True)
class MergedRows:
    """What became of scans of one cell: the rounds of the longest, the schedule that they have, how
    many rows they are, of how many lengths, in how many stretches they run (none: each length by
    itself), and by whose rates."""

    where: str
    count: int
    schedule: str
    rows: int
    lengths: int
    stretches: int
    costs: tuple[tuple[str, float], ...]
    executor: str


@dataclass(frozen=True, slots=True)
class MergedLoops:
    """A graph, and what became of the groups of scans in it."""

    graph: ComputationGraph
    rows: tuple[MergedRows, ...]


def merge_loops(
    graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None,
    lane_bodies: Collection[int],
) -> MergedLoops:  # fmt: skip
    """The graph with scans of one cell merged where that costs less, or where `asked`, a schedule,
    says so; loops whose body is among `lane_bodies` are scans of all their lanes after it."""
    lists = (whole_graph(graph), *graph.bodies)
    if lane_bodies or any(alike_scans(each, graph.bodies, ()).groups for each in lists):
        return _Merging(graph, rates, asked, lane_bodies).run()
    return MergedLoops(graph, ())


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A group that is merged, and after how many others it comes."""

    stage: int
    merging: Merging


class _Merging:
    def __init__(
        self, graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None,
        lane_bodies: Collection[int],
    ) -> None:  # fmt: skip
        self.builder = ComputationGraphBuilder(graph.name)
        # Those of the graph come first, then those that are written.
        now = self.builder.bodies.add_all(graph.bodies)
        self.bodies: Sequence[Body] = self.builder.bodies.bodies
        self.graph = replace(graph, operations=renumbered(graph.operations, now))
        self.lane_bodies = {now[body] for body in lane_bodies}
        self.asked = asked
        self.estimates = [LoopCosts(each, self.bodies) for each in rates]
        self.rows: list[MergedRows] = []

    def run(self) -> MergedLoops:
        holder, builder = whole_graph(self.graph), self.builder
        graph = rewritten(
            self.graph, builder, lambda given: self._written(holder, given, builder)
        )  # fmt: skip
        return MergedLoops(graph, tuple(dict.fromkeys(self.rows)))

    # Lists of operations -----------------------------------------------------------------------

    def _written(self, holder: Body, given: Sequence[Any], builder: Any) -> list[Any]:
        """The outputs of a body on these operands."""
        alike = alike_scans(holder, self.bodies, self.lane_bodies)
        chosen = [
            _Chosen(stage, merging)
            for stage, group in alike.groups
            if (merging := self._merging(group, holder)) is not None
        ]
        if not chosen:
            results = lift(holder, given, [False] * len(given), 1, builder, self._lifted).results
            return [result.tensor for result in results]
        merged = {id(scan.operation) for each in chosen for scan in each.merging.scans}
        data = {constant.value: constant.data for constant in holder.constants}
        at = dict(zip(holder.inputs, given, strict=True))

        def tensor(source: Any) -> Any:
            """A value as far as it is written, or data."""
            if not isinstance(source, int):
                return builder.constant(source)
            if source not in at:
                at[source] = builder.constant(data[source])
            return at[source]

        for stage in range(max(alike.stages) + 1):
            operations = tuple(
                [
                    operation
                    for operation, its in zip(holder.operations, alike.stages, strict=True)
                    if its == stage and id(operation) not in merged
                ]
            )
            made = [v for o in operations for v in o.outputs if v != ABSENT]
            inside = set(made)
            needs = dict.fromkeys(
                v for o in operations for v in o.inputs if v != ABSENT and v not in inside
            )
            part = Body(tuple(needs), tuple(made), holder.values, operations)
            taken = [tensor(v) for v in needs]
            results = lift(part, taken, [False] * len(taken), 1, builder, self._lifted).results
            at |= dict(zip(made, [result.tensor for result in results], strict=True))
            for each in chosen:
                if each.stage == stage:
                    at |= self._stretches(each.merging, tensor, builder)
        return [tensor(v) for v in holder.outputs]

    def _stretches(self, merging: Merging, tensor: Any, builder: Any) -> dict[int, Any]:
        """The results of merged scans, by their values."""
        operands = [list(map(tensor, scan.operands)) for scan in merging.scans]
        with builder.at(merging.scans[0].operation.location):
            results = written_stretches(builder, merging, operands, self._lifted)
        return {
            v: result
            for scan, each in zip(merging.scans, results, strict=True)
            for v, result in zip(scan.results, each, strict=True)
            if v != ABSENT
        }

    def _lifted(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """An operation with a body, or without a rule, for the lanes of a context."""
        builder: Any = context.builder
        builder = builder.innermost(context.operands)
        bodies = self.bodies
        if not is_scan(operation):
            return by_itself(builder, operation, bodies, context, self._lifted)
        form, body = ScanForm.of(operation), bodies[operation.body]
        if operation.body in self.lane_bodies:
            scan = lane_scan_of(operation, bodies, self.lane_bodies)
            write = lanes_of_lanes if any(context.batched) else scan_of_lanes
            return write(builder, scan, bodies, operation, context, self._lifted)
        if any(context.batched) and form.has_condition:
            return lane_by_lane(
                builder, context,
                lambda operands, inside: in_rounds(
                    inside, body, form, operands,
                    lambda given, within: self._written(body, given, within),
                ),
            )  # fmt: skip
        if any(context.batched):
            return lifted_scan(builder, body, form, context, self._lifted)
        return in_rounds(
            builder, body, form, context.operands,
            lambda given, inside: self._written(body, given, inside),
        )  # fmt: skip

    # Choice ------------------------------------------------------------------------------------

    def _merging(self, scans: tuple[LaneScan, ...], holder: Body) -> Merging | None:
        """How a group is merged; None where each by itself costs less, or is asked for."""
        bodies, form = self.bodies, scans[0].form
        body, first = bodies[scans[0].body], form.states + form.sequences
        data = {constant.value: constant.data for constant in holder.constants}
        same = same_operands(scans, data)
        batched = rows_that_vary(scans, body, same)
        shared = zip(body.inputs[first:], scans[0].operands[first:], strict=True)
        fixed = tuple([v for v, source in shared if not isinstance(source, int) or source in data])
        lengths = [scan.form.count for scan in scans for _ in range(scan.rows)]
        read = {i for scan in scans for i, v in enumerate(scan.results) if v != ABSENT}
        gives = [i for i in read if i >= form.states]
        may_run_on = not can_fail(body, form, bodies, elements=False)
        costs: dict[str, float] = {}
        by: dict[str, str] = {}
        plan: StretchPlan | None = None
        for estimate in self.estimates:
            cell = CellCosts(estimate, body, form, batched, fixed)
            its = cell.by_schedule((scan.form.count, scan.rows) for scan in scans)
            found = cell.stretches(lengths, gives, may_run_on=may_run_on)
            if found is not None:
                its[STRETCHES] = found[1]
            for name, seconds in its.items():
                if seconds < costs.get(name, math.inf):
                    costs[name], by[name] = seconds, estimate.rates.executor
                    plan = found[0] if found is not None and name == STRETCHES else plan
        taken = min(costs, key=lambda name: (costs[name], name))
        taken = self.asked if self.asked in costs else taken
        plan = plan if taken == STRETCHES else None
        many = 0 if plan is None else len(plan.stretches)
        if many or len(set(lengths)) > 1:
            listed = tuple(sorted(costs.items(), key=lambda item: item[1]))
            where, each = scans[0].operation.location, len(set(lengths))
            self.rows.append(
                MergedRows(where, form.count, taken, len(lengths), each, many, listed, by[taken])
            )
        return None if plan is None else Merging(scans, body, same, batched, plan)


def whole_graph(graph: ComputationGraph) -> Body:
    """A graph as a body."""
    inputs, outputs = ([slot.value for slot in slots] for slots in (graph.inputs, graph.outputs))
    return Body(tuple(inputs), tuple(outputs), graph.values, graph.operations, graph.constants)
