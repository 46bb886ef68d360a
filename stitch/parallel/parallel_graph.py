"""`ParallelComputationGraph`: a computation graph whose values are divided among devices.

Each value has a `ParallelShape`. The operators `Repartition`, `Combine`, `Replicate` and
`Reduction` change it; any other operator runs on shard i of each of its operands. As the shards of
a value are stacked, the graph also runs on one device (`stacked`), and its gradients are those of
an ordinary graph: the sum over the replicas of a parameter is the gradient of its `Replicate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from stitch import ops
from stitch.errors import CompileError
from stitch.frozen_json import check_format, from_plain, located, read_json, to_plain
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    KnownValues,
    SymbolicTensor,
    as_data,
    from_data,
    vmap,
)
from stitch.ops import COPIES, PARALLEL_OPERATORS, SUMS, BatchingContext
from stitch.parallel.shard_order import (
    REPLICAS,
    Order,
    order_after,
    orders_of_results,
    text_of,
)
from stitch.program import ABSENT, Array, Body, InputKind, Operation, Value, ValueType

FORMAT: Final = "stitch.parallel_computation_graph"
VERSION: Final = 2
_OF_BATCH = frozenset({InputKind.ACTIVATION, InputKind.KEY})


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """How a value is divided into shards, one for each device that computes it.

    Attributes:
        type: The logical shape and data type.
        degrees: Shards along each axis; 1: whole.
        sum_degree: Partial sums: the value is the sum of so many shards.
        copy_degree: Equal copies.

    Raises:
        CompileError: An axis does not divide into that many equal shards.

    >>> from stitch.program import DataType
    >>> shape = ParallelShape(ValueType((8, 6), DataType.FLOAT32), (2, 1), copy_degree=3)
    >>> shape.shard.shape, shape.count
    ((4, 6), 6)
    """

    type: ValueType
    degrees: tuple[int, ...]
    sum_degree: int = 1
    copy_degree: int = 1

    def __post_init__(self) -> None:
        shape = self.type.shape
        if len(self.degrees) != len(shape):
            raise CompileError(
                "a parallel shape has one degree for each axis", expected=f"{len(shape)} degrees",
                got=str(list(self.degrees)),
            )  # fmt: skip
        if min(*self.degrees, self.sum_degree, self.copy_degree, 1) < 1:
            raise CompileError("a degree must be at least 1", got=self.text())
        for axis, (size, degree) in enumerate(zip(shape, self.degrees, strict=True)):
            if size % degree:
                raise CompileError(
                    f"axis {axis} of {self.type.text()} does not divide into {degree} equal shards",
                    expected=f"a degree that divides {size}", got=str(degree),
                )  # fmt: skip

    @staticmethod
    def whole(kind: ValueType) -> ParallelShape:
        """Return the shape of a value that is not divided."""
        return ParallelShape(kind, (1,) * len(kind.shape))

    @staticmethod
    def ordered(kind: ValueType, order: Order) -> ParallelShape:
        """Return the shape of a value after divisions; raise `CompileError` if it has no such axis
        or does not divide."""
        degrees, counts = [1] * len(kind.shape), {SUMS: 1, COPIES: 1}
        for part, degree in order:
            axis = 0 if part == REPLICAS else part
            if isinstance(axis, str):
                counts[axis] *= degree
            elif axis < len(degrees):
                degrees[axis] *= degree
            else:
                raise CompileError("a value without the axis along which it is divided",
                                   expected=text_of(order), got=kind.text())  # fmt: skip
        return ParallelShape(kind, tuple(degrees), counts[SUMS], counts[COPIES])

    @property
    def count(self) -> int:
        """The number of shards."""
        return math.prod(self.degrees) * self.sum_degree * self.copy_degree

    @property
    def shard(self) -> ValueType:
        """The type of one shard."""
        pairs = zip(self.type.shape, self.degrees, strict=True)
        return replace(self.type, shape=tuple(size // degree for size, degree in pairs))

    def after(self, operation: Operation) -> ParallelShape:
        """Return the shape after a parallel operator; raise `CompileError` if it cannot be."""
        words = ops.attributes_of(operation)
        degree = words["degree"]
        assert isinstance(degree, int)
        degrees, sums, copies = list(self.degrees), self.sum_degree, self.copy_degree
        if operation.op == "Replicate":
            return replace(self, copy_degree=copies * degree)
        if operation.op == "Reduction":
            return replace(self, sum_degree=_joined(operation, sums, degree, "partial sums"))
        axis = words["axis"]
        assert isinstance(axis, int)
        if not -len(degrees) <= axis < len(degrees):
            raise CompileError(
                f"{operation.op} divides an axis that the value does not have",
                expected=f"an axis of {self.type.text()}", got=str(axis),
            )  # fmt: skip
        if operation.op == "Repartition":
            degrees[axis] *= degree
        else:
            degrees[axis] = _joined(operation, degrees[axis], degree, f"shards of axis {axis}")
        return replace(self, degrees=tuple(degrees))

    def text(self) -> str:
        """Return the logical type and what it is divided into, as in `8x6xf32 /2x1 copies 3`."""
        words = [self.type.text()]
        if max(self.degrees, default=1) > 1:
            words.append("/" + "x".join(map(str, self.degrees)))
        words += [f"sums {self.sum_degree}"] * (self.sum_degree != 1)
        words += [f"copies {self.copy_degree}"] * (self.copy_degree != 1)
        return " ".join(words)


def _joined(operation: Operation, count: int, degree: int, what: str) -> int:
    if degree < 1 or count % degree:
        raise CompileError(f"{operation.op} cannot join {count} {what} {degree} at a time",
                           expected=f"a degree that divides {count}", got=str(degree))  # fmt: skip
    return count // degree


def _check_replicas(operation: Operation, rank: int, replicas: int) -> None:
    """Raise `CompileError` if the first division of the batch is not into whole replicas."""
    words = ops.attributes_of(operation)
    axis, degree = words["axis"], words["degree"]
    assert isinstance(axis, int) and isinstance(degree, int)
    if axis % rank == 0 and degree % replicas:
        raise CompileError(f"the batch is divided into {degree} shards among {replicas} replicas",
                           expected=f"a multiple of {replicas}", got=str(degree))  # fmt: skip


class _Shape(NamedTuple):
    degrees: tuple[int, ...]
    sum_degree: int
    copy_degree: int


class _Graph(NamedTuple):
    format: Literal["stitch.parallel_computation_graph"]
    version: Literal[2]
    graph: Any
    shapes: tuple[_Shape, ...]
    replicas: int


@dataclass(frozen=True, slots=True)
class ParallelComputationGraph:
    """A computation graph of logical values, and how each is divided.

    Inputs, constants and outputs are whole; a constant is read whole by all shards. Each operator
    computes the shards of its logical results: what it does not permit is refused.

    Attributes:
        graph: Its types are those of logical values.
        shapes: One for each value.
        replicas: The first division of an input of the batch along axis 0 is into so many
            micro-batches, each of which the graph computes by itself.
        orders: How the shards of each value are numbered.

    Raises:
        CompileError: Degrees do not divide, an operator does not fit the shards of its operands or
            does not permit how they are divided, or shards are joined in another order than
            they were divided; names the operation.
    """

    graph: ComputationGraph
    shapes: tuple[ParallelShape, ...]
    replicas: int = 1
    orders: tuple[Order, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        graph, shapes = self.graph, self.shapes
        where = f"parallel graph {graph.name!r}"
        if self.replicas < 1:
            raise CompileError("a parallel graph has at least one replica", where=where,
                               got=str(self.replicas))  # fmt: skip
        if [value.type for value in graph.values] != [shape.type for shape in shapes]:
            raise CompileError("each value needs a parallel shape of its type", where=where,
                               expected=f"{len(graph.values)} shapes",
                               got=f"{len(shapes)}, or of other types")  # fmt: skip
        constants = {constant.value: constant.data for constant in graph.constants}
        ends = [("input", s.name, s.value) for s in graph.inputs]
        ends += [("output", s.name, s.value) for s in graph.outputs]
        ends += [("constant", graph.values[i].name, i) for i in constants]
        for kind, name, value in ends:
            if shapes[value].count != 1:
                raise CompileError(f"{kind} {name!r} must be whole", where=where,
                                   got=shapes[value].text())  # fmt: skip
        known = KnownValues(constants)
        orders: list[Order] = [()] * len(shapes)
        for i, operation in enumerate(graph.operations):
            try:
                self._check(operation, known, orders)
            except CompileError as error:
                error.where = f"operation {i} ({operation.op}) of {where}"
                raise
        object.__setattr__(self, "orders", tuple(orders))

    def _check(self, operation: Operation, known: KnownValues, orders: list[Order]) -> None:
        """Raise `CompileError` unless the results are divided as the operands make them."""
        operands = [None if v == ABSENT else self.shapes[v] for v in operation.inputs]
        results = [None if v == ABSENT else self.shapes[v] for v in operation.outputs]
        if is_parallel(operation):
            for what, shapes in (("operand", operands), ("result", results)):
                if len(shapes) != 1 or None in shapes:
                    raise CompileError(
                        f"{operation.op} has one {what}, which is not left out",
                        got=f"{len(shapes)}, {shapes.count(None)} of them left out",
                    )
            (source,), (result,) = operands, results
            assert source is not None
            if source.after(operation) != result:
                raise CompileError(
                    "the result is divided otherwise", expected=source.after(operation).text(),
                    got=result.text() if result else None,
                )  # fmt: skip
            (value,), rank = operation.inputs, len(source.degrees)
            is_batch = value in {s.value for s in self.graph.inputs if s.kind in _OF_BATCH}
            replicas = self.replicas if is_batch else 1
            if replicas > 1 and operation.op == "Repartition" and not orders[value]:
                _check_replicas(operation, rank, replicas)
            orders[operation.outputs[0]] = order_after(orders[value], operation, rank, replicas)
            return
        types = [None if one is None else one.shard for one in operands]
        counts = {
            shape.count for value, shape in zip(operation.inputs, operands, strict=True)
            if shape is not None and known.get(value) is None
        }  # fmt: skip
        if len(counts) > 1:
            raise CompileError(
                "the operands have different numbers of shards",
                got=", ".join(self._named(v) for v in operation.inputs if v != ABSENT),
                remedy="Repartition or Replicate the operand that has fewer",
            )
        count = max(counts, default=1)
        if operation.is_foreign:
            inferred: Sequence[ValueType | None] = [
                None if one is None else one.shard for one in results
            ]
        else:
            inferred = ops.infer_operation(
                operation, types, known.operands(operation), bodies=self.graph.bodies
            )
        read = known.operands(operation)
        known.add_operation(operation, types)
        for value, shape, kind in zip(operation.outputs, results, inferred, strict=True):
            if shape is not None and (shape.shard, shape.count) != (kind, count):
                raise CompileError(
                    "the result does not have the shards that the operands give",
                    expected=f"{count} of {kind.text() if kind else '?'}",
                    got=f"{shape.count} of {shape.shard.text()} for {self._named(value)}",
                )
        made = orders_of_results(
            operation,
            [None if v == ABSENT or data is not None else orders[v]
             for v, data in zip(operation.inputs, read, strict=True)],
            types, [None if one is None else one.shard for one in results], read,
            [None if one is None else one.type for one in results],
        )  # fmt: skip
        for value, shape, order in zip(operation.outputs, results, made, strict=True):
            if shape is None:
                continue
            orders[value] = order
            if shape != ParallelShape.ordered(shape.type, order):
                raise CompileError(
                    "the result is divided otherwise", expected=text_of(order),
                    got=self._named(value),
                )  # fmt: skip

    def _named(self, value: int) -> str:
        return f"{self.graph.values[value].name} {self.shapes[value].text()}"

    @staticmethod
    def whole(graph: ComputationGraph) -> ParallelComputationGraph:
        """Return a graph of which nothing is divided."""
        shapes = tuple([ParallelShape.whole(value.type) for value in graph.values])
        return ParallelComputationGraph(graph, shapes)

    def __repr__(self) -> str:
        most = max((shape.count for shape in self.shapes), default=1)
        return f"<ParallelComputationGraph {self.graph.name}: values of up to {most} shards>"

    def text(self) -> str:
        """Return a line for each operation, with how its results are divided."""
        lines = []
        for operation in self.graph.operations:
            made = ", ".join(self._named(v) for v in operation.outputs if v != ABSENT)
            read = [self.graph.values[v].name for v in operation.inputs if v != ABSENT]
            lines.append(f"{made} = {operation.op}({', '.join(read)})")
        return "\n".join(lines)

    # -- on one device -----------------------------------------------------------------------------

    def stacked(self) -> ComputationGraph:
        """Return an ordinary graph that computes the shards of each value stacked along axis 0.

        It has the inputs and outputs of this graph: the reference of what any placement computes.
        """
        graph, builder = self.graph, ComputationGraphBuilder(self.graph.name)
        tensors: dict[int, Any] = {}
        for i, slot in enumerate(graph.inputs):
            kind = graph.input_type(i)
            tensors[slot.value] = builder.input(slot.name, kind.shape, kind.data_type, slot.kind)
        for constant in graph.constants:
            name = graph.values[constant.value].name
            tensors[constant.value] = builder.parameter(name, constant.data)
        for operation in graph.operations:
            with builder.at(operation.location):
                made = self._write(builder, operation, tensors)
            tensors |= zip(operation.outputs, made, strict=True)
        for output in graph.outputs:
            builder.output(output.name, tensors[output.value])
        return replace(builder.build(), initial_state=graph.initial_state)

    def _write(
        self, builder: ComputationGraphBuilder, operation: Operation, tensors: Mapping[int, Any]
    ) -> Sequence[Any]:
        """Write an operation for all shards; return its results."""
        if is_parallel(operation):
            (source,), (result,) = operation.inputs, operation.outputs
            tensor = tensors[source]
            if self.shapes[source].count == 1:
                tensor = builder.op("Unsqueeze", tensor, [0])
            tensor = builder.apply(
                operation.op, [tensor], 1, operation.attributes, operation.domain
            )[0]
            return [
                builder.op("Squeeze", tensor, [0]) if self.shapes[result].count == 1 else tensor
            ]
        read = [v for v in dict.fromkeys(operation.inputs) if v != ABSENT]
        made = [v for v in operation.outputs if v != ABSENT]
        numbers = {v: i for i, v in enumerate([*read, *made])} | {ABSENT: ABSENT}
        values = [Value(self.graph.values[v].name, self.shapes[v].shard) for v in [*read, *made]]
        alone = replace(
            operation, inputs=tuple([numbers[v] for v in operation.inputs]),
            outputs=tuple([numbers[v] for v in operation.outputs]),
        )  # fmt: skip
        body = Body(tuple(range(len(read))), tuple([numbers[v] for v in made]), tuple(values),
                    (alone,), ())  # fmt: skip
        count = max((self.shapes[v].count for v in read), default=1)
        varies = [self.shapes[v].count > 1 for v in read]

        def each_shard(one: Operation, context: BatchingContext) -> Sequence[Any]:
            return self._each_shard(builder, one, context)

        found = vmap(body, [tensors[v] for v in read], varies, count, builder, each_shard).results
        results = dict(zip(made, found, strict=True))
        stacks: list[Any] = []
        for v in operation.outputs:
            if v == ABSENT:
                stacks.append(None)
                continue
            tensor, shape = results[v].tensor, self.shapes[v]
            if shape.count > 1 and not results[v].is_batched:
                tensor = builder.op("Expand", tensor, [shape.count, *shape.shard.shape])
            stacks.append(tensor)
        return stacks

    def _each_shard(
        self, builder: ComputationGraphBuilder, operation: Operation, context: BatchingContext
    ) -> Sequence[Any]:
        """Write an operation that has no batching rule, or a body, once for each shard."""

        def once(operands: Sequence[Any]) -> Sequence[SymbolicTensor]:
            if operation.body != ABSENT:
                body = self.graph.bodies[operation.body]
                return builder.carry(
                    operation.op, operation.domain, body, operands, operation.attributes
                )
            names = [operation.op.lower()] * len(operation.outputs)
            return builder.repeat(operation, operands, names, context.output_types)

        if not any(context.batched):
            return once(context.operands)
        shards = [
            once([
                operand[i] if varies else operand
                for operand, varies in zip(context.operands, context.batched, strict=True)
            ])
            for i in range(context.batch_size)
        ]  # fmt: skip
        return [
            builder.op("Concat", *[builder.op("Unsqueeze", one, [0]) for one in same], axis=0)
            for same in zip(*shards, strict=True)
        ]

    # -- JSON --------------------------------------------------------------------------------------

    def as_json(self, *, with_data: bool = True) -> str:
        """Return the graph as JSON: that of its computation graph, and the parallel shapes.

        Args:
            with_data: Whether to include the data of constants.
        """
        shapes = [_Shape(s.degrees, s.sum_degree, s.copy_degree) for s in self.shapes]
        graph = as_data(self.graph, with_data=with_data)
        data = to_plain(_Graph(FORMAT, VERSION, graph, tuple(shapes), self.replicas))
        return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @staticmethod
    def from_json(
        text: str | bytes, constants: Mapping[str, Array] | None = None
    ) -> ParallelComputationGraph:
        """Read what `as_json` wrote.

        Args:
            constants: Arrays by value name, for constants without data in the text.

        Raises:
            FormatError: The text is no parallel graph, of another version, or its degrees do not
                divide.
        """
        data = read_json(text, "parallel computation graph")
        check_format(
            data, "parallel computation graph", "write it again with as_json() of this version",
            format=FORMAT, version=VERSION,
        )  # fmt: skip
        form = from_plain(_Graph, data, "graph")
        graph = from_data(form.graph, constants)
        with located("graph.shapes"):
            if len(form.shapes) != len(graph.values):
                raise CompileError("each value needs a parallel shape",
                                   expected=str(len(graph.values)),
                                   got=str(len(form.shapes)))  # fmt: skip
            shapes = [
                ParallelShape(value.type, *shape)
                for value, shape in zip(graph.values, form.shapes, strict=True)
            ]
            return ParallelComputationGraph(graph, tuple(shapes), form.replicas)


def is_parallel(operation: Operation) -> bool:
    """Return whether an operation is one of the four parallel operators."""
    return operation.domain == "stitch" and operation.op in PARALLEL_OPERATORS
