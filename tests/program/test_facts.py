"""Facts of operations are shared by operations of one form, and by programs at several sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import ops
from stitch.program import Constant, DataType, Operation, Program, Value, ValueType, facts
from stitch.program.facts import operation_forms
from stitch.runtime import loading

VALUES = [Value(name, ValueType((2, 3), DataType.FLOAT32)) for name in "abcd"]


def forms(*operations: Operation, values: Any = VALUES, constants: Any = ()) -> Any:
    return operation_forms(values, operations, constants)


def test_operations_of_one_form_share_their_facts_wherever_their_values_are() -> None:
    add = Operation("Add", (0, 1), (2,))
    first, second = forms(add, Operation("Add", (2, 0), (3,), location="elsewhere"))
    assert first is second is forms(add)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda o: replace(o, op="Sub"),
        lambda o: replace(o, attributes={"axis": 1.0}),
        lambda o: replace(o, outputs=(3,)),
        lambda o: replace(o, inputs=(0, 3)),
        lambda o: replace(o, inputs=(0, -1)),
        lambda o: replace(o, opset=2),
        lambda o: replace(o, body=0),
    ],
)
def test_other_operators_attributes_and_types_are_other_forms(
    change: Callable[[Operation], Operation]
) -> None:  # fmt: skip
    operation = Operation("Add", (0, 1), (2,), attributes={"axis": 1})
    values = [*VALUES[:3], Value("d", ValueType((2, 4), DataType.FLOAT32))]
    one, other = (forms(o, values=values)[0] for o in (operation, change(operation)))
    assert one is not other


def test_small_constants_are_compared_and_large_ones_are_those_of_one_array() -> None:
    add = Operation("Add", (0, 1), (2,))

    def of(data: Any) -> Any:
        kind = Value("c", ValueType(data.shape, DataType.FLOAT32))
        return forms(add, values=[VALUES[0], kind, VALUES[2]], constants=[Constant(1, data)])[0]

    small, large = np.ones(3, np.float32), np.ones(300, np.float32)
    small.flags.writeable = large.flags.writeable = False
    assert of(small) is of(small.copy()) is not of(small * 2)
    assert of(large) is of(large) is not of(large.copy())
    known = len(facts._arrays)
    del large
    gc.collect()
    assert len(facts._arrays) < known


def test_a_program_with_other_shapes_has_its_own_forms() -> None:
    model = stitch.compile(lambda x: x + 1, (np.ones(3, np.float32),))
    program: Program = model.binary.program(0)
    values = [replace(v, type=ValueType((4,), v.type.data_type)) for v in program.values]
    assert program.resized(tuple(values), program.constants).forms[0] is not program.forms[0]


def test_a_program_at_another_size_is_checked_only_where_its_types_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inferred: list[str] = []
    infer = ops.infer_operation

    def counted(operation: Operation, *arguments: Any) -> Any:
        inferred.append(operation.op)
        return infer(operation, *arguments)

    monkeypatch.setattr(loading, "infer_operation", counted)

    def function(x: Any, y: Any) -> Any:
        return x * 2 - np.tanh(y).sum()

    model = stitch.compile(
        function, (np.ones((7, 13), np.float32), np.ones((5, 11, 3), np.float32)),
        dynamic_shapes={"x": {0: stitch.Dim("rows", 1, 64)}},
    )  # fmt: skip
    counts = []
    for rows in (7, 9, 7):
        before = len(inferred)
        with stitch.open_device("wormhole_n150") as device:
            device.load(model.at(rows=rows))
        counts.append(inferred[before:])
    assert counts == [["Mul", "Tanh", "ReduceSum", "Sub"], ["Mul", "Sub"], []]
