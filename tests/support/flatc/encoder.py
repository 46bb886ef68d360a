"""The peer of `stitch.ttb.encoding`: the same metadata, by the schema as flatc understands it.

Shares nothing with the product's encoder but the codes of enums and the rows of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    AttributeValue,
    Body,
    Constant,
    InputSlot,
    Layout,
    MathFidelity,
    Operation,
    OutputSlot,
    Program,
    Seam,
    ShardSpec,
    Value,
    ValueType,
)
from stitch.ttb.binary import Binary, SegmentRow
from stitch.ttb.decoding import CODES
from stitch.ttb.envelope import Segments
from tests.support.flatc.peer import ENUMS, add_table


def flatc_metadata(binary: Binary, segments: Segments) -> bytes:
    """The size-prefixed flatbuffer of a binary."""
    return _Encoder(segments).root(binary)


class _Encoder:
    """One flatbuffer being built; every method returns the offset of what it has written."""

    def __init__(self, segments: Segments) -> None:
        self._builder = flatbuffers.Builder(1 << 16)
        self._segments = segments
        self._strings: dict[str, int] = {}
        self._types: dict[ValueType, int] = {}
        self._layouts: dict[Layout, int] = {}

    def root(self, binary: Binary) -> bytes:
        b = self._builder
        programs = self._vector([self._program(p) for p in binary.programs])
        machine = self._machine(binary.machine)
        segments = self._vector([self._segment(row) for row in self._segments.rows])
        requires = self._vector([self._text(name) for name in binary.requires])
        producer = self._string(binary.producer)
        version = self._table("Version", major=binary.version.major, minor=binary.version.minor)
        root = self._table(
            "Binary",
            version=version,
            producer=producer,
            opset=binary.opset,
            machine=machine,
            programs=programs,
            segments=segments,
            requires=requires,
        )
        b.FinishSizePrefixed(root, file_identifier=b"STCH")
        return bytes(b.Output())

    # Parts ---------------------------------------------------------------------------------

    def _table(self, table: str, /, **values: Any) -> int:
        return add_table(self._builder, table, **values)

    def _vector(self, offsets: Sequence[int]) -> int:
        """A vector of offsets; 0, which adds no field, for none."""
        if not offsets:
            return 0
        b = self._builder
        b.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            b.PrependUOffsetTRelative(offset)
        end: int = b.EndVector()
        return end

    def _scalars(self, values: Sequence[int] | Sequence[float], dtype: str) -> int:
        if not values:
            return 0
        offset: int = self._builder.CreateNumpyVector(np.array(values, dtype))
        return offset

    def _string(self, text: str) -> int:
        """A string of a field with a limit: equal ones are written once."""
        if text not in self._strings:
            self._strings[text] = self._text(text)
        return self._strings[text]

    def _text(self, text: str) -> int:
        """A string of its own."""
        offset: int = self._builder.CreateString(text)
        return offset

    # Machine and segments ------------------------------------------------------------------

    def _segment(self, row: SegmentRow) -> int:
        return self._table("Segment", offset=row.offset, length=row.nbytes, crc32=row.crc32)

    def _machine(self, machine: MachineShape) -> int:
        name = self._string(machine.name)
        host, l1, dram = map(self._space, (machine.host, machine.l1, machine.dram))
        rows, columns = machine.core_grid
        return self._table(
            "Machine", name=name, core_rows=rows, core_columns=columns, host=host, l1=l1, dram=dram
        )

    def _space(self, space: SpaceShape | None) -> int:
        if space is None:
            return 0
        return self._table(
            "SpaceShape",
            banks=space.banks,
            base=space.base,
            limit=space.limit,
            alignment=space.alignment,
            granule=0 if space.granule == space.alignment else space.granule,
        )

    # Programs ------------------------------------------------------------------------------

    def _program(self, program: Program) -> int:
        inputs = self._vector([self._input(slot) for slot in program.inputs])
        outputs = self._vector([self._output(slot) for slot in program.outputs])
        values = self._vector([self._value(value) for value in program.values])
        operations = self._vector([self._operation(o) for o in program.operations])
        constants = self._vector([self._constant(c) for c in program.constants])
        name = self._string(program.name)
        scratch = self._table(
            "Scratch",
            space=CODES[program.scratch.space],
            size_per_bank=program.scratch.size_per_bank,
        )
        seams = self._vector([self._seam(seam) for seam in program.seams])
        bodies = self._vector([self._body(body) for body in program.bodies])
        return self._table(
            "Program",
            name=name,
            role=CODES[program.role],
            inputs=inputs,
            outputs=outputs,
            values=values,
            operations=operations,
            constants=constants,
            scratch=scratch,
            seams=seams,
            bodies=bodies,
        )

    def _seam(self, seam: Seam) -> int:
        held = self._scalars(seam.held, "<u4")
        return self._table("Seam", first=seam.first, held=held)

    def _body(self, body: Body) -> int:
        inputs = self._scalars(body.inputs, "<i4")
        outputs = self._scalars(body.outputs, "<u4")
        values = self._vector([self._body_value(value) for value in body.values])
        operations = self._vector([self._operation(o) for o in body.operations])
        constants = self._vector([self._constant(c) for c in body.constants])
        return self._table(
            "Body",
            inputs=inputs,
            outputs=outputs,
            values=values,
            operations=operations,
            constants=constants,
        )

    def _body_value(self, value: Value) -> int:
        name = self._string(value.name)
        return self._table("BodyValue", name=name, type=self._value_type(value.type))

    def _input(self, slot: InputSlot) -> int:
        name = self._string(slot.name)
        return self._table(
            "InputSlot",
            name=name,
            value=slot.value,
            kind=CODES[slot.kind],
            ownership=CODES[slot.ownership],
        )

    def _output(self, slot: OutputSlot) -> int:
        name = self._string(slot.name)
        alias = -1 if slot.aliases_input is None else slot.aliases_input
        return self._table("OutputSlot", name=name, value=slot.value, aliases_input=alias)

    def _constant(self, constant: Constant) -> int:
        return self._table(
            "Constant", value=constant.value, segment=self._segments.of_constant[id(constant)]
        )

    def _value(self, value: Value) -> int:
        name = self._string(value.name)
        kind, layout = self._value_type(value.type), self._layout(value.desc.layout)
        return self._table("Value", name=name, type=kind, layout=layout)

    def _value_type(self, kind: ValueType) -> int:
        if kind not in self._types:
            shape = self._scalars(kind.shape, "<i8")
            self._types[kind] = self._table(
                "ValueType", shape=shape, data_type=CODES[kind.data_type]
            )
        return self._types[kind]

    def _layout(self, layout: Layout) -> int:
        if layout not in self._layouts:
            spec = 0 if layout.shard_spec is None else self._shard_spec(layout.shard_spec)
            tile_rows, tile_columns = layout.tile_shape or (0, 0)
            address = -1 if layout.address is None else layout.address
            self._layouts[layout] = self._table(
                "Layout",
                data_type=CODES[layout.data_type],
                space=CODES[layout.space],
                tile_rows=tile_rows,
                tile_columns=tile_columns,
                memory_layout=CODES[layout.memory_layout],
                shard_spec=spec,
                address=address,
            )
        return self._layouts[layout]

    def _shard_spec(self, spec: ShardSpec) -> int:
        return self._table(
            "ShardSpec",
            grid_rows=spec.core_grid[0],
            grid_columns=spec.core_grid[1],
            rows=spec.shape[0],
            columns=spec.shape[1],
            orientation=CODES[spec.orientation],
        )

    def _operation(self, operation: Operation) -> int:
        op = self._string(operation.op)
        domain = self._string(operation.domain) if operation.domain else 0
        location = self._string(operation.location) if operation.location else 0
        inputs = self._scalars(operation.inputs, "<i4")
        outputs = self._scalars(operation.outputs, "<i4")
        attributes = self._vector(
            [self._attribute(name, value) for name, value in sorted(operation.attributes.items())]
        )
        return self._table(
            "Operation",
            op=op,
            domain=domain,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes,
            location=location,
            body=operation.body,
            math_fidelity=list(MathFidelity).index(operation.math_fidelity),
        )

    # Attributes ----------------------------------------------------------------------------

    def _attribute(self, name: str, value: AttributeValue) -> int:
        key = self._string(name)
        code, member = self._attribute_value(value)
        return self._table("Attribute", name=key, value_type=code, value=member)

    def _attribute_value(self, value: AttributeValue) -> tuple[int, int]:
        """The code of the attribute's table and the table."""
        elements: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        kind = "Int"
        for name, of in (("Float", float), ("String", str)):
            kind = name if any(isinstance(element, of) for element in elements) else kind
        table = f"{kind}sAttribute" if isinstance(value, tuple) else f"{kind}Attribute"
        b = self._builder
        if isinstance(value, tuple):
            values = (
                self._vector([self._text(text) for text in elements])
                if kind == "String"
                else self._scalars(elements, "<f8" if kind == "Float" else "<i8")
            )
            member = self._table(table, values=values)
        elif kind == "Float":
            # Written although it may equal the default, or the sign of -0.0 would be lost.
            b.StartObject(1)
            b.PrependFloat64(value)
            b.Slot(0)
            member = b.EndObject()
        else:
            member = self._table(
                table, value=self._text(value) if isinstance(value, str) else value
            )
        return ENUMS["AttributeValue"][table], member
