"""Schedules: each scan of a graph, the outermost first, becomes what costs least on a machine.

Comes in: a graph, a machine, the name of a schedule that is to be taken wherever it can be. Goes
out: the graph that computes the same, a note for each loop. Must not know: executors, what a
schedule does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stitch import ops
from stitch.compiler.loops.lanes import in_lanes, lifted_scan
from stitch.compiler.loops.loop_costs import LoopCosts, rates_of
from stitch.compiler.loops.loop_notes import LoopNote
from stitch.compiler.loops.schedules import TABLE, Candidate, Loop, written_rounds
from stitch.errors import UsageError, closest
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, lift, scan
from stitch.machine import Machine
from stitch.program import Body, Operation, ScanForm, is_scan

#: The names that a schedule may be asked for by.
SCHEDULES = tuple(sorted(TABLE))


def check_schedule(schedule: str | None) -> None:
    """Raises `UsageError` for a schedule that there is not."""
    if schedule is not None and schedule not in SCHEDULES:
        raise UsageError(
            f"there is no schedule {schedule!r}", expected=", ".join(SCHEDULES),
            remedy=closest(schedule, SCHEDULES) or "leave it out: the cheapest is taken",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScheduledLoops:
    """A graph whose loops are scheduled, and what became of them."""

    graph: ComputationGraph
    notes: tuple[LoopNote, ...]


def schedule_loops(
    graph: ComputationGraph, machine: Machine, schedule: str | None = None
) -> ScheduledLoops:
    """The graph with each loop as its cheapest schedule has it, or as `schedule` where that can be.

    Slots, wishes and results stay. Without loops it is the graph itself. Loops without states come
    first: a loop with states in their bodies is then one for all their rounds, with a schedule too.
    """
    notes: list[LoopNote] = []
    for has_states in (False, True):
        if any(has_states == bool(form.states) for form in _loops(graph)):
            scheduled = _Scheduling(graph, machine, schedule, has_states=has_states).run()
            graph = scheduled.graph
            notes += scheduled.notes
    return ScheduledLoops(graph, tuple(dict.fromkeys(notes)))


def _loops(graph: ComputationGraph) -> Iterator[ScanForm]:
    """The forms of all loops, also in loops."""
    for operations in (graph.operations, *(body.operations for body in graph.bodies)):
        yield from (ScanForm.of(operation) for operation in operations if is_scan(operation))


class _Scheduling:
    """Schedules the loops that have states, or those that have none; others stay as they are."""

    def __init__(
        self, graph: ComputationGraph, machine: Machine, schedule: str | None, *, has_states: bool
    ) -> None:
        self.graph, self.has_states = graph, has_states
        self.bodies = graph.bodies
        self.asked = schedule
        self.notes: list[LoopNote] = []
        #: How many rounds of loops that are written out are being written, one by one.
        self.copies = 1
        self.estimate = LoopCosts(rates_of(machine), graph.bodies)

    def run(self) -> ScheduledLoops:
        graph = self.graph
        builder = ComputationGraphBuilder(graph.name)
        given = [
            builder.input(
                slot.name, graph.input_type(i).shape, graph.input_type(i).data_type, slot.kind,
                slot.ownership,
            )
            for i, slot in enumerate(graph.inputs)
        ]  # fmt: skip
        lifted = lift(graph, given, [False] * len(given), 1, builder, self.written)
        for slot, result in zip(graph.outputs, lifted.results, strict=True):
            builder.output(slot.name, result.tensor, aliases_input=slot.aliases_input)
        builder.wish(*graph.wishes)
        return ScheduledLoops(builder.build(), tuple(dict.fromkeys(self.notes)))

    def written(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """An operation with a body, or without a rule, for the lanes of a context."""
        builder: Any = context.builder
        builder = builder.innermost(context.operands)
        if not is_scan(operation):
            return self._by_itself(builder, operation, context)
        form, body = ScanForm.of(operation), self.bodies[operation.body]
        if any(context.batched):
            return lifted_scan(builder, body, form, context, self.written)
        return self._scheduled(builder, body, form, context)

    def _by_itself(
        self, builder: Any, operation: Operation, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """An operator without a rule: a loop over the lanes; a body that is no loop: what it is."""
        if operation.body >= 0:
            body = self.bodies[operation.body]
            made = lift(
                body, context.operands, context.batched, context.lanes, builder, self.written
            ).results
            if not any(context.batched):
                return [r.tensor for r in made]
            return [in_lanes(builder, r.tensor, r.is_batched, context.lanes) for r in made]
        lanes = [o for o, batched in zip(context.operands, context.batched, strict=True) if batched]

        def lane(_: Any, elements: Sequence[SymbolicTensor]) -> Any:
            inside: Any = elements[0].builder
            rest = iter(elements)
            operands = [
                next(rest) if batched else o
                for o, batched in zip(context.operands, context.batched, strict=True)
            ]
            return [], inside.apply(
                operation.op, operands, len(operation.outputs), operation.attributes,
                operation.domain,
            )  # fmt: skip

        _, results = scan(builder, lane, [], lanes)
        return results

    def _scheduled(
        self, builder: Any, body: Body, form: ScanForm, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """A scan as its cheapest schedule has it, or the one that was asked for."""
        operands = list(context.operands)
        if bool(form.states) != self.has_states or not form.count:
            return written_rounds(builder, body, form, operands, self)
        fixed = _constant_inputs(builder, body, form, operands)
        candidates = self._candidates(Loop(body, form, fixed, self.copies))
        costs = sorted(((name, c.seconds) for name, c in candidates.items()), key=_by_cost)
        taken = self.asked if self.asked in candidates else costs[0][0]
        at = len(self.notes)
        written = candidates[taken].write(builder, operands)
        # Loops come before those in them.
        self.notes.insert(
            at, LoopNote(context.location, form.count, taken, tuple(costs), written.without_rule)
        )
        return written.results

    def _candidates(self, loop: Loop) -> dict[str, Candidate]:
        """The schedules that a loop may have."""
        found = {name: schedule(loop, self) for name, schedule in TABLE.items()}
        return {name: candidate for name, candidate in found.items() if candidate is not None}

    def least_seconds(self, loop: Loop) -> float:
        return min(candidate.seconds for candidate in self._candidates(loop).values())

    @contextmanager
    def copied(self, times: int) -> Iterator[None]:
        copies, self.copies = self.copies, self.copies * times
        try:
            yield
        finally:
            self.copies = copies


def _by_cost(named: tuple[str, float]) -> tuple[float, str]:
    """The cheapest first, those that cost the same by name."""
    return named[1], named[0]


def _constant_inputs(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
) -> tuple[int, ...]:
    """What of a body all rounds share that is constant."""
    first = form.states + form.sequences
    shared = zip(body.inputs[first:], operands[first:], strict=True)
    return tuple([value for value, operand in shared if builder.known_data(operand) is not None])
