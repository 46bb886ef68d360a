"""Batches of products for training: they come out the way round in which they are read.

The gradient of a transposed operand is transposed back. `(AᵀB)ᵀ` becomes `BᵀA`, whose rows can be
written where they belong; the transposes inside are views, or undo one that is there. This is no
pass of `optimize`: the sums may run in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.linker import remove_dead_code
from stitch.program import Operation, Value, ValueType


def turn_products(graph: ComputationGraph) -> ComputationGraph:
    """The graph without products of which columns would become rows, and nothing else is read."""
    makers = {v: o for o in graph.operations for v in o.outputs}
    readers = Counter(v for o in graph.operations for v in o.inputs)
    readers.update(slot.value for slot in graph.outputs)
    #: By what a transpose makes: its new order; by what a product makes: whether it is turned.
    orders: dict[int, tuple[int, ...]] = {}
    products: set[int] = set()
    for operation in graph.operations:
        order = _order(operation)
        product = makers.get(operation.inputs[0]) if order else None
        if order is None or product is None or order[-1] != len(order) - 2:
            continue
        if _is_batch(graph, product) and readers[product.outputs[0]] == 1:
            products.add(product.outputs[0])
            exchange = _exchange(len(order))
            orders[operation.outputs[0]] = tuple(exchange[axis] for axis in order)
    # What a turned product makes is another value afterwards.
    kept = {v: o for v, o in makers.items() if v not in orders}
    turning = _Turning(list(graph.values), kept)
    for operation in graph.operations:
        if not products.isdisjoint(operation.outputs):
            turning.product(operation)
        elif not orders.keys().isdisjoint(operation.outputs):
            attributes = {"perm": orders[operation.outputs[0]]}
            turning.operations.append(replace(operation, attributes=attributes))
        else:
            turning.operations.append(operation)
    values, operations = tuple(turning.values), tuple(turning.operations)
    return remove_dead_code(replace(graph, values=values, operations=operations))


class _Turning:
    def __init__(self, values: list[Value], makers: Mapping[int, Operation]) -> None:
        self.values = values
        self.makers = makers
        self.operations: list[Operation] = []

    def product(self, operation: Operation) -> None:
        """Write a product of its operands' transposes, in the other order."""
        second, first = (self._transposed(v, operation) for v in operation.inputs)
        written = operation.outputs[0]
        self.values[written] = self._exchanged(written)
        self.operations.append(replace(operation, inputs=(first, second)))

    def _transposed(self, value: int, near: Operation) -> int:
        exchange = _exchange(len(self.values[value].type.shape))
        maker = self.makers.get(value)
        if maker is not None and _order(maker) == exchange:
            return maker.inputs[0]
        self.values.append(self._exchanged(value))
        turned, attributes = len(self.values) - 1, {"perm": exchange}
        self.operations.append(
            replace(near, op="Transpose", inputs=(value,), outputs=(turned,), attributes=attributes)
        )
        return turned

    def _exchanged(self, value: int) -> Value:
        before = self.values[value]
        *batch, rows, columns = before.type.shape
        return replace(before, type=ValueType((*batch, columns, rows), before.type.data_type))


def _order(operation: Operation) -> tuple[int, ...] | None:
    """The order of a transpose's axes; None for other operations."""
    order = operation.attributes.get("perm")
    if operation.op != "Transpose" or operation.domain or not isinstance(order, tuple):
        return None
    return tuple(map(int, order))


def _exchange(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _is_batch(graph: ComputationGraph, operation: Operation) -> bool:
    ranks = {len(graph.values[v].type.shape) for v in (*operation.inputs, *operation.outputs)}
    floating = graph.values[operation.outputs[0]].type.data_type.is_floating
    return (
        operation.op == "MatMul" and not operation.domain
        and floating and len(ranks) == 1 and min(ranks) > 2
    )  # fmt: skip
