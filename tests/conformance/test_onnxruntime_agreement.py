"""ONNX Runtime agrees with our kernels on every row of the operators' tables, or refuses by name.

The tables are those of `tests/ops`; each row is one program of one operation, run twice.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.machine import load_machine
from stitch.ops import infer_types
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
from stitch.runtime.executors import Executor, as_bytes, dense_view, make_executor

TABLES = Path(__file__).parent.parent / "ops"
MACHINE = load_machine("tiny").shape


def _table(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"operator_tables_{name}", TABLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CASES = _table("conftest")
ROWS: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
for _name in ("test_elementwise_operators", "test_structured_operators"):
    for _row in _table(_name).CASES:
        ROWS[_row[0]].append(_row)


def one_operation(row: tuple[Any, ...]) -> tuple[Program, list[Array | None]]:
    """The program of a row, and its operands."""
    op, specs, attributes, *rest = row
    operands = CASES.operands_of(specs)
    kinds = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    made = infer_types(
        op, kinds, constants=operands, attributes=attributes, outputs=rest[0] if rest else 1
    )
    values: list[Value] = []
    slots: list[InputSlot] = []
    constants: list[Constant] = []
    inputs: list[int] = []
    for spec, array, kind in zip(specs, operands, kinds, strict=True):
        inputs.append(ABSENT if kind is None else len(values))
        if kind is None:
            continue
        if isinstance(spec, str):
            slots.append(InputSlot(f"x{len(values)}", len(values)))
        else:
            constants.append(Constant(len(values), np.array(array, order="C")))
        values.append(Value(f"x{len(values)}", kind, host_layout(kind.data_type)))
    first = len(values)
    values += [Value(f"y{i}", t, host_layout(t.data_type)) for i, t in enumerate(made)]
    outputs = tuple(range(first, len(values)))
    program = Program(
        op,
        tuple(slots),
        tuple(OutputSlot(f"y{v}", v) for v in outputs),
        tuple(values),
        (Operation(op, tuple(inputs), outputs, attributes),),
        tuple(constants),
        Scratch(Space.HOST, 0),
    )
    return program, [a for a, s in zip(operands, specs, strict=True) if isinstance(s, str)]


def run(executor: Executor, program: Program, operands: list[Array | None]) -> list[Array]:
    """The outputs of the second of two runs over spoiled bytes."""
    inputs = [as_bytes(np.array(a, order="C").reshape(-1)) for a in operands if a is not None]
    kinds = [program.values[slot.value].type for slot in program.outputs]
    sizes = [int(np.prod(k.shape, dtype=np.int64)) * k.data_type.itemsize for k in kinds]
    outputs = [np.full(size, 77, np.uint8) for size in sizes]
    bound = executor.prepare(program, MACHINE).bind(tuple(inputs), tuple(outputs), None)
    with np.errstate(all="ignore"):
        for _ in range(2):
            for step in bound.steps:
                step()
    return [dense_view(region, kind) for region, kind in zip(outputs, kinds, strict=True)]


@pytest.mark.parametrize("op", sorted(ROWS))
def test_every_row_agrees_or_is_refused_by_name(op: str) -> None:
    numpy, onnxruntime = make_executor("numpy"), make_executor("onnxruntime")
    right = 0
    for row in ROWS[op]:
        program, operands = one_operation(row)
        try:
            found = run(onnxruntime, program, operands)
        except CompileError as error:
            assert op in str(error), row
            continue
        for ours, theirs in zip(run(numpy, program, operands), found, strict=True):
            CASES.assert_close(theirs, ours)
        right += 1
    assert right > 0, f"no row of {op} runs"
