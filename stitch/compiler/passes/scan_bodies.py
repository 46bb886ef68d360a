"""Optimise the bodies of scans, and remove states without readers.

A state that no round changes becomes an operand shared by all rounds. Other bodies stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stitch.compiler.body_graphs import body_of_graph, graph_of_body
from stitch.graph import ComputationGraph
from stitch.linker import remove_dead_code
from stitch.program import ABSENT, Body, BodyPool, Operation, ScanForm, is_scan

Passes = Callable[[ComputationGraph], ComputationGraph]


def optimize_bodies(graph: ComputationGraph, passes: Passes) -> ComputationGraph:
    """Apply passes to the bodies of scans; dead code remains."""
    if not any(map(is_scan, graph.operations)):
        return graph
    return _Scans(graph, passes).written()


@dataclass(frozen=True, slots=True)
class _ReducedBody:
    """A body after the passes, and the operands and results that remain.

    Attributes:
        body: None if nothing remains to compute.
        states: Indices of carried states.
        sequences: Indices of sequences that are read.
        fixed: States that no round changes, but that rounds read.
        shared: Shared operands that are read.
        given: Collected results that are read.
        unchanged: States that no round changes.
    """

    body: Body | None
    states: tuple[int, ...]
    sequences: tuple[int, ...]
    fixed: tuple[int, ...]
    shared: tuple[int, ...]
    given: tuple[int, ...]
    unchanged: frozenset[int]


class _Scans:
    def __init__(self, graph: ComputationGraph, passes: Passes) -> None:
        self.graph = graph
        self.passes = passes
        self.read = {v for operation in graph.operations for v in operation.inputs}
        self.read |= {slot.value for slot in graph.outputs}
        self.pool = BodyPool()
        #: Replacements of values.
        self.now: dict[int, int] = {}
        self._found: dict[tuple[int, int, int, tuple[bool, ...], bool], _ReducedBody] = {}

    def written(self) -> ComputationGraph:
        graph, kept = self.graph, list[Operation]()
        plain = (o.body for o in graph.operations if not is_scan(o))
        at = self.pool.add_all(graph.bodies, plain)
        for operation in graph.operations:
            moved = replace(operation, inputs=tuple(self.now.get(v, v) for v in operation.inputs))
            if not is_scan(operation):
                kept.append(replace(moved, body=at[operation.body]))
            elif (scan := self._scan(moved)) is not None:
                kept.append(scan)
        outputs = [replace(s, value=self.now.get(s.value, s.value)) for s in graph.outputs]
        return replace(
            graph, operations=tuple(kept), outputs=tuple(outputs), bodies=tuple(self.pool.bodies)
        )

    def _scan(self, operation: Operation) -> Operation | None:
        """Return a scan with the smaller body, or None if no state or result remains."""
        form = ScanForm.of(operation)
        wanted = tuple(v in self.read for v in operation.outputs)
        key = operation.body, form.states, form.sequences, wanted, form.has_condition
        small = self._found.get(key)
        if small is None:
            body = graph_of_body("round", self.graph.bodies[operation.body], self.graph.bodies)
            small = self._found[key] = self._reduced_body(body, form, wanted)
        for state in small.unchanged:
            if operation.outputs[state] != ABSENT:
                self.now[operation.outputs[state]] = operation.inputs[state]
        if small.body is None:
            return None
        first = form.states + form.sequences
        operands = [
            *small.states, *(form.states + i for i in small.sequences), *small.fixed,
            *(first + i for i in small.shared),
        ]  # fmt: skip
        now = ScanForm(
            form.count, len(small.states), len(small.sequences), len(small.given),
            tuple(form.taken_backward[i] for i in small.sequences),
            tuple(form.given_backward[i] for i in small.given), form.has_condition,
        )  # fmt: skip
        return replace(
            operation,
            inputs=tuple(operation.inputs[i] for i in operands),
            outputs=tuple(
                operation.outputs[i]
                for i in (*small.states, *(form.states + i for i in small.given))
            ),
            attributes=now.attributes,
            body=self.pool.add(small.body),
        )

    def _reduced_body(
        self, graph: ComputationGraph, form: ScanForm, wanted: Sequence[bool]
    ) -> _ReducedBody:
        states = range(form.states)
        given = tuple(i for i in range(form.collected) if wanted[form.states + i])
        slots = [*states, *(form.states + i for i in given)]
        graph = self.passes(replace(graph, outputs=tuple(graph.outputs[i] for i in slots)))
        inputs = [slot.value for slot in graph.inputs]
        results = [slot.value for slot in graph.outputs]
        condition = {0} if form.has_condition else set()
        unchanged = frozenset(i for i in states if results[i] == inputs[i]) - condition
        collected = graph.outputs[form.states :]
        going = {i for i in states if wanted[i]} - unchanged
        if going:
            going |= condition
        while True:
            outputs = (*(graph.outputs[i] for i in sorted(going)), *collected)
            cut = remove_dead_code(replace(graph, outputs=outputs))
            used = {v for operation in cut.operations for v in operation.inputs}
            used |= {slot.value for slot in cut.outputs}
            read = [slot.value in used for slot in cut.inputs]
            more = {i for i in states if read[i]} - unchanged - going
            if not more:
                break
            going |= more
        first = form.states + form.sequences
        sequences = tuple(i for i in range(form.sequences) if read[form.states + i])
        fixed = tuple(sorted(i for i in unchanged if read[i]))
        shared = tuple(i for i in range(len(inputs) - first) if read[first + i])
        kept = [
            *sorted(going), *(form.states + i for i in sequences), *fixed,
            *(first + i for i in shared),
        ]  # fmt: skip
        cut = replace(cut, inputs=tuple(cut.inputs[i] for i in kept))
        body = body_of_graph(cut, self.pool) if cut.outputs else None
        return _ReducedBody(
            body, tuple(sorted(going)), sequences, fixed, shared, given, unchanged
        )  # fmt: skip
