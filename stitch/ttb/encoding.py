"""Programs to metadata: a `Binary` becomes one flatbuffer and a list of segments.

Comes in: a `Binary`. Goes out: the size-prefixed flatbuffer and the arrays behind it, the same
bytes for the same binary in every process. Must not know: paths, flatbuffers.

Tables are written children first, in the order of the program's own tuples; nothing is taken from
a set or from the order of a hash. Strings, layouts and value types that are equal are written once.
Values stand in the order of the schema's slots, as the decoder unpacks them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.errors import StitchError
from stitch.flatbuffer import ProblemList, Verifier
from stitch.machine import MachineShape, SpaceShape
from stitch.program import (
    AttributeValue,
    Body,
    Constant,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Seam,
    ShardSpec,
    Value,
    ValueType,
)
from stitch.ttb.binary import Binary, SegmentRow
from stitch.ttb.enum_codes import CODES
from stitch.ttb.envelope import Segments
from stitch.ttb.generated import SCHEMA, UNIONS
from stitch.ttb.table_writer import TableWriter

#: The type code of each table that an attribute's value may be.
_VALUE_TYPES = {name: code for code, name in enumerate(UNIONS["AttributeValue"], 1)}
_INT64 = range(-(2**63), 2**63)


def encode_metadata(binary: Binary, segments: Segments) -> bytes:
    """The size-prefixed flatbuffer of a binary, which a reader will take.

    Raises `StitchError` for what the format cannot hold.
    """
    try:
        metadata = _Encoder(segments).root(binary)
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
    """One flatbuffer being built; every method returns the offset of what it has written."""

    def __init__(self, segments: Segments) -> None:
        self._writer = TableWriter()
        self._segments = segments
        self._types: dict[ValueType, int] = {}
        self._layouts: dict[Layout, int] = {}

    def root(self, binary: Binary) -> bytes:
        write = self._writer
        programs = write.vector([self._program(p) for p in binary.programs])
        machine = self._machine(binary.machine)
        segments = write.vector([self._segment(row) for row in self._segments.rows])
        requires = write.vector([write.text(name, "requires") for name in binary.requires])
        producer = write.string("Binary", "producer", binary.producer)
        version = write.table("Version", binary.version.major, binary.version.minor)
        return write.finish(
            write.table(
                "Binary", version, producer, binary.opset, machine, programs, segments, requires
            )
        )

    # Machine and segments ------------------------------------------------------------------

    def _segment(self, row: SegmentRow) -> int:
        return self._writer.table("Segment", row.offset, row.nbytes, row.crc32)

    def _machine(self, machine: MachineShape) -> int:
        name = self._writer.string("Machine", "name", machine.name)
        host, l1, dram = map(self._space, (machine.host, machine.l1, machine.dram))
        return self._writer.table("Machine", name, *machine.core_grid, host, l1, dram)

    def _space(self, space: SpaceShape | None) -> int:
        if space is None:
            return 0
        return self._writer.table(
            "SpaceShape",
            space.banks,
            space.base,
            space.limit,
            space.alignment,
            0 if space.granule == space.alignment else space.granule,
        )

    # Programs ------------------------------------------------------------------------------

    def _program(self, program: Program) -> int:
        write = self._writer
        inputs = write.vector([self._input(slot) for slot in program.inputs])
        outputs = write.vector([self._output(slot) for slot in program.outputs])
        values = write.vector([self._value(value) for value in program.values])
        operations = write.vector([self._operation(o) for o in program.operations])
        constants = write.vector([self._constant(c) for c in program.constants])
        name = write.string("Program", "name", program.name)
        scratch = write.table(
            "Scratch", CODES[program.scratch.space], program.scratch.size_per_bank
        )
        seams = write.vector([self._seam(seam) for seam in program.seams])
        bodies = write.vector([self._body(body) for body in program.bodies])
        return write.table(
            "Program",
            name, CODES[program.role], inputs, outputs, values, operations, constants, scratch,
            seams, bodies,
        )  # fmt: skip

    def _seam(self, seam: Seam) -> int:
        held = self._writer.scalars("Seam", "held", seam.held)
        return self._writer.table("Seam", seam.first, held)

    def _body(self, body: Body) -> int:
        write = self._writer
        inputs = write.scalars("Body", "inputs", body.inputs)
        outputs = write.scalars("Body", "outputs", body.outputs)
        values = write.vector([self._body_value(value) for value in body.values])
        operations = write.vector([self._operation(o) for o in body.operations])
        constants = write.vector([self._constant(c) for c in body.constants])
        return write.table("Body", inputs, outputs, values, operations, constants)

    def _body_value(self, value: Value) -> int:
        name = self._writer.string("BodyValue", "name", value.name)
        return self._writer.table("BodyValue", name, self._value_type(value.type))

    def _input(self, slot: InputSlot) -> int:
        name = self._writer.string("InputSlot", "name", slot.name)
        return self._writer.table(
            "InputSlot", name, slot.value, CODES[slot.kind], CODES[slot.ownership]
        )

    def _output(self, slot: OutputSlot) -> int:
        name = self._writer.string("OutputSlot", "name", slot.name)
        alias = -1 if slot.aliases_input is None else slot.aliases_input
        return self._writer.table("OutputSlot", name, slot.value, alias)

    def _constant(self, constant: Constant) -> int:
        segment = self._segments.of_constant[id(constant)]
        return self._writer.table("Constant", constant.value, segment)

    def _value(self, value: Value) -> int:
        name = self._writer.string("Value", "name", value.name)
        kind, layout = self._value_type(value.type), self._layout(value.desc.layout)
        return self._writer.table("Value", name, kind, layout)

    def _value_type(self, kind: ValueType) -> int:
        if kind not in self._types:
            shape = self._writer.scalars("ValueType", "shape", kind.shape)
            self._types[kind] = self._writer.table("ValueType", shape, CODES[kind.data_type])
        return self._types[kind]

    def _layout(self, layout: Layout) -> int:
        if layout not in self._layouts:
            spec = 0 if layout.shard_spec is None else self._shard_spec(layout.shard_spec)
            tile_rows, tile_columns = layout.tile_shape or (0, 0)
            address = -1 if layout.address is None else layout.address
            self._layouts[layout] = self._writer.table(
                "Layout",
                CODES[layout.data_type], CODES[layout.space], tile_rows, tile_columns,
                CODES[layout.memory_layout], spec, address,
            )  # fmt: skip
        return self._layouts[layout]

    def _shard_spec(self, spec: ShardSpec) -> int:
        return self._writer.table(
            "ShardSpec", *spec.core_grid, *spec.shape, CODES[spec.orientation]
        )

    def _operation(self, operation: Operation) -> int:
        write = self._writer
        op = write.string("Operation", "op", operation.op)
        domain, location = (
            write.string("Operation", field, text) if text else 0
            for field, text in (("domain", operation.domain), ("location", operation.location))
        )
        inputs = write.scalars("Operation", "inputs", operation.inputs)
        outputs = write.scalars("Operation", "outputs", operation.outputs)
        attributes = write.vector(
            [self._attribute(name, value) for name, value in sorted(operation.attributes.items())]
        )
        return write.table(
            "Operation", op, domain, inputs, outputs, attributes, location, operation.body,
            CODES[operation.math_fidelity], operation.opset,
        )  # fmt: skip

    # Attributes ----------------------------------------------------------------------------

    def _attribute(self, name: str, value: AttributeValue) -> int:
        key = self._writer.string("Attribute", "name", name)
        kind, content = self._attribute_value(name, value)
        member = self._writer.table(kind, content)
        return self._writer.table("Attribute", key, _VALUE_TYPES[kind], member)

    def _attribute_value(self, name: str, value: AttributeValue) -> tuple[str, int | float]:
        """The table that holds a value, and what that table's only field holds."""
        if isinstance(value, tuple):
            return self._attribute_vector(name, value)
        if isinstance(value, str):
            return "StringAttribute", self._writer.text(value, f"attribute {name!r}")
        if isinstance(value, float):
            return "FloatAttribute", value
        _check_integers(name, (value,))
        return "IntAttribute", value

    def _attribute_vector(
        self, name: str, values: tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
    ) -> tuple[str, int]:
        write = self._writer
        texts = [value for value in values if isinstance(value, str)]
        numbers = [value for value in values if not isinstance(value, str)]
        if texts:
            if numbers:
                raise StitchError(f"attribute {name!r} mixes text and numbers", got=repr(values))
            offsets = [write.text(text, f"attribute {name!r}") for text in texts]
            return "StringsAttribute", write.vector(offsets)
        if any(isinstance(value, float) for value in numbers):
            return "FloatsAttribute", write.scalars("FloatsAttribute", "values", numbers)
        _check_integers(name, numbers)
        return "IntsAttribute", write.scalars("IntsAttribute", "values", numbers)


def _check_integers(name: str, values: Sequence[int | float]) -> None:
    for value in values:
        if not isinstance(value, int) or value not in _INT64:
            raise StitchError(
                f"attribute {name!r} cannot be written to a .ttb file",
                expected="64-bit integers, floats, strings, or tuples of one of them",
                got=repr(value),
            )
