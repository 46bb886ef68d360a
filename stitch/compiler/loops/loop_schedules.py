"""Schedules: each scan of a graph, the outermost first, becomes what costs least on a machine.

* `batch`: a loop without states is one computation for all its rounds, by the operators' batching
  rules; an operator without one is a loop of its own.
* `hoisted`: what does not read the states is computed before the loop, for all rounds.
* `rows`: a short loop around loops is written out, a loop for each of its rounds.
* `wave`: the anti-diagonals of a loop in a loop are one loop.
* `stretches`: loops of one cell over sequences of different lengths are a loop for each stretch of
  rounds in which the same sequences are not at their end.
* `rounds`: the loop as it is.

Comes in: a graph, a machine, the name of a schedule that is to be taken wherever it can be. Goes
out: the graph that computes the same, a note for each loop. Must not know: executors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from stitch import ops
from stitch.compiler.loops.hoisting import Hoisted, hoisted
from stitch.compiler.loops.lanes import (
    by_itself,
    in_lanes,
    in_rounds,
    lane_by_lane,
    lifted_scan,
)
from stitch.compiler.loops.loop_costs import LoopCosts, rates_of
from stitch.compiler.loops.merged import MergedRows, merge_loops
from stitch.compiler.loops.waves import can_fail, wave_of, written_wave
from stitch.errors import UsageError, closest
from stitch.graph import (
    BodyBuilder,
    ComputationGraph,
    ComputationGraphBuilder,
    lift,
)
from stitch.machine import Machine
from stitch.program import Body, Operation, ScanForm, is_scan

_NO_COSTS: Mapping[str, float] = MappingProxyType({})
#: A loop of more rounds than that, those of loops around it that are written out counted with
#: them, is not written out.
MOST_ROWS = 64
#: Nor is a loop whose rows would be more operations than that, loops in it counted as one.
MOST_WRITTEN = 2048
#: The names that a schedule may be asked for by.
SCHEDULES = ("batch", "hoisted", "rounds", "rows", "stretches", "wave")


def check_schedule(schedule: str | None) -> None:
    """Raises `UsageError` for a schedule that there is not."""
    if schedule is not None and schedule not in SCHEDULES:
        raise UsageError(
            f"there is no schedule {schedule!r}", expected=", ".join(SCHEDULES),
            remedy=closest(schedule, SCHEDULES) or "leave it out: the cheapest is taken",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoopNote:
    """How a loop runs: where it was written, its rounds, the schedule, the seconds that this is
    estimated to take and those of the schedules that were not taken, operators without a batching
    rule; `merged`: what loops run together."""

    where: str
    count: int
    schedule: str
    costs: tuple[tuple[str, float], ...] = ()
    without_rule: tuple[str, ...] = ()
    merged: str = ""

    def text(self) -> str:
        """One line.

        >>> LoopNote("net.py:3", 64, "hoisted", (("hoisted", 1e-3), ("rounds", 2e-3))).text()
        'loop of 64 rounds at net.py:3: hoisted (1 ms); not rounds (2 ms)'
        """
        costs = {name: f"{seconds * 1e3:.3g} ms" for name, seconds in self.costs}
        taken = f" ({costs.pop(self.schedule)})" if self.schedule in costs else ""
        others = ", ".join(f"{name} ({text})" for name, text in costs.items())
        rules = ", ".join(self.without_rule)
        rounds = f"{self.count} round{'s' * (self.count != 1)}"
        return (
            f"loop of {rounds} at {self.where or 'an unknown line'}: {self.schedule}"
            f"{self.merged and f', {self.merged}'}{taken}{f'; not {others}' if others else ''}"
            f"{f'; without a batching rule, one by one: {rules}' if rules else ''}"
        )


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
    lane_bodies: set[int] = set()
    for has_states in (False, True):
        if has_states and any(form.states for form in _loops(graph)):
            merged = merge_loops(graph, rates_of(machine), schedule, lane_bodies)
            graph = merged.graph
            notes += map(_merged_note, merged.rows)
        if any(has_states == bool(form.states) for form in _loops(graph)):
            scheduling = _Scheduling(graph, machine, schedule, has_states=has_states)
            scheduled = scheduling.run()
            graph, lane_bodies = scheduled.graph, scheduling.lane_bodies
            notes += scheduled.notes
    return ScheduledLoops(graph, tuple(dict.fromkeys(notes)))


def _merged_note(rows: MergedRows) -> LoopNote:
    """How loops of one cell run together, or that they do not."""
    loops = f"in {rows.stretches} loop{'s' * (rows.stretches != 1)}"
    how = f"{rows.rows} rows of {rows.lengths} lengths {loops if rows.stretches else 'by length'}"
    return LoopNote(rows.where, rows.count, rows.schedule, rows.costs, merged=how)


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
        self.machine = machine
        self.asked = schedule
        self.notes: list[LoopNote] = []
        #: Loops in loops without states are left to be merged with others.
        self.keeps_lanes = not has_states
        #: The bodies that are such a loop alone.
        self.lane_bodies: set[int] = set()
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
            return by_itself(builder, operation, self.graph.bodies, context, self.written)
        form, body = ScanForm.of(operation), self.graph.bodies[operation.body]
        if any(context.batched):
            if self.keeps_lanes and form.states and form.count:
                return self._lane_by_lane(builder, body, form, context)
            return lifted_scan(builder, body, form, context, self.written)
        return self._scheduled(builder, body, form, context)

    def _lane_by_lane(
        self, builder: Any, body: Body, form: ScanForm, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """A scan for all lanes of which it is not said yet how they run together."""
        results = lane_by_lane(
            builder, context, lambda operands, inside: self._rounds(inside, body, form, operands)
        )  # fmt: skip
        self.lane_bodies.add(builder.operations[-1].body)
        return results

    def _scheduled(
        self, builder: Any, body: Body, form: ScanForm, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """A scan as its cheapest schedule has it, or the one that was asked for."""
        operands, where = list(context.operands), context.location
        if bool(form.states) != self.has_states or not form.count:
            return self._rounds(builder, body, form, operands)
        fixed = _constant_inputs(builder, body, form, operands)
        costs = self._costs(body, form, fixed, self.copies)
        taken = min(costs, key=lambda name: (costs[name], name))
        if self.asked in costs:
            taken = self.asked
        if taken == "batch":
            return self._batched(builder, body, form, operands, where, costs)
        self._note(where, form, taken, costs)
        if taken == "wave":
            wave = wave_of(body, form)
            assert wave is not None
            cell = self.graph.bodies[wave.inner.body]
            return written_wave(builder, wave, cell, form, operands, self.written)
        if taken == "rows":
            return self._rows(builder, body, form, operands)
        if taken == "hoisted":
            parts = hoisted(body, form)
            assert parts is not None
            return self._hoisted(builder, parts, form, operands)
        return self._rounds(builder, body, form, operands)

    def _costs(
        self, body: Body, form: ScanForm, fixed: Collection[int], copies: int
    ) -> dict[str, float]:
        """The schedules that a loop may have that is written so many times, and what each costs;
        `fixed` are the inputs of its body that are constants."""
        estimate, costs = self.estimate, {"rounds": self.estimate.scan(body, form, fixed=fixed)}
        round_seconds = estimate.rates.round_seconds
        if not form.states:
            takes = body.inputs[: form.sequences]
            return {**costs, "batch": estimate.round(body, form.count, takes, fixed)}
        parts = hoisted(body, form) if form.count > 1 and form.sequences else None
        if parts is not None:
            takes = parts.before.inputs[: form.sequences]
            costs["hoisted"] = estimate.round(
                parts.before, form.count, takes, fixed
            ) + form.count * (round_seconds + estimate.round(parts.rest, fixed=fixed))
        if any(is_scan(o) for o in body.operations):
            rows = form.count * copies
            if 0 < rows <= MOST_ROWS and rows * len(body.operations) <= MOST_WRITTEN:
                costs["rows"] = form.count * self._row(body, rows)
            wave = wave_of(body, form)
            cell = None if wave is None else self.graph.bodies[wave.inner.body]
            if wave and cell and not can_fail(cell, wave.form, self.graph.bodies):
                rounds = wave.form.count + form.count - 1
                costs["wave"] = rounds * (round_seconds + estimate.round(cell, form.count))
        return costs

    def _row(self, body: Body, copies: int) -> float:
        """What one round of a loop around loops costs, these as they will be, on weights that are
        constants."""
        beside = replace(body, operations=tuple(o for o in body.operations if not is_scan(o)))
        seconds = self.estimate.round(beside, fixed=body.inputs[1:])
        for operation in body.operations:
            if is_scan(operation):
                inner, form = self.graph.bodies[operation.body], ScanForm.of(operation)
                shared = inner.inputs[form.states + form.sequences :]
                seconds += min(self._costs(inner, form, shared, copies).values())
        return seconds

    def _hoisted(
        self, builder: Any, parts: Hoisted, form: ScanForm, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """What reads no state beforehand, for all rounds, and then the rest."""
        states, first = operands[: form.states], form.states + form.sequences
        sequences, shared = operands[form.states : first], operands[first:]
        ordered = [
            self._turned(builder, s) if back else s
            for s, back in zip(sequences, form.taken_backward, strict=True)
        ]
        flags = [*[True] * len(ordered), *[False] * len(shared)]
        before = lift(
            parts.before, [*ordered, *shared], flags, form.count, builder, self.written
        ).results
        passed = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in before]
        inner = ScanForm(
            form.count, form.states, form.sequences + len(passed), form.collected,
            (*(False,) * (form.sequences + len(passed)),), form.given_backward,
        )  # fmt: skip
        return self._rounds(builder, parts.rest, inner, [*states, *ordered, *passed, *shared])

    def _rounds(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """A loop as it is, the loops in its body scheduled."""

        def written(given: Sequence[Any], inside: BodyBuilder) -> Sequence[Any]:
            results = lift(body, given, [False] * len(given), 1, inside, self.written).results
            return [r.tensor for r in results]

        return in_rounds(builder, body, form, operands, written)

    def _rows(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """A loop written out, one round after the other."""
        states, first = list(operands[: form.states]), form.states + form.sequences
        sequences, shared = operands[form.states : first], list(operands[first:])
        known = [builder.known_data(sequence) for sequence in sequences]
        given: list[list[Any]] = []
        copies, self.copies = self.copies, self.copies * form.count
        for round_ in range(form.count):
            elements = []
            for sequence, data, back in zip(sequences, known, form.taken_backward, strict=True):
                at = form.count - 1 - round_ if back else round_
                # What is constant stays so, at the place where it is.
                elements.append(
                    builder.index(sequence, at) if data is None
                    else builder.parameter(f"{sequence.name}_{at}", data[at])
                )  # fmt: skip
            inside = [*states, *elements, *shared]
            made = lift(body, inside, [False] * len(inside), 1, builder, self.written).results
            tensors = [result.tensor for result in made]
            states = tensors[: form.states]
            given.append(tensors[form.states :])
        self.copies = copies
        collected = [
            builder.stack([each[i] for each in (given[::-1] if back else given)])
            for i, back in enumerate(form.given_backward)
        ]
        return [*states, *collected]

    def _batched(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], where: str,
        costs: Mapping[str, float],
    ) -> Sequence[Any]:  # fmt: skip
        """A loop without states, for all rounds at once."""
        sequences, shared = operands[: form.sequences], operands[form.sequences :]
        ordered = [
            self._turned(builder, s) if back else s
            for s, back in zip(sequences, form.taken_backward, strict=True)
        ]
        flags = [*[True] * len(ordered), *[False] * len(shared)]
        lifted = lift(body, [*ordered, *shared], flags, form.count, builder, self.written)
        names = sorted({o.op for o in lifted.without_rule if o.body < 0})
        self._note(where, form, "batch", costs, tuple(names))
        results = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in lifted.results]
        return [
            self._turned(builder, r) if back else r
            for r, back in zip(results, form.given_backward, strict=True)
        ]

    def _turned(self, builder: Any, tensor: Any) -> Any:
        """From the last to the first."""
        return builder.index(tensor, slice(None, None, -1))

    def _note(
        self, where: str, form: ScanForm, schedule: str, costs: Mapping[str, float] = _NO_COSTS,
        without_rule: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        listed = tuple(sorted(costs.items(), key=lambda item: item[1]))
        self.notes.append(LoopNote(where, form.count, schedule, listed, without_rule))


def _constant_inputs(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
) -> tuple[int, ...]:
    """What of a body all rounds share that is constant."""
    first = form.states + form.sequences
    shared = zip(body.inputs[first:], operands[first:], strict=True)
    return tuple([value for value, operand in shared if builder.known_data(operand) is not None])
