"""Horizontal fusion: compute neighbouring parts of a value together (the gates of an LSTM).

Slices that cover an axis become one Split. If neighbouring parts of a Split are only read by equal
elementwise operations, one operation is applied to the joined part and its result is split. Results
are bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stitch import ops
from stitch.graph import ComputationGraph
from stitch.program import ABSENT, Array, Constant, DataType, Operation, Value, ValueType


def horizontal_fusion(graph: ComputationGraph) -> ComputationGraph:
    """Turn slices into splits, and fuse operations on neighbouring parts."""
    listed = _Fusion(graph)
    listed.join_slices()
    while listed.join_parts():
        pass
    return listed.graph()


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice along one axis, and the index of its operation."""

    index: int
    start: int
    end: int


class _Fusion:
    """A graph whose operations are being replaced."""

    def __init__(self, graph: ComputationGraph) -> None:
        self._graph = graph
        self.values = list(graph.values)
        self.constants = list(graph.constants)
        self.operations: list[Operation | None] = list(graph.operations)
        self.outputs = {slot.value for slot in graph.outputs}

    def graph(self) -> ComputationGraph:
        """Return the graph, itself if nothing changed."""
        kept = tuple(o for o in self.operations if o is not None)
        if kept == self._graph.operations:
            return self._graph
        return replace(
            self._graph, values=tuple(self.values), operations=kept,
            constants=tuple(self.constants),
        )  # fmt: skip

    def join_slices(self) -> None:
        """Replace slices that cover an axis by one Split."""
        data = self._graph.constant_data()
        groups: dict[tuple[int, int], list[_Part]] = {}
        for index, operation in enumerate(self._graph.operations):
            found = _one_axis(operation, self.values, data)
            if found is not None:
                axis, start, end = found
                key = (operation.inputs[0], axis)
                groups.setdefault(key, []).append(_Part(index, start, end))
        for (source, axis), parts in groups.items():
            parts.sort(key=lambda part: part.start)
            length = self.values[source].type.shape[axis]
            is_whole = parts[0].start == 0 and parts[-1].end == length
            if len(parts) < 2 or not is_whole:
                continue
            if any(a.end != b.start for a, b in pairwise(parts)):
                continue
            first = min(part.index for part in parts)
            made = [self._graph.operations[part.index].outputs[0] for part in parts]
            sizes = [part.end - part.start for part in parts]
            location = self._graph.operations[first].location
            for part in parts:
                self.operations[part.index] = None
            self.operations[first] = self._split(source, made, sizes, axis, location)

    def join_parts(self) -> bool:
        """Fuse one run of equal operations on neighbouring parts; return whether there was one."""
        readers: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for value in operation.inputs if operation is not None else ():
                readers.setdefault(value, []).append(index)
        for index, operation in enumerate(self.operations):
            if operation is None or operation.op != "Split" or operation.domain:
                continue
            for run in self._alike(operation, readers):
                self._join(index, operation, run, readers)
                return True
        return False

    def _alike(self, split: Operation, readers: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
        """Yield runs of neighbouring parts (by number) that are read by equal operations only."""
        run: list[int] = []
        before: object = None
        for number, value in enumerate((*split.outputs, ABSENT)):
            key = self._only_reader(value, readers)
            if key is not None and key == before:
                run.append(number)
                continue
            if len(run) > 1:
                yield run
            run, before = [number], key

    def _only_reader(self, value: int, readers: Mapping[int, Sequence[int]]) -> object:
        """Return a key for the only operation that reads a value; None if there are more."""
        at = readers.get(value, ())
        if value == ABSENT or value in self.outputs or len(at) != 1:
            return None
        operation = self.operations[at[0]]
        assert operation is not None
        if len(operation.inputs) != 1 or not ops.is_elementwise(operation):
            return None
        kind = self.values[operation.outputs[0]].type.data_type
        words = tuple(sorted((name, repr(v)) for name, v in operation.attributes.items()))
        return (operation.op, operation.domain, words, kind)

    def _join(
        self, index: int, split: Operation, run: Sequence[int],
        readers: Mapping[int, Sequence[int]],
    ) -> None:  # fmt: skip
        axis = int(str(split.attributes.get("axis", 0)))
        parts = [split.outputs[number] for number in run]
        firsts = [readers[value][0] for value in parts]
        pieces = [self._operation(at).outputs[0] for at in firsts]
        sizes = [self.values[v].type.shape[axis] for v in parts]
        shape = list(self.values[parts[0]].type.shape)
        shape[axis] = sum(sizes)
        whole = self._value("parts", ValueType(tuple(shape), self.values[parts[0]].type.data_type))
        model = self._operation(min(firsts))
        kind = ValueType(tuple(shape), self.values[pieces[0]].type.data_type)
        computed = self._value(model.op.lower(), kind)
        for at in firsts:
            self.operations[at] = None
        outputs = [v for i, v in enumerate(split.outputs) if i not in run[1:]]
        outputs[outputs.index(parts[0])] = whole
        source = split.inputs[0]
        if len(outputs) == 1:
            # All parts are fused: the split is not needed.
            self.operations[index] = None
            whole = source
        else:
            lengths = [self.values[v].type.shape[axis] for v in outputs]
            self.operations[index] = self._split(source, outputs, lengths, axis, split.location)
        together = replace(model, inputs=(whole,), outputs=(computed,))
        after = self._split(computed, pieces, sizes, axis, split.location)
        # After the split, before all readers of a part.
        self.operations[index + 1 : index + 1] = [together, after]

    def _operation(self, index: int) -> Operation:
        operation = self.operations[index]
        assert operation is not None
        return operation

    def _split(
        self, source: int, made: Sequence[int], sizes: Sequence[int], axis: int, location: str
    ) -> Operation:
        kind = ValueType((len(sizes),), DataType.INT64)
        lengths = self._value("sizes", kind)
        self.constants.append(Constant(lengths, np.array(sizes, np.int64)))
        return Operation("Split", (source, lengths), tuple(made), {"axis": axis}, location=location)

    def _value(self, name: str, kind: ValueType) -> int:
        self.values.append(Value(name, kind))
        return len(self.values) - 1


def _one_axis(
    operation: Operation, values: Sequence[Value], data: Mapping[int, Array]
) -> tuple[int, int, int] | None:
    """Return axis, start and end of a slice along one axis with step 1; None for others."""
    if operation.op != "Slice" or operation.domain:
        return None
    known = [data.get(v) for v in operation.inputs[1:]]
    if any(k is None or k.size != 1 for k in known):
        return None
    numbers = [int(k.ravel()[0]) for k in known if k is not None]
    shape = values[operation.inputs[0]].type.shape
    starts, ends = numbers[:2]
    axis = numbers[2] % len(shape) if len(numbers) > 2 else 0
    if len(numbers) > 3 and numbers[3] != 1:
        return None
    start, end, _ = slice(starts, ends).indices(shape[axis])
    return (axis, start, end) if start < end else None
