"""The parallel graph of a training whose weights are divided among a group of devices.

A plan says along which axis each divided weight is divided. All else follows: an operator whose
operands are divided runs in shards where it can (`divisions_of`), and any other runs whole on the
first device. Between them values are replicated, divided and joined; partial sums are added at
once. Columns of one weight and rows of the next so give Megatron's placement, with one sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from stitch.errors import CompileError, UsageError, unknown
from stitch.graph import ComputationGraph
from stitch.ops import attributes_of
from stitch.parallel.operator_divisions import Division, divisions_of
from stitch.parallel.parallel_graph import ParallelComputationGraph, ParallelShape
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputKind,
    Operation,
    Value,
    ValueType,
)

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
        is_axis = isinstance(axis, int) and not isinstance(axis, bool)
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
        checked[name] = axis % len(shape)
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
    return _Divided(graph, degree, checked_axes(graph, degree, axes)).build()


class _Divided:
    """The parallel graph under construction."""

    def __init__(self, graph: ComputationGraph, degree: int, axes: Axes) -> None:
        self.degree = degree
        names = {slot.name: slot.value for slot in graph.inputs}
        #: The axis of each divided weight by its value.
        self.wanted = {names[name]: axis for name, axis in axes.items()}
        self.graph = graph = _with_sums_before_biases(graph, self.wanted)
        self.known = graph.constant_data()
        self.parameters = {s.value for s in graph.inputs if s.kind is InputKind.PARAMETER}
        self.values = list(graph.values)
        self.shapes = [ParallelShape.whole(value.type) for value in graph.values]
        self.operations: list[Operation] = []
        self.constants = list(graph.constants)
        #: The axis along which each value is divided.
        self.axes: dict[int, int] = {}
        #: Values that are divided, joined or copied, by the value and the axis, None: copies.
        self.converted: dict[tuple[int, int | None], int] = {}
        self.used: set[int] = set()

    def build(self) -> ParallelComputationGraph:
        for operation in self.graph.operations:
            self._add(operation)
        outputs = tuple([replace(s, value=self._whole(s.value)) for s in self.graph.outputs])
        for value in self.wanted.keys() - self.used:
            kind, name = self.values[value].type, self.values[value].name
            raise CompileError(
                f"no operator that reads parameter {name!r} runs in {self.degree} shards divided "
                f"along axis {self.wanted[value]} of {kind.text()}",
                where=f"graph {self.graph.name!r}",
                remedy="leave it whole, or divide another axis",
            )
        graph = replace(
            self.graph, operations=tuple(self.operations), values=tuple(self.values),
            constants=tuple(self.constants), outputs=outputs,
        )  # fmt: skip
        return ParallelComputationGraph(graph, tuple(self.shapes))

    # -- operations --------------------------------------------------------------------------------

    def _add(self, operation: Operation) -> None:
        division = self._division(operation)
        if division is None:
            read = [v if v == ABSENT else self._whole(v) for v in operation.inputs]
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
            if axis is None:
                made[i] = self._value(f"{self.values[v].name}.parts", v, sums=True)
            else:
                self.axes[v], self.shapes[v] = axis, self._shape(v, axis)
        words = operation.attributes
        if operation.op == "Reshape":  # Its operand is the shape of a shard.
            result = operation.outputs[0]
            sizes = np.array(self.shapes[result].shard.shape, np.int64)
            read[1] = self._constant(f"{self.values[result].name}.sizes", sizes)
            words = {name: word for name, word in words.items() if name != "allowzero"}
        self.operations.append(
            replace(operation, inputs=tuple(read), outputs=tuple(made), attributes=words)
        )
        if made != list(operation.outputs):
            self._convert("Reduction", made[0], operation.outputs[0])

    def _division(self, operation: Operation) -> Division | None:
        """Return how an operation runs in shards, None for whole."""
        read = operation.inputs
        named = {i: self.wanted[v] for i, v in enumerate(read) if v in self.wanted}
        given = {i: self.axes[v] for i, v in enumerate(read) if v in self.axes}
        if not named and not given:
            return None
        possible = list(self._divisions(operation))
        # A weight is divided as the plan says; divided values stay so if the operator allows it.
        for asked in ({**given, **named}, named):
            for division in possible if asked else ():
                fits = all(division.operands[i] == axis for i, axis in asked.items())
                if fits and self._is_taken(operation, division, bool(named)):
                    return division
        return None

    def _is_taken(self, operation: Operation, division: Division, has_weight: bool) -> bool:
        """Whether an operator runs so: without a divided weight, it makes no sums, and no whole
        value of the batch is divided to keep another one divided."""
        return has_weight or (
            None not in division.results
            and all(
                axis is None or v in self.axes or v in self.parameters or v in self.known
                for v, axis in zip(operation.inputs, division.operands, strict=True)
            )
        )

    def _divisions(self, operation: Operation) -> Iterator[Division]:
        values = self.graph.values
        operands, results = (
            [None if v == ABSENT else values[v].type for v in side]
            for side in (operation.inputs, operation.outputs)
        )
        constants = [self.known.get(v) for v in operation.inputs]
        return divisions_of(operation, operands, results, constants, self.degree)

    # -- values ------------------------------------------------------------------------------------

    def _shape(self, like: int, axis: int | None, *, sums: bool = False) -> ParallelShape:
        whole, degree = ParallelShape.whole(self.values[like].type), self.degree
        if axis is not None:
            degrees = tuple([degree if i == axis else 1 for i in range(len(whole.degrees))])
            return replace(whole, degrees=degrees)
        return replace(whole, sum_degree=degree) if sums else replace(whole, copy_degree=degree)

    def _value(self, name: str, like: int, axis: int | None = None, *, sums: bool = False) -> int:
        self.values.append(Value(name, self.values[like].type))
        self.shapes.append(self._shape(like, axis, sums=sums))
        return len(self.values) - 1

    def _constant(self, name: str, data: np.ndarray) -> int:
        kind = ValueType(data.shape, DataType.from_dtype(data.dtype))
        self.values.append(Value(name, kind))
        self.shapes.append(ParallelShape.whole(kind))
        self.constants.append(Constant(len(self.values) - 1, data))
        return len(self.values) - 1

    def _convert(self, op: str, source: int, result: int, **words: int) -> None:
        attributes = {**words, "degree": self.degree}
        self.operations.append(Operation(op, (source,), (result,), attributes, "stitch"))

    def _whole(self, value: int) -> int:
        """Return the whole of a value on the first device."""
        axis = self.axes.get(value)
        if axis is None:
            return value
        if (value, -1) not in self.converted:
            made = self._value(f"{self.values[value].name}.whole", value, 0)
            self.shapes[made] = ParallelShape.whole(self.values[value].type)
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
            whole = self._whole(value)
            name = self.values[value].name
            mark = "copies" if axis is None else f"shards{axis}"
            made = self._value(f"{name}.{mark}", value, axis)
            self.converted[value, axis] = made
            words = {} if axis is None else {"axis": axis}
            self._convert("Replicate" if axis is None else "Repartition", whole, made, **words)
        return self.converted[value, axis]


#: Products with a bias as their third operand: the axis of the weight along which sums are made.
_SUMMED_AXES = {"Gemm": 0, "Conv": 1}


def _with_sums_before_biases(
    graph: ComputationGraph, wanted: Mapping[int, int]
) -> ComputationGraph:
    """Return the graph with the biases of products by rows added after them, to their sums."""
    values, constants, operations = list(graph.values), list(graph.constants), []

    def add(name: str, kind: ValueType, data: np.ndarray | None = None) -> int:
        values.append(Value(name, kind))
        if data is not None:
            constants.append(Constant(len(values) - 1, data))
        return len(values) - 1

    for one in graph.operations:
        axis = _SUMMED_AXES.get(one.op) if not one.domain and len(one.inputs) == 3 else None
        words = {} if axis is None else attributes_of(one)
        if axis is not None and one.op == "Gemm" and words["transB"]:
            axis = 1
        asked = None if axis is None else wanted.get(one.inputs[1])
        if axis is None or asked != axis or one.inputs[2] == ABSENT:
            operations.append(one)
            continue
        (result,), bias = one.outputs, one.inputs[2]
        kind, name = values[result].type, values[result].name
        product = add(f"{name}.product", kind)
        operations.append(replace(one, inputs=one.inputs[:2], outputs=(product,)))
        if one.op == "Conv":
            size = values[bias].type.shape[0]
            shape = (size, *(1,) * (len(kind.shape) - 2))
            sizes = np.array(shape, np.int64)
            at = add(f"{name}.bias_shape", ValueType(sizes.shape, DataType.INT64), sizes)
            column = add(f"{name}.bias", ValueType(shape, kind.data_type))
            operations.append(Operation("Reshape", (bias, at), (column,), location=one.location))
            bias = column
        elif words["beta"] != 1:
            beta = np.array(words["beta"], kind.data_type.dtype)
            factor = add(f"{name}.beta", ValueType((), kind.data_type), beta)
            scaled = add(f"{name}.bias", values[bias].type)
            operations.append(Operation("Mul", (bias, factor), (scaled,), location=one.location))
            bias = scaled
        operations.append(Operation("Add", (product, bias), (result,), location=one.location))
    return replace(
        graph, values=tuple(values), constants=tuple(constants), operations=tuple(operations)
    )
