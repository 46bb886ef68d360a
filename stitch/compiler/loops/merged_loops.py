"""Merge independent scans of one cell into segments of rounds, if that is cheaper.

All scans of a group run in the same loops: a segment is a range of rounds in which the same rows
run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stitch import ops
from stitch.compiler.body_graphs import remap_bodies, rewrite_graph
from stitch.compiler.loops.batch_axes import (
    BatchedScan,
    batched_scan,
    batched_scan_of,
    nested_batch,
    write_scan,
)
from stitch.compiler.loops.hoisting import form_of_rest, hoist
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.compiler.loops.ragged_segments import (
    MergedGroup,
    SegmentPlan,
    SegmentWriter,
    plan_segments,
    rows_that_vary,
)
from stitch.compiler.loops.schedules import LoopNote, LoopWriter, ScheduledLoops, can_fail
from stitch.graph import ComputationGraph, ComputationGraphBuilder, inline
from stitch.machine import LoopRates
from stitch.program import ABSENT, Array, Body, Operation, ScanForm, is_scan

#: Constants up to this many bytes are compared by content.
_COMPARED_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class AlikeScans:
    """Groups of scans of one cell.

    Attributes:
        groups: Pairs of a stage and its scans, longest first.
        stages: The stage of each operation: the number of groups that it depends on.
    """

    groups: tuple[tuple[int, tuple[BatchedScan, ...]], ...]
    stages: tuple[int, ...]


def find_groups(
    holder: Body, bodies: Sequence[Body], batched_bodies: Collection[int]
) -> AlikeScans:  # fmt: skip
    """Return the groups of at least two scans of a body."""
    names = _equal_values(holder)
    read = {v for o in holder.operations for v in o.inputs} | set(holder.outputs)
    keys: dict[int, Hashable] = {}
    scans: dict[int, BatchedScan] = {}
    for number, operation in enumerate(holder.operations):
        if not is_scan(operation):
            continue
        found = batched_scan_of(operation, bodies, batched_bodies)
        if found.form.states and found.form.count and not found.form.has_condition:
            wanted = tuple([v if v in read else ABSENT for v in found.results])
            scans[number] = BatchedScan(
                operation, found.body, found.form, found.batch_size, found.operands, found.batched,
                wanted,
            )  # fmt: skip
            keys[number] = _cell(found, names)
    many = {key for key, times in Counter(keys.values()).items() if times > 1}
    after: dict[int, int] = {}
    stages: list[int] = []
    groups: dict[tuple[Hashable, int], list[BatchedScan]] = {}
    for number, operation in enumerate(holder.operations):
        stage = max((after.get(v, 0) for v in operation.inputs), default=0)
        stages.append(stage)
        is_one = keys.get(number) in many
        after.update({v: stage + is_one for v in operation.outputs if v != ABSENT})
        if is_one:
            groups.setdefault((keys[number], stage), []).append(scans[number])
    listed = [
        (stage, tuple(sorted(group, key=lambda scan: -scan.form.count)))
        for (_, stage), group in groups.items()
        if len(group) > 1
    ]
    return AlikeScans(tuple(listed), tuple(stages))


def _cell(scan: BatchedScan, names: Mapping[int, Hashable]) -> Hashable:
    """Return a key that is equal for scans of one cell: same body, and equal shared operands."""
    form, first = scan.form, scan.form.states + scan.form.sequences
    shared = [
        None if batched else names.get(v, v) if isinstance(v, int) else data_name(v)
        for v, batched in zip(scan.operands[first:], scan.batched[first:], strict=True)
    ]
    return scan.body, form.states, form.sequences, form.collected, tuple(shared)


def same_operands(scans: Sequence[BatchedScan], data: Mapping[int, Array]) -> tuple[bool, ...]:
    """Return which operands are one value in all scans of a group; `data` are the constants."""
    form = scans[0].form
    found = []
    for operand in range(len(scans[0].operands)):
        sources = [scan.operands[operand] for scan in scans]
        known = [data.get(v, v) if isinstance(v, int) else v for v in sources]
        names = {v if isinstance(v, int) else data_name(v) for v in known}
        # Shared operands of one cell are equal, or computed equally.
        is_one = len(names) == 1 or operand >= form.states + form.sequences
        found.append(is_one and not any(scan.batched[operand] for scan in scans))
    return tuple(found)


def data_name(data: Array) -> Hashable:
    """Equal for equal data; large data is compared by identity."""
    content = data.tobytes() if data.nbytes <= _COMPARED_NBYTES else id(data)
    return data.dtype.str, data.shape, content


def _equal_values(holder: Body) -> dict[int, Hashable]:
    """Return equal names for values that are computed equally or have equal data."""
    names: dict[int, Hashable] = {c.value: data_name(c.data) for c in holder.constants}
    known: dict[Hashable, int] = {}
    for operation in holder.operations:
        way = (
            operation.op, operation.domain, operation.body,
            tuple([(k, repr(v)) for k, v in sorted(operation.attributes.items())]),
            tuple([names.get(v, v) for v in operation.inputs]), len(operation.outputs),
        )  # fmt: skip
        first = known.setdefault(way, len(known))
        made = [(i, value) for i, value in enumerate(operation.outputs) if value != ABSENT]
        names.update({value: ("made", first, i) for i, value in made})
    return names


#: Maximum number of segments of a group, and of the operations written for them.
MOST_SEGMENTS, MOST_WRITTEN = 32, 2048
#: Operations of a segment besides its body, per state, sequence and result.
_BESIDE = 2


@dataclass(frozen=True, slots=True)
class CellCosts:
    """Seconds of a cell for several rows; `fixed` are inputs that are constants."""

    estimate: LoopCosts
    body: Body
    form: ScanForm
    batched: tuple[bool, ...]
    fixed: tuple[int, ...]

    def by_schedule(self, scans: Iterable[tuple[int, int]]) -> dict[str, float]:
        """Return the seconds of scans (rounds, rows) by schedule: `rounds`, perhaps `hoisted`."""
        form = self.form
        parts = hoist(self.body, form) if form.sequences else None
        costs = {"rounds": 0.0} | ({} if parts is None else {"hoisted": 0.0})
        for count, rows in scans:
            its = replace(form, count=count)
            costs["rounds"] += self._scan(self.body, its, rows)
            if parts is not None:
                takes = parts.before.inputs[: form.sequences]
                costs["hoisted"] += self.estimate.round(
                    parts.before, count * rows, takes, self.fixed
                ) + self._scan(parts.rest, form_of_rest(parts, its), rows)
        return costs

    def segments(
        self, lengths: Sequence[int], read: Collection[int], *, may_run_on: bool
    ) -> tuple[SegmentPlan, float] | None:
        """Return the cheapest plan and its seconds, or None if there is none.

        Args:
            lengths: The rounds of each row, longest first.
            read: Collected results of the body that have readers.
            may_run_on: Whether rounds past the end of a row may be computed.
        """
        rates, body = self.estimate.rates, self.body
        sides = len(body.inputs) + len(body.outputs)
        most = MOST_WRITTEN // (len(body.operations) + _BESIDE * sides)
        kept = sum(body.values[v].type.nbytes for v in body.outputs[: self.form.states])
        found = plan_segments(
            lengths,
            lambda rows: self.estimate.turn(body, self.form, rows, self._varies(body), self.fixed),
            rates.loop_seconds + _BESIDE * sides * rates.movement_seconds,
            kept / rates.near_bytes_per_second,
            max(1, min(MOST_SEGMENTS, most)),
            may_run_on=may_run_on,
        )
        if found is None:
            return None
        plan, seconds = found
        for each in plan.segments:
            costs = self.by_schedule([(each.count, each.rows)])
            seconds += min(costs.values()) - costs["rounds"]
        return plan, seconds + self._moving(plan, read)

    def _scan(self, cell: Body, form: ScanForm, rows: int) -> float:
        return self.estimate.scan(cell, form, rows, self._varies(cell), self.fixed)

    def _varies(self, cell: Body) -> list[int]:
        """Return the inputs of a cell that differ between rows; hoisted values are elements."""
        first = self.form.states + self.form.sequences
        more = len(cell.inputs) - len(self.batched)
        flags = [*self.batched[:first], *[True] * more, *self.batched[first:]]
        return [v for v, flag in zip(cell.inputs, flags, strict=True) if flag]

    def _moving(self, plan: SegmentPlan, read: Collection[int]) -> float:
        """Return the seconds of reordering elements before the segments and results after."""
        body, form = self.body, self.form
        moved = [*body.inputs[form.states : form.states + form.sequences]]
        moved += [body.outputs[result] for result in read]
        nbytes = sum(body.values[v].type.nbytes for v in moved) * plan.size
        return 2 * nbytes / self.estimate.rates.far_bytes_per_second


#: The name of the schedule.
SEGMENTS = "segments"


def merge_loops(
    graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None,
    batched_bodies: Collection[int],
) -> ScheduledLoops:  # fmt: skip
    """Merge scans of one cell where that is cheaper, or where `asked` is `segments`.

    Loops whose body is in `batched_bodies` become scans for all their batch elements.
    """
    lists = (graph.as_body(), *graph.bodies)
    if batched_bodies or any(find_groups(each, graph.bodies, ()).groups for each in lists):
        return _LoopMerger(graph, rates, asked, batched_bodies).run()
    return ScheduledLoops(graph, ())


class _LoopMerger(LoopWriter):
    """Writes a graph with merged scans."""

    def __init__(
        self, graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None,
        batched_bodies: Collection[int],
    ) -> None:  # fmt: skip
        self.builder = ComputationGraphBuilder(graph.name)
        # The original bodies come first.
        now = self.builder.bodies.add_all(graph.bodies)
        bodies: Sequence[Body] = self.builder.bodies.bodies
        super().__init__(bodies, [LoopCosts(each, bodies) for each in rates])
        self.graph = replace(graph, operations=remap_bodies(graph.operations, now))
        self._batches = {now[body] for body in batched_bodies}
        self.asked = asked
        self.notes: list[LoopNote] = []

    def run(self) -> ScheduledLoops:
        holder, builder = self.graph.as_body(), self.builder
        graph = rewrite_graph(
            self.graph, builder, lambda given: self._write_body(holder, given, builder)
        )  # fmt: skip
        return ScheduledLoops(graph, tuple(dict.fromkeys(self.notes)))

    # Lists of operations -----------------------------------------------------------------------

    def _write_body(self, holder: Body, given: Sequence[Any], builder: Any) -> list[Any]:
        """Write a body with these operands; return its outputs."""
        alike = find_groups(holder, self.bodies, self._batches)
        chosen = [
            (stage, merging)
            for stage, group in alike.groups
            if (merging := self._merging(group, holder)) is not None
        ]
        if not chosen:
            return inline(holder, given, builder, self.write)
        merged = {id(scan.operation) for _, merging in chosen for scan in merging.scans}
        data = {constant.value: constant.data for constant in holder.constants}
        at = dict(zip(holder.inputs, given, strict=True))

        def tensor(source: Any) -> Any:
            """Return a value written so far, or data."""
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
            results = inline(part, taken, builder, self.write)
            at |= dict(zip(made, results, strict=True))
            for number, merging in chosen:
                if number == stage:
                    at |= self._segments(merging, tensor, builder)
        return [tensor(v) for v in holder.outputs]

    def _segments(self, merging: MergedGroup, tensor: Any, builder: Any) -> dict[int, Any]:
        """Write merged scans; return their results by value."""
        operands = [list(map(tensor, scan.operands)) for scan in merging.scans]
        with builder.at(merging.scans[0].operation.location):
            results = SegmentWriter(builder, merging, operands, self.write).run()
        return {
            v: result
            for scan, each in zip(merging.scans, results, strict=True)
            for v, result in zip(scan.results, each, strict=True)
            if v != ABSENT
        }

    def write(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """Write an operation with a body or without a batching rule, for a batch."""
        if operation.body not in self._batches:
            return super().write(operation, context)
        builder: Any = context.builder
        builder, bodies = builder.innermost(context.operands), self.bodies
        scan = batched_scan_of(operation, bodies, self._batches)
        write_scan = nested_batch if any(context.batched) else batched_scan
        return write_scan(builder, scan, bodies, operation, context, self.write)

    def unscheduled(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], where: str = ""
    ) -> Sequence[Any]:
        """Write a loop; merge the scans in its body."""
        return write_scan(
            builder, body, form, operands,
            lambda given, inside: self._write_body(body, given, inside),
        )  # fmt: skip

    # Choice ------------------------------------------------------------------------------------

    def _merging(self, scans: tuple[BatchedScan, ...], holder: Body) -> MergedGroup | None:
        """Choose how to merge a group; None if it is not merged."""
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
        plan: SegmentPlan | None = None
        for estimate in self.estimates:
            cell = CellCosts(estimate, body, form, batched, fixed)
            its = cell.by_schedule((scan.form.count, scan.rows) for scan in scans)
            found = cell.segments(lengths, gives, may_run_on=may_run_on)
            if found is not None:
                its[SEGMENTS] = found[1]
            for name, seconds in its.items():
                if seconds < costs.get(name, math.inf):
                    costs[name], by[name] = seconds, estimate.rates.executor
                    plan = found[0] if found is not None and name == SEGMENTS else plan
        taken = min(costs, key=lambda name: (costs[name], name))
        taken = self.asked if self.asked in costs else taken
        plan = plan if taken == SEGMENTS else None
        many = 0 if plan is None else len(plan.segments)
        if many or len(set(lengths)) > 1:
            listed = tuple(sorted(costs.items(), key=lambda item: item[1]))
            loops = f"in {many} loop{'s' * (many != 1)}" if many else "by length"
            rows = f"{len(lengths)} rows of {len(set(lengths))} lengths {loops}"
            where, by_rates = scans[0].operation.location, by[taken]
            self.notes.append(
                LoopNote(where, form.count, taken, listed, merged=rows, executor=by_rates)
            )
        return None if plan is None else MergedGroup(scans, body, same, batched, plan)
