"""Redundancy: operations whose results are there already are bypassed.

Identities hand their operand on unchanged: `Identity`, `Cast` to the type that the operand has,
`Dropout` at inference, and shape operators whose result has the operand's shape. Casts that round
are never touched. A transpose of a transpose is one, or none.

Common subexpressions are computed once; constants with the same type, shape and bits become one as
well. The first of two equals stays, so the result depends on the order of operations alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from stitch.compiler.passes.axis_orders import axis_order
from stitch.compiler.passes.constant_folding import is_repeatable
from stitch.graph import ComputationGraph
from stitch.program import ABSENT, Constant, Operation, Value

#: Operators that never change the elements or their order, only the shape.
_SHAPE_OPERATORS = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def remove_identities(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which readers of an identity read its operand; dead code is left behind."""
    read = {v for operation in graph.operations for v in operation.inputs}
    read |= {slot.value for slot in graph.outputs}
    now: dict[int, int] = {}
    #: By what a transpose makes: what it reads, and in which order of axes.
    turned: dict[int, tuple[int, tuple[int, ...]]] = {}
    kept: list[Operation] = []
    for operation in graph.operations:
        inputs = tuple(now.get(v, v) for v in operation.inputs)
        operation = replace(operation, inputs=inputs)
        order = axis_order(operation, graph.values)
        if order is not None:
            if inputs[0] in turned:
                source, before = turned[inputs[0]]
                order = tuple(before[axis] for axis in order)
                operation = replace(operation, inputs=(source,), attributes={"perm": order})
            turned[operation.outputs[0]] = operation.inputs[0], order
        if _is_identity(operation, graph.values, read):
            now[operation.outputs[0]] = operation.inputs[0]
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
        rank = len(values[operation.inputs[0]].type.shape)
        return axis_order(operation, values) == tuple(range(rank))
    return operation.op in ("Identity", "Cast") or operation.op in _SHAPE_OPERATORS


def merge_common_subexpressions(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which equal operations and equal constants are merged into the first."""
    now: dict[int, int] = {}
    seen: dict[Hashable, tuple[int, ...]] = {}
    constants: list[Constant] = []
    samples = Counter(_sample(constant) for constant in graph.constants)
    for constant in graph.constants:
        alone = samples[_sample(constant)] == 1
        key = constant.value if alone else _constant_key(constant)
        first = seen.setdefault(key, (constant.value,))
        if first == (constant.value,):
            constants.append(constant)
        else:
            now[constant.value] = first[0]
    kept: list[Operation] = []
    for operation in graph.operations:
        operation = replace(operation, inputs=tuple(now.get(v, v) for v in operation.inputs))
        if is_repeatable(operation):
            first = seen.setdefault(_operation_key(operation, graph.values), operation.outputs)
            if first != operation.outputs:
                now.update(zip(operation.outputs, first, strict=True))
                now.pop(ABSENT, None)
                continue
        kept.append(operation)
    outputs = tuple(replace(s, value=now.get(s.value, s.value)) for s in graph.outputs)
    return replace(graph, operations=tuple(kept), constants=tuple(constants), outputs=outputs)


def _sample(constant: Constant) -> Hashable:
    """Type, shape and the first and last elements: what differs here need not be hashed."""
    ends = constant.data.reshape(-1)
    ends = ends if ends.size <= 16 else np.concatenate([ends[:8], ends[-8:]])
    return (constant.data.dtype.name, constant.data.shape, ends.tobytes())


def _constant_key(constant: Constant) -> Hashable:
    import hashlib  # It loads OpenSSL: only for graphs that have constants.

    data = constant.data
    content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return (data.dtype.name, data.shape, hashlib.blake2b(content.data).digest())


def _operation_key(operation: Operation, values: tuple[Value, ...]) -> Hashable:
    types = tuple(None if v == ABSENT else values[v].type for v in operation.outputs)
    # repr tells 1 from 1.0 and 0.0 from -0.0, which `==` does not.
    attributes = tuple(
        (name, repr(operation.attributes[name])) for name in sorted(operation.attributes)
    )
    return (operation.domain, operation.op, operation.opset, operation.inputs, types, attributes)
