"""What an operation of a round takes beside its FLOPs and bytes, and which bytes it passes over.

Comes in: an operation, rates. Goes out: seconds, values. Must not know: bodies, schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from stitch.machine import LoopRates
from stitch.ops import RESHAPING
from stitch.program import ABSENT, Operation

#: They only move elements: what some executors see in place, and what all copy.
_VIEWS = frozenset({"Expand", "Slice", "Split", "Transpose"})
_COPIES = frozenset({"Concat", "Gather"})
#: Of what they read, they read what they give.
_PICKS = frozenset({"Gather", "Slice"})
#: One function of the processor's, or of NumPy's, each; of others there are several to a result.
_PLAIN = frozenset({
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Exp", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mul", "Neg", "Not",
    "Or", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceSum", "Relu", "Sqrt", "Sub", "Tanh",
    "Where",
})  # fmt: skip
#: Functions of whole rows: several times the steps of one of single elements.
_OVER_ROWS = frozenset({
    "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax",
    "RMSNormalization", "Softmax",
})  # fmt: skip
_STEPS_OVER_ROWS = 7


def call_seconds(operation: Operation, rates: LoopRates) -> float:
    """What an operation takes beside its FLOPs and bytes."""
    if operation.domain:
        return rates.function_seconds
    if rates.has_views and operation.op in _COPIES:
        # A call for each piece that is copied, or for what is picked and whether it is there.
        return rates.operation_seconds * len(operation.inputs)
    if operation.op in RESHAPING | _VIEWS | _COPIES:
        return rates.movement_seconds
    if operation.op in _PLAIN:
        return rates.operation_seconds
    return rates.function_seconds * (_STEPS_OVER_ROWS if operation.op in _OVER_ROWS else 1)


def passed_over(operation: Operation, rates: LoopRates) -> Iterator[int]:
    """The values of which an operation reads or writes all elements: none where it is a view; where
    it picks some, as many as it gives."""
    values = (*operation.inputs, *operation.outputs)
    if not operation.domain:
        if operation.op in RESHAPING or (rates.has_views and operation.op in _VIEWS):
            return
        if operation.op in _PICKS:
            values = operation.outputs
    yield from (value for value in values if value != ABSENT)
