"""Choose the cheapest schedule for each scan of a graph, and rewrite the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stitch.compiler.body_graphs import remap_bodies, rewrite_graph
from stitch.compiler.loops.loop_costs import LoopCosts, rates_of
from stitch.compiler.loops.merged_loops import SEGMENTS, merge_loops
from stitch.compiler.loops.schedules import (
    TABLE,
    Candidate,
    Loop,
    LoopNote,
    LoopWriter,
    ScheduledLoops,
    candidates_for,
)
from stitch.errors import unknown
from stitch.graph import BodyBuilder, ComputationGraph, ComputationGraphBuilder, inline
from stitch.machine import LoopRates, Machine
from stitch.program import ABSENT, Body, ScanForm, is_scan

#: Names of the schedules.
SCHEDULES = tuple(sorted([*TABLE, SEGMENTS]))


def check_schedule(schedule: str | None) -> None:
    """Raise `UsageError` if `schedule` is not in `SCHEDULES`."""
    if schedule is not None and schedule not in SCHEDULES:
        what, remedy = f"unknown schedule {schedule!r}", "omit it: the cheapest is used"
        raise unknown(what, schedule, SCHEDULES, remedy=remedy)


def schedule_loops(
    graph: ComputationGraph, machine: Machine, schedule: str | None = None,
    executor: str | None = None,
) -> ScheduledLoops:  # fmt: skip
    """Rewrite each loop with its cheapest schedule, or with `schedule` where it applies.

    Slots, placement options and results stay. Loops without states come first: a nested loop with
    states then becomes one loop for all their rounds, which may be merged with loops of its cell.
    """
    notes: list[LoopNote] = []
    rates = rates_of(machine, executor)
    batched_bodies: set[int] = set()
    if any(not form.states for form in _loops(graph)):
        scheduled = _innermost_first(graph, rates, schedule, batched_bodies)
        graph, notes = scheduled.graph, [*scheduled.notes]
    if any(form.states for form in _loops(graph)):
        merged = merge_loops(graph, rates, schedule, batched_bodies)
        scheduled = _outermost_first(merged.graph, rates, schedule)
        graph, notes = scheduled.graph, [*notes, *merged.notes, *scheduled.notes]
    return ScheduledLoops(graph, tuple(dict.fromkeys(notes)))


def _loops(graph: ComputationGraph) -> Iterator[ScanForm]:
    """Yield the forms of all loops, including nested ones."""
    for operations in (graph.operations, *(body.operations for body in graph.bodies)):
        yield from (ScanForm.of(operation) for operation in operations if is_scan(operation))


def _innermost_first(
    graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None, batched_bodies: set[int]
) -> ScheduledLoops:
    """Schedule loops without states, inner ones first.

    Nested loops with states become loops over a batch; `batched_bodies` collects their bodies.
    """
    builder = ComputationGraphBuilder(graph.name)
    bodies = builder.bodies.bodies
    inside = LoopWriter(
        bodies, [LoopCosts(each, bodies, batched_bodies) for each in rates],
        batched_bodies=batched_bodies,
    )  # fmt: skip
    notes: list[LoopNote] = []
    now = {ABSENT: ABSENT}

    def writing() -> tuple[_Choices, LoopWriter]:
        choices = _Choices(asked, inside, has_states=False)
        return choices, LoopWriter(bodies, inside.estimates, choices.write, batched_bodies)

    # Bodies come after those that their operations carry.
    for index, body in enumerate(graph.bodies):
        choices, its = writing()
        body = replace(body, operations=remap_bodies(body.operations, now))
        if any(is_scan(o) and not ScanForm.of(o).states for o in body.operations):
            within = BodyBuilder("body", builder)
            given = [
                None if v == ABSENT else within.input(body.values[v].name, body.values[v].type)
                for v in body.inputs
            ]
            body = within.build(inline(body, given, within, its.write))
        now[index] = builder.bodies.add(body)
        notes[:0] = choices.notes
    moved = replace(graph, operations=remap_bodies(graph.operations, now), bodies=tuple(bodies))
    choices, its = writing()
    return ScheduledLoops(_rewrite_loops(moved, builder, its), (*choices.notes, *notes))


def _outermost_first(
    graph: ComputationGraph, rates: Sequence[LoopRates], asked: str | None
) -> ScheduledLoops:
    """Schedule loops with states; nested ones are scheduled as part of the outer one."""
    choices = _Choices(asked, has_states=True)
    writing = LoopWriter(
        graph.bodies, [LoopCosts(each, graph.bodies) for each in rates], choices.write
    )  # fmt: skip
    choices.inside = writing
    builder = ComputationGraphBuilder(graph.name)
    return ScheduledLoops(_rewrite_loops(graph, builder, writing), tuple(choices.notes))


def _rewrite_loops(
    graph: ComputationGraph, builder: ComputationGraphBuilder, writing: LoopWriter
) -> ComputationGraph:
    """Return the graph with its loops rewritten."""
    return rewrite_graph(graph, builder, lambda given: inline(graph, given, builder, writing.write))


class _Choices:
    """Chooses and writes schedules for loops with states, or for loops without; others stay.

    `inside` writes the operations of the loops.
    """

    def __init__(
        self, asked: str | None, inside: LoopWriter | None = None, *, has_states: bool
    ) -> None:
        self.asked, self.has_states = asked, has_states
        self.inside = inside
        self.notes: list[LoopNote] = []

    def write(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], where: str
    ) -> Sequence[Any]:
        """Return the results of a loop."""
        inside = self.inside
        assert inside is not None
        if bool(form.states) != self.has_states or not form.count:
            return inside.unscheduled(builder, body, form, operands)
        fixed = _constant_inputs(builder, body, form, operands)
        candidates, by = _cheapest(Loop(body, form, fixed, inside.copies), inside)
        costs = sorted(((name, c.seconds) for name, c in candidates.items()), key=_by_cost)
        taken = self.asked if self.asked in candidates else costs[0][0]
        at = len(self.notes)
        written = candidates[taken].write(builder, operands)
        # A loop comes before the loops nested in it.
        self.notes.insert(
            at, LoopNote(where, form.count, taken, tuple(costs), written.without_rule,
                         candidates[taken].batch_size, executor=by[taken]),
        )  # fmt: skip
        return written.results


def _cheapest(loop: Loop, inside: LoopWriter) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the cheapest candidate of each schedule, and the executor whose rates gave it."""
    found: dict[str, Candidate] = {}
    by: dict[str, str] = {}
    for estimate in inside.estimates:
        inside.estimate = estimate
        for name, candidate in candidates_for(loop, inside).items():
            if name not in found or candidate.seconds < found[name].seconds:
                found[name], by[name] = candidate, estimate.rates.executor
    return found, by


def _by_cost(named: tuple[str, float]) -> tuple[float, str]:
    return named[1], named[0]


def _constant_inputs(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
) -> tuple[int, ...]:
    """Return the inputs of the body that are shared by all rounds and constant."""
    first = form.states + form.sequences
    shared = zip(body.inputs[first:], operands[first:], strict=True)
    return tuple([value for value, operand in shared if builder.known_data(operand) is not None])
