"""Batching rules: what an operator becomes for many lanes gives what one lane after the other does.

Every case of every operator runs lifted into one graph, and lane by lane: to the bit, but where a
product of another shape, in the rule or inside a kernel, may round otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stitch.errors import TaskError
from stitch.ops import operators
from stitch.program import SCAN, Array
from stitch.runtime.executors import make_executor
from tests.support.grids import CAMPAIGN, in_pairs
from tests.support.operators.against_onnx import assert_close
from tests.support.operators.lanes import HOST, Way, lifted_program, rows, ways_of
from tests.support.operators.one_operation import Binding, Row, one_operation

#: Operators of which each example is computed by itself.
WITHOUT_RULE = {
    "ConstantOfShape", "MatMulInteger", "QLinearMatMul", "Range", "RoiAlign", "Shape",
    "Size", "TfIdfVectorizer",
}  # fmt: skip
#: Operands that may not differ from lane to lane for a rule to apply: weights, scales, numbers that
#: a kernel takes one of.
NOT_FOR = {
    "Conv": {1, 2}, "ConvTranspose": {1, 2},
    "GroupNormalization": {1, 2}, "InstanceNormalization": {1, 2}, "LayerNormalization": {1, 2},
    "DequantizeLinear": {1, 2}, "QuantizeLinear": {1, 2},
    "ConvInteger": {1, 2, 3}, "DeformConv": {1, 3}, "QLinearConv": set(range(1, 9)),
    "Dropout": {1}, "OneHot": {2}, "Pad": {2}, "RMSNormalization": {1},
    "GRU": {1, 2, 3}, "LSTM": {1, 2, 3, 7}, "RNN": {1, 2, 3},
}  # fmt: skip
#: Operators that have a rule for some shapes only.
FOR_SOME = {"BatchNormalization", "BatchNormalizationGradient", "DequantizeLinear",
            "QuantizeLinear"}  # fmt: skip
#: Products, and kernels that sum by products with ones.
PRODUCTS = {
    "BatchNormalization", "BatchNormalizationGradient", "Conv", "ConvTranspose",
    "ConvWeightGradient", "Einsum", "GRU", "Gemm", "GroupNormalization", "InstanceNormalization",
    "LSTM", "LayerNormalization", "LayerNormalizationGradient", "MatMul", "RNN", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceSum", "ReduceSumSquare",
    "Softmax",
}  # fmt: skip
#: A scan has no rule: it is lifted with its body (tests/fractal/test_batched_schedules.py).
NAMES = sorted({d.name for d in operators() if (d.domain, d.name) != SCAN})


def test_operators_without_a_rule_are_these() -> None:
    assert {n for n in NAMES for d in operators() if d.name == n and d.batching is None} == (
        WITHOUT_RULE
    )


@pytest.mark.parametrize(
    ("which", "name"),
    in_pairs(
        ["some", pytest.param("all", marks=CAMPAIGN)],
        [name for name in NAMES if name not in WITHOUT_RULE],
    ),
)
def test_all_lanes_at_once_are_one_after_the_other(name: str, which: str) -> None:
    """Of some rows, every sixth of an operator."""
    rows_of = [row for row in rows() if row.op == name][:: 1 if which == "all" else 6]
    ways = [way for row in rows_of for way in ways_of(row)]
    assert any(way.has_rule for way in ways)
    for way in ways:
        check(way)
        may_have = not NOT_FOR.get(name, set()) & set(way.varying)
        assert way.has_rule == may_have or (may_have and name in FOR_SOME), way.row


@pytest.mark.parametrize("lanes", [1, pytest.param(5, marks=CAMPAIGN)])
def test_any_number_of_lanes(lanes: int) -> None:
    firsts = {row.op: row for row in reversed(rows())}
    for row in firsts.values():
        for way in ways_of(row, lanes):
            check(way)


def check(way: Way) -> None:
    for ours, theirs in zip(way.vmapped, way.expected, strict=True):
        assert ours.dtype == theirs.dtype, way.row
        assert ours.shape == theirs.shape, (way.row, way.varying)
        if way.row.op in PRODUCTS:
            assert_close(ours, theirs)
        else:
            assert ours.tobytes() == theirs.tobytes(), (way.row, way.varying)


def run(row: Row, *stacks: Sequence[Array]) -> list[Array] | TaskError:
    """All operands of an operation, each with lanes."""
    program = one_operation(row, open_=True).program
    whole, has_rule = lifted_program(program, range(len(stacks)), len(stacks[0]))
    assert has_rule
    return Binding(make_executor("numpy").prepare(whole, HOST.shape), whole).outcome(
        [np.stack(stack) for stack in stacks]
    )


#: Operators of indices, and for each operand two lanes: the second has an index that is out of
#: range there, and would be a place of another lane's.
OUT_OF_RANGE: dict[str, tuple[Row, int, list[Any]]] = {
    "Gather": (Row("Gather", ["f32[3,2]", "i64[2]<3"]), 1, [[0, 2], [1, -4]]),
    "GatherElements": (Row("GatherElements", ["f32[3]", "i64[2]<3"]), 1, [[0, 2], [1, -4]]),
    "GatherND": (Row("GatherND", ["f32[3,2]", "i64[2,1]<3"]), 1, [[[0], [2]], [[1], [-4]]]),
    "Window": (
        Row("Window", ["f32[3,2]", "i64[]+", np.array([1])], {"lengths": (2,)}, 1, "stitch"), 1,
        [1, -1],
    ),
    "ScatterElements": (
        Row("ScatterElements", ["f32[3]", "i64[2]<3", "f32[2]"]), 1, [[0, 2], [1, -4]],
    ),
    "ScatterND": (
        Row("ScatterND", ["f32[3]", "i64[2,1]<3", "f32[2]"]), 1, [[[0], [2]], [[1], [-4]]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_stays_inside_its_lane(name: str) -> None:
    row, place, indices = OUT_OF_RANGE[name]
    operands = one_operation(row, open_=True).operands
    stacks = [[array, array] for array in operands]
    stacks[place] = [np.array(lane, np.int64) for lane in indices]
    outcome = run(row, *stacks)
    assert isinstance(outcome, TaskError)
    assert "out of range" in str(outcome)
    stacks[place] = [stacks[place][0]] * 2
    assert not isinstance(run(row, *stacks), TaskError)


def test_what_was_compiled_for_one_value_is_checked_in_all_lanes() -> None:
    row = Row("Expect", ["f32[2]", np.array([1, 2]), np.array([1, 2])], {"name": "x"}, 1, "stitch")
    data, wanted = np.zeros(2, np.float32), np.array([1, 2])
    good = run(row, [data, data + 1], [wanted, wanted], [wanted, wanted])
    assert not isinstance(good, TaskError)
    assert good[0].tolist() == [[0, 0], [1, 1]]
    bad = run(row, [data, data + 1], [wanted, wanted + 1], [wanted, wanted])
    assert isinstance(bad, TaskError)
