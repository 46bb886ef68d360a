"""The parallel graph of a training whose weights are divided among a group of devices.

A plan says along which axis each divided weight is divided. All else follows: an operator whose
operands are divided runs in shards where it can (`divisions_of`), and any other runs whole on the
first device. Between them values are replicated, divided and joined; partial sums are added at
once. Columns of one weight and rows of the next so give Megatron's placement, with one sum.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from copy import copy
from dataclasses import replace
from numbers import Integral

import numpy as np

from stitch.errors import CompileError, UsageError, unknown
from stitch.graph import ComputationGraph
from stitch.ops import attributes_of
from stitch.parallel.operator_divisions import Division, divisions_of
from stitch.parallel.parallel_graph import ParallelComputationGraph, ParallelShape
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    DataType,
    InputKind,
    Operation,
    Value,
    ValueType,
)

#: The operators whose weights are divided, and the position of the weight.
WEIGHTS = {"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0}
#: The axis of each divided weight, by name.
Axes = Mapping[str, int]


def checked_axes(graph: ComputationGraph, degree: int, axes: Axes) -> dict[str, int]:
    """Return the axis of each divided weight, counted from the first.

    Raises:
        UsageError: A name is no parameter, an axis is none of the weight, or does not divide.
    """
    kinds = {
        slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)
        if slot.kind is InputKind.PARAMETER
    }  # fmt: skip
    checked = {}
    for name, axis in axes.items():
        if name not in kinds:
            raise unknown(f"graph {graph.name!r} has no parameter {name!r} to divide", name, kinds)
        shape = kinds[name].shape
        is_axis = isinstance(axis, Integral) and not isinstance(axis, bool)
        if not is_axis or not -len(shape) <= axis < len(shape):
            raise UsageError(
                f"parameter {name!r} ({kinds[name].text()}) has no such axis to divide",
                expected=f"0 to {len(shape) - 1}", got=repr(axis),
            )  # fmt: skip
        if shape[axis] % degree:
            raise UsageError(
                f"axis {axis} of parameter {name!r} ({kinds[name].text()}) does not divide into "
                f"{degree} equal shards",
                expected=f"a number of devices that divides {shape[axis]}", got=str(degree),
            )  # fmt: skip
        checked[name] = int(axis) % len(shape)
    return checked


def divided_graph(graph: ComputationGraph, degree: int, axes: Axes) -> ParallelComputationGraph:
    """Return the parallel graph of a forward pass with weights in `degree` shards.

    Args:
        graph: A graph after the compiler's passes, as from `stage_graph`.
        axes: The axis of each divided weight, by name.

    Raises:
        UsageError: A name is no parameter, an axis is none of the weight, or does not divide.
        CompileError: No reader of a weight runs in shards that are divided so.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> b = ComputationGraphBuilder("two")
    >>> x = b.input("x", (8, 6), "float32")
    >>> w = b.input("w", (6, 4), "float32", InputKind.PARAMETER)
    >>> b.output("y", b.op("MatMul", x, w))
    >>> [o.op for o in divided_graph(b.build(), 2, {"w": 0}).graph.operations]
    ['Repartition', 'Repartition', 'MatMul', 'Reduction']
    """
    division = GraphDivision(graph, degree)
    numbers = {slot.name: slot.value for slot in graph.inputs}
    checked = checked_axes(graph, degree, axes)
    division.wanted |= {numbers[name]: axis for name, axis in checked.items()}
    for operation in graph.operations:
        division.add(operation)
    for value in division.wanted.keys() - division.used:
        kind, name = graph.values[value].type, graph.values[value].name
        raise CompileError(
            f"no operator that reads parameter {name!r} runs in {degree} shards divided along "
            f"axis {division.wanted[value]} of {kind.text()}",
            where=f"graph {graph.name!r}",
            remedy="leave it whole, or divide another axis",
        )
    return division.parallel_graph()


class GraphDivision:
    """A parallel graph under construction, operation by operation.

    `operations` are those that were added. A search copies it, and forgets them.
    """

    def __init__(self, graph: ComputationGraph, degree: int) -> None:
        self.graph, self.degree = graph, degree
        self.known = graph.constant_data()
        self.parameters = {s.value for s in graph.inputs if s.kind is InputKind.PARAMETER}
        self.operations: list[Operation] = []
        self.constants: list[Constant] = []
        #: The axis of each divided weight by its value; those that an operator reads so; the
        #: parameters that an operator reads whole.
        self.wanted: dict[int, int] = {}
        self.used: set[int] = set()
        self.read_whole: set[int] = set()
        #: The axis along which each value of the graph is divided, and further values.
        self.axes: dict[int, int] = {}
        self.more: dict[int, tuple[Value, ParallelShape]] = {}
        self.count = len(graph.values)
        #: Values that are divided, joined or copied, by the value and the axis (None: copies, -1:
        #: the whole).
        self.converted: dict[tuple[int, int | None], int] = {}
        #: The ways to divide operations of the graph, which copies share.
        self._ways: dict[tuple[int, ...], list[Division]] = {}

    def copy(self, live: Container[int]) -> GraphDivision:
        """Return a copy without operations, that knows of values only the live ones."""
        new = copy(self)
        new.operations, new.constants = [], []
        new.wanted, new.used = dict(self.wanted), set(self.used)
        new.read_whole = set(self.read_whole)
        new.axes = {v: axis for v, axis in self.axes.items() if v in live}
        new.converted = {key: v for key, v in self.converted.items() if key[0] in live}
        new.more = {v: self.more[v] for v in new.converted.values()}
        return new

    def parallel_graph(self) -> ParallelComputationGraph:
        """Return the graph of all operations, with whole outputs."""
        outputs = tuple([replace(s, value=self.whole(s.value)) for s in self.graph.outputs])
        numbers = range(self.count)
        graph = replace(
            self.graph, operations=tuple(self.operations),
            values=tuple([self.value(v) for v in numbers]),
            constants=(*self.graph.constants, *self.constants), outputs=outputs,
        )  # fmt: skip
        return ParallelComputationGraph(graph, tuple([self.shape(v) for v in numbers]))

    # -- operations --------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        """Add an operation, and what its operands need."""
        for one in self._with_sums_before_bias(operation):
            self._add(one)

    def _add(self, operation: Operation) -> None:
        division = self._division(operation)
        if division is None:
            read = [v if v == ABSENT else self.whole(v) for v in operation.inputs]
            self.read_whole |= self.parameters.intersection(read)
            self.operations.append(replace(operation, inputs=tuple(read)))
            return
        read = [
            v if v == ABSENT else self._as(v, axis)
            for v, axis in zip(operation.inputs, division.operands, strict=True)
        ]
        self.used |= {
            v for v, axis in zip(operation.inputs, division.operands, strict=True)
            if axis is not None and self.wanted.get(v) == axis
        }  # fmt: skip
        made = list(operation.outputs)
        for i, (v, axis) in enumerate(zip(operation.outputs, division.results, strict=False)):
            if v == ABSENT:
                continue
            if axis is None:
                made[i] = self._converted_value(f"{self.value(v).name}.parts", v, sums=True)
            else:
                self.axes[v] = axis
        words = operation.attributes
        if operation.op == "Reshape":  # Its operand is the shape of a shard.
            result = operation.outputs[0]
            sizes = np.array(self.shape(result).shard.shape, np.int64)
            read[1] = self._constant(f"{self.value(result).name}.sizes", sizes)
            words = {name: word for name, word in words.items() if name != "allowzero"}
        self.operations.append(
            replace(operation, inputs=tuple(read), outputs=tuple(made), attributes=words)
        )
        for source, result in zip(made, operation.outputs, strict=True):
            if source != result:
                self._convert("Reduction", source, result)

    def _division(self, operation: Operation) -> Division | None:
        """Return how an operation runs in shards, None for whole."""
        read = operation.inputs
        named = {i: self.wanted[v] for i, v in enumerate(read) if v in self.wanted}
        given = {i: self.axes[v] for i, v in enumerate(read) if v in self.axes}
        if not named and not given:
            return None
        possible = self._divisions(operation)
        # A weight is divided as the plan says; divided values stay so if the operator allows it.
        for asked in ({**given, **named}, named):
            for division in possible if asked else ():
                fits = all(division.operands[i] == axis for i, axis in asked.items())
                if fits and self._is_taken(operation, division, bool(named)):
                    return division
        return None

    def _is_taken(self, operation: Operation, division: Division, has_weight: bool) -> bool:
        """Whether an operator runs so: a bias does not divide its weight; without a divided
        weight, it makes no sums, and no whole value of the batch is divided to keep another one
        divided."""
        at = WEIGHTS.get(operation.op, 0)
        weight, axis = operation.inputs[at], division.operands[at]
        if weight in self.parameters and axis is not None and operation.op in WEIGHTS:
            return self.wanted.get(weight) == axis
        return has_weight or (
            None not in division.results
            and all(
                axis is None or v in self.axes or v in self.parameters or v in self.known
                for v, axis in zip(operation.inputs, division.operands, strict=True)
            )
        )

    def axes_of(self, operation: Operation, position: int) -> list[int]:
        """Return the axes along which an operand may be divided."""
        found = {each.operands[position] for each in self._divisions(operation)}
        found |= {
            axis for one in (replace(operation, inputs=operation.inputs[:2]),)
            if len(operation.inputs) == 3 and operation.op in _SUMMED_AXES
            for axis in {each.operands[position] for each in self._divisions(one)}
        }  # fmt: skip
        return sorted(axis for axis in found if axis is not None)

    def _divisions(self, operation: Operation) -> list[Division]:
        operands, results = (
            [None if v == ABSENT else self.value(v).type for v in side]
            for side in (operation.inputs, operation.outputs)
        )
        constants = [self.known.get(v) for v in operation.inputs]
        numbers = (*operation.inputs, *operation.outputs)
        if max(numbers) >= len(self.graph.values):
            return list(divisions_of(operation, operands, results, constants, self.degree))
        if numbers not in self._ways:
            found = divisions_of(operation, operands, results, constants, self.degree)
            self._ways[numbers] = list(found)
        return self._ways[numbers]

    def _with_sums_before_bias(self, operation: Operation) -> Iterator[Operation]:
        """Yield a product by rows and the addition of its bias to the sums; others as they are."""
        has_bias = not operation.domain and len(operation.inputs) == 3
        axis = _SUMMED_AXES.get(operation.op) if has_bias else None
        words = {} if axis is None else attributes_of(operation)
        if axis is not None and operation.op == "Gemm" and words["transB"]:
            axis = 1
        if axis is None or self.wanted.get(operation.inputs[1]) != axis:
            yield operation
            return
        (result,), bias, where = operation.outputs, operation.inputs[2], operation.location
        kind, name = self.value(result).type, self.value(result).name
        product = self._new(f"{name}.product", kind)
        yield replace(operation, inputs=operation.inputs[:2], outputs=(product,))
        if operation.op == "Conv":
            shape = (self.value(bias).type.shape[0], *(1,) * (len(kind.shape) - 2))
            sizes = self._constant(f"{name}.bias_shape", np.array(shape, np.int64))
            column = self._new(f"{name}.bias", ValueType(shape, kind.data_type))
            yield Operation("Reshape", (bias, sizes), (column,), location=where)
            bias = column
        elif words["beta"] != 1:
            beta = np.array(words["beta"], kind.data_type.dtype)
            factor = self._constant(f"{name}.beta", beta)
            scaled = self._new(f"{name}.bias", self.value(bias).type)
            yield Operation("Mul", (bias, factor), (scaled,), location=where)
            bias = scaled
        yield Operation("Add", (product, bias), (result,), location=where)

    # -- values ------------------------------------------------------------------------------------

    def value(self, v: int) -> Value:
        """Return the logical value of a number."""
        return self.graph.values[v] if v < len(self.graph.values) else self.more[v][0]

    def shape(self, v: int) -> ParallelShape:
        """Return how a value is divided."""
        if v in self.axes:
            return self._divided(v, self.axes[v])
        return self.more[v][1] if v in self.more else ParallelShape.whole(self.value(v).type)

    def _divided(self, like: int, axis: int | None, *, sums: bool = False) -> ParallelShape:
        whole, degree = ParallelShape.whole(self.value(like).type), self.degree
        if axis is not None:
            degrees = tuple([degree if i == axis else 1 for i in range(len(whole.degrees))])
            return replace(whole, degrees=degrees)
        return replace(whole, sum_degree=degree) if sums else replace(whole, copy_degree=degree)

    def _new(self, name: str, kind: ValueType, shape: ParallelShape | None = None) -> int:
        self.more[self.count] = Value(name, kind), shape or ParallelShape.whole(kind)
        self.count += 1
        return self.count - 1

    def _converted_value(
        self, name: str, like: int, axis: int | None = None, *, sums: bool = False
    ) -> int:
        return self._new(name, self.value(like).type, self._divided(like, axis, sums=sums))

    def _constant(self, name: str, data: Array) -> int:
        value = self._new(name, ValueType(data.shape, DataType.from_dtype(data.dtype)))
        self.constants.append(Constant(value, data))
        return value

    def _convert(self, op: str, source: int, result: int, **words: int) -> None:
        attributes = {**words, "degree": self.degree}
        self.operations.append(Operation(op, (source,), (result,), attributes, "stitch"))

    def whole(self, value: int) -> int:
        """Return the whole of a value on the first device."""
        axis = self.axes.get(value)
        if axis is None:
            return value
        if (value, -1) not in self.converted:
            made = self._new(f"{self.value(value).name}.whole", self.value(value).type)
            self.converted[value, -1] = made
            self._convert("Combine", value, made, axis=axis)
        return self.converted[value, -1]

    def _as(self, value: int, axis: int | None) -> int:
        """Return a value divided along an axis, or equal copies of it."""
        if axis is None and value in self.known:
            return value  # Constants are read whole by all shards.
        if axis is not None and self.axes.get(value) == axis:
            return value
        if (value, axis) not in self.converted:
            whole, name = self.whole(value), self.value(value).name
            mark = "copies" if axis is None else f"shards{axis}"
            made = self._converted_value(f"{name}.{mark}", value, axis)
            self.converted[value, axis] = made
            words = {} if axis is None else {"axis": axis}
            self._convert("Replicate" if axis is None else "Repartition", whole, made, **words)
        return self.converted[value, axis]


#: Products with a bias as their third operand: the axis of the weight along which sums are made.
_SUMMED_AXES = {"Gemm": 0, "Conv": 1}
