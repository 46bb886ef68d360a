"""Decode verified flatbuffer records into `Program`s and a `Binary`.

Records are unpacked by position: their fields are in the schema's order.
"""

from __future__ import annotations

import enum
import itertools
import math
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from stitch.errors import CompileError, Problem, StitchError
from stitch.flatbuffer import ProblemList, Record
from stitch.machine import MachineShape, SpaceShape
from stitch.program import (
    NO_ATTRIBUTES,
    Array,
    AttributeValue,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Layout,
    MathFidelity,
    MemoryLayout,
    Operation,
    Orientation,
    OutputSlot,
    Ownership,
    Program,
    Role,
    Scratch,
    Seam,
    ShardSpec,
    Space,
    Value,
    ValueType,
)
from stitch.ttb.binary import Binary, SegmentChecks, SegmentRow, Version
from stitch.ttb.envelope import ALIGNMENT
from stitch.ttb.generated import ENUMS

# Enumerations: codes of the schema and members of the program, matched by name.

E = TypeVar("E", bound=enum.Enum)

#: The enums that files hold; the schema's enums have the same names and members.
FILE_ENUMS: tuple[type[enum.Enum], ...] = (
    DataType, Space, MemoryLayout, Orientation, InputKind, Ownership, Role, MathFidelity,
)  # fmt: skip

#: The code of each member of each enum.
CODES: dict[enum.Enum, int] = {
    kind[name]: code for kind in FILE_ENUMS for code, name in enumerate(ENUMS[kind.__name__])
}


def members(kind: type[E]) -> tuple[E, ...]:
    """The members of an enum by their code.

    >>> members(Space)[1]
    <Space.DRAM: 'dram'>
    """
    return tuple(kind[name] for name in ENUMS[kind.__name__])


_DATA_TYPES = members(DataType)
_FIDELITIES = members(MathFidelity)
_SPACES = members(Space)
_MEMORY_LAYOUTS = members(MemoryLayout)
_ORIENTATIONS = members(Orientation)
_INPUT_KINDS = members(InputKind)
_OWNERSHIPS = members(Ownership)
_ROLES = members(Role)
#: NumPy counts bytes in a signed 64-bit number, dimensions of size 0 left out.
_MOST_NBYTES = 2**63 - 1


class Decoder:
    """Decodes one file; `problems` collects what is wrong instead of stopping at the first."""

    def __init__(self, data: memoryview, problems: ProblemList, where: str) -> None:
        self._data = data
        self._problems = problems
        self._where = where
        self._types: dict[int, ValueType] = {}
        self._layouts: dict[int, Layout | None] = {}
        self._segments: tuple[Array, ...] = ()
        self._used_by: dict[str, tuple[int, ...]] = {}

    def binary(self, root: Record) -> Binary | None:
        """The binary of a root record; None where problems were found."""
        version, producer, opset, _, programs, _, requires, _ = root
        rows, shape = self._frame(root)
        if self._problems.count:
            return None
        decoded = [self._program(record, i) for i, record in enumerate(programs)]
        if self._problems.count:
            return None
        whole = tuple([program for program in decoded if program is not None])
        checks = SegmentChecks(self._where, rows, self._segments, self._used_by)
        try:
            return Binary(whole, shape, producer, opset, Version(*version), requires, checks)
        except StitchError as error:
            self._problems.add("binary", "Binary", one_line(error))
            return None

    def _frame(self, root: Record) -> tuple[tuple[SegmentRow, ...], MachineShape]:
        """The segments and the machine of a root record."""
        rows = tuple([SegmentRow(*row) for row in root[5]])
        self._check_segments(rows)
        shape = self._machine(root[3])
        if not self._problems.count:
            view = self._data
            self._segments = tuple(
                [np.frombuffer(view[r.offset : r.offset + r.nbytes], np.uint8) for r in rows]
            )
        return rows, shape

    # Segments and machine ------------------------------------------------------------------

    def _check_segments(self, rows: tuple[SegmentRow, ...]) -> None:
        available, add = len(self._data), self._problems.add
        ends = [(row.offset, row.offset + row.nbytes, i) for i, row in enumerate(rows)]
        for start, end, i in ends:
            if start % ALIGNMENT:
                add("alignment", f"segments[{i}]", f"offset {start} is no multiple of {ALIGNMENT}")
            if end > available:
                detail = f"bytes {start} to {end} of {available} in the file: it is cut off"
                add("bounds", f"segments[{i}]", detail)
        reach, owner = 0, -1
        for start, end, i in sorted(ends):
            if start < reach and end > start:
                add("overlap", f"segments[{i}]", f"it overlaps segment {owner}")
            if end > reach:
                reach, owner = end, i
        if reach < available:
            add("trailing", "file", f"{available - reach} bytes follow the last segment")

    def _machine(self, record: Record) -> MachineShape:
        name, rows, columns, host, l1, dram = record
        for where, space in (("host", host), ("l1", l1), ("dram", dram)):
            if space is None:
                continue
            _, base, limit, alignment, granule = space
            if base > limit:
                self._problems.add("range", f"machine.{where}", f"base {base} is beyond {limit}")
            if alignment & (alignment - 1):
                detail = f"alignment {alignment} is no power of two"
                self._problems.add("range", f"machine.{where}", detail)
            if granule % alignment:
                detail = f"granule {granule} is no multiple of the alignment {alignment}"
                self._problems.add("range", f"machine.{where}", detail)
        return MachineShape(
            name,
            (rows, columns),
            SpaceShape(*host),
            None if l1 is None else SpaceShape(*l1),
            None if dram is None else SpaceShape(*dram),
        )

    # Programs ------------------------------------------------------------------------------

    def _program(self, record: Record, index: int) -> Program | None:
        (name, role, inputs, outputs, values, operations, constants, scratch, seams,
         bodies) = record  # fmt: skip
        where = f"programs[{index}]"
        before = self._problems.count
        decoded_values = self._values(values, where)
        decoded_operations = self._operations(operations, where)
        decoded_constants = self._constants(constants, decoded_values, where)
        decoded_bodies = tuple(
            [self._body(body, f"{where}.bodies[{i}]") for i, body in enumerate(bodies)]
        )
        if self._problems.count > before:
            return None
        space, size_per_bank = scratch
        try:
            program = Program(
                name,
                tuple([input_slot(slot) for slot in inputs]),
                tuple([output_slot(slot) for slot in outputs]),
                decoded_values,
                decoded_operations,
                decoded_constants,
                Scratch(_SPACES[space], size_per_bank),
                _ROLES[role],
                tuple([Seam(first, held) for first, held in seams]),
                bodies=decoded_bodies,
            )
        except CompileError as error:
            for problem in error.problems or (Problem("program", "", one_line(error)),):
                at = f"{where}: {problem.where}" if problem.where else where
                self._problems.add(problem.kind, at, problem.detail)
            return None
        held = itertools.chain(constants, *[body[-1] for body in bodies])
        self._used_by[name] = tuple([segment for _, segment in held])
        return program

    def _values(self, records: tuple[Record, ...], where: str) -> tuple[Value, ...]:
        layouts, values = self._layouts, list[Value]()
        for name, type_record, layout_record in records:
            value_type = self._value_type(type_record)
            if id(layout_record) not in layouts:
                place = f"{where}.values[{len(values)}].layout"
                layouts[id(layout_record)] = self._layout(layout_record, place)
            values.append(Value(name, value_type, layouts[id(layout_record)]))
        return tuple(values)

    def _value_type(self, record: Record) -> ValueType:
        # Pooled records are one object however often they are pointed at.
        value_type = self._types.get(id(record))
        if value_type is None:
            shape, data_type = record
            value_type = self._types[id(record)] = ValueType(shape, _DATA_TYPES[data_type])
        return value_type

    def _body(self, record: Record, where: str) -> Body:
        inputs, outputs, values, operations, constants = record
        described = tuple([Value(name, self._value_type(kind)) for name, kind in values])
        return Body(
            inputs,
            outputs,
            described,
            self._operations(operations, where),
            self._constants(constants, described, where),
        )

    def _layout(self, record: Record, where: str) -> Layout | None:
        data_type, space, tile_rows, tile_columns, memory_layout, spec, address = record
        try:
            return Layout(
                _DATA_TYPES[data_type],
                _SPACES[space],
                (tile_rows, tile_columns) if tile_rows or tile_columns else None,
                _MEMORY_LAYOUTS[memory_layout],
                None if spec is None else _shard_spec(spec),
                None if address == -1 else address,
            )
        except StitchError as error:
            self._problems.add("layout", where, one_line(error))
            return None

    def _operations(self, records: tuple[Record, ...], where: str) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        for record in records:
            op, domain, inputs, outputs, attributes, location, body, fidelity, opset = record
            read = NO_ATTRIBUTES
            if attributes:
                read = MappingProxyType({name: _attribute(value) for name, value in attributes})
                names = [name for name, _ in attributes]
                if any(a >= b for a, b in itertools.pairwise(names)):
                    place = f"{where}.operations[{len(operations)}]"
                    self._problems.add(
                        "attribute_order", place, "attributes are not sorted, or named twice"
                    )
            how = _FIDELITIES[fidelity]
            operations.append(
                Operation(op, inputs, outputs, read, domain, location, body, how, opset)
            )
        return tuple(operations)

    # Constants -----------------------------------------------------------------------------

    def _constants(
        self, records: tuple[Record, ...], values: tuple[Value, ...], where: str
    ) -> tuple[Constant, ...]:
        constants = []
        for i, (index, segment) in enumerate(records):
            place = f"{where}.constants[{i}]"
            if index >= len(values):
                self._problems.add("bad_index", place, f"value {index} of {len(values)}")
            elif segment >= len(self._segments):
                detail = f"segment {segment} of {len(self._segments)}"
                self._problems.add("bad_index", place, detail)
            else:
                array = self._array(values[index].type, self._segments[segment], place)
                if array is not None:
                    constants.append(Constant(index, array))
        return tuple(constants)

    def _array(self, kind: ValueType, segment: Array, where: str) -> Array | None:
        if kind.data_type.is_block:
            self._problems.add("constant_type", where, "block formats have no dense elements")
            return None
        dtype = kind.data_type.dtype
        if kind.nbytes != segment.nbytes:
            detail = f"{kind.text()} takes {kind.nbytes} bytes, its segment has {segment.nbytes}"
            self._problems.add("constant_length", where, detail)
            return None
        if math.prod([d for d in kind.shape if d]) * dtype.itemsize > _MOST_NBYTES:
            self._problems.add("constant_length", where, f"{kind.text()} is beyond any address")
            return None
        return segment.view(dtype).reshape(kind.shape)


def one_line(error: StitchError) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())


def input_slot(record: Record) -> InputSlot:
    """The input slot of a record."""
    name, value, kind, ownership = record
    return InputSlot(name, value, _INPUT_KINDS[kind], _OWNERSHIPS[ownership])


def output_slot(record: Record) -> OutputSlot:
    """The output slot of a record."""
    name, value, alias = record
    return OutputSlot(name, value, None if alias == -1 else alias)


def _shard_spec(record: Record) -> ShardSpec:
    grid_rows, grid_columns, rows, columns, orientation = record
    return ShardSpec((grid_rows, grid_columns), (rows, columns), _ORIENTATIONS[orientation])


def _attribute(value: tuple[int, tuple[Any, ...]]) -> AttributeValue:
    """Every member of the union is a table of one field, and that field is the value."""
    read: AttributeValue = value[1][0]
    return read
