"""Stretches: a scan becomes a scan of stretches, each a scan of some rounds.

Comes in: a graph, which of its scans, how many rounds a stretch has. Goes out: the graph that
computes the same to the last bit, and its scans of stretches. Rounds that are left over are a
stretch of their own, after the others. Must not know: gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stitch.graph import ComputationGraph
from stitch.program import (
    ABSENT,
    MAX_RANK,
    Body,
    BodyPool,
    Constant,
    DataType,
    Operation,
    ScanForm,
    Value,
    ValueType,
    is_scan,
)


@dataclass(frozen=True, slots=True)
class Stretched:
    """A graph, what its scans of stretches make, and the parts of sequences that they take."""

    graph: ComputationGraph
    scans: frozenset[tuple[int, ...]] = frozenset()
    parts: frozenset[int] = frozenset()


def in_stretches(graph: ComputationGraph, path: Collection[int], every: int) -> Stretched:
    """The graph with its scans that make some of these values in stretches of `every` rounds."""
    writing = _Writing(graph, every)
    for operation in graph.operations:
        if is_scan(operation) and not set(path).isdisjoint(operation.outputs):
            writing.stretch(operation)
        else:
            writing.operations.append(operation)
    stretched = replace(
        graph,
        values=tuple(writing.values),
        operations=tuple(writing.operations),
        constants=tuple(writing.constants),
        bodies=tuple(writing.bodies.bodies),
    )
    return Stretched(stretched, frozenset(writing.scans), frozenset(writing.parts))


class _Writing:
    """One graph under way."""

    def __init__(self, graph: ComputationGraph, every: int) -> None:
        self.every = every
        self.values = list(graph.values)
        self.constants = list(graph.constants)
        self.operations: list[Operation] = []
        self.bodies = BodyPool()
        self.bodies.add_all(graph.bodies)
        self.scans: list[tuple[int, ...]] = []
        self.parts: list[int] = []

    def stretch(self, operation: Operation) -> None:
        """Write a scan in stretches."""
        form = ScanForm.of(operation)
        whole, rest = divmod(form.count, self.every)
        parts = [(whole, self.every)] * (whole > 0) + [(1, rest)] * (rest > 0)
        ranks = [len(self.values[v].type.shape) for v in operation.inputs]
        ranks += [len(self.values[v].type.shape) for v in operation.outputs if v != ABSENT]
        if not parts or max(ranks) >= MAX_RANK:
            self.operations.append(operation)
            return
        first = form.states + form.sequences
        states, shared = operation.inputs[: form.states], operation.inputs[first:]
        sequences = operation.inputs[form.states : first]
        made: list[tuple[int, ...]] = []
        begin = 0
        for many, rounds in parts:
            end = begin + many * rounds
            elements = [
                self._elements(v, operation, (form.count, begin, end), rounds, backward)
                for v, backward in zip(sequences, form.taken_backward, strict=True)
            ]
            # The last stretches make the last states themselves.
            ends = operation.outputs[: form.states] if end == form.count else ()
            operands = (*states, *elements, *shared)
            results = self._scan(operation, form, operands, (many, rounds), ends)
            states = results[: form.states]
            made.append(results[form.states :])
            begin = end
        for i, backward in enumerate(form.given_backward):
            target = operation.outputs[form.states + i]
            if target == ABSENT:
                continue
            if len(parts) == 1:
                self._reshape(made[0][i], target, operation)
                continue
            shape = self.values[target].type.shape[1:]
            pieces = [
                self._shaped(results[i], operation, (many * rounds, *shape))
                for results, (many, rounds) in zip(made, parts, strict=True)
            ]
            order = tuple(pieces[::-1] if backward else pieces)
            self._write(operation, "Concat", order, target, {"axis": 0})

    def _scan(
        self, near: Operation, form: ScanForm, operands: tuple[int, ...], part: tuple[int, int],
        ends: Sequence[int],
    ) -> tuple[int, ...]:  # fmt: skip
        """What a scan of many stretches makes, of so many rounds each; `ends` are its last states
        where these have values already."""
        many, rounds = part
        body = self.bodies.bodies[near.body]
        inner, outer = replace(form, count=rounds), replace(form, count=many)
        takes = [k for k in inner.operand_types(body.input_types) if k is not None]
        makes = [k for k in inner.result_types(body.output_types) if k is not None]
        values = tuple(Value(f"v{i}", kind) for i, kind in enumerate((*takes, *makes)))
        inputs = tuple(range(len(takes)))
        outputs = tuple(range(len(takes), len(values)))
        scan = replace(near, inputs=inputs, outputs=outputs, attributes=inner.attributes)
        stretch = self.bodies.add(Body(inputs, outputs, values, (scan,)))
        results: list[int] = []
        for i, kind in enumerate(outer.result_types(makes)):
            assert kind is not None
            if i < form.states:
                result = ends[i] if ends else self._value("state", kind)
            else:
                result = ABSENT if near.outputs[i] == ABSENT else self._value("stretches", kind)
            results.append(result)
        made = tuple(results)
        attributes = outer.attributes
        self.operations.append(
            replace(near, inputs=operands, outputs=made, attributes=attributes, body=stretch)
        )
        self.scans.append(made)
        return made

    def _elements(
        self, value: int, near: Operation, span: tuple[int, int, int], rounds: int, backward: bool
    ) -> int:
        """What some rounds take of a sequence, in stretches: of `count` those from `begin` on to
        `end`."""
        count, begin, end = span
        if backward:
            begin, end = count - end, count - begin
        kind = self.values[value].type
        element = kind.shape[1:]
        if (begin, end) != (0, count):
            part = self._value("part", replace(kind, shape=(end - begin, *element)))
            cut = (self._ints([number]) for number in (begin, end, 0))
            self._write(near, "Slice", (value, *cut), part, {})
            self.parts.append(part)
            value = part
        return self._shaped(value, near, ((end - begin) // rounds, rounds, *element))

    def _shaped(self, value: int, near: Operation, shape: tuple[int, ...]) -> int:
        target = self._value("shaped", replace(self.values[value].type, shape=shape))
        self._reshape(value, target, near)
        return target

    def _reshape(self, value: int, target: int, near: Operation) -> None:
        shape = self.values[target].type.shape
        inputs, attributes = (value, self._ints(shape)), {"allowzero": int(0 in shape)}
        self._write(near, "Reshape", inputs, target, attributes)

    def _write(
        self, near: Operation, op: str, inputs: tuple[int, ...], target: int,
        attributes: dict[str, int],
    ) -> None:  # fmt: skip
        self.operations.append(Operation(op, inputs, (target,), attributes, "", near.location))

    def _ints(self, numbers: Sequence[int]) -> int:
        data = np.array(numbers, np.int64)
        value = self._value("constant", ValueType(data.shape, DataType.INT64))
        self.constants.append(Constant(value, data))
        return value

    def _value(self, name: str, kind: ValueType) -> int:
        self.values.append(Value(name, kind))
        return len(self.values) - 1
