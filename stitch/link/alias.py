"""Alias proofs: may an output be written over a donated input?

Comes in: an operation list, an output, an input. Goes out: None where the proof holds, else the
sentence that says who forbids it. Must not know: addresses, devices.

The rule: the operation that writes the output is elementwise, reads the input itself, and nothing
reads the input after it. Then each element is read before it is overwritten.
"""

from __future__ import annotations

from stitch import ops
from stitch.program import Operation, OperationList


def alias_obstacle(body: OperationList, output: int, input: int) -> str | None:
    """Why output `output` cannot take the buffer of input `input`; None if it can.

    Indices are those of the slots. Shape, layout and ownership are checked where programs are.
    """
    made, source = body.outputs[output].value, body.inputs[input].value
    name = body.inputs[input].name
    writer = next((i for i, o in enumerate(body.operations) if made in o.outputs), None)
    if writer is None:
        return "no operation writes this output"
    operation = body.operations[writer]
    if made != operation.outputs[0]:
        return f"it is a second output of {_operation(operation, writer)}"
    if not ops.lookup(operation.op, operation.domain).elementwise:
        return f"{_operation(operation, writer)} writes it and is not elementwise"
    if source not in operation.inputs:
        return f"{_operation(operation, writer)} writes it without reading input {name!r}"
    for at in range(len(body.operations) - 1, writer, -1):
        if source in body.operations[at].inputs:
            return f"{_operation(body.operations[at], at)} still reads input {name!r} afterwards"
    if source in {slot.value for slot in body.outputs}:
        return f"input {name!r} is itself an output"
    return None


def _operation(operation: Operation, index: int) -> str:
    place = f" at {operation.location}" if operation.location else ""
    op = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
    return f"operation {index} ({op}{place})"
