"""Decode the verified record of a symbolic program: apart, since most files have none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stitch.errors import StitchError
from stitch.flatbuffer import Record
from stitch.graph import ComputationGraph, parse_placement
from stitch.program import (
    Constant,
    DataType,
    Dim,
    Expression,
    Guard,
    MathFidelity,
    Role,
    SymbolicData,
    SymbolicSize,
    SymbolicSizes,
    Value,
    ValueType,
    expressions_of,
)
from stitch.ttb.binary import SegmentChecks, Version
from stitch.ttb.decoding import Decoder, input_slot, members, one_line, output_slot
from stitch.ttb.generated import ENUMS
from stitch.ttb.symbolic_binary import RELATION_NAMES, SymbolicBinary

_RELATIONS = [RELATION_NAMES[name] for name in ENUMS["SizeRelation"]]
_ROLES = members(Role)
_FIDELITIES = members(MathFidelity)
_WHERE = "symbolic"


class SymbolicDecoder(Decoder):
    """Decodes one file with named sizes; `problems` collects what is wrong."""

    def symbolic_binary(self, root: Record) -> SymbolicBinary | None:
        """Return what a root record holds, its constants checked; None where problems were found.

        Raises:
            FormatError: Constants are damaged.
        """
        version, producer, opset, _, programs, _, _, symbolic = root
        if programs:
            self._problems.add("symbolic", "programs", "expected none beside a symbolic program")
        rows, shape = self._frame(root)
        if self._problems.count:
            return None
        try:
            graph, sizes, used = self._symbolic_graph(symbolic)
        except StitchError as error:
            if not self._problems.count:
                self._problems.add("symbolic", _WHERE, one_line(error))
            return None
        if self._problems.count:
            return None
        binary = SymbolicBinary(
            graph, sizes, shape, producer, _ROLES[symbolic[1]], _FIDELITIES[symbolic[2]], opset,
            Version(*version), rows, bool(symbolic[-1]),
        )  # fmt: skip
        checks = SegmentChecks(self._where, rows, self._segments, {graph.name: used})
        checks.check((binary.stored_constants(),), every=True)
        return binary

    def _symbolic_graph(
        self, record: Record
    ) -> tuple[ComputationGraph, SymbolicSizes, tuple[int, ...]]:
        """Return the graph, its sizes, and the segments of its constants.

        Raises:
            StitchError: The parts do not fit together.
        """
        (name, _, _, named, rows, guards, inputs, outputs, values, operations, constants,
         placement, _) = record  # fmt: skip
        dims = [Dim(size, least, most) for size, least, most, _ in named]
        names = [dim.name for dim in dims]
        listed = expressions_of(rows, names)
        sizes = SymbolicSizes.restored(
            dims,
            {size: example for size, _, _, example in named},
            [self._guard(guard, i, listed) for i, guard in enumerate(guards)],
        )
        elements = [sizes.size(expression) for expression in listed]
        decoded = tuple([self._symbolic_value(v, i, elements) for i, v in enumerate(values)])
        kept, used = self._symbolic_constants(constants, decoded, elements)
        asked = tuple(map(parse_placement, placement))
        read = self._operations(operations, _WHERE)
        if self._problems.count:
            raise StitchError("its parts are not sound")
        graph = ComputationGraph(
            name, tuple(map(input_slot, inputs)), tuple(map(output_slot, outputs)), decoded, read,
            kept, asked,
        )  # fmt: skip
        graph.with_placement()  # Every option names a slot.
        for operation in graph.foreign_operations():
            self._problems.add("symbolic", _WHERE, f"a foreign operator, {operation.title}")
        for slot in graph.inputs:
            for axis, size in enumerate(graph.values[slot.value].type.shape):
                if isinstance(size, SymbolicSize) and str(size.expression) in sizes.dims:
                    sizes.sources.append((slot.name, axis, str(size.expression)))
        return graph, sizes, used

    def _guard(self, record: Record, index: int, listed: Sequence[Expression]) -> Guard:
        left, relation, right, line, relied, is_specialised = record
        place = f"guards[{index}]"
        sides = [_at(listed, side, place) for side in (left, right)]
        return Guard(sides[0], _RELATIONS[relation], sides[1], line, relied, bool(is_specialised))

    def _symbolic_value(self, record: Record, index: int, elements: Sequence[Any]) -> Value:
        name, kind, sizes, is_numbered = record
        place = f"{_WHERE}.values[{index}]"
        shape, data_type = (value_type := self._value_type(kind)).shape, value_type.data_type
        if not sizes:
            return Value(name, value_type, is_numbered=bool(is_numbered))
        if len(sizes) != len(shape):
            detail = f"{len(sizes)} sizes for {len(shape)} axes"
            self._problems.add("symbolic", place, detail)
            return Value(name, value_type)
        mixed = [
            own if size == -1 else _at(elements, size, place)
            for own, size in zip(shape, sizes, strict=True)
        ]
        for axis, (own, size) in enumerate(zip(shape, sizes, strict=True)):
            if size != -1 and own:
                detail = f"axis {axis} has a size and an expression"
                self._problems.add("symbolic", place, detail)
            if type(mixed[axis]) is int and mixed[axis] < 0:
                self._problems.add("symbolic", place, f"axis {axis} has the size {mixed[axis]}")
        kind_there = ValueType(tuple(mixed), data_type)
        return Value(name, kind_there, is_numbered=bool(is_numbered))

    def _symbolic_constants(
        self, records: Sequence[Record], values: tuple[Value, ...], elements: Sequence[Any]
    ) -> tuple[tuple[Constant, ...], tuple[int, ...]]:
        kept: list[Constant] = []
        used: list[int] = []
        for index, (value, segment, sizes) in enumerate(records):
            place = f"{_WHERE}.constants[{index}]"
            if value >= len(values):
                self._problems.add("bad_index", place, f"value {value} of {len(values)}")
                continue
            kind = values[value].type
            if any(isinstance(size, SymbolicSize) for size in kind.shape):
                self._problems.add("constant_type", place, "its value has symbolic axes")
            elif not sizes:
                kept += self._constants(((value, segment),), values, place)
                used.append(segment)
            elif kind.data_type not in (DataType.INT64, DataType.INT32) or math.prod(
                kind.shape
            ) != len(sizes):
                detail = f"{len(sizes)} expressions for {kind.text()}"
                self._problems.add("constant_length", place, detail)
            else:
                data: Any = SymbolicData(
                    [_at(elements, s, place) for s in sizes], kind.shape, kind.data_type.dtype
                )
                kept.append(Constant(value, data))
        return tuple(kept), tuple(used)


def _at(listed: Sequence[Any], index: int, where: str) -> Any:
    if index >= len(listed):
        raise StitchError(f"{where} names expression {index} of {len(listed)}")
    return listed[index]
