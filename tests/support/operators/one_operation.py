"""Programs of one operation each, from the rows of the operators' tables, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from stitch.errors import CompileError, TaskError
from stitch.machine import load_machine
from stitch.ops import infer_types, operators
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
    host_layout,
)
from stitch.runtime.executors import PreparedProgram, as_bytes, dense_view
from tests.support.operators.drawn_operands import operands_of

MACHINE = load_machine("tiny").shape


@dataclass(frozen=True)
class Row:
    """One operation on drawn operands: texts stand for inputs, what else there is is constant."""

    op: str
    specs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""


@cache
def table_rows(*names: str) -> tuple[Row, ...]:
    """The rows of some tables of `tests/ops`."""
    tables = [import_module(f"tests.ops.test_{name}_operators").CASES for name in names]
    return tuple(Row(*row) for table in tables for row in table)


def own_rows(spec: str) -> tuple[Row, ...]:
    """Rows of Stitch's own elementwise operators of one operand: ONNX has none to compare with."""
    return tuple(
        Row(d.name, [spec], {}, 1, d.domain)
        for d in operators()
        if d.domain == "stitch" and d.elementwise and d.inputs == (1, 1)
    )


@dataclass(frozen=True, eq=False)
class OneOperation:
    """A program of one operation, and operands for its inputs."""

    program: Program
    operands: tuple[Array, ...]

    @property
    def operation(self) -> Operation:
        return self.program.operations[0]


def one_operation(row: Row, seed: int = 7, *, open_: bool = False) -> OneOperation:
    """The program of a row. `open_` makes inputs of all constants that the operator can do without
    at compile time."""
    operands = operands_of(row.specs, seed)
    kinds = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    known = [
        None if isinstance(spec, str) else array
        for spec, array in zip(row.specs, operands, strict=True)
    ]

    def types(constants: Sequence[Array | None]) -> tuple[ValueType, ...]:
        return infer_types(
            row.op, kinds, domain=row.domain, constants=constants,
            attributes=row.attributes, outputs=row.outputs,
        )  # fmt: skip

    for index, data in enumerate(known):
        if open_ and data is not None and data.size:
            without: list[Array | None] = [*known[:index], None, *known[index + 1 :]]
            try:
                types(without)
            except CompileError:
                continue
            known = without
    made = types(known)
    values: list[Value] = []
    inputs: list[int] = []
    slots: list[InputSlot] = []
    constants: list[Constant] = []
    given: list[Array] = []
    for array, data, kind in zip(operands, known, kinds, strict=True):
        if array is None or kind is None:
            inputs.append(ABSENT)
            continue
        value = len(values)
        inputs.append(value)
        if data is None:
            slots.append(InputSlot(f"x{value}", value))
            given.append(array)
        else:
            constants.append(Constant(value, np.array(data, order="C")))
        values.append(Value(f"x{value}", kind, host_layout(kind.data_type)))
    first = len(values)
    values += [Value(f"y{i}", t, host_layout(t.data_type)) for i, t in enumerate(made)]
    outputs = tuple(range(first, len(values)))
    operation = Operation(row.op, tuple(inputs), outputs, row.attributes, domain=row.domain)
    program = Program(
        row.op, tuple(slots), tuple(OutputSlot(f"y{v}", v) for v in outputs), tuple(values),
        (operation,), tuple(constants), Scratch(Space.HOST, 0),
    )  # fmt: skip
    return OneOperation(program, tuple(given))


class Binding:
    """A prepared program bound to bytes of its own, to run on one set of operands after another."""

    def __init__(self, prepared: PreparedProgram, program: Program) -> None:
        def empty(slots: Sequence[InputSlot] | Sequence[OutputSlot]) -> tuple[Array, ...]:
            kinds = [program.values[slot.value].type for slot in slots]
            sizes = [int(np.prod(k.shape, dtype=np.int64)) * k.data_type.itemsize for k in kinds]
            return tuple(np.empty(size, np.uint8) for size in sizes)

        self.inputs, self.outputs = empty(program.inputs), empty(program.outputs)
        self.kinds = [program.values[slot.value].type for slot in program.outputs]
        # On the host, where its places are those of one bank.
        self.scratch = np.empty(program.scratch.size_per_bank, np.uint8)
        with np.errstate(all="ignore"):
            self.steps = prepared.bind(self.inputs, self.outputs, self.scratch).steps

    def run(self, operands: Sequence[Array]) -> list[Array]:
        """The outputs, computed over spoiled bytes; raises `TaskError` where operands are refused.

        They lie where the next run writes.
        """
        for region, array in zip(self.inputs, operands, strict=True):
            region[...] = as_bytes(np.array(array, order="C").reshape(-1))
        for region in self.outputs:
            region.fill(77)
        with np.errstate(all="ignore"):
            for step in self.steps:
                step()
        return [dense_view(r, k) for r, k in zip(self.outputs, self.kinds, strict=True)]

    def outcome(self, operands: Sequence[Array]) -> list[Array] | TaskError:
        """The outputs in arrays of their own, or the refusal."""
        try:
            return [array.copy() for array in self.run(operands)]
        except TaskError as error:
            return error
