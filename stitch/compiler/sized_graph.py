"""`SizedGraph`: a graph with symbolic sizes, evaluated at numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stitch.graph import ComputationGraph
from stitch.program import (
    MAX_SIZE,
    Constant,
    DataType,
    Expression,
    SymbolicSize,
    Value,
    ValueType,
    as_read_only,
    has_symbols,
    integers_of,
)


class SizedGraph:
    """A graph with symbolic sizes: each expression, type and array of it is evaluated once."""

    __slots__ = ("_arrays", "_axes", "_constants", "_expressions", "_graph", "_types", "_values")

    def __init__(self, graph: ComputationGraph) -> None:
        self._graph = graph
        #: The expressions in the order of their numbers: those of axes, then those of constants.
        self._expressions: dict[Expression, int] = {}
        #: The symbolic types: data type, and the number of the expression or the size of each axis.
        self._types: dict[tuple[DataType, tuple[tuple[int, bool], ...]], int] = {}
        #: The values of symbolic types: index, value, number of the type.
        self._values: list[tuple[int, Value, int]] = []
        for index, value in enumerate(graph.values):
            axes = tuple([self._axis(size) for size in value.type.shape])
            if any(is_symbolic for _, is_symbolic in axes):
                number = self._types.setdefault((value.type.data_type, axes), len(self._types))
                self._values.append((index, value, number))
        #: The number of expressions of axes.
        self._axes = len(self._expressions)
        #: The arrays with symbolic elements: type, shape, and elements as the axes of a type.
        self._arrays: dict[tuple[Any, tuple[int, ...], tuple[tuple[int, bool], ...]], int] = {}
        #: The constants of symbolic elements: index, value, number of the array.
        self._constants: list[tuple[int, int, int]] = []
        for at, constant in enumerate(graph.constants):
            if has_symbols(constant.data):
                elements = tuple([self._axis(element) for element in integers_of(constant.data)])
                key = constant.data.dtype, constant.data.shape, elements
                number = self._arrays.setdefault(key, len(self._arrays))
                self._constants.append((at, constant.value, number))

    def _axis(self, size: int) -> tuple[int, bool]:
        if not isinstance(size, SymbolicSize):
            return size, False
        return self._expressions.setdefault(size.expression, len(self._expressions)), True

    def at(self, sizes: Mapping[str, int]) -> ComputationGraph:
        """Return the graph at some sizes, without checking again what does not depend on them.

        Raises:
            ArithmeticError: An expression divides by zero.
            ValueError: An axis would be negative or too long.
        """
        numbers = [expression.at(sizes) for expression in self._expressions]
        axes = numbers[: self._axes]
        if axes and (min(axes) < 0 or max(axes) > MAX_SIZE):
            self._refuse(numbers)
        types = [
            ValueType(tuple([numbers[n] if symbolic else n for n, symbolic in axes]), data_type)
            for data_type, axes in self._types
        ]
        values = list(self._graph.values)
        for index, value, number in self._values:
            values[index] = Value(value.name, types[number], None, value.is_numbered)
        arrays = [
            as_read_only(
                np.array([numbers[n] if symbolic else n for n, symbolic in elements], dtype)
                .reshape(shape)
            )
            for dtype, shape, elements in self._arrays
        ]  # fmt: skip
        constants = list(self._graph.constants)
        for at, place, number in self._constants:
            constants[at] = Constant(place, arrays[number])
        return self._graph.resized(tuple(values), tuple(constants))

    def _refuse(self, numbers: list[int]) -> None:
        listed = list(self._types)
        for _, value, number in self._values:
            shape = [numbers[n] if symbolic else n for n, symbolic in listed[number][1]]
            if min(shape) < 0 or max(shape) > MAX_SIZE:
                name = value.name or "a value"
                raise ValueError(f"{name}, {value.type.text()}, would be {shape}")
