"""One operation for several lanes: lifted into one graph, and one lane after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stitch.compiler import compile_graph
from stitch.errors import TaskError
from stitch.graph import ComputationGraphBuilder, vmap
from stitch.machine import load_machine
from stitch.ops import BatchingContext
from stitch.program import ABSENT, Array, Body, Operation, Program, Value
from stitch.runtime.executors import make_executor
from tests.support.operators.drawn_operands import operands_of
from tests.support.operators.one_operation import Binding, Row, one_operation, own_rows, table_rows

LANES = 3
HOST = load_machine("host")
_ROW, _IMAGE, _SMALL = "f32[2,6]", "f32[2,3,4,4]", "f32[2,3,2,2]"
OWN_ROWS = (
    Row("CumProd", [_ROW, np.array(1)]),
    Row("CumProd", [_ROW, np.array(-2)], {"exclusive": 1, "reverse": 1}),
    Row("GeluGradient", [_ROW, _ROW], domain="stitch"),
    Row("SoftmaxGradient", [_ROW, _ROW], domain="stitch"),
    Row("SoftmaxGradient", ["f32[2,3,4]", "f32[2,3,4]"], {"axis": 1}, domain="stitch"),
    Row("BatchNormalizationGradient", ["f32[4,3,2]", "f32[4,3,2]", "f32[3]"], {}, 3, "stitch"),
    Row("BatchNormalizationGradient", ["f16[4,3]", "f16[4,3]", "f16[3]"], {}, 2, "stitch"),
    Row("BatchNormalizationGradient",
        ["f32[4,3,2]", "f32[4,3,2]", "f32[3]", "f32[3]", "f32[3]+"], {}, 3, "stitch"),
    Row("BatchNormalizationGradient",
        ["f32[4]", "f32[4]", "f32[1]", "f32[1]", "f32[1]+"], {}, 3, "stitch"),
    Row("BatchNormalizationGradient", ["f32[5]", "f32[5]", "f32[1]"], {}, 3, "stitch"),
    Row("LayerNormalizationGradient", [_ROW, _ROW, "f32[2,1]", "f32[2,1]+", "f32[6]"], {}, 3,
        "stitch"),
    Row("LayerNormalizationGradient",
        ["f32[2,3,4]", "f32[2,3,4]", "f32[2,1,1]", "f32[2,1,1]+", "f32[3,4]"], {"axis": 1}, 3,
        "stitch"),
    Row("LayerNormalizationGradient", ["f16[3,4]", "f16[3,4]", "f16[1,1]", "f16[1,1]+", "f16[3,4]"],
        {"axis": 0}, 2, "stitch"),
    Row("MaxPoolGradient", [_SMALL, _IMAGE, _SMALL], {"kernel_shape": (2, 2), "strides": (2, 2)},
        domain="stitch"),
    Row("ConvWeightGradient", [_IMAGE, "f32[2,5,3,3]"], {"kernel_shape": (2, 2)}, domain="stitch"),
    Row("ConvWeightGradient", ["f32[2,4,5]", "f32[2,6,3]"], {"kernel_shape": (3,), "group": 2},
        domain="stitch"),
    Row("Window", ["f32[9,2]", np.array(1), np.array([2, 1])], {"lengths": (3, 2)},
        domain="stitch"),
    Row("Window", ["f16[9,2,1]", np.array(8), np.array([-3])], {"lengths": (3,)}, domain="stitch"),
    Row("Window", ["i64[5]", np.array(4), np.array([0, 2, 9])], {"lengths": (2, 0, 3)},
        domain="stitch"),
    Row("Repartition", ["f32[2,3,4]"], {"axis": 1, "degree": 2}, domain="stitch"),
    Row("Combine", ["i64[6,3,4]"], {"axis": -2, "degree": 3}, domain="stitch"),
    Row("Replicate", ["f16[2,3]"], {"degree": 3}, domain="stitch"),
    Row("Reduction", ["f32[6,3]"], {"degree": 3}, domain="stitch"),
    Row("Expect", [_ROW, np.array([1, 2]), np.array([1, 2])], {"name": "x"}, domain="stitch"),
    # What the tables do not ask for, as it is no matter of one lane.
    Row("MaxPool", ["f32[2,1,4]"], {"kernel_shape": (2,), "pads": (1, 0)}, 2),
    Row("QuantizeLinear", ["f32[4,6]", "f32[1]+"], {"block_size": 2}),
    Row("ReduceSumSquare", ["f32[]"]),
    Row("ReduceMax", ["f32[]"], {"keepdims": 0}),
    Row("RNN", ["f32[7,3,2]", "f32[1,5,2]1", "f32[1,5,5]1", None, "i32[3]+"]),
    Row("GRU", ["f32[9,3,2]", "f32[2,15,2]1", "f32[2,15,5]1", None, "i32[3]+", "f32[2,3,5]1"],
        {"direction": "bidirectional"}, 2),
    Row("LSTM", ["f32[3,9,2]", "f32[1,8,2]1", "f32[1,8,2]1", None, "i32[3]+", "f32[3,1,2]1",
                 "f32[3,1,2]1"], {"layout": 1}, 3),
)  # fmt: skip


@cache
def rows() -> tuple[Row, ...]:
    """Sound cases of every operator."""
    tables = table_rows("elementwise", "layer", "signal", "structured", "window")
    return (*tables, *OWN_ROWS, *own_rows(f"{_ROW}1"))


@dataclass(frozen=True)
class Way:
    """One operation with some operands that differ from lane to lane."""

    row: Row
    #: Which of the operation's operands differ.
    varying: tuple[int, ...]
    #: The results of all lanes, the lane axis in front.
    vmapped: Sequence[Array]
    expected: Sequence[Array]
    has_rule: bool


def ways_of(row: Row, lanes: int = LANES) -> Iterator[Way]:
    """Each operand alone, and all together where there are several.

    What the operator has to know at compile time does not differ.
    """
    one = one_operation(row, open_=True)
    program, operation = one.program, one.operation
    at = {slot.value: i for i, slot in enumerate(program.inputs)}
    open_ = [i for i, value in enumerate(operation.inputs) if value in at]
    if not open_:
        return
    executor = make_executor("numpy")
    by_lane = Binding(executor.prepare(program, HOST.shape), program)
    operands = [one.operands[at[operation.inputs[i]]] for i in open_]
    stacks = [_stacked(row, i, array, lanes) for i, array in zip(open_, operands, strict=True)]
    for k, stack in enumerate(stacks):
        if not isinstance(row.specs[open_[k]], str):
            # What stands for itself may be good for no other value.
            tried = (
                by_lane.outcome([one if j == k else array for j, array in enumerate(operands)])
                for one in stack
            )
            if any(isinstance(outcome, TaskError) for outcome in tried):
                stacks[k] = np.stack([operands[k]] * lanes)
    patterns: list[tuple[int, ...]] = [(k,) for k in range(len(open_))]
    patterns += [tuple(range(len(open_)))] if len(open_) > 1 else []
    for pattern in patterns:
        given = [
            stack if k in pattern else array
            for k, (stack, array) in enumerate(zip(stacks, operands, strict=True))
        ]
        expected = []
        for lane in range(lanes):
            own = [g[lane] if k in pattern else g for k, g in enumerate(given)]
            one_lane = by_lane.outcome(own)
            assert not isinstance(one_lane, TaskError), (row, one_lane)
            expected.append(one_lane)
        whole, has_rule = lifted_program(program, [open_[k] for k in pattern], lanes)
        vmapped = Binding(executor.prepare(whole, HOST.shape), whole).outcome(given)
        assert not isinstance(vmapped, TaskError), (row, pattern, vmapped)
        columns = [np.stack(column) for column in zip(*expected, strict=True)]
        yield Way(row, tuple(open_[k] for k in pattern), vmapped, columns, has_rule)


def _stacked(row: Row, index: int, array: Array, lanes: int) -> Array:
    """An operand for each lane: drawn again, or what stands for itself turned round or scaled."""
    if isinstance(row.specs[index], str):
        drawn = [operands_of(row.specs, 7 + lane)[index] for lane in range(lanes)]
        return np.stack([a for a in drawn if a is not None])
    if array.dtype.kind == "f":
        return np.stack([(array * array.dtype.type(1 + lane / 4)) for lane in range(lanes)])
    return np.stack([np.roll(array, lane) for lane in range(lanes)])


def lifted_program(program: Program, varying: Sequence[int], lanes: int) -> tuple[Program, bool]:
    """A program of one operation for all lanes, and whether that has a rule for it."""
    operation = program.operations[0]
    body = Body(
        tuple(slot.value for slot in program.inputs), operation.outputs,
        tuple(Value(value.name, value.type) for value in program.values), program.operations,
        program.constants,
    )  # fmt: skip
    builder = ComputationGraphBuilder(program.name)
    batched = [operation.inputs.index(slot.value) in varying for slot in program.inputs]
    operands = []
    for slot, varies in zip(program.inputs, batched, strict=True):
        kind = program.values[slot.value].type
        shape = (lanes, *kind.shape) if varies else kind.shape
        operands.append(builder.input(slot.name, shape, kind.data_type))
    done = vmap(body, operands, batched, lanes, builder, one_after_the_other)
    for index, result in enumerate(done.results):
        tensor = result.tensor
        if not result.is_batched:
            tensor = builder.apply("Expand", [tensor, [lanes, *tensor.shape]], 1, {})[0]
        builder.output(f"y{index}", tensor)
    return compile_graph(builder.build(), HOST).program, not done.without_rule


def one_after_the_other(operation: Operation, context: BatchingContext) -> list[Any]:
    """What has no rule: each lane's operands, cut out, and the results joined."""
    joined: list[list[Any]] = []
    for lane in range(context.batch_size):
        own = []
        for index, operand in enumerate(context.operands):
            if operand is not None and context.batched[index]:
                part = context.apply("Slice", operand, [lane], [lane + 1], [0])
                operand = context.apply("Squeeze", part, [0])
            own.append(operand)
        joined.append([context.apply("Unsqueeze", r, [0]) for r in context.emit(*own)])
    return [
        None if value == ABSENT else context.apply("Concat", *column, axis=0)
        for value, column in zip(operation.outputs, zip(*joined, strict=True), strict=True)
    ]
