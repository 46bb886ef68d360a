"""Common subexpressions: what is computed twice from the same operands is computed once.

Constants with the same type, shape and bits become one as well. The first of two equals stays, so
the result depends on the order of operations alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import replace

from stitch.compiler.constant_folding import is_repeatable
from stitch.graph.computation_graph import ComputationGraph
from stitch.program import ABSENT, Constant, Operation, Value


def merge_common_subexpressions(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which equal operations and equal constants are merged into the first."""
    now: dict[int, int] = {}
    seen: dict[Hashable, tuple[int, ...]] = {}
    constants: list[Constant] = []
    for constant in graph.constants:
        first = seen.setdefault(_constant_key(constant), (constant.value,))
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


def _constant_key(constant: Constant) -> Hashable:
    data = constant.data
    digest = hashlib.blake2b(data.tobytes()).digest()
    return ("constant", data.dtype.name, data.shape, digest)


def _operation_key(operation: Operation, values: tuple[Value, ...]) -> Hashable:
    made = tuple(None if v == ABSENT else values[v].type for v in operation.outputs)
    # repr tells 1 from 1.0 and 0.0 from -0.0, which `==` does not.
    attributes = tuple(
        (name, repr(operation.attributes[name])) for name in sorted(operation.attributes)
    )
    return (operation.domain, operation.op, operation.inputs, made, attributes)
