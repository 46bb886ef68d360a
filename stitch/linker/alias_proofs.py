"""Alias proofs: may an output be written over a donated input?

The rule: the operation that writes the output is elementwise, reads the input itself, and nothing
reads the input after it. Then each element is read before it is overwritten.
"""

from __future__ import annotations

from typing import final

from stitch import ops
from stitch.program import Operation, OperationList


@final
class AliasProofs:
    """The operations that write and that last read each value of a list, looked up once."""

    __slots__ = ("_body", "_last_reader", "_outputs", "_writer")

    def __init__(self, body: OperationList) -> None:
        self._body = body
        self._writer: dict[int, int] = {}
        self._last_reader: dict[int, int] = {}
        for at, operation in enumerate(body.operations):
            self._writer |= dict.fromkeys(operation.outputs, at)
            self._last_reader |= dict.fromkeys(operation.inputs, at)
        self._outputs = frozenset(slot.value for slot in body.outputs)

    def read_by_writer(self, output: int) -> tuple[int, ...]:
        """The values that the operation reads that writes an output."""
        writer = self._writer.get(self._body.outputs[output].value)
        return () if writer is None else self._body.operations[writer].inputs

    def obstacle(self, output: int, input: int) -> str | None:
        """Why output `output` cannot take the buffer of input `input`; None if it can.

        Indices are those of the slots. Shape, layout and ownership are checked where programs are.
        """
        body = self._body
        written, source = body.outputs[output].value, body.inputs[input].value
        name = body.inputs[input].name
        writer = self._writer.get(written)
        if writer is None:
            return "no operation writes this output"
        operation = body.operations[writer]
        if written != operation.outputs[0]:
            return f"it is a second output of {_operation(operation, writer)}"
        if not ops.is_elementwise(operation):
            return f"{_operation(operation, writer)} writes it and is not elementwise"
        if source not in operation.inputs:
            return f"{_operation(operation, writer)} writes it without reading input {name!r}"
        last = self._last_reader[source]
        if last > writer:
            return (
                f"{_operation(body.operations[last], last)} still reads input {name!r} afterwards"
            )
        if source in self._outputs:
            return f"input {name!r} is itself an output"
        return None


def _operation(operation: Operation, index: int) -> str:
    place = f" at {operation.location}" if operation.location else ""
    op = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
    return f"operation {index} ({op}{place})"
