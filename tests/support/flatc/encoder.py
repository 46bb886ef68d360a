"""The peer of `stitch.ttb.encoding`: the same metadata, written with the code that flatc generates.

Shares nothing with the product's encoder but the codes of enums and the rows of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tests.support.flatc import classes

fb: Any = classes


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
        version = self._table(
            fb.VersionStart, fb.VersionEnd,
            (fb.VersionAddMajor, binary.version.major), (fb.VersionAddMinor, binary.version.minor),
        )  # fmt: skip
        root = self._table(
            fb.BinaryStart, fb.BinaryEnd,
            (fb.BinaryAddVersion, version), (fb.BinaryAddProducer, producer),
            (fb.BinaryAddOpset, binary.opset), (fb.BinaryAddMachine, machine),
            (fb.BinaryAddPrograms, programs), (fb.BinaryAddSegments, segments),
            (fb.BinaryAddRequires, requires),
        )  # fmt: skip
        b.FinishSizePrefixed(root, file_identifier=b"STCH")
        return bytes(b.Output())

    # Parts ---------------------------------------------------------------------------------

    def _table(
        self,
        start: Callable[[Any], None],
        end: Callable[[Any], int],
        *fields: tuple[Callable[[Any, Any], None], int | float],
    ) -> int:
        start(self._builder)
        for add, value in fields:
            add(self._builder, value)
        return end(self._builder)

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
        return self._table(
            fb.SegmentStart, fb.SegmentEnd, (fb.SegmentAddOffset, row.offset),
            (fb.SegmentAddLength, row.nbytes), (fb.SegmentAddCrc32, row.crc32),
        )  # fmt: skip

    def _machine(self, machine: MachineShape) -> int:
        name = self._string(machine.name)
        host, l1, dram = map(self._space, (machine.host, machine.l1, machine.dram))
        rows, columns = machine.core_grid
        return self._table(
            fb.MachineStart, fb.MachineEnd, (fb.MachineAddName, name),
            (fb.MachineAddCoreRows, rows), (fb.MachineAddCoreColumns, columns),
            (fb.MachineAddHost, host), (fb.MachineAddL1, l1), (fb.MachineAddDram, dram),
        )  # fmt: skip

    def _space(self, space: SpaceShape | None) -> int:
        if space is None:
            return 0
        return self._table(
            fb.SpaceShapeStart, fb.SpaceShapeEnd,
            (fb.SpaceShapeAddBanks, space.banks), (fb.SpaceShapeAddBase, space.base),
            (fb.SpaceShapeAddLimit, space.limit), (fb.SpaceShapeAddAlignment, space.alignment),
            (fb.SpaceShapeAddGranule, 0 if space.granule == space.alignment else space.granule),
        )  # fmt: skip

    # Programs ------------------------------------------------------------------------------

    def _program(self, program: Program) -> int:
        inputs = self._vector([self._input(slot) for slot in program.inputs])
        outputs = self._vector([self._output(slot) for slot in program.outputs])
        values = self._vector([self._value(value) for value in program.values])
        operations = self._vector([self._operation(o) for o in program.operations])
        constants = self._vector([self._constant(c) for c in program.constants])
        name = self._string(program.name)
        scratch = self._table(
            fb.ScratchStart, fb.ScratchEnd, (fb.ScratchAddSpace, CODES[program.scratch.space]),
            (fb.ScratchAddSizePerBank, program.scratch.size_per_bank),
        )  # fmt: skip
        seams = self._vector([self._seam(seam) for seam in program.seams])
        bodies = self._vector([self._body(body) for body in program.bodies])
        return self._table(
            fb.ProgramStart, fb.ProgramEnd,
            (fb.ProgramAddName, name), (fb.ProgramAddRole, CODES[program.role]),
            (fb.ProgramAddInputs, inputs), (fb.ProgramAddOutputs, outputs),
            (fb.ProgramAddValues, values), (fb.ProgramAddOperations, operations),
            (fb.ProgramAddConstants, constants), (fb.ProgramAddScratch, scratch),
            (fb.ProgramAddSeams, seams), (fb.ProgramAddBodies, bodies),
        )  # fmt: skip

    def _seam(self, seam: Seam) -> int:
        held = self._scalars(seam.held, "<u4")
        return self._table(
            fb.SeamStart, fb.SeamEnd, (fb.SeamAddFirst, seam.first), (fb.SeamAddHeld, held)
        )

    def _body(self, body: Body) -> int:
        inputs = self._scalars(body.inputs, "<i4")
        outputs = self._scalars(body.outputs, "<u4")
        values = self._vector([self._body_value(value) for value in body.values])
        operations = self._vector([self._operation(o) for o in body.operations])
        constants = self._vector([self._constant(c) for c in body.constants])
        return self._table(
            fb.BodyStart, fb.BodyEnd,
            (fb.BodyAddInputs, inputs), (fb.BodyAddOutputs, outputs), (fb.BodyAddValues, values),
            (fb.BodyAddOperations, operations), (fb.BodyAddConstants, constants),
        )  # fmt: skip

    def _body_value(self, value: Value) -> int:
        name = self._string(value.name)
        return self._table(
            fb.BodyValueStart, fb.BodyValueEnd,
            (fb.BodyValueAddName, name), (fb.BodyValueAddType, self._value_type(value.type)),
        )  # fmt: skip

    def _input(self, slot: InputSlot) -> int:
        name = self._string(slot.name)
        return self._table(
            fb.InputSlotStart, fb.InputSlotEnd,
            (fb.InputSlotAddName, name), (fb.InputSlotAddValue, slot.value),
            (fb.InputSlotAddKind, CODES[slot.kind]),
            (fb.InputSlotAddOwnership, CODES[slot.ownership]),
        )  # fmt: skip

    def _output(self, slot: OutputSlot) -> int:
        name = self._string(slot.name)
        alias = -1 if slot.aliases_input is None else slot.aliases_input
        return self._table(
            fb.OutputSlotStart, fb.OutputSlotEnd, (fb.OutputSlotAddName, name),
            (fb.OutputSlotAddValue, slot.value), (fb.OutputSlotAddAliasesInput, alias),
        )  # fmt: skip

    def _constant(self, constant: Constant) -> int:
        return self._table(
            fb.ConstantStart, fb.ConstantEnd, (fb.ConstantAddValue, constant.value),
            (fb.ConstantAddSegment, self._segments.of_constant[id(constant)]),
        )  # fmt: skip

    def _value(self, value: Value) -> int:
        name = self._string(value.name)
        kind, layout = self._value_type(value.type), self._layout(value.desc.layout)
        return self._table(
            fb.ValueStart, fb.ValueEnd, (fb.ValueAddName, name),
            (fb.ValueAddType, kind), (fb.ValueAddLayout, layout),
        )  # fmt: skip

    def _value_type(self, kind: ValueType) -> int:
        if kind not in self._types:
            shape = self._scalars(kind.shape, "<i8")
            self._types[kind] = self._table(
                fb.ValueTypeStart, fb.ValueTypeEnd, (fb.ValueTypeAddShape, shape),
                (fb.ValueTypeAddDataType, CODES[kind.data_type]),
            )  # fmt: skip
        return self._types[kind]

    def _layout(self, layout: Layout) -> int:
        if layout not in self._layouts:
            spec = 0 if layout.shard_spec is None else self._shard_spec(layout.shard_spec)
            tile_rows, tile_columns = layout.tile_shape or (0, 0)
            address = -1 if layout.address is None else layout.address
            self._layouts[layout] = self._table(
                fb.LayoutStart, fb.LayoutEnd,
                (fb.LayoutAddDataType, CODES[layout.data_type]),
                (fb.LayoutAddSpace, CODES[layout.space]),
                (fb.LayoutAddTileRows, tile_rows), (fb.LayoutAddTileColumns, tile_columns),
                (fb.LayoutAddMemoryLayout, CODES[layout.memory_layout]),
                (fb.LayoutAddShardSpec, spec), (fb.LayoutAddAddress, address),
            )  # fmt: skip
        return self._layouts[layout]

    def _shard_spec(self, spec: ShardSpec) -> int:
        return self._table(
            fb.ShardSpecStart, fb.ShardSpecEnd,
            (fb.ShardSpecAddGridRows, spec.core_grid[0]),
            (fb.ShardSpecAddGridColumns, spec.core_grid[1]),
            (fb.ShardSpecAddRows, spec.shape[0]), (fb.ShardSpecAddColumns, spec.shape[1]),
            (fb.ShardSpecAddOrientation, CODES[spec.orientation]),
        )  # fmt: skip

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
            fb.OperationStart, fb.OperationEnd,
            (fb.OperationAddOp, op), (fb.OperationAddDomain, domain),
            (fb.OperationAddInputs, inputs), (fb.OperationAddOutputs, outputs),
            (fb.OperationAddAttributes, attributes), (fb.OperationAddLocation, location),
            (fb.OperationAddBody, operation.body),
            (fb.OperationAddMathFidelity, list(MathFidelity).index(operation.math_fidelity)),
        )  # fmt: skip

    # Attributes ----------------------------------------------------------------------------

    def _attribute(self, name: str, value: AttributeValue) -> int:
        key = self._string(name)
        code, member = self._attribute_value(value)
        return self._table(
            fb.AttributeStart, fb.AttributeEnd, (fb.AttributeAddName, key),
            (fb.AttributeAddValueType, code), (fb.AttributeAddValue, member),
        )  # fmt: skip

    def _attribute_value(self, value: AttributeValue) -> tuple[int, int]:
        kinds = fb.AttributeValue
        if isinstance(value, tuple):
            return self._attribute_vector(value)
        if isinstance(value, str):
            text = self._text(value)
            return kinds.StringAttribute, self._table(
                fb.StringAttributeStart, fb.StringAttributeEnd, (fb.StringAttributeAddValue, text)
            )
        if isinstance(value, float):
            return kinds.FloatAttribute, self._table(
                fb.FloatAttributeStart, fb.FloatAttributeEnd,
                # Added past the default, or the sign of -0.0 would be lost.
                (_add_float_value, value),
            )  # fmt: skip
        return kinds.IntAttribute, self._table(
            fb.IntAttributeStart, fb.IntAttributeEnd, (fb.IntAttributeAddValue, value)
        )

    def _attribute_vector(
        self, values: tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
    ) -> tuple[int, int]:
        kinds = fb.AttributeValue
        texts = [value for value in values if isinstance(value, str)]
        numbers = [value for value in values if not isinstance(value, str)]
        if texts:
            strings = self._vector([self._text(t) for t in texts])
            return kinds.StringsAttribute, self._table(
                fb.StringsAttributeStart, fb.StringsAttributeEnd,
                (fb.StringsAttributeAddValues, strings),
            )  # fmt: skip
        if any(isinstance(value, float) for value in numbers):
            return kinds.FloatsAttribute, self._table(
                fb.FloatsAttributeStart, fb.FloatsAttributeEnd,
                (fb.FloatsAttributeAddValues, self._scalars(numbers, "<f8")),
            )  # fmt: skip
        return kinds.IntsAttribute, self._table(
            fb.IntsAttributeStart, fb.IntsAttributeEnd,
            (fb.IntsAttributeAddValues, self._scalars(numbers, "<i8")),
        )  # fmt: skip


def _add_float_value(builder: Any, value: float) -> None:
    builder.PrependFloat64(value)
    builder.Slot(0)
