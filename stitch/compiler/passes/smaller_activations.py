"""Activations of what a pool gives, in place of pools of what an activation gives.

A training keeps both, reads both again, and goes through the activation's slope: behind the pool
there is but a part of all that. Relu never turns an order round, so the largest of a window stays
the largest, to the last bit, and the first of several; where Relu makes equals of what differs, at
zero, its slope is none.

This is no pass of `optimize`: who runs a graph forward alone may join the activation to what makes
its operand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.ops import attributes_of, sees_everywhere
from stitch.program import ABSENT, Operation, Value


def sink_relu_below_max_pool(graph: ComputationGraph) -> ComputationGraph:
    """The graph with each Relu behind the pool that alone reads it."""
    readers = Counter(v for o in graph.operations for v in o.inputs)
    readers.update(slot.value for slot in graph.outputs)
    values, operations = list(graph.values), list(graph.operations)
    #: Where the Relu is that makes a value which is read once.
    made = {
        o.outputs[0]: i for i, o in enumerate(operations)
        if o.op == "Relu" and not o.domain and readers[o.outputs[0]] == 1
    }  # fmt: skip
    moved: set[int] = set()
    for index, pool in enumerate(graph.operations):
        first = made.get(pool.inputs[0]) if pool.inputs else None
        if first is None or not _gives_maxima(pool, graph.values, readers):
            continue
        relu, (result, *_) = operations[first], pool.outputs
        # The names stay with what they name: a pool's result, and that of an activation.
        between = relu.outputs[0]
        values[between] = Value(values[result].name, values[result].type)
        values[result] = Value(graph.values[between].name, values[result].type)
        operations[first] = replace(pool, inputs=relu.inputs, outputs=(between,))
        operations[index] = replace(relu, inputs=(between,), outputs=(result,))
        moved.add(first)
    return replace(graph, values=tuple(values), operations=tuple(operations)) if moved else graph


def _gives_maxima(pool: Operation, values: tuple[Value, ...], readers: Counter[int]) -> bool:
    """Whether an operation is a pool of which nothing but the maxima is read, each an element's."""
    if (
        pool.op != "MaxPool"
        or pool.domain
        or any(v != ABSENT and readers[v] for v in pool.outputs[1:])
    ):
        return False
    return sees_everywhere(attributes_of(pool), values[pool.inputs[0]].type.shape[2:])
