"""Schedules: each scan of a graph, the outermost first, becomes what costs least on a machine.

* `batch`: a loop without states is one computation for all its rounds, by the operators' batching
  rules; an operator without one is a loop of its own.
* `hoisted`: what does not read the states is computed before the loop, for all rounds.
* `rows`: a short loop around loops is written out, a loop for each of its rounds.
* `wave`: the anti-diagonals of a loop in a loop are one loop.
* `rounds`: the loop as it is.

Comes in: a graph, a machine, the name of a schedule that is to be taken wherever it can be. Goes
out: the graph that computes the same, a note for each loop. Must not know: executors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler.loops.hoisting import Hoisted, hoisted, hoisted_form
from stitch.compiler.loops.lanes import in_lanes, lifted_scan
from stitch.compiler.loops.loop_costs import LoopCosts, rates_of
from stitch.compiler.loops.waves import can_fail, wave_of, written_wave
from stitch.errors import UsageError, closest
from stitch.graph import (
    BodyBuilder,
    ComputationGraph,
    ComputationGraphBuilder,
    SymbolicTensor,
    lift,
    scan,
    scan_in_body,
)
from stitch.machine import Machine
from stitch.program import Body, Operation, ScanForm, is_scan

#: A loop of more rounds than that, those of loops around it that are written out counted with
#: them, is not written out.
MOST_ROWS = 64
#: Nor is a loop whose rows would be more operations than that, loops in it counted as one.
MOST_WRITTEN = 2048
#: The names that a schedule may be asked for by.
SCHEDULES = ("batch", "hoisted", "rounds", "rows", "wave")


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
    rule, by whose rates the schedule was taken."""

    where: str
    count: int
    schedule: str
    costs: tuple[tuple[str, float], ...] = ()
    without_rule: tuple[str, ...] = ()
    executor: str = ""

    def text(self) -> str:
        """One line.

        >>> costs = (("hoisted", 1e-3), ("rounds", 2e-3))
        >>> LoopNote("net.py:3", 64, "hoisted", costs, executor="numpy").text()
        'loop of 64 rounds at net.py:3: hoisted (1 ms by numpy); not rounds (2 ms)'
        """
        costs = {name: f"{seconds * 1e3:.3g} ms" for name, seconds in self.costs}
        by = f" by {self.executor}" if self.executor else ""
        taken = f" ({costs.pop(self.schedule)}{by})" if self.schedule in costs else ""
        others = ", ".join(f"{name} ({text})" for name, text in costs.items())
        rules = ", ".join(self.without_rule)
        rounds = f"{self.count} round{'s' * (self.count != 1)}"
        return (
            f"loop of {rounds} at {self.where or 'an unknown line'}: {self.schedule}"
            f"{taken}{f'; not {others}' if others else ''}"
            f"{f'; without a batching rule, one by one: {rules}' if rules else ''}"
        )


@dataclass(frozen=True, slots=True)
class ScheduledLoops:
    """A graph whose loops are scheduled, and what became of them."""

    graph: ComputationGraph
    notes: tuple[LoopNote, ...]


def schedule_loops(
    graph: ComputationGraph, machine: Machine, schedule: str | None = None,
    executor: str | None = None,
) -> ScheduledLoops:  # fmt: skip
    """The graph with each loop as its cheapest schedule has it for an executor, or as `schedule`
    where that can be.

    Slots, wishes and results stay. Without loops it is the graph itself. Loops without states come
    first: a loop with states in their bodies is then one for all their rounds, with a schedule too.
    """
    notes: list[LoopNote] = []
    for has_states in (False, True):
        if any(has_states == bool(form.states) for form in _loops(graph)):
            estimates = [LoopCosts(rates, graph.bodies) for rates in rates_of(machine, executor)]
            scheduled = _Scheduling(graph, estimates, schedule, has_states=has_states).run()
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
        self, graph: ComputationGraph, estimates: Sequence[LoopCosts], schedule: str | None,
        *, has_states: bool,
    ) -> None:  # fmt: skip
        self.graph, self.has_states = graph, has_states
        #: By the rates of each executor that may compute; and the one that is being asked.
        self.estimates, self.estimate = estimates, estimates[0]
        self.asked = schedule
        self.notes: list[LoopNote] = []
        #: How many rounds of loops that are written out are being written, one by one.
        self.copies = 1

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
        form, body = ScanForm.of(operation), self.graph.bodies[operation.body]
        if any(context.batched):
            return lifted_scan(builder, body, form, context, self.written)
        return self._scheduled(builder, body, form, context)

    def _by_itself(
        self, builder: Any, operation: Operation, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """An operator without a rule: a loop over the lanes; a body that is no loop: what it is."""
        if operation.body >= 0:
            body = self.graph.bodies[operation.body]
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
        operands, where = list(context.operands), context.location
        if bool(form.states) != self.has_states or not form.count:
            return self._rounds(builder, body, form, operands)
        fixed = _constant_inputs(builder, body, form, operands)
        costs, by = self._least_costs(body, form, fixed)
        taken = min(costs, key=lambda name: (costs[name], name))
        if self.asked in costs:
            taken = self.asked
        if taken == "batch":
            return self._batched(builder, body, form, operands, where, costs, by[taken])
        self._note(where, form, taken, costs, by[taken])
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

    def _least_costs(
        self, body: Body, form: ScanForm, fixed: Collection[int]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """What each schedule of a loop costs by the executor that is cheapest there, and its
        name."""
        costs: dict[str, float] = {}
        by: dict[str, str] = {}
        for estimate in self.estimates:
            self.estimate = estimate
            for name, seconds in self._costs(body, form, fixed, self.copies).items():
                if seconds < costs.get(name, math.inf):
                    costs[name], by[name] = seconds, estimate.rates.executor
        return costs, by

    def _costs(
        self, body: Body, form: ScanForm, fixed: Collection[int], copies: int
    ) -> dict[str, float]:
        """The schedules that a loop may have that is written so many times, and what each costs;
        `fixed` are the inputs of its body that are constants."""
        estimate, costs = self.estimate, {"rounds": self.estimate.scan(body, form, fixed=fixed)}
        if not form.states:
            takes = body.inputs[: form.sequences]
            return {**costs, "batch": estimate.round(body, form.count, takes, fixed)}
        parts = hoisted(body, form) if form.count > 1 and form.sequences else None
        if parts is not None:
            takes = parts.before.inputs[: form.sequences]
            costs["hoisted"] = estimate.round(
                parts.before, form.count, takes, fixed
            ) + estimate.scan(parts.rest, hoisted_form(parts, form), fixed=fixed)
        if any(is_scan(o) for o in body.operations):
            rows = form.count * copies
            if 0 < rows <= MOST_ROWS and rows * len(body.operations) <= MOST_WRITTEN:
                costs["rows"] = form.count * self._row(body, rows)
            wave = wave_of(body, form)
            cell = None if wave is None else self.graph.bodies[wave.inner.body]
            if wave and cell and not can_fail(cell, wave.form, self.graph.bodies):
                along = replace(wave.form, count=wave.form.count + form.count - 1)
                costs["wave"] = estimate.scan(cell, along, form.count)
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
        inner = hoisted_form(parts, form)
        return self._rounds(builder, parts.rest, inner, [*states, *ordered, *passed, *shared])

    def _rounds(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """A loop as it is, the loops in its body scheduled."""
        first = form.states + form.sequences
        shared = list(operands[first:])
        if not form.count and not first:
            kinds = [form.whole(kind) for kind in body.output_types]
            return [builder.constant(np.empty(k.shape, k.data_type.dtype)) for k in kinds]

        def round_(inside: BodyBuilder, states: Sequence[Any], elements: Sequence[Any]) -> Any:
            given = [*states, *elements, *shared]
            results = lift(body, given, [False] * len(given), 1, inside, self.written).results
            tensors = [r.tensor for r in results]
            return tensors[: form.states], tensors[form.states :]

        last, collected = scan_in_body(
            builder, round_, operands[: form.states], operands[form.states : first],
            count=form.count, taken_backward=form.taken_backward,
            given_backward=form.given_backward,
        )  # fmt: skip
        return (*last, *collected)

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
        costs: Mapping[str, float], by: str,
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
        self._note(where, form, "batch", costs, by, tuple(names))
        results = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in lifted.results]
        return [
            self._turned(builder, r) if back else r
            for r, back in zip(results, form.given_backward, strict=True)
        ]

    def _turned(self, builder: Any, tensor: Any) -> Any:
        """From the last to the first."""
        return builder.index(tensor, slice(None, None, -1))

    def _note(
        self, where: str, form: ScanForm, schedule: str, costs: Mapping[str, float], by: str,
        without_rule: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        listed = tuple(sorted(costs.items(), key=lambda item: item[1]))
        self.notes.append(LoopNote(where, form.count, schedule, listed, without_rule, by))


def _constant_inputs(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any]
) -> tuple[int, ...]:
    """What of a body all rounds share that is constant."""
    first = form.states + form.sequences
    shared = zip(body.inputs[first:], operands[first:], strict=True)
    return tuple([value for value, operand in shared if builder.known_data(operand) is not None])
