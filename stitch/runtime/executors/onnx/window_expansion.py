"""`stitch.Window`, written in ONNX's operators: a Gather whose indices are computed.

Comes in: an operation and the writer of its model. Goes out: its expansion.
"""

from __future__ import annotations

import numpy as np

from stitch.program import Operation
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter


def window_of_rows(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Rows by number, the outermost axis first; a number below 0, which would count from the end,
    becomes one that is refused."""
    data, base, strides = map(writer.operand, operation.inputs)
    count, rank = (writer.type_of(v).shape[0] for v in operation.inputs[::2])
    lengths = writer.type_of(operation.outputs[0]).shape[:rank]
    zero, end = writer.scalar(0, np.int64), writer.scalar(count, np.int64)
    # Far outside is outside; of numbers that are cut no sum is too large for its type.
    rows = writer.node("Clip", [base, writer.scalar(-1, np.int64), end])
    steps = writer.node("Clip", [strides, writer.scalar(-count, np.int64), end])
    for axis, length in enumerate(lengths):
        places = np.arange(length, dtype=np.int64)
        along = writer.constant(places.reshape(-1, *(1,) * (rank - 1 - axis)))
        step = writer.node("Gather", [steps, writer.scalar(axis, np.int64)])
        rows = writer.node("Add", [rows, writer.node("Mul", [step, along])])
    inside = writer.node("Where", [writer.node("Less", [rows, zero]), end, rows])
    return writer.give(operation, "Gather", [data, inside], axis=0)
