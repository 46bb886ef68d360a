"""Identity removal: operations that hand their operand on unchanged are bypassed.

These are `Identity`, `Cast` to the type that the operand has, `Dropout` at inference, and shape
operators whose result has the operand's shape. Casts that round are never touched.
"""

from __future__ import annotations

from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import ABSENT, Operation, Value

#: Operators that never change the elements or their order, only the shape.
_SHAPE_OPERATORS = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def remove_identities(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which readers of an identity read its operand; dead code is left behind."""
    read = {v for operation in graph.operations for v in operation.inputs}
    read |= {slot.value for slot in graph.outputs}
    now: dict[int, int] = {}
    kept: list[Operation] = []
    for operation in graph.operations:
        inputs = tuple(now.get(v, v) for v in operation.inputs)
        operation = replace(operation, inputs=inputs)
        if _is_identity(operation, graph.values, read):
            now[operation.outputs[0]] = inputs[0]
        else:
            kept.append(operation)
    outputs = tuple(replace(s, value=now.get(s.value, s.value)) for s in graph.outputs)
    return replace(graph, operations=tuple(kept), outputs=outputs)


def _is_identity(operation: Operation, values: tuple[Value, ...], read: set[int]) -> bool:
    if operation.domain or not operation.inputs or operation.inputs[0] == ABSENT:
        return False
    written = [v for v in operation.outputs if v != ABSENT and v in read]
    if not operation.outputs or set(written) - {operation.outputs[0]}:
        return False
    if values[operation.inputs[0]].type != values[operation.outputs[0]].type:
        return False
    if operation.op == "Dropout":
        return len(operation.inputs) < 3 or operation.inputs[2] == ABSENT
    if operation.op == "Transpose":
        axes = tuple(range(len(values[operation.inputs[0]].type.shape)))
        return operation.attributes.get("perm", axes[::-1]) == axes
    return operation.op in ("Identity", "Cast") or operation.op in _SHAPE_OPERATORS
