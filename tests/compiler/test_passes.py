"""Passes: graphs shrink, results stay the same to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import ops
from stitch.compiler import optimize
from stitch.compiler.body_graphs import add_output_identities
from stitch.compiler.passes.simplification import (
    fold_constants,
    is_repeatable,
    merge_common_subexpressions,
    remove_identities,
)
from stitch.graph.computation_graph import ComputationGraph
from stitch.linker import remove_dead_code
from stitch.program import (
    Array,
    Constant,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Value,
    ValueType,
)
from tests.support.gradients import running

F32 = DataType.FLOAT32


class Sketch:
    """Builds a graph by hand; types come from inference."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.inputs: list[InputSlot] = []
        self.operations: list[Operation] = []
        self.constants: list[Constant] = []
        self.data: dict[int, Array] = {}

    def _value(self, name: str, kind: ValueType) -> int:
        self.values.append(Value(name, kind))
        return len(self.values) - 1

    def input(self, name: str, *shape: int, data_type: DataType = F32) -> int:
        value = self._value(name, ValueType(shape or (2, 3), data_type))
        self.inputs.append(InputSlot(name, value))
        return value

    def constant(self, data: Any) -> int:
        array = np.array(data)
        value = self._value("c", ValueType(array.shape, DataType.from_dtype(array.dtype)))
        self.constants.append(Constant(value, array))
        self.data[value] = array
        return value

    def op(self, op: str, *inputs: int, **attributes: Any) -> int:
        (kind,) = ops.infer_types(
            op,
            [self.values[v].type for v in inputs],
            constants=[self.data.get(v) for v in inputs],
            attributes=attributes,
        )
        made = self._value(op.lower(), kind)
        self.operations.append(Operation(op, inputs, (made,), attributes))
        return made

    def graph(self, *outputs: int) -> ComputationGraph:
        slots = tuple(OutputSlot(f"y{i}", v) for i, v in enumerate(outputs))
        return ComputationGraph(
            "g",
            tuple(self.inputs),
            slots,
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
        )


def run(graph: ComputationGraph, *inputs: Array) -> list[Array]:
    names = [slot.name for slot in graph.inputs]
    return [*running.run(graph, dict(zip(names, inputs, strict=True))).values()]


def f32(data: Any) -> Array:
    return np.array(data, np.float32)


def names(graph: ComputationGraph) -> list[str]:
    return [operation.op for operation in graph.operations]


def test_an_operation_on_constants_becomes_its_result() -> None:
    sketch = Sketch()
    x = sketch.input("x")
    weight = sketch.op("Exp", sketch.constant(f32([[1, 2, 3], [4, 5, 6]])))
    graph = sketch.graph(sketch.op("Mul", x, weight))
    folded = fold_constants(graph, 1024)
    assert names(folded) == ["Mul"]
    array = f32([[1, 2, 3], [3, 2, 1]])
    assert run(folded, array)[0].tobytes() == run(graph, array)[0].tobytes()


def test_a_result_beyond_the_budget_is_left_to_the_run() -> None:
    sketch = Sketch()
    x = sketch.input("x", 100, 100)
    ones = sketch.op("Expand", sketch.constant(f32([1])), sketch.constant([100, 100]))
    graph = sketch.graph(sketch.op("Add", x, ones))
    assert names(fold_constants(graph, 39_000)) == ["Expand", "Add"]
    assert names(fold_constants(graph, 40_000)) == ["Add"]


def test_what_fails_now_is_left_to_fail_where_it_runs() -> None:
    sketch = Sketch()
    data, index = sketch.constant(f32([1, 2])), sketch.constant([7])
    sketch.input("x")
    graph = sketch.graph(sketch.op("Gather", data, index))
    assert names(fold_constants(graph, 1024)) == ["Gather"]


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniformLike", "Bernoulli", "Multinomial"])
def test_operators_with_hidden_state_are_never_repeated(op: str) -> None:
    assert not is_repeatable(Operation(op, (), (0,)))
    assert is_repeatable(Operation("Add", (0, 1), (2,)))


def test_identities_are_bypassed() -> None:
    sketch = Sketch()
    x = sketch.input("x")
    same = sketch.op("Identity", x)
    same = sketch.op("Cast", same, to=1)
    same = sketch.op("Transpose", same, perm=(0, 1))
    same = sketch.op("Reshape", same, sketch.constant([2, 3]))
    graph = sketch.graph(sketch.op("Relu", same))
    assert names(remove_identities(graph)) == ["Relu"]
    assert remove_identities(graph).operations[0].inputs == (x,)


@pytest.mark.parametrize(
    ("condition", "bypassed"),
    [(True, "xx"), (False, "yx"), ([[True], [True]], "xx"), ([[True], [False]], "")],
)
def test_a_where_that_takes_one_operand_everywhere_is_that_operand(
    condition: Any, bypassed: str
) -> None:
    sketch = Sketch()
    x, y, row = sketch.input("x"), sketch.input("y"), sketch.constant(f32([[1, 2, 3]]))
    c = sketch.constant(condition)
    chosen = [sketch.op("Where", c, *operands) for operands in ((x, y), (x, row), (row, x))]
    graph = sketch.graph(*[sketch.op("Neg", value) for value in chosen])
    shorter = remove_identities(graph)
    read = [o.inputs[0] for o in shorter.operations if o.op == "Neg"]
    # The row has another shape than the result.
    assert "".join({x: "x", y: "y"}.get(value, "") for value in read) == bypassed
    operands = f32([[1, 2, 3], [4, 5, 6]]), f32([[7] * 3] * 2)
    for found, wanted in zip(run(shorter, *operands), run(graph, *operands), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_transpose_of_a_transpose_is_one_or_none() -> None:
    sketch = Sketch()
    x = sketch.input("x", 2, 3, 4)
    turned = sketch.op("Transpose", x, perm=(2, 0, 1))
    back = sketch.op("Transpose", turned, perm=(1, 2, 0))
    other = sketch.op("Transpose", turned, perm=(0, 2, 1))
    thrice = sketch.op("Transpose", sketch.op("Transpose", other))
    graph = sketch.graph(sketch.op("Relu", back), other, thrice)
    shorter = remove_dead_code(remove_identities(graph))
    assert sorted(names(shorter)) == ["Relu", "Transpose", "Transpose"]  # Two that are equal.
    assert all(operation.inputs == (x,) for operation in shorter.operations)
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for ours, theirs in zip(run(shorter, data), run(graph, data), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_casts_that_round_are_never_touched() -> None:
    sketch = Sketch()
    x = sketch.input("x")
    rounded = sketch.op("Cast", sketch.op("Cast", x, to=16), to=1)
    assert names(optimize(sketch.graph(sketch.op("Relu", rounded)))) == ["Cast", "Cast", "Relu"]


def test_a_transpose_that_moves_elements_stays_also_where_the_shape_does_not_change() -> None:
    sketch = Sketch()
    x = sketch.input("x", 3, 3)
    graph = sketch.graph(sketch.op("Transpose", x), sketch.op("Transpose", x, perm=(1, 0)))
    assert names(remove_identities(graph)) == ["Transpose", "Transpose"]


def test_what_is_computed_twice_is_computed_once() -> None:
    sketch = Sketch()
    x = sketch.input("x")
    left = sketch.op("Add", sketch.op("Exp", x), sketch.constant(f32(2)))
    right = sketch.op("Add", sketch.op("Exp", x), sketch.constant(f32(2)))
    graph = sketch.graph(sketch.op("Mul", left, right))
    merged = merge_common_subexpressions(graph)
    assert names(merged) == ["Exp", "Add", "Mul"]
    assert len(merged.constants) == 1


def test_what_differs_only_in_an_attribute_or_the_sign_of_zero_stays_apart() -> None:
    sketch = Sketch()
    x = sketch.input("x", 3, 3)
    graph = sketch.graph(
        sketch.op("Softmax", x, axis=0),
        sketch.op("Softmax", x, axis=1),
        sketch.op("Div", x, sketch.constant(f32(0.0))),
        sketch.op("Div", x, sketch.constant(f32(-0.0))),
    )
    assert len(merge_common_subexpressions(graph).operations) == 4


def test_dead_code_goes_and_the_signature_stays() -> None:
    sketch = Sketch()
    x, unused = sketch.input("x"), sketch.input("unused")
    sketch.op("Exp", unused)
    sketch.op("Add", x, sketch.constant(f32(3)))
    graph = remove_dead_code(sketch.graph(sketch.op("Relu", x)))
    assert names(graph) == ["Relu"]
    assert [slot.name for slot in graph.inputs] == ["x", "unused"]
    assert len(graph.values) == 3
    assert graph.constants == ()


def test_an_output_that_is_an_input_or_a_constant_or_a_second_name_gets_its_own_value() -> None:
    sketch = Sketch()
    x = sketch.input("x")
    made, constant = sketch.op("Relu", x), sketch.constant(f32([[1]]))
    graph = add_output_identities(sketch.graph(x, made, made, constant))
    assert names(graph) == ["Relu", "Identity", "Identity", "Identity"]
    assert len({slot.value for slot in graph.outputs} - {x, constant}) == 4
    array = f32([[1, -2, 3], [-4, 5, -6]])
    relu = np.maximum(array, 0).tolist()
    assert [a.tolist() for a in run(graph, array)] == [array.tolist(), relu, relu, [[1.0]]]


_UNARY = ["Relu", "Neg", "Identity", "Exp", "Transpose", "Tanh"]
_BINARY = ["Add", "Mul", "Sub", "Max", "MatMul"]


@st.composite
def _graphs(draw: st.DrawFn) -> ComputationGraph:
    sketch = Sketch()
    for i in range(2):
        sketch.input(f"x{i}", 3, 3)
    for i in range(draw(st.integers(0, 3))):
        sketch.constant(np.full((3, 3), draw(st.integers(-1, 2)), np.float32) + i % 2)
    for _ in range(draw(st.integers(1, 14))):
        count = len(sketch.values)
        op = draw(st.sampled_from(_UNARY + _BINARY))
        operands = [draw(st.integers(0, count - 1)) for _ in range(1 + (op in _BINARY))]
        sketch.op(op, *operands)
    count = len(sketch.values)
    return sketch.graph(*[draw(st.integers(0, count - 1)) for _ in range(draw(st.integers(1, 3)))])


@given(_graphs(), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_optimising_changes_no_bit_of_any_result(graph: ComputationGraph, seed: int) -> None:
    chance = np.random.default_rng(seed)
    inputs = [chance.standard_normal((3, 3)).astype(np.float32) for _ in range(2)]
    small = optimize(graph)
    assert [a.tobytes() for a in run(small, *inputs)] == [a.tobytes() for a in run(graph, *inputs)]
    assert len(small.operations) <= len(graph.operations)
    assert optimize(small) == small
