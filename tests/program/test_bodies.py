"""Bodies: what does not fit is named, equal ones are one, text and JSON show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.graph import ComputationGraph
from stitch.graph.graph_json import as_json, from_json
from stitch.program import (
    MAX_EXPANSION,
    Body,
    BodyPool,
    Constant,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Value,
    ValueType,
    host_layout,
)
from tests.support.bodied_graphs import SHAPE, bodied_graph, bomb, gate_body, scaled_body

KIND = ValueType(SHAPE, DataType.FLOAT32)
SCALED, GATE = scaled_body(KIND), gate_body(KIND)
PLACED = replace(GATE.values[3], layout=host_layout(DataType.FLOAT32))


def test_the_text_shows_bodies_and_who_carries_them() -> None:
    assert bodied_graph().text() == (
        "graph @bodied {\n"
        "  input x: %x 6x8xf32\n"
        "  input w: %w 6x8xf32\n"
        "  constant %matrix 8x4xf32\n"
        "  body 0 (%x 6x8xf32, _) -> (%scaled 6x8xf32, %rare 6x8xf32)\n"
        "    constant %half 8xf32\n"
        "    %rare = Exp(%x) : 6x8xf32\n"
        "    %scaled = Mul(%x, %half) : 6x8xf32\n"
        "  body 1 (%x 6x8xf32, %y 6x8xf32) -> (%gate 6x8xf32)\n"
        "    %half, _ = own.Scale(%x, _) body=0 : 6x8xf32, _\n"
        "    %tanh = Tanh(%half) : 6x8xf32\n"
        "    %product = Mul(%tanh, %y) : 6x8xf32\n"
        "    %gate = Add(%product, %x) : 6x8xf32\n"
        "  %first = own.Gate(%x, %w) body=1 : 6x8xf32\n"
        "  %second = own.Gate(%first, %x) {how='again'} body=1 : 6x8xf32\n"
        "  %y = MatMul(%second, %matrix) : 6x4xf32\n"
        "  _, %z = own.Scale(%x, _) body=0 : _, 6x8xf32\n"
        "  output y: %y\n"
        "  output z: %z\n"
        "}\n"
    )


def test_the_json_form_keeps_bodies() -> None:
    graph = bodied_graph()
    assert from_json(as_json(graph)) == graph


def carrying(operation: int = 0, **changes: Any) -> dict[str, Any]:
    """Other fields of one of the graph's operations."""
    operations = list(bodied_graph().operations)
    operations[operation] = replace(operations[operation], **changes)
    return {"operations": tuple(operations)}


def bodies(index: int, **changes: Any) -> dict[str, Any]:
    """Other fields of one of the two bodies."""
    both = [SCALED, GATE]
    both[index] = replace(both[index], **changes)
    return {"bodies": tuple(both)}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such body": (carrying(body=2), "bad_body", "body 2 of 2"),
    "an operator of ONNX's": (carrying(domain=""), "bad_body", "has none"),
    "too few operands": (carrying(inputs=(0,)), "bad_body", "1 operands, body 1 has 2"),
    "an operand that the body lacks": (carrying(3, inputs=(0, 1)), "bad_body", "one side"),
    "an operand that it wants": (carrying(inputs=(0, -1)), "bad_body", "one side"),
    "too many results": (carrying(outputs=(2, -1)), "bad_body", "2 results, body 1 has 1"),
    "an operand of another type": (carrying(1, inputs=(5, 0)), "undefined", "value 5"),
    "a body of another type": (
        bodies(1, values=scaled_body(ValueType((8,), DataType.FLOAT64)).values * 2),
        "bad_body", "operand 0 is 6x8xf32, in body 1 8xf64"),
    "a body inside itself": (
        bodies(1, operations=(replace(GATE.operations[0], body=1), *GATE.operations[1:])),
        "bad_body", "body 1 of 1"),
    "a body inside one before it": (
        bodies(0, operations=(Operation("Gate", (0, 0), (2,), {}, "own", "", 1),
                              Operation("Exp", (0,), (3,)))), "bad_body", "body 1 of 0"),
    "an input that is no value": (bodies(1, inputs=(0, 9)), "bad_index", "value 9 of 6"),
    "an input twice": (bodies(1, inputs=(0, 0)), "defined_twice", "value 0"),
    "an output that is an input": (bodies(1, outputs=(0,)), "output_value", "made in the body"),
    "an output twice": (bodies(0, outputs=(2, 2)), "output_value", "of its own"),
    "no output": (bodies(1, outputs=()), "no_output", "makes something"),
    "a value from outside": (
        bodies(1, operations=(*GATE.operations, Operation("Neg", (6,), (-1,)))),
        "undefined", "input value 6"),
    "a value before it is made": (
        bodies(1, operations=GATE.operations[::-1]), "undefined", "not defined before it"),
    "a constant of another type": (
        bodies(0, constants=(Constant(1, np.ones(3, np.float32)),)), "constant_type", "float32[3]"),
    "a value with a place": (
        bodies(1, values=(*GATE.values[:3], PLACED, *GATE.values[4:])), "placed", "no layout"),
    "a value of a block format": (
        bodies(1, values=(*GATE.values, Value("b", ValueType((4,), DataType.BFP8)))),
        "storage_type", "only store"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    changes, kind, detail = WRONG[name]
    with pytest.raises(CompileError) as caught:
        replace(bodied_graph(), **changes)
    assert f"[{kind}]" in str(caught.value) and detail in str(caught.value)


def test_bodies_of_bodies_come_to_a_bounded_size() -> None:
    kind = ValueType((2,), DataType.FLOAT32)

    def graph(levels: int) -> ComputationGraph:
        held, operation = bomb(levels)
        return ComputationGraph(
            "bomb", (InputSlot("x", 0),), (OutputSlot("y", 1),),
            (Value("x", kind), Value("y", kind)), (operation,), bodies=held,
        )  # fmt: skip

    assert len(graph(10).bodies) == 11
    with pytest.raises(CompileError, match=f"more than {MAX_EXPANSION}"):
        graph(60)


def test_a_list_of_bodies_joins_another_by_what_they_are() -> None:
    pool = BodyPool()
    pool.add(GATE.__class__(*_relu()))
    now = pool.add_all((SCALED, GATE))
    again = pool.add_all((SCALED, SCALED, replace(GATE, operations=_carrying(GATE, 1))))
    assert now == {-1: -1, 0: 1, 1: 2} and again == {-1: -1, 0: 1, 1: 1, 2: 2}
    assert [o.body for o in pool.bodies[2].operations] == [1, -1, -1, -1]
    assert pool.add_all((SCALED, GATE), [0]) == {-1: -1, 0: 1}
    assert len(pool.bodies) == 3


def _carrying(body: Body, index: int) -> tuple[Operation, ...]:
    first, *others = body.operations
    return replace(first, body=index), *others


def _relu() -> tuple[Any, ...]:
    return (0,), (1,), (Value("x", KIND), Value("y", KIND)), (Operation("Relu", (0,), (1,)),)
