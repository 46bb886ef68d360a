"""Absorb transposes into matrix products.

`MatMul(x, Transpose(weight))` with a bias added becomes a `Gemm` between two reshapes: it copies
no weight, and the gradient of the weight has the weight's own shape. Of batched products, `(AᵀB)ᵀ`
becomes `BᵀA`; the inner transposes are views, or cancel.

Not part of `optimize`: sums may run in another order, so results agree up to rounding. Used before
differentiation, and with `CompileOptions.reassociate`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stitch.compiler.passes.simplification import axis_order, exchange
from stitch.graph import ComputationGraph
from stitch.linker import remove_dead_code
from stitch.program import Constant, DataType, Operation, Value, ValueType


def fold_transposes(graph: ComputationGraph) -> ComputationGraph:
    """Let `MatMul` and `Gemm` read matrices in place of their transposes.

    A vector added to such a `MatMul` becomes the third operand, unless its type rounds in between.
    """
    folding = _TransposeFolder(graph)
    for operation in graph.operations:
        folding.take(operation)
    values, operations = tuple(folding.values), tuple(folding.operations)
    constants = tuple(folding.constants)
    return remove_dead_code(
        replace(graph, values=values, operations=operations, constants=constants)
    )


class _TransposeFolder:
    """A graph whose operations are rewritten in order."""

    def __init__(self, graph: ComputationGraph) -> None:
        self.values = list(graph.values)
        self.constants = list(graph.constants)
        self.operations: list[Operation] = []
        self.readers: dict[int, list[Operation]] = {}
        for operation in graph.operations:
            for v in operation.inputs:
                self.readers.setdefault(v, []).append(operation)
        self.given = {slot.value for slot in graph.outputs}
        #: Matrices by the value that is their transpose.
        self.turned: dict[int, int] = {}
        #: Products to be merged with the addition of a vector, by their result.
        self.waiting: dict[int, Operation] = {}

    def take(self, operation: Operation) -> None:
        """Write an operation or its replacement."""
        op = "" if operation.domain else operation.op
        if axis_order(operation, self.values) == (1, 0):
            self.turned[operation.outputs[0]] = operation.inputs[0]
        if op == "Add" and not self.waiting.keys().isdisjoint(operation.inputs):
            first, second = operation.inputs
            product, vector = (first, second) if first in self.waiting else (second, first)
            self._product(self.waiting.pop(product), operation.outputs[0], vector)
        elif op == "Gemm":
            self.operations.append(self._gemm(operation))
        elif op != "MatMul" or not self._is_linear(operation):
            self.operations.append(operation)
        elif self._is_added_to_a_vector(operation.outputs[0]):
            self.waiting[operation.outputs[0]] = operation
        else:
            self._product(operation, operation.outputs[0])

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.values[value].type.shape

    def _is_linear(self, operation: Operation) -> bool:
        """Whether the right operand is one matrix, and it or a left matrix is a transpose."""
        left, right = operation.inputs
        if not self.values[left].type.data_type.is_floating or len(self._shape(right)) != 2:
            return False
        rank = len(self._shape(left))
        return (right in self.turned and rank > 1) or (left in self.turned and rank == 2)

    def _is_added_to_a_vector(self, product: int) -> bool:
        kind, readers = self.values[product].type, self.readers.get(product, [])
        if len(readers) != 1 or readers[0].op != "Add" or readers[0].domain:
            return False
        if product in self.given or kind.data_type.dtype != kind.data_type.compute_dtype:
            return False
        others = [v for v in readers[0].inputs if v != product]
        return len(others) == 1 and self._shape(others[0]) == kind.shape[-1:]

    def _product(self, operation: Operation, target: int, *vector: int) -> None:
        """Write a Gemm, between two reshapes if the left operand is not a matrix."""
        left, right = operation.inputs
        *rows, inner = self._shape(left)
        flat = target
        if len(rows) > 1:
            matrix = (math.prod(rows), inner)
            left = self._reshape(left, self._value(left, matrix), operation)
            flat = self._value(target, (matrix[0], self._shape(right)[1]))
        gemm = replace(operation, op="Gemm", inputs=(left, right, *vector), outputs=(flat,))
        self.operations.append(self._gemm(gemm))
        if flat != target:
            self._reshape(flat, target, operation)

    def _gemm(self, operation: Operation) -> Operation:
        """Return a Gemm that reads matrices in place of their transposes."""
        inputs, attributes = list(operation.inputs), dict(operation.attributes)
        for index, name in enumerate(("transA", "transB")):
            while inputs[index] in self.turned:
                inputs[index] = self.turned[inputs[index]]
                attributes[name] = 0 if attributes.get(name, 0) else 1
        return replace(operation, inputs=tuple(inputs), attributes=attributes)

    def _value(self, like: int, shape: tuple[int, ...]) -> int:
        """Add a value with the elements of another in another shape."""
        name, kind = self.values[like].name, self.values[like].type
        self.values.append(Value(name, ValueType(shape, kind.data_type)))
        return len(self.values) - 1

    def _reshape(self, source: int, target: int, near: Operation) -> int:
        shape = np.array(self._shape(target), np.int64)
        constant = len(self.values)
        self.values.append(Value("shape", ValueType(shape.shape, DataType.INT64)))
        self.constants.append(Constant(constant, shape))
        attributes = {"allowzero": 1} if 0 in shape else {}
        inputs, outputs = (source, constant), (target,)
        self.operations.append(
            replace(near, op="Reshape", inputs=inputs, outputs=outputs, attributes=attributes)
        )
        return target


def transpose_products(graph: ComputationGraph) -> ComputationGraph:
    """Replace transposed batched products by products of transposes, if nothing else reads them."""
    makers = {v: o for o in graph.operations for v in o.outputs}
    readers = Counter(v for o in graph.operations for v in o.inputs)
    readers.update(slot.value for slot in graph.outputs)
    #: New axis orders by the result of a transpose; results of products to transpose.
    orders: dict[int, tuple[int, ...]] = {}
    products: set[int] = set()
    for operation in graph.operations:
        order = axis_order(operation, graph.values)
        product = makers.get(operation.inputs[0]) if order else None
        if order is None or product is None or order[-1] != len(order) - 2:
            continue
        if _is_batch(graph, product) and readers[product.outputs[0]] == 1:
            products.add(product.outputs[0])
            exchanged = exchange(len(order))
            orders[operation.outputs[0]] = tuple(exchanged[axis] for axis in order)
    # Results of transposed products get other values.
    kept = {v: o for v, o in makers.items() if v not in orders}
    turning = _ProductTransposer(list(graph.values), kept)
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


class _ProductTransposer:
    def __init__(self, values: list[Value], makers: Mapping[int, Operation]) -> None:
        self.values = values
        self.makers = makers
        self.operations: list[Operation] = []

    def product(self, operation: Operation) -> None:
        """Write a product as the product of its operands' transposes, in reverse order."""
        second, first = (self._transposed(v, operation) for v in operation.inputs)
        written = operation.outputs[0]
        self.values[written] = self._exchanged(written)
        self.operations.append(replace(operation, inputs=(first, second)))

    def _transposed(self, value: int, near: Operation) -> int:
        order = exchange(len(self.values[value].type.shape))
        maker = self.makers.get(value)
        if maker is not None and axis_order(maker, self.values) == order:
            return maker.inputs[0]
        self.values.append(self._exchanged(value))
        turned, attributes = len(self.values) - 1, {"perm": order}
        self.operations.append(
            replace(near, op="Transpose", inputs=(value,), outputs=(turned,), attributes=attributes)
        )
        return turned

    def _exchanged(self, value: int) -> Value:
        before = self.values[value]
        *batch, rows, columns = before.type.shape
        return replace(before, type=ValueType((*batch, columns, rows), before.type.data_type))


def _is_batch(graph: ComputationGraph, operation: Operation) -> bool:
    ranks = {len(graph.values[v].type.shape) for v in (*operation.inputs, *operation.outputs)}
    floating = graph.values[operation.outputs[0]].type.data_type.is_floating
    return (
        operation.op == "MatMul" and not operation.domain
        and floating and len(ranks) == 1 and min(ranks) > 2
    )  # fmt: skip
