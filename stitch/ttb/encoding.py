"""Encode a `Binary` as one flatbuffer and a list of segments.

Deterministic: tables are written children first, in the order of the program's own tuples, never in
that of a set or a hash. Equal strings, layouts and value types are written once. Values are in the
order of the schema's slots, which the decoder relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
import numpy as np

from stitch.errors import StitchError
from stitch.flatbuffer import FieldSpec, ProblemList, TableSpec, Verifier
from stitch.machine import MachineShape, SpaceShape
from stitch.program import (
    AttributeValue,
    Body,
    Constant,
    Expression,
    ExpressionRow,
    ExpressionRows,
    Guard,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Seam,
    ShardSpec,
    SymbolicData,
    SymbolicSize,
    Value,
    ValueType,
    expressions_of,
)
from stitch.ttb.binary import Binary, SegmentRow
from stitch.ttb.decoding import CODES
from stitch.ttb.envelope import Segments
from stitch.ttb.generated import ENUMS, FILE_IDENTIFIER, SCHEMA, TABLES, UNIONS
from stitch.ttb.symbolic_binary import RELATION_NAMES, SymbolicBinary

#: Writes one value into the table that a builder has begun.
Prepend = Callable[[Any, Any], None]
#: A slot, what writes it, and the default that is not written.
Row = tuple[int, Prepend, int | float | None]

_PREPENDS: dict[str, Prepend] = {
    "b": flatbuffers.Builder.PrependInt8, "B": flatbuffers.Builder.PrependUint8,
    "h": flatbuffers.Builder.PrependInt16, "H": flatbuffers.Builder.PrependUint16,
    "i": flatbuffers.Builder.PrependInt32, "I": flatbuffers.Builder.PrependUint32,
    "q": flatbuffers.Builder.PrependInt64, "Q": flatbuffers.Builder.PrependUint64,
    "f": flatbuffers.Builder.PrependFloat32, "d": flatbuffers.Builder.PrependFloat64,
}  # fmt: skip
_OFFSET: tuple[Prepend, int] = (flatbuffers.Builder.PrependUOffsetTRelative, 0)
_INITIAL_NBYTES = 1 << 16


def _rows(spec: TableSpec) -> tuple[Row, ...]:
    """The rows of a table, in the order of its slots."""
    rows: list[Row] = []
    for field in spec.fields:
        if field.kind == "union":
            rows += [(field.slot, _PREPENDS["B"], 0), (field.slot + 1, *_OFFSET)]
        elif field.kind == "scalar":
            # A float is written whatever it is, or the sign of -0.0 would be lost.
            default = None if field.code in "fd" else field.default
            rows.append((field.slot, _PREPENDS[field.code], default))
        else:
            rows.append((field.slot, *_OFFSET))
    return tuple(rows)


_ROWS = {name: _rows(spec) for name, spec in TABLES.items()}
_FIELDS: dict[tuple[str, str], FieldSpec] = {
    (table.name, field.name): field for table in TABLES.values() for field in table.fields
}


#: The type code of each table that an attribute's value may be.
_VALUE_TYPES = {name: code for code, name in enumerate(UNIONS["AttributeValue"], 1)}
#: The code of each relation of a guard.
_RELATIONS = {RELATION_NAMES[name]: code for code, name in enumerate(ENUMS["SizeRelation"])}
_INT64 = range(-(2**63), 2**63)


def encode_metadata(binary: Binary | SymbolicBinary, segments: Segments) -> bytes:
    """The size-prefixed flatbuffer of a binary, which a reader will take.

    Raises `StitchError` for what the format cannot hold.
    """
    try:
        encoder = _Encoder(segments)
        if isinstance(binary, SymbolicBinary):
            metadata = encoder.symbolic_root(binary)
        else:
            metadata = encoder.root(binary)
    except (TypeError, OverflowError) as error:  # What flatbuffers and NumPy say of wide numbers.
        raise StitchError(
            "the binary holds a number that a .ttb file cannot",
            got=str(error),
            remedy="keep sizes, addresses and counts within 64 bits, and not negative",
        ) from error
    problems = ProblemList()
    Verifier(metadata, problems, SCHEMA).root()
    problems.raise_if_any(
        "the binary is beyond what a .ttb file may hold", remedy="change what the problems name"
    )
    return metadata


class _Encoder:
    """One flatbuffer; every method but `root` returns the offset of what it has written.

    An offset of 0 stands for a field that is absent.
    """

    def __init__(self, segments: Segments) -> None:
        self._builder = flatbuffers.Builder(_INITIAL_NBYTES)
        self._strings: dict[str, int] = {}
        self._segments = segments
        self._types: dict[ValueType, int] = {}
        self._layouts: dict[Layout, int] = {}

    # Tables, vectors and strings ------------------------------------------------------------

    def _table(self, name: str, *values: int | float) -> int:
        """A table, its values in the order of its slots: a union has two, type and value."""
        builder = self._builder
        builder.StartObject(len(values))
        for (slot, prepend, default), value in zip(_ROWS[name], values, strict=True):
            if value != default:
                prepend(builder, value)
                builder.Slot(slot)
        offset: int = builder.EndObject()
        return offset

    def _vector(self, offsets: Sequence[int]) -> int:
        """A vector of offsets; absent where there are none."""
        if not offsets:
            return 0
        builder = self._builder
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        end: int = builder.EndVector()
        return end

    def _scalars(self, table: str, field: str, values: Sequence[int] | Sequence[float]) -> int:
        """A field that is a vector of scalars; absent where there are none."""
        if not values:
            return 0
        array = np.array(values, f"<{_FIELDS[table, field].code}")
        offset: int = self._builder.CreateNumpyVector(array)
        return offset

    def _string(self, table: str, field: str, text: str) -> int:
        """A field whose bytes are limited: equal texts are written once."""
        limit = _FIELDS[table, field].limit
        if limit is not None and len(text.encode("utf-8", "replace")) > limit:
            raise StitchError(
                f"a {table.lower()}'s {field} is too long for a .ttb file",
                expected=f"at most {limit} bytes",
                got=f"{text[:40]!r}...",
                remedy="shorten it",
            )
        if text not in self._strings:
            self._strings[text] = self._text(text, f"{table.lower()}'s {field}")
        return self._strings[text]

    def _text(self, text: str, what: str) -> int:
        """A string of its own: readers charge those without a limit each time they are used."""
        try:
            offset: int = self._builder.CreateString(text)
        except UnicodeEncodeError as error:
            raise StitchError(f"the {what} {text!r} is not valid Unicode") from error
        return offset

    # The binary ------------------------------------------------------------------------------

    def root(self, binary: Binary) -> bytes:
        programs = self._vector([self._program(p) for p in binary.programs])
        return self._finished(binary, binary.requires, programs, 0)

    def symbolic_root(self, binary: SymbolicBinary) -> bytes:
        symbolic = self._symbolic_program(binary)
        return self._finished(binary, binary.requires, self._empty_vector(), symbolic)

    def _finished(
        self, binary: Binary | SymbolicBinary, required: Sequence[str], programs: int, symbolic: int
    ) -> bytes:
        machine = self._machine(binary.machine)
        segments = self._vector([self._segment(row) for row in self._segments.rows])
        requires = self._vector([self._text(name, "requires") for name in required])
        producer = self._string("Binary", "producer", binary.producer)
        version = self._table("Version", binary.version.major, binary.version.minor)
        root = self._table(
            "Binary", version, producer, binary.opset, machine, programs, segments, requires,
            symbolic,
        )  # fmt: skip
        self._builder.FinishSizePrefixed(root, file_identifier=FILE_IDENTIFIER)
        return bytes(self._builder.Output())

    # Machine and segments ------------------------------------------------------------------

    def _segment(self, row: SegmentRow) -> int:
        return self._table("Segment", row.offset, row.nbytes, row.crc32)

    def _machine(self, machine: MachineShape) -> int:
        name = self._string("Machine", "name", machine.name)
        host, l1, dram = map(self._space, (machine.host, machine.l1, machine.dram))
        return self._table("Machine", name, *machine.core_grid, host, l1, dram)

    def _space(self, space: SpaceShape | None) -> int:
        if space is None:
            return 0
        return self._table(
            "SpaceShape",
            space.banks,
            space.base,
            space.limit,
            space.alignment,
            0 if space.granule == space.alignment else space.granule,
        )

    # Programs ------------------------------------------------------------------------------

    def _program(self, program: Program) -> int:
        inputs = self._vector([self._input(slot) for slot in program.inputs])
        outputs = self._vector([self._output(slot) for slot in program.outputs])
        values = self._vector([self._value(value) for value in program.values])
        operations = self._vector([self._operation(o) for o in program.operations])
        constants = self._vector([self._constant(c) for c in program.constants])
        name = self._string("Program", "name", program.name)
        scratch = self._table(
            "Scratch", CODES[program.scratch.space], program.scratch.size_per_bank
        )
        seams = self._vector([self._seam(seam) for seam in program.seams])
        bodies = self._vector([self._body(body) for body in program.bodies])
        return self._table(
            "Program",
            name, CODES[program.role], inputs, outputs, values, operations, constants, scratch,
            seams, bodies,
        )  # fmt: skip

    def _seam(self, seam: Seam) -> int:
        held = self._scalars("Seam", "held", seam.held)
        return self._table("Seam", seam.first, held)

    def _body(self, body: Body) -> int:
        inputs = self._scalars("Body", "inputs", body.inputs)
        outputs = self._scalars("Body", "outputs", body.outputs)
        values = self._vector([self._body_value(value) for value in body.values])
        operations = self._vector([self._operation(o) for o in body.operations])
        constants = self._vector([self._constant(c) for c in body.constants])
        return self._table("Body", inputs, outputs, values, operations, constants)

    def _body_value(self, value: Value) -> int:
        name = self._string("BodyValue", "name", value.name)
        return self._table("BodyValue", name, self._value_type(value.type))

    def _input(self, slot: InputSlot) -> int:
        name = self._string("InputSlot", "name", slot.name)
        return self._table("InputSlot", name, slot.value, CODES[slot.kind], CODES[slot.ownership])

    def _output(self, slot: OutputSlot) -> int:
        name = self._string("OutputSlot", "name", slot.name)
        alias = -1 if slot.aliases_input is None else slot.aliases_input
        return self._table("OutputSlot", name, slot.value, alias)

    def _constant(self, constant: Constant) -> int:
        segment = self._segments.of_constant[id(constant)]
        return self._table("Constant", constant.value, segment)

    def _value(self, value: Value) -> int:
        name = self._string("Value", "name", value.name)
        kind, layout = self._value_type(value.type), self._layout(value.desc.layout)
        return self._table("Value", name, kind, layout)

    def _value_type(self, kind: ValueType) -> int:
        if kind not in self._types:
            shape = self._scalars("ValueType", "shape", kind.shape)
            self._types[kind] = self._table("ValueType", shape, CODES[kind.data_type])
        return self._types[kind]

    def _layout(self, layout: Layout) -> int:
        if layout not in self._layouts:
            spec = 0 if layout.shard_spec is None else self._shard_spec(layout.shard_spec)
            tile_rows, tile_columns = layout.tile_shape or (0, 0)
            address = -1 if layout.address is None else layout.address
            self._layouts[layout] = self._table(
                "Layout",
                CODES[layout.data_type], CODES[layout.space], tile_rows, tile_columns,
                CODES[layout.memory_layout], spec, address,
            )  # fmt: skip
        return self._layouts[layout]

    def _shard_spec(self, spec: ShardSpec) -> int:
        return self._table("ShardSpec", *spec.core_grid, *spec.shape, CODES[spec.orientation])

    def _operation(self, operation: Operation) -> int:
        op = self._string("Operation", "op", operation.op)
        domain, location = (
            self._string("Operation", field, text) if text else 0
            for field, text in (("domain", operation.domain), ("location", operation.location))
        )
        inputs = self._scalars("Operation", "inputs", operation.inputs)
        outputs = self._scalars("Operation", "outputs", operation.outputs)
        attributes = self._vector(
            [self._attribute(name, value) for name, value in sorted(operation.attributes.items())]
        )
        return self._table(
            "Operation", op, domain, inputs, outputs, attributes, location, operation.body,
            CODES[operation.math_fidelity], operation.opset,
        )  # fmt: skip

    # Symbolic programs -----------------------------------------------------------------------

    def _empty_vector(self) -> int:
        """A vector of nothing, where the schema requires one."""
        self._builder.StartVector(4, 0, 4)
        end: int = self._builder.EndVector()
        return end

    def _symbolic_program(self, binary: SymbolicBinary) -> int:
        graph, dims = binary.graph, binary.sizes.dims
        rows = ExpressionRows(list(dims))
        values = self._vector([self._symbolic_value(value, rows) for value in graph.values])
        constants = self._vector([self._symbolic_constant(c, rows) for c in graph.constants])
        guards = self._vector([self._guard(guard, rows) for guard in binary.sizes.guards])
        expressions_of(rows.rows, list(dims))  # Raises for what no reader takes.
        expressions = self._vector([self._expression(row) for row in rows.rows])
        named = [
            self._table(
                "NamedSize", self._string("NamedSize", "name", name), dim.least, dim.most,
                binary.sizes.hints[name],
            )
            for name, dim in dims.items()
        ]  # fmt: skip
        sizes = self._vector(named) or self._empty_vector()
        inputs = self._vector([self._input(slot) for slot in graph.inputs])
        outputs = self._vector([self._output(slot) for slot in graph.outputs])
        operations = self._vector([self._operation(o) for o in graph.operations])
        placement = self._vector([
            self._string("SymbolicProgram", "placement", option.text())
            for option in graph.placement
        ])  # fmt: skip
        name = self._string("SymbolicProgram", "name", graph.name)
        return self._table(
            "SymbolicProgram", name, CODES[binary.role], CODES[binary.math_fidelity], sizes,
            expressions, guards, inputs, outputs, values, operations, constants, placement,
            int(binary.needs_passes),
        )  # fmt: skip

    def _expression(self, row: ExpressionRow) -> int:
        terms = [
            self._table("SizeTerm", coefficient, self._scalars("SizeTerm", "factors", factors))
            for coefficient, factors in row[0]
        ]
        return self._table("SizeExpression", self._vector(terms), row[1])

    def _guard(self, guard: Guard, rows: ExpressionRows) -> int:
        line, relied = (
            self._string("SizeGuard", field, text) if text else 0
            for field, text in (("line", guard.line), ("relied", guard.relied))
        )
        return self._table(
            "SizeGuard", rows.number(guard.left), _RELATIONS[guard.relation],
            rows.number(guard.right), line, relied, int(guard.is_specialised),
        )  # fmt: skip

    def _symbolic_value(self, value: Value, rows: ExpressionRows) -> int:
        name, shape = self._string("SymbolicValue", "name", value.name), value.type.shape
        sizes = [
            rows.number(size.expression) if isinstance(size, SymbolicSize) else -1 for size in shape
        ]
        fixed = tuple([
            0 if isinstance(size, SymbolicSize) else size for size in shape
        ])  # fmt: skip
        kind = self._value_type(ValueType(fixed, value.type.data_type))
        is_symbolic = any(size != -1 for size in sizes)
        listed = self._scalars("SymbolicValue", "sizes", sizes) if is_symbolic else 0
        return self._table("SymbolicValue", name, kind, listed, int(value.is_numbered))

    def _symbolic_constant(self, constant: Constant, rows: ExpressionRows) -> int:
        if not isinstance(constant.data, SymbolicData):
            segment = self._segments.of_constant[id(constant)]
            return self._table("SymbolicConstant", constant.value, segment, 0)
        numbers = [
            rows.number(e.expression if isinstance(e, SymbolicSize) else Expression.of_int(int(e)))
            for e in constant.data.elements
        ]
        elements = self._scalars("SymbolicConstant", "elements", numbers)
        return self._table("SymbolicConstant", constant.value, 0, elements)

    # Attributes ----------------------------------------------------------------------------

    def _attribute(self, name: str, value: AttributeValue) -> int:
        key = self._string("Attribute", "name", name)
        kind, content = self._attribute_value(name, value)
        member = self._table(kind, content)
        return self._table("Attribute", key, _VALUE_TYPES[kind], member)

    def _attribute_value(self, name: str, value: AttributeValue) -> tuple[str, int | float]:
        """The table that holds a value, and what that table's only field holds."""
        if isinstance(value, tuple):
            return self._attribute_vector(name, value)
        if isinstance(value, str):
            return "StringAttribute", self._text(value, f"attribute {name!r}")
        if isinstance(value, float):
            return "FloatAttribute", value
        _check_integers(name, (value,))
        return "IntAttribute", value

    def _attribute_vector(
        self, name: str, values: tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
    ) -> tuple[str, int]:
        texts = [value for value in values if isinstance(value, str)]
        numbers = [value for value in values if not isinstance(value, str)]
        if texts:
            if numbers:
                raise StitchError(f"attribute {name!r} mixes text and numbers", got=repr(values))
            offsets = [self._text(text, f"attribute {name!r}") for text in texts]
            return "StringsAttribute", self._vector(offsets)
        if any(isinstance(value, float) for value in numbers):
            return "FloatsAttribute", self._scalars("FloatsAttribute", "values", numbers)
        _check_integers(name, numbers)
        return "IntsAttribute", self._scalars("IntsAttribute", "values", numbers)


def _check_integers(name: str, values: Sequence[int | float]) -> None:
    for value in values:
        if not isinstance(value, int) or value not in _INT64:
            raise StitchError(
                f"attribute {name!r} cannot be written to a .ttb file",
                expected="64-bit integers, floats, strings, or tuples of one of them",
                got=repr(value),
            )
